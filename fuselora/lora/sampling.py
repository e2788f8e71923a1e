"""What a LoRA says of how to sample with it: in its metadata, in its name, or by its family's data.

Nothing is guessed: a name that can be read in two ways says nothing. Standard library only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from fuselora.specs import HUB, local_path, parse_hub

if TYPE_CHECKING:
    from fuselora.families import Family, FewStep
    from fuselora.lora.adapter import Adapter
    from fuselora.resolve import LoraLocation

# Called as diffusers and vLLM-Omni call them; ``solver`` is vLLM-Omni's ``sample_solver``.
Setting = Literal[
    "num_inference_steps", "guidance_scale", "guidance_scale_2", "flow_shift", "boundary_ratio", "solver"
]
Source = Literal["metadata", "name", "family", "base"]
Value = int | float | str

MAX_STEPS = 16  # a larger number before "steps" is a training's as often as not
# 4steps, 4-step, 8_steps; not 4-8steps, and not what was trained: rank_16_steps_2000, 10-steps-1000
STEPS = re.compile(
    r"(?P<distill>distill[-_ ])?(?<![0-9a-z.,])(?<!v[0-9][-_])"
    r"(?P<range>[0-9]{1,2}[-_,])?(?P<steps>[0-9]{1,2})"
    r"(?:steps?|(?:[-_ ]steps|[- ]step)(?(distill)|(?![-_ ]?[0-9])))(?![a-z])",
    re.IGNORECASE,
)
# Words of a file or folder name that do not say whose LoRA it is.
PLAIN_WORDS = frozenset((
    "high", "low", "noise", "model", "models", "lora", "loras", "weights", "adapter", "pytorch",
    "diffusion", "transformer", "1", "2", "bf16", "fp16", "fp32", "comfyui",
))  # fmt: skip
NAMES_IN_METADATA = ("modelspec.title", "ss_output_name")
NAME_CHARS = 255  # of a name in the metadata, as long as a file's can be
SOLVER = re.compile(r"[a-z][a-z0-9_+]{1,31}")


@dataclass(frozen=True, slots=True)
class Stated:
    """A value and who says so: ``origin`` in words, such as ``in the name x-4steps``."""

    value: Value
    source: Source
    origin: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """What one LoRA says; ``remark`` is what no setting can say, ``phase`` the only one that it is for.

    ``alpha`` is what is published for it, where a file stores none.
    """

    settings: Mapping[Setting, Stated]
    remark: str | None = None
    phase: str | None = None
    alpha: Stated | None = None


def sampling_of(adapter: Adapter, family: Family | None) -> Sampling:
    """How a LoRA wants to be sampled. Its metadata beats its name, and that what is published for it."""
    metadata = adapter.metadata
    names = _names(adapter.location, metadata)
    row = _published(names, family)
    settings: dict[Setting, Stated] = dict(_of_row(row)) if row else {}
    if steps := next(filter(None, map(_steps, names)), None):
        settings["num_inference_steps"] = steps
    settings.update(_of_metadata(metadata, adapter.name))
    if row is None:
        return Sampling(settings)
    alpha = None if row.alpha is None else Stated(row.alpha, "family", _published_for(row))
    return Sampling(settings, row.remark, row.phase, alpha)


def steps_in(name: str) -> int | None:
    """The number of sampling steps that a name states; None if it states none, or not just one."""
    found = list(STEPS.finditer(name))
    counts = {int(match["steps"]) for match in found}
    if len(counts) != 1 or any(match["range"] for match in found):
        return None
    steps = counts.pop()
    return steps if 0 < steps <= MAX_STEPS else None


def by_name(value: Value, name: str) -> Stated:
    """A value that is in a name, or the name itself."""
    return Stated(value, "name", f"in the name {name}")


# Names -----------------------------------------------------------------------------------------------


def _names(location: LoraLocation, metadata: Mapping[str, str]) -> tuple[Stated, ...]:
    """The names that a LoRA goes by, the most telling first.

    A folder counts if the file's own name says nothing, as in
    ``Wan2.2-T2V-A14B-4steps-lora-rank64-Seko-V1.1/high_noise_model.safetensors``.
    """
    own = next((name for name in _path_names(location) if not _is_plain(name)), None)
    inside = [
        Stated(metadata[key][:NAME_CHARS], "metadata", _in_metadata(key, location.name))
        for key in NAMES_IN_METADATA
        if key in metadata
    ]
    return (by_name(own, own), *inside) if own is not None else tuple(inside)


def _path_names(location: LoraLocation) -> list[str]:
    """The file, then folders: a local file's own, on the Hub all of them and the repository."""
    source = location.spec.source
    folders = [location.path.absolute().parent.name]
    if source.startswith(HUB) and local_path(source) is None:
        address = parse_hub(source)
        *above, last = (address.repo.rpartition("/")[2], *filter(None, address.path.split("/")))
        folders = [*([] if last == location.name else [last]), *reversed(above)]
    # a folder's name may hold bytes that no text can
    names = [name.encode("utf-8", "replace").decode("utf-8") for name in folders if name]
    return [location.name, *names]


