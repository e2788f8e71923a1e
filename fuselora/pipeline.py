"""merge and plan: the only module that knows the order of the rooms."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from fuselora.checkpoint import Checkpoint, open_checkpoint
from fuselora.errors import Fault, Notice, Refused, UsageError
from fuselora.faults import check, strict_faults
from fuselora.file_options import in_layouts, misdirected
from fuselora.lora.adapter import Adapter, is_lora, open_adapter
from fuselora.match import Matching, match
from fuselora.output import staging
from fuselora.planning import FusePlan, build_plan
from fuselora.progress import Progress, Silent
from fuselora.resolve import resolve_base, resolve_lora, resolve_skeleton
from fuselora.resources import require_current_folder
from fuselora.serving_notes import serving_notes
from fuselora.skeleton import Skeleton, open_skeleton
from fuselora.skeleton_faults import skeleton_faults
from fuselora.specs import (
    EMPTY_PATH,
    AlphaSpec,
    BlockSpec,
    LayoutSpec,
    LoraSpec,
    Request,
    parse_alpha,
    parse_block,
    parse_layout,
    parse_lora,
    place,
)
from fuselora.targets import assign, encoders_named
from fuselora.twins import twin_faults

if TYPE_CHECKING:
    from fuselora.content import LoraContent
    from fuselora.estimate import Estimate
    from fuselora.marker import Marker

__all__ = ["FusePlan", "FuseReport", "merge", "merge_request", "plan", "plan_request", "request"]

# OpenMP reads this when torch is loaded, which is later. Left alone, its threads spin while they wait
# and take the cores from the threads that read, hash and write.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@dataclass(frozen=True, slots=True)
class FuseReport:
    """What ``merge`` did. ``kept`` are shards taken over from an earlier, interrupted run."""

    out: Path
    plan: FusePlan
    marker: Marker
    notices: tuple[Notice, ...]
    kept: tuple[str, ...]
    seconds: float


def merge(
    base: str | Path,
    loras: Sequence[str | Path | LoraSpec],
    out: str | Path | None = None,
    *,
    progress: Progress | None = None,
    **options: object,
) -> FuseReport:
    """Fuse ``loras`` into ``base`` and write ``out`` (default ``./<base name>-fused``).

    ``loras`` are ``[COMPONENT=]FILE[:STRENGTH]`` texts or ``LoraSpec``; ``options`` are the fields of
    ``Request``, the command's options. Raises ``FuseloraError``; ``out`` is then as it was.
    """
    return merge_request(request(base, loras, out, **options), progress or Silent())


def plan(
    base: str | Path,
    loras: Sequence[str | Path | LoraSpec],
    out: str | Path | None = None,
    *,
    progress: Progress | None = None,
    **options: object,
) -> FusePlan:
    """What ``merge`` would do, from headers; with ``content=True`` the LoRA data is read as well.

    Raises ``FuseloraError`` for inputs that ``merge`` would refuse; machine and ``out`` are not looked at.
    """
    return plan_request(request(base, loras, out, **options), progress or Silent())


def request(
    base: str | Path,
    loras: Sequence[str | Path | LoraSpec],
    out: str | Path | None = None,
    **options: object,
) -> Request:
    """The arguments of a library call as one value. Raises ``UsageError`` or ``Refused``."""
    _refuse_unknown(options)
    specs = tuple(spec for lora in _several(loras) for spec in _specs(lora))
    if not specs:
        raise UsageError("no LoRA was given", hint="Give at least one --lora FILE.")
    readers = (("alphas", _alpha), ("blocks", _block), ("lora_layouts", _layout), ("allow_unmatched", str))
    for name, read in readers:
        if name in options:
            options[name] = tuple(map(read, _several(options[name])))
    if options.get("skeleton") is not None:
        options["skeleton"] = str(options["skeleton"])
    if out == "":
        raise UsageError(EMPTY_PATH, hint="Give out a folder, or leave it away.")
    where = place(out) if out is not None else None
    return Request(base=str(base), loras=specs, out=where, **options)  # type: ignore[arg-type]


def plan_request(asked: Request, progress: Progress) -> FusePlan:
    """Everything up to the plan; nothing is written."""
    if asked.content:
        require_current_folder()
    matched = _matched(asked, headers_only=not asked.content)
    contents = _contents(matched, asked, progress) if asked.content else None
    return _planned(matched, contents, asked)


def estimate_plan(planned: FusePlan) -> Estimate:
    """How long the merge will take; probes disk and kernels for a few seconds. Raises ``FuseloraError``."""
    from fuselora.engine.means import choose_means
    from fuselora.engine.settings import exact_settings
    from fuselora.estimate import estimate

    means = choose_means(planned.request, planned.fused_steps)
    with exact_settings():
        return estimate(planned, means, planned.request.out or _default_out(planned.checkpoint))


def merge_request(asked: Request, progress: Progress) -> FuseReport:
    """The whole run."""
    require_current_folder()
    from fuselora.build import build

    started, fixed = time.monotonic(), _fixed_time()
    matched = _matched(asked, headers_only=False)
    out = asked.out or _default_out(matched.checkpoint)
    stage = staging.prepare(out, inputs=matched.inputs, overwrite=asked.overwrite, restart=asked.restart)
    planned = _planned(matched, _contents(matched, asked, progress), asked)
    built = build(planned, stage, progress, fixed or datetime.now(timezone.utc))
    seconds = time.monotonic() - started
    return FuseReport(out, planned, built.marker, built.notices, built.kept, seconds)


@dataclass(frozen=True, slots=True)
class _Matched:
    """All inputs, opened and found to fit together."""

    checkpoint: Checkpoint
    skeleton: Skeleton | None
    matchings: tuple[Matching, ...]
    notices: tuple[Notice, ...]

    @property
    def inputs(self) -> list[Path]:
        loras = [path for matching in self.matchings for path in matching.assignment.adapter.paths]
        return [self.checkpoint.root, *([self.skeleton.root] if self.skeleton else []), *loras]


def _matched(asked: Request, *, headers_only: bool) -> _Matched:
    """Resolve, read headers, assign, match and check. Raises ``Refused`` with every fault found."""
    locations = [resolve_lora(spec) for spec in asked.loras]
    _refuse(misdirected(locations, asked.lora_layouts, "--lora-layout"))
    adapters = [open_adapter(location) for location in in_layouts(locations, asked.lora_layouts)]
    skeleton = None
    if asked.skeleton is not None:
        skeleton = open_skeleton(resolve_skeleton(asked.skeleton, headers_only=headers_only))
    location = resolve_base(
        asked.base,
        revision=asked.revision,
        variant=asked.variant,
        headers_only=headers_only,
        model_only=skeleton is not None,
    )
    checkpoint = open_checkpoint(
        location.path,
        source=location.source,
        revision=location.revision,
        variant=asked.variant,
        text_encoders=encoders_named(adapters),
        layout=asked.base_layout,
    )
    _refuse(_no_checkpoint(checkpoint))
    assigned = assign(adapters, checkpoint)
    unfit = (*twin_faults(checkpoint), *_skeleton_faults(skeleton, checkpoint, asked))
    _refuse([*_adapter_faults(adapters), *assigned.faults, *unfit])
    matchings = [match(a, checkpoint.family, checkpoint.layout) for a in assigned.assignments]
    checked = check(checkpoint, matchings, asked)
    notices = (*assigned.notices, *checked.notices)
    _refuse([*checked.faults, *(strict_faults(notices) if asked.strict else ())])
    return _Matched(checkpoint, skeleton, checked.matchings, notices)


def _no_checkpoint(checkpoint: Checkpoint) -> Iterator[Fault]:
    for component in checkpoint.transformers:
        if all(map(is_lora, component.shards)):
            hint = "--base is the checkpoint that it is for, --lora the LoRA."
            yield Fault("no_checkpoint", "is a LoRA, and no checkpoint", path=str(checkpoint.root), hint=hint)


def _skeleton_faults(skeleton: Skeleton | None, checkpoint: Checkpoint, asked: Request) -> tuple[Fault, ...]:
    return skeleton_faults(skeleton, checkpoint, whole=asked.assets != "skip") if skeleton else ()


def _contents(matched: _Matched, asked: Request, progress: Progress) -> tuple[LoraContent, ...]:
    """One pass over each LoRA's data, and the checks that need it."""
    from fuselora.content import content_faults, read_content
    from fuselora.engine.settings import exact_settings

    adapters = {m.assignment.order: m.assignment.adapter for m in matched.matchings}
    n_bytes = sum(adapter.n_bytes for adapter in adapters.values())
    with exact_settings(), progress.phase("read LoRAs", n_bytes) as advance:
        contents = tuple(
            read_content(adapters[order], digest=asked.digest, advance=advance) for order in sorted(adapters)
        )
    _refuse(content_faults(matched.checkpoint, matched.matchings, contents))
    return contents


