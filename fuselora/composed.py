"""Deltas that turn or scale the weight, beside others on the same rows: the sum is not their product."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from fuselora.errors import Notice
from fuselora.match import overlap
from fuselora.plural import many

if TYPE_CHECKING:
    from fuselora.match import Hit, Matching

Given = tuple["Matching", "Hit"]


def composed_notices(matchings: Sequence[Matching]) -> Iterator[Notice]:
    """Where OFT, BOFT or IA3 meets anything else: what is fused, and that others may mean another thing.

    Each is worked out from the base's weight, and their differences are added, whatever their order. PEFT
    and ComfyUI let one change what the other has made.
    """
    for component, tensors in _by_tensor(matchings).items():
        met = {key: given for key, given in tensors.items() if _meets(given)}
        if met:
            names = dict.fromkeys(m.assignment.adapter.name for given in met.values() for m, _ in given)
            kinds = dict.fromkeys(
                hit.kind.counted for given in met.values() for _, hit in given if _multiplies(hit)
            )
            what = f"{component}: {many(len(met), 'tensor')}, such as {next(iter(met))}"
            text = (
                f"{what}, {'takes' if len(met) == 1 else 'take'} {' and '.join(kinds)} and another delta "
                f"({', '.join(names)}): each is worked out from the base and the differences are added; PEFT "
                "and ComfyUI apply one to what the other has made, which is not the same"
            )
            yield Notice("not_composed", text, {"component": component, "tensors": len(met)})


def _by_tensor(matchings: Sequence[Matching]) -> dict[str, dict[str, list[Given]]]:
    """All that is added, by component and base tensor."""
    found: dict[str, dict[str, list[Given]]] = {}
    for matching in matchings:
        tensors = found.setdefault(matching.assignment.component.name, {})
        for hit in matching.hits:
            if hit.scale(matching.assignment.strength) != 0:
                tensors.setdefault(hit.base_key, []).append((matching, hit))
    return found


def _meets(given: Sequence[Given]) -> bool:
    return any(
        _multiplies(one) and one is not two and overlap(one.rows, two.rows)
        for _, one in given
        for _, two in given
    )


def _multiplies(hit: Hit) -> bool:
    """Whether it is a rotation or a factor; a replacement has nothing of the base's weight in it."""
    return hit.kind.moves and not hit.kind.replaces