def _is_plain(name: str) -> bool:
    return PLAIN_WORDS.issuperset(re.split(r"[-_. ]+", name.lower().removesuffix(".safetensors")))


def _published(names: Sequence[Stated], family: Family | None) -> FewStep | None:
    rows = (family.few_step_named(str(name.value)) for name in names) if family else ()
    return next(filter(None, rows), None)


def _of_row(row: FewStep) -> Iterator[tuple[Setting, Stated]]:
    values: Mapping[Setting, Value | None] = {
        "num_inference_steps": row.num_inference_steps,
        "guidance_scale": row.guidance_scale,
        "flow_shift": row.flow_shift,
        "solver": row.solver,
    }
    for setting, value in values.items():
        if value is not None:
            yield setting, Stated(value, "family", _published_for(row))


def _published_for(row: FewStep) -> str:
    return f"published for {row.name} ({row.source})"


def _steps(name: Stated) -> Stated | None:
    steps = steps_in(str(name.value))
    return None if steps is None else Stated(steps, name.source, name.origin)


# Values ----------------------------------------------------------------------------------------------


def read_setting(setting: Setting, value: object) -> Value | None:
    """A value from a file, text or number, as the setting takes it; None if it makes no sense there."""
    return READERS[setting](value)


def _of_metadata(metadata: Mapping[str, str], lora: str) -> Iterator[tuple[Setting, Stated]]:
    """Entries that are called like an engine's setting; one that makes no sense says nothing."""
    found = {key: read_setting(setting, metadata.get(key)) for key, setting in METADATA_KEYS.items()}
    found = {SCHEDULE_KEY: _intervals(metadata.get(SCHEDULE_KEY, "")), **found}
    for key, value in found.items():
        if value is not None:
            setting = METADATA_KEYS.get(key, "num_inference_steps")
            yield setting, Stated(value, "metadata", _in_metadata(key, lora))


def _in_metadata(key: str, lora: str) -> str:
    return f"{key} in the metadata of {lora}"


def _count(value: object) -> int | None:
    return int(str(value)) if re.fullmatch(r"[1-9][0-9]{0,3}", str(value), re.ASCII) else None


def _from_zero(value: object) -> float | None:
    try:
        number = float(str(value))
    except ValueError:
        return None
    return number if math.isfinite(number) and number >= 0 else None


def _above_zero(value: object) -> float | None:
    return _from_zero(value) or None


def _ratio(value: object) -> float | None:
    number = _from_zero(value)
    return number if number is not None and number <= 1 else None


def _solver(value: object) -> str | None:
    name = str(value).lower()
    return name if isinstance(value, str) and SOLVER.fullmatch(name) else None


def _intervals(text: str) -> int | None:
    """The steps of a comma list of noise levels that falls to 0: one fewer than there are levels."""
    levels = [_from_zero(part) for part in text.split(",")]
    numbers = [level for level in levels if level is not None]
    falls = all(high > low for high, low in pairwise(numbers))
    return len(numbers) - 1 if len(levels) == len(numbers) > 1 and falls and numbers[-1] == 0 else None


READERS: Mapping[Setting, Callable[[object], Value | None]] = {
    "num_inference_steps": _count,
    "guidance_scale": _from_zero,
    "guidance_scale_2": _from_zero,
    "flow_shift": _above_zero,
    "boundary_ratio": _ratio,
    "solver": _solver,
}
SCHEDULE_KEY = "base_schedule"  # of the native MiniMax-H3 LoRAs that vLLM-Omni reads
METADATA_KEYS: Mapping[str, Setting] = {
    "num_inference_steps": "num_inference_steps",
    "guidance_scale": "guidance_scale",
    "flow_shift": "flow_shift",
    "boundary_ratio": "boundary_ratio",
    "sample_solver": "solver",
}