def _planned(matched: _Matched, contents: tuple[LoraContent, ...] | None, asked: Request) -> FusePlan:
    checkpoint, matchings, notices = matched.checkpoint, matched.matchings, matched.notices
    if contents is not None:
        from fuselora.content import zero_notices

        notices = (*notices, *zero_notices(matchings, contents))
    skeleton = matched.skeleton.root if matched.skeleton else None
    serving = serving_notes(checkpoint, matchings, pipeline=skeleton)
    return build_plan(
        checkpoint,
        matchings,
        contents,
        asked,
        (*notices, *serving.notices),
        serving,
        matched.skeleton,
    )


def _adapter_faults(adapters: Iterable[Adapter]) -> list[Fault]:
    return [fault for adapter in adapters for fault in adapter.faults]


def _refuse(faults: Iterable[Fault]) -> None:
    found = tuple(faults)
    if found:
        raise Refused(found)


def _refuse_unknown(options: Iterable[str]) -> None:
    known = [field.name for field in fields(Request)]
    for name in options:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"Did you mean {close[0]}?" if close else f"There are {', '.join(known)}."
            raise UsageError(f"there is no option {name}", hint=hint)


def _several(value: object) -> Iterable[object]:
    """One value alone is meant as a list of one."""
    return value if isinstance(value, (list, tuple)) else (value,)


