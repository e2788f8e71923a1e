"""What the user asked for, as one frozen value: the grammar of its options.

Standard library only. The one question asked of the file system is whether a text names a file whole.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args
from urllib.parse import unquote

from fuselora.errors import Fault, Refused, UsageError
from fuselora.text_encoders import TEXT_ENCODERS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

ALL = "all"
# The folders of a pipeline's own models, which LoRAs can be for.
PIPELINE_COMPONENTS = ("transformer", "transformer_2", "unet")
HUB = "hf://"
COMPONENTS: Mapping[str, str] = {
    "transformer": "transformer", "high": "transformer", "high_noise": "transformer",
    "transformer_2": "transformer_2", "low": "transformer_2", "low_noise": "transformer_2",
    "unet": "unet", **{name: name for name in TEXT_ENCODERS}, ALL: ALL,
}  # fmt: skip
SHORT_NAMES: Mapping[str, str] = {
    "Wan2.2": "Wan-AI/Wan2.2-T2V-A14B-Diffusers",
    "Wan2.2-T2V": "Wan-AI/Wan2.2-T2V-A14B-Diffusers",
    "Wan2.2-I2V": "Wan-AI/Wan2.2-I2V-A14B-Diffusers",
    "Wan2.2-TI2V": "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
    "Wan2.1": "Wan-AI/Wan2.1-T2V-14B-Diffusers",
    "Wan2.1-1.3B": "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    "Wan2.1-I2V": "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers",
    "Wan2.1-VACE": "Wan-AI/Wan2.1-VACE-14B-diffusers",
    "Qwen-Image": "Qwen/Qwen-Image",
    "Qwen-Image-2512": "Qwen/Qwen-Image-2512",
    "Qwen-Image-Edit": "Qwen/Qwen-Image-Edit",
    "Qwen-Image-Edit-2509": "Qwen/Qwen-Image-Edit-2509",
    "Qwen-Image-Edit-2511": "Qwen/Qwen-Image-Edit-2511",
    "FLUX.1-dev": "black-forest-labs/FLUX.1-dev",
    "FLUX.1-schnell": "black-forest-labs/FLUX.1-schnell",
    "FLUX.1-Kontext": "black-forest-labs/FLUX.1-Kontext-dev",
    "FLUX.2-dev": "black-forest-labs/FLUX.2-dev",
    "Chroma": "lodestones/Chroma1-HD",
    "Z-Image-Turbo": "Tongyi-MAI/Z-Image-Turbo",
    "SD3.5": "stabilityai/stable-diffusion-3.5-large",
    "SD3.5-medium": "stabilityai/stable-diffusion-3.5-medium",
    "SDXL": "stabilityai/stable-diffusion-xl-base-1.0",
    "HunyuanVideo": "hunyuanvideo-community/HunyuanVideo",
    "LTX-Video": "Lightricks/LTX-Video",
    "LTX-2": "Lightricks/LTX-2",
    "MiniMax-H3": "MiniMaxAI/MiniMax-H3",
    "SenseNova-U1": "sensenova/SenseNova-U1-8B-MoT",
    "SenseNova-U1.5": "sensenova/SenseNova-U1.5-8B-MoT",
    "Kandinsky-5": "kandinskylab/Kandinsky-5.0-T2V-Lite-sft-5s-Diffusers",
}
EMPTY_PATH = "an empty text names no file"
Dtype = Literal["keep", "bfloat16", "float16", "float32"]
Kernel = Literal["auto", "reference"]
Assets = Literal["copy", "hardlink", "symlink", "skip"]
OutputLayout = Literal["diffusers"]


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """One ``[COMPONENT=]FILE[:STRENGTH]``.

    ``source`` is a path, an adapter folder or an ``hf://`` address as typed; ``component`` is a
    component's name, ``"all"``, or None when the user named none; ``position`` is the place in a
    comma list of ``listed`` files (0 of 1 for a file that stands alone). ``layout`` is the one that its names
    and rows are in, where the user said so.
    """

    source: str
    strength: float = 1.0
    component: str | None = None
    position: int = 0
    listed: int = 1
    layout: str | None = None


@dataclass(frozen=True, slots=True)
class AlphaSpec:
    """``--alpha [FILE=]A``: the alpha of modules that store none, of one file or (None) of all."""

    alpha: float
    source: str | None = None


@dataclass(frozen=True, slots=True)
class LayoutSpec:
    """``--lora-layout [FILE=]LAYOUT``: the layout that names and rows of one file or (None) of all are in."""

    layout: str
    source: str | None = None


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """``--blocks [COMPONENT=]GLOB=STRENGTH``: what the strength of modules that ``glob`` means is times."""

    glob: str
    strength: float
    component: str | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """Everything ``merge`` and ``plan`` were told; the meaning of each field is its option's.

    Raises ``UsageError`` for a choice that there is not, and for options that only make sense together.
    """

    base: str
    loras: tuple[LoraSpec, ...]
    out: Path | None = None
    dtype: Dtype = "keep"
    uniform: bool = False
    variant: str | None = None
    alphas: tuple[AlphaSpec, ...] = ()
    blocks: tuple[BlockSpec, ...] = ()
    allow_unmatched: tuple[str, ...] = ()
    strict: bool = False
    stack: bool = False
    device: str = "cpu"
    kernel: Kernel = "auto"
    jobs: int | None = None
    assets: Assets = "copy"
    overwrite: bool = False
    restart: bool = False
    digest: bool = True
    content: bool = False
    revision: str | None = None
    layout: OutputLayout | None = None
    skeleton: str | None = None
    base_layout: str | None = None
    lora_layouts: tuple[LayoutSpec, ...] = ()

    def __post_init__(self) -> None:
        self._refuse_unknown_choices()
        if self.layout and self.skeleton is None:
            hint = "Name the diffusers pipeline that gives the configs and all else: --skeleton DIR."
            raise UsageError(f"--layout {self.layout} needs a skeleton", hint=hint)
        if self.uniform and self.dtype == "keep":
            hint = "Say which dtype all tensors get, such as --dtype bfloat16."
            raise UsageError("--uniform does nothing without --dtype", hint=hint)
        if self.skeleton is not None and not self.layout:
            hint = "To write a native base as a diffusers pipeline say --layout diffusers too."
            raise UsageError(f"--skeleton {self.skeleton!r} is given and no --layout", hint=hint)
        if self.layout and self.variant:
            hint = "A native base has no variants; if its one file is called so, name the file."
            raise UsageError(f"--variant {self.variant} does not go with --layout", hint=hint)

    def _refuse_unknown_choices(self) -> None:
        for name, value, choices in (
            ("dtype", self.dtype, get_args(Dtype)),
            ("kernel", self.kernel, get_args(Kernel)),
            ("assets", self.assets, get_args(Assets)),
            ("layout", self.layout, get_args(OutputLayout)),
        ):
            if value not in choices and (name, value) != ("layout", None):
                raise UsageError(f"{name} is {value!r}", hint=f"It is one of {', '.join(choices)}.")
        if self.jobs is not None and (not isinstance(self.jobs, int) or self.jobs < 1):
            raise UsageError(f"jobs is {self.jobs!r}", hint="It is a number of threads, at least 1.")


@dataclass(frozen=True, slots=True)
class HubAddress:
    """A place on the Hugging Face Hub: ``repo`` is ``owner/name``, ``path`` a file or folder in it or ""."""

    repo: str
    path: str = ""
    revision: str | None = None

    @property
    def source(self) -> str:
        return f"{self.repo}/{self.path}" if self.path else self.repo


def local_path(text: str) -> Path | None:
    """The file or folder that ``text`` names, ``~`` expanded if need be; None if there is none."""
    if not text:
        return None
    for spelling in (Path(text), _expanded(text)):
        try:
            spelling.stat()
        except (OSError, ValueError):
            continue
        return spelling
    return None


def place(text: str | Path) -> Path:
    """Where ``text`` is or is to be: ``~`` expanded, unless something here is called so."""
    path = Path(text)
    return path if not path.parts or Path(path.parts[0]).exists() else _expanded(str(path))


def local_exists(text: str) -> bool:
    """Whether ``text`` names a file or folder on this machine."""
    return local_path(text) is not None


def parse_lora(text: str, *, exists: Callable[[str], bool] = local_exists) -> tuple[LoraSpec, ...]:
    """The files of one ``[COMPONENT=]FILE[:STRENGTH][,...]``, in order.

    A text that names an existing file whole is that file, and in a comma list the longest run of
    pieces that names an existing file is one file. Raises ``UsageError`` for a text that makes no
    sense and ``Refused`` for one file listed twice.
    """
    if not text:
        raise UsageError("--lora is given no file")
    if exists(text):
        return (LoraSpec(text),)
    items = _items(text, exists)
    if len(items) > 1:
        _check_list(text, items)
    return tuple(
        LoraSpec(item.source, item.strength, item.component, position, len(items))
        for position, item in enumerate(items)
    )


def plain_loras(text: str, *, why: str) -> tuple[LoraSpec, ...]:
    """The files of a ``--lora`` that are compared by content, on every component and at any strength.

    Raises ``UsageError``, which says ``why``, for ``COMPONENT=`` or ``:STRENGTH``.
    """
    specs = parse_lora(text)
    if any(spec.component is not None or spec.strength != 1.0 for spec in specs):
        hint = "Give FILE alone, without COMPONENT= before it and :STRENGTH after it."
        raise UsageError(f"--lora {text!r}: {why}", hint=hint)
    return specs


def parse_alpha(text: str) -> AlphaSpec:
    """The value of ``--alpha [FILE=]A``; raises ``UsageError`` unless A is one finite number."""
    source, equals, number = text.rpartition("=")
    if equals and not source:
        raise UsageError(f"--alpha {text!r} names no file before its '='")
    if not NUMBER.fullmatch(number) or not math.isfinite(float(number)):
        raise UsageError(f"--alpha {text!r}: {number!r} is not a finite number", hint="Write [FILE=]ALPHA.")
    return AlphaSpec(float(number), source or None)


def parse_layout(text: str) -> LayoutSpec:
    """The value of ``--lora-layout [FILE=]LAYOUT``; raises ``UsageError`` for anything else."""
    source, equals, layout = text.rpartition("=")
    if not layout or (equals and not source):
        raise UsageError(
            f"--lora-layout {text!r} is no [FILE=]LAYOUT", hint="Write native or x.safetensors=native."
        )
    return LayoutSpec(layout, source or None)


def parse_block(text: str) -> BlockSpec:
    """The value of ``--blocks [COMPONENT=]GLOB=STRENGTH``; raises ``UsageError`` for anything else."""
    place, equals, number = text.rpartition("=")
    component, glob = _component(place)
    if not equals or not glob or component == ALL:
        hint = "Write [COMPONENT=]GLOB=STRENGTH, such as blocks.0=0 or low=*.ffn.*=0.5."
        raise UsageError(f"--blocks {text!r} is no GLOB=STRENGTH", hint=hint)
    if not NUMBER.fullmatch(number) or not math.isfinite(float(number)):
        raise UsageError(f"--blocks {text!r}: {number!r} is not a finite number")
    return BlockSpec(glob, float(number), component)


def parse_hub(text: str) -> HubAddress:
    """The parts of ``hf://owner/name[@rev][/path]`` or ``hf://owner/name/path[@rev]``.

    A last ``@`` that is followed by a ``.safetensors`` name belongs to the file's name. Raises
    ``UsageError`` for anything else.
    """
    found = _HUB_TEXT.fullmatch(text)
    repo, revision, path = found.groups() if found else ("", None, None)
    path = (path or "").strip("/")
    head, at, tail = path.rpartition("@")
    if at and revision is None and not tail.endswith(".safetensors"):
        path, revision = head, tail
    if not hub_legal(repo) or revision == "" or ".." in path.split("/"):
        hint = "Write hf://owner/name[/path/to/file][@revision]."
        raise UsageError(f"{text!r} is no Hub address", hint=hint)
    return HubAddress(repo, path, unquote(revision) if revision else None)


def hub_legal(text: str) -> bool:
    """Whether ``text`` can be the ``owner/name`` of a repository on the Hub."""
    return bool(_REPO.fullmatch(text)) and "--" not in text and ".." not in text and not text.endswith(".git")


NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_NOT_FINITE = re.compile(r"[+-]?(nan|inf|infinity)", re.IGNORECASE)
_NAME = r"[A-Za-z0-9_](?:[\w.-]{0,94}[A-Za-z0-9_])?"
_REPO = re.compile(f"{_NAME}/{_NAME}", re.ASCII)
_HUB_TEXT = re.compile(r"hf://([^/@]+/[^/@]+)(?:@(refs/(?:pr|convert)/[^/]+|[^/]*))?(?:/(.*))?")


def _expanded(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:  # ~someone, who has no home here
        return Path(text)


def _items(text: str, exists: Callable[[str], bool]) -> list[LoraSpec]:
    """The items of a comma list; a comma inside the name of an existing file separates nothing."""
    pieces, items, at = text.split(","), [], 0
    while at < len(pieces):
        for end in range(len(pieces), at, -1):
            item = _existing(",".join(pieces[at:end]), exists)
            if item is not None:
                break
        items.append(item or _literal(pieces[at], text, exists))
        at = end
    return items


def _existing(text: str, exists: Callable[[str], bool]) -> LoraSpec | None:
    """``text`` read so that its FILE exists, with as little as possible taken off; None if it cannot be."""
    component, rest = _component(text)
    for target, body in ((None, text), (component, rest)):
        if not body:
            continue
        if exists(body):
            return LoraSpec(body, component=target)
        source, _, strength = body.rpartition(":")
        if source and exists(source):
            number = _strength(strength, text)
            if number is not None:
                return LoraSpec(source, number, target)
    return None


def _component(text: str) -> tuple[str | None, str]:
    """``COMPONENT=rest`` taken apart; ``(None, text)`` if it does not begin with a component's name."""
    word, equals, rest = text.partition("=")
    return (COMPONENTS[word], rest) if equals and word in COMPONENTS else (None, text)


