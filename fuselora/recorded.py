"""What a marker says was added to each tensor, held against the LoRA file that it names.

Scales come from the marker alone. That each is strength * alpha / rank is worked out here anew, with
the ranks and alphas that the file holds; nothing of a plan is used.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fuselora.fields import Fields
from fuselora.lora.adapter import open_adapter
from fuselora.marker import FILE_NAME, LoraRecord
from fuselora.match import COUNTED, Matching, match, plain_name
from fuselora.resolve import LoraLocation
from fuselora.specs import LoraSpec
from fuselora.targets import Assignment

if TYPE_CHECKING:
    from fuselora.checkpoint import Checkpoint, Component
    from fuselora.match import Hit

# sources of alpha that may divide by sqrt(rank) instead of rank, as rank-stabilised LoRA does
CONFIGURED = ("adapter_config", "metadata")


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
    """``scale`` times the product of ``factors``: up (out, rank) and down (rank, in), or one difference."""

    scale: float
    factors: tuple[Stored, ...]


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
    modules: tuple[str, ...]


def additions(entry: LoraRecord, lora: Path, component: Component, base: Checkpoint) -> Additions:
    """Find the base tensors of every module of ``lora`` and take their scales from ``entry``.

    Raises ``MarkerError`` for an entry without the fields that this needs, ``InputError`` for a LoRA
    that cannot be read.
    """
    adapter = open_adapter(LoraLocation(LoraSpec(str(lora)), lora, entry.name, None))
    matching = match(Assignment(0, adapter, component), base.family, base.layout)
    faults = (*adapter.faults, *matching.faults)
    if faults:
        return Additions(None, tuple(Finding("lora", entry.name, f.key, f.message) for f in faults))
    scales = tuple(_scales(entry))
    by_module = {module: scale for scale in scales for module in scale.modules}
    findings = [
        *_formula_findings(entry, scales),
        *_account_findings(entry, matching, by_module),
        *(f for hit in matching.hits for f in _pair_findings(entry, hit, by_module, lora)),
    ]
    return Additions(tuple(_deltas(entry, matching, by_module, lora)), tuple(findings))


def _scales(entry: LoraRecord) -> Iterator[Scale]:
    for group in Fields(entry.raw, FILE_NAME, entry.name).items("scales"):
        modules = group.values.get("modules")
        if not isinstance(modules, list) or not all(isinstance(name, str) for name in modules):
            group.refuse("modules", "a list of names")
        yield Scale(
            group.number("scale"), group.number("alpha"), group.count("rank"), group.text("source"),
            tuple(modules),
        )  # fmt: skip


def _deltas(
    entry: LoraRecord, matching: Matching, scales: Mapping[str, Scale], lora: Path
) -> Iterator[tuple[str, Delta]]:
    """A pair without a scale is left out: it is among the findings."""
    for hit in matching.hits:
        factors = tuple(Stored(lora, tensor.name) for tensor in hit.tensors)
        if hit.kind != "pair":
            yield hit.base_key, Delta(entry.strength, factors)
        elif scale := scales.get(plain_name(hit.module.name)):
            yield hit.base_key, Delta(scale.scale, factors)


def _formula_findings(entry: LoraRecord, scales: tuple[Scale, ...]) -> Iterator[Finding]:
    """scale = strength * alpha / rank, or / sqrt(rank) where a configuration may have asked for it."""
    for group in scales:
        divisors = [float(group.rank), math.sqrt(group.rank)][: 1 + (group.source in CONFIGURED)]
        wanted = entry.strength * group.alpha
        if not any(math.isclose(group.scale * divisor, wanted, rel_tol=1e-9) for divisor in divisors):
            text = (
                f"the scale {group.scale:g} of {len(group.modules)} modules is not "
                f"strength {entry.strength:g} * alpha {group.alpha:g} / rank {group.rank}"
            )
            yield Finding("scale", entry.name, None, text)


def _pair_findings(entry: LoraRecord, hit: Hit, scales: Mapping[str, Scale], lora: Path) -> Iterator[Finding]:
    """Rank and alpha of one pair, as the file holds them."""
    if hit.kind != "pair":
        return
    name, group = hit.module.name, scales.get(plain_name(hit.module.name))
    if group is None:
        yield Finding("scale", entry.name, name, f"{FILE_NAME} gives no scale for it")
        return
    rank = hit.module.parts["down"].shape[0]
    if group.rank != rank:
        yield Finding("scale", entry.name, name, f"its rank is {rank}; {FILE_NAME} says {group.rank}")
    if wrong := _alpha_fault(hit, group, lora):
        said = f"{FILE_NAME} says {group.alpha:g}, from {group.source}"
        yield Finding("alpha", entry.name, name, f"{wrong}; {said}")


def _alpha_fault(hit: Hit, group: Scale, lora: Path) -> str | None:
    """An alpha in the file counts before all others; without any, alpha is the rank."""
    from fuselora.exact import scalar

    tensor = hit.module.parts.get("alpha")
    if tensor is not None:
        held = scalar(Stored(lora, tensor.name))
        return None if (group.source, group.alpha) == ("tensor", held) else f"its alpha is {held:g}"
    if group.source == "tensor":
        return "the file holds no alpha for it"
    return "its alpha is not its rank" if group.source == "rank" and group.alpha != group.rank else None


def _account_findings(
    entry: LoraRecord, matching: Matching, scales: Mapping[str, Scale]
) -> Iterator[Finding]:
    """Every module was added or skipped, as the marker says, and no other was."""
    fields = Fields(entry.raw, FILE_NAME, entry.name)
    recorded = {item.text("module") for item in fields.items("skipped")}
    skipped = {s.module.name for s in matching.skipped} | {u.module.name for u in matching.unmatched}
    pairs = {plain_name(hit.module.name) for hit in matching.hits if hit.kind == "pair"}
    for name in sorted(skipped - recorded):
        yield Finding("lora", entry.name, name, f"it has no place in the base; {FILE_NAME} does not say so")
    for name in sorted(recorded - skipped):
        yield Finding("lora", entry.name, name, f"{FILE_NAME} says it was skipped, but it fits the base")
    for name in sorted(scales.keys() - pairs):
        yield Finding("lora", entry.name, name, f"{FILE_NAME} says it was added, but there is no such pair")
    counts = Counter(COUNTED[hit.kind] for hit in matching.hits)
    said = entry.raw.get("applied")
    if not isinstance(said, dict) or any(said.get(kind, 0) != counts[kind] for kind in COUNTED.values()):
        held = ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items()))
        yield Finding("count", entry.name, None, f"it has {held} for this base; {FILE_NAME} counts others")