def _specs(lora: object) -> tuple[LoraSpec, ...]:
    return (lora,) if isinstance(lora, LoraSpec) else parse_lora(str(lora))


def _alpha(option: object) -> AlphaSpec:
    return option if isinstance(option, AlphaSpec) else parse_alpha(str(option))


def _block(option: object) -> BlockSpec:
    return option if isinstance(option, BlockSpec) else parse_block(str(option))


def _layout(option: object) -> LayoutSpec:
    return option if isinstance(option, LayoutSpec) else parse_layout(str(option))


def _default_out(checkpoint: Checkpoint) -> Path:
    """``./<base name>-fused``: the last part of a Hub id, a folder's name, a file's without its suffix."""
    name = checkpoint.source.rstrip("/").rpartition("/")[2]
    return Path(f"{name.removesuffix('.safetensors')}-fused")


def _fixed_time() -> datetime | None:
    """The one of reproducible builds (https://reproducible-builds.org/specs/source-date-epoch)."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    if epoch is None:
        return None
    try:
        if not re.fullmatch(r"-?[0-9]+", epoch):
            raise ValueError(epoch)
        return datetime.fromtimestamp(int(epoch), timezone.utc)
    except (ValueError, OverflowError, OSError) as error:
        hint = "Unset it, or give it the seconds since 1970."
        raise UsageError(f"SOURCE_DATE_EPOCH is {epoch!r}, not a number of seconds", hint=hint) from error