def _literal(text: str, whole: str, exists: Callable[[str], bool]) -> LoraSpec:
    """``text`` read by the grammar alone: its FILE is on the Hub or missing."""
    component, body = _component(text)
    if component is None:
        _refuse_unknown_component(text, whole, exists)
    source, colon, tail = body.rpartition(":")
    strength = _strength(tail, text) if colon else None
    source = body if strength is None else source
    if not source:
        hint = "Write [COMPONENT=]FILE[:STRENGTH]."
        raise UsageError(f"--lora {whole!r} has an item without a file", hint=hint)
    return LoraSpec(source, 1.0 if strength is None else strength, component)


def _refuse_unknown_component(text: str, whole: str, exists: Callable[[str], bool]) -> None:
    word, equals, rest = text.partition("=")
    if equals and (rest.startswith(HUB) or _existing(rest, exists)):
        hint = f"A component is one of {', '.join(COMPONENTS)}."
        raise UsageError(f"--lora {whole!r}: {word!r} is not a component", hint=hint)


def _strength(text: str, item: str) -> float | None:
    """``text`` as a number, or None if it does not look like one."""
    if not NUMBER.fullmatch(text) and not _NOT_FINITE.fullmatch(text):
        return None
    if not math.isfinite(float(text)):
        raise UsageError(f"--lora {item!r}: the strength {text!r} is not a finite number")
    return float(text)


def _check_list(text: str, items: Sequence[LoraSpec]) -> None:
    """A comma list gives each expert one file: all items in order, or each with a component of its own."""
    named = [item.component for item in items if item.component]
    if named and len(named) < len(items):
        raise UsageError(
            f"--lora {text!r} names a component for some files of the list and not for others",
            hint="Name one for each, as in high=FILE,low=FILE, or for none.",
        )
    if ALL in named or len(set(named)) < len(named):
        raise UsageError(
            f"--lora {text!r} gives one component two files; a comma list is one file per expert",
            hint="To add several LoRAs to one component, repeat --lora.",
        )
    sources = [item.source for item in items]
    if not named and len(set(sources)) < len(sources):
        raise Refused([_repeated(text, next(name for name in sources if sources.count(name) > 1))])


def _repeated(text: str, source: str) -> Fault:
    return Fault(
        "repeated",
        f"--lora {text!r} lists the same file twice, {source!r}; a comma list is one file per expert",
        key=source,
        hint=f"For one LoRA on both experts write all={source}.",
    )
