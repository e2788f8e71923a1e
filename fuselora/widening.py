"""Weights that a LoRA gives more columns, such as the input layer of a control model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fuselora.errors import Fault, Notice
from fuselora.kinds import BadParts

if TYPE_CHECKING:
    from fuselora.checkpoint import Component
    from fuselora.families import Family, Layout
    from fuselora.match import Hit, Matching

Shape = tuple[int, ...]
PLAIN = frozenset({"up", "down"})


def widened(hit: Hit, component: Component, family: Family | None, layout: Layout | None) -> Hit:
    """The hit, with the shape that its tensor grows to where the family lets it have more columns."""
    plain = hit.kind.name == "pair" and hit.parts.keys() == PLAIN  # what published LoRAs widen by
    if family is None or hit.rows or not plain:
        return hit
    name = family.canonical_name(hit.base_key[len(component.prefix) :], layout)
    try:
        shape = hit.kind.shape(hit.module.shapes, hit.shape)
    except BadParts:
        return hit
    grows = len(shape) == len(hit.shape) == 2 and shape[0] == hit.shape[0] and shape[1] > hit.shape[1]
    return replace(hit, wide=shape) if grows and name in family.widens else hit


def widening_faults(matchings: Sequence[Matching]) -> Iterator[Fault]:
    """A tensor that LoRAs want of several widths: what the columns of each mean nobody can say."""
    for (component, base_key), found in _by_tensor(matchings).items():
        if len({shape for _, shape in found}) > 1:
            listed = " and ".join(f"by {name} to {list(shape)}" for name, shape in found)
            text = f"{base_key} is widened to several shapes: {listed}"
            yield Fault("shape", text, path=component, key=base_key)


def widening_notices(matchings: Sequence[Matching]) -> Iterator[Notice]:
    """The result is a model with more inputs, which another pipeline class serves."""
    for (component, base_key), found in _by_tensor(matchings).items():
        name, shape = found[0]
        text = (
            f"{name}: widens {base_key} to {list(shape)}: {component} then takes more channels than the base"
        )
        yield Notice("widened", text, {"tensor": base_key, "shape": list(shape)})


def _by_tensor(matchings: Sequence[Matching]) -> dict[tuple[str, str], list[tuple[str, Shape]]]:
    """By component and base tensor, the LoRAs that widen it and to what shape."""
    grown: dict[tuple[str, str], list[tuple[str, Shape]]] = {}
    for matching in matchings:
        assignment = matching.assignment
        for hit in matching.hits:
            if hit.wide:
                tensor = (assignment.component.name, hit.base_key)
                grown.setdefault(tensor, []).append((assignment.adapter.name, hit.wide))
    return grown
