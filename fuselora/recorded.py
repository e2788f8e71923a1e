"""What a marker says was added to each tensor, held against the LoRA file that it names.

Scales come from the marker alone. That each is strength * alpha / rank is worked out here anew, with
the ranks and alphas that the file holds; nothing of a plan is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fuselora.block_strengths import with_blocks
from fuselora.fields import Fields
from fuselora.kinds import Kind
from fuselora.kinds.kind import ALPHAS
from fuselora.kinds.settings import UNSAID, Settings
from fuselora.lora.adapter import open_adapter
from fuselora.marker import FILE_NAME, LoraRecord
from fuselora.match import Matching, match, recorded_name
from fuselora.record import applied_counts
from fuselora.resolve import LoraLocation
from fuselora.specs import BlockSpec, LoraSpec
from fuselora.targets import Assignment, modules_for

if TYPE_CHECKING:
    from fuselora.checkpoint import Checkpoint, Component
    from fuselora.exact import Files
    from fuselora.families.runs import Runs
    from fuselora.lora.adapter import Adapter
    from fuselora.match import Hit

# sources of alpha that may divide by sqrt(rank) instead of rank, as rank-stabilised LoRA does
CONFIGURED = ("adapter_config", "metadata")
# sources that are numbers in the file
STORED = ("tensor", "rs_lora", "alpha_scale")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that does not hold. ``file`` is relative to the folder, or an input's name or path."""

    code: str
    file: str
    tensor: str | None
    message: str


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a safetensors file."""

    path: Path
    key: str


@dataclass(frozen=True, slots=True)
class Delta:
    """What a kind makes of ``factors``: a difference, times ``ratio * strength``, or a changed tensor.

    With ``rows`` it is for a tensor of ``shape``, of which the base has these rows, in this order. ``wide``
    is the shape that the base tensor grows to for it.
    """

    kind: Kind
    factors: Mapping[str, Stored]
    ratio: float
    strength: float
    settings: Settings = UNSAID
    shape: tuple[int, ...] = ()
    rows: Runs = ()
    wide: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Additions:
    """The deltas that one entry of a marker stands for, each with its base tensor; None if unusable."""

    deltas: tuple[tuple[str, Delta], ...] | None
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class Scale:
    """One of the marker's ``scales``: what the product of the factors of ``modules`` was multiplied by."""

    scale: float
    alpha: float
    rank: int
    source: str
    block: float
    modules: tuple[str, ...]

    def alpha_over_rank(self, strength: float) -> float:
        """What is left of the scale without the strength; nothing of it counts at strength 0."""
        return self.scale / strength if strength else 0.0


def additions(entry: LoraRecord, given: LoraLocation, component: Component, base: Checkpoint) -> Additions:
    """Find the base tensors of every module of a LoRA and take their scales from ``entry``.

    An adapter's configuration is read for what its parts mean, not for their scale. Raises
    ``MarkerError`` for an entry without the fields that this needs, ``InputError`` for a LoRA that cannot
    be read.
    """
    spec = LoraSpec(str(given.path), layout=_layout(entry))
    adapter = open_adapter(LoraLocation(spec, given.path, entry.name, given.config))
    assignment = Assignment(0, adapter, component, modules_for(adapter, component, base))
    matched = match(assignment, base.family, base.layout)
    matching = with_blocks(matched, tuple(_blocks(entry)))
    faults = (*adapter.faults, *matching.faults)
    if faults:
        return Additions(None, tuple(Finding("lora", entry.name, f.key, f.message) for f in faults))
    from fuselora.exact import Files

    scales, files = tuple(_scales(entry)), Files()
    by_module = {module: scale for scale in scales for module in scale.modules}
    findings = [
        *_formula_findings(entry, scales),
        *_account_findings(entry, matching, by_module),
        *(f for hit in matching.hits for f in _pair_findings(entry, hit, by_module, adapter, files)),
    ]
    return Additions(tuple(_deltas(entry, matching, by_module)), tuple(findings))


def _scales(entry: LoraRecord) -> Iterator[Scale]:
    for group in Fields(entry.raw, FILE_NAME, entry.name).items("scales"):
        modules = group.values.get("modules")
        if not isinstance(modules, list) or not all(isinstance(name, str) for name in modules):
            group.refuse("modules", "a list of names")
        yield Scale(
            group.number("scale"), group.number("alpha"), group.count("rank"), group.text("source"),
            group.number("block") if "block" in group.values else 1.0,
            tuple(modules),
        )  # fmt: skip


def _layout(entry: LoraRecord) -> str | None:
    """The layout that the user said the LoRA was in."""
    return Fields(entry.raw, FILE_NAME, entry.name).text("layout") if "layout" in entry.raw else None


def _blocks(entry: LoraRecord) -> Iterator[BlockSpec]:
    if "blocks" in entry.raw:
        for item in Fields(entry.raw, FILE_NAME, entry.name).items("blocks"):
            yield BlockSpec(item.text("glob"), item.number("strength"))


def _deltas(
    entry: LoraRecord, matching: Matching, scales: Mapping[str, Scale]
) -> Iterator[tuple[str, Delta]]:
    """A pair without a scale is left out: it is among the findings."""
    homes = matching.assignment.adapter.homes
    for hit in matching.hits:
        factors = {part: Stored(homes[t.name].path, t.name) for part, t in hit.parts.items()}
        scale = scales.get(recorded_name(hit.module.name)) if hit.kind.scaled else None
        if hit.rank is not None and scale is None:
            continue
        strength = entry.strength * hit.block
        ratio = 1.0 if scale is None else scale.alpha_over_rank(strength)
        delta = Delta(hit.kind, factors, ratio, strength, hit.module.settings, hit.shape, hit.rows, hit.wide)
        yield hit.base_key, delta


def _formula_findings(entry: LoraRecord, scales: tuple[Scale, ...]) -> Iterator[Finding]:
    """scale = strength * alpha / rank, or / sqrt(rank) where a configuration may have asked for it."""
    for group in scales:
        divisors = _divisors(group)
        wanted = entry.strength * group.block * group.alpha
        if not any(math.isclose(group.scale * divisor, wanted, rel_tol=1e-9) for divisor in divisors):
            text = (
                f"the scale {group.scale:g} of {len(group.modules)} modules is not "
                f"strength {entry.strength:g} * alpha {group.alpha:g} / rank {group.rank}"
            )
            yield Finding("scale", entry.name, None, text)


def _divisors(group: Scale) -> tuple[float, ...]:
    """What its alpha may have been divided by; a finished factor by nothing."""
    root = math.sqrt(group.rank)
    if group.source in CONFIGURED:
        return float(group.rank), root
    return ({"alpha_scale": 1.0, "rs_lora": root}.get(group.source, float(group.rank)),)


def _pair_findings(
    entry: LoraRecord, hit: Hit, scales: Mapping[str, Scale], adapter: Adapter, files: Files
) -> Iterator[Finding]:
    """Rank and alpha of one pair, as the file holds them."""
    rank = hit.rank
    if rank is None:
        return
    name, group = hit.module.name, scales.get(recorded_name(hit.module.name))
    if group is None:
        yield Finding("scale", entry.name, name, f"{FILE_NAME} gives no scale for it")
        return
    if group.block != hit.block:
        text = f"its strength is times {hit.block:g} by the globs; {FILE_NAME} says {group.block:g}"
        yield Finding("scale", entry.name, name, text)
    if group.rank != rank:
        yield Finding("scale", entry.name, name, f"its rank is {rank}; {FILE_NAME} says {group.rank}")
    if wrong := _alpha_fault(hit, group, adapter, files):
        said = f"{FILE_NAME} says {group.alpha:g}, from {group.source}"
        yield Finding("alpha", entry.name, name, f"{wrong}; {said}")


def _alpha_fault(hit: Hit, group: Scale, adapter: Adapter, files: Files) -> str | None:
    """An alpha in the file counts before all others; without any, alpha is the rank."""
    from fuselora.exact import scalar

    files.close_in_time()
    for part in hit.module.parts.keys() & ALPHAS:
        tensor = hit.module.parts[part]
        held = scalar(Stored(adapter.homes[tensor.name].path, tensor.name), files)
        said = group.source in _sources(hit, group.rank, adapter) and group.alpha == held
        return None if said else f"its {part} is {held:g}"
    if group.source in STORED:
        return "the file holds no alpha for it"
    return "its alpha is not its rank" if group.source == "rank" and group.alpha != group.rank else None


def _sources(hit: Hit, rank: int, adapter: Adapter) -> set[str]:
    """What a number in the file may be called, of a linear layer and of a convolution."""
    found = (adapter.stored_alpha(hit.module, rank, conv=conv) for conv in (False, True))
    return {stored.over(rank).source for stored in found if stored}


def _account_findings(
    entry: LoraRecord, matching: Matching, scales: Mapping[str, Scale]
) -> Iterator[Finding]:
    """Every module was added or skipped, as the marker says, and no other was."""
    fields = Fields(entry.raw, FILE_NAME, entry.name)
    recorded = {item.text("module") for item in fields.items("skipped")}
    skipped = {s.module.name for s in matching.skipped} | {u.module.name for u in matching.unmatched}
    pairs = {recorded_name(hit.module.name) for hit in matching.hits if hit.kind.scaled}
    for name in sorted(skipped - recorded):
        yield Finding("lora", entry.name, name, f"it has no place in the base; {FILE_NAME} does not say so")
    for name in sorted(recorded - skipped):
        yield Finding("lora", entry.name, name, f"{FILE_NAME} says it was skipped, but it fits the base")
    for name in sorted(scales.keys() - pairs):
        yield Finding("lora", entry.name, name, f"{FILE_NAME} says it was added, but there is no such pair")
    counts, said = applied_counts(matching.hits), entry.raw.get("applied")
    if said != counts:
        held = ", ".join(f"{n} {kind}" for kind, n in counts.items() if n)
        yield Finding("count", entry.name, None, f"it has {held} for this base; {FILE_NAME} counts others")
