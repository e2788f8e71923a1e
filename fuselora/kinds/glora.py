"""GLoRA: W += scale * (W @ a1 @ a2 + b1 @ b2), of a convolution at each place of its kernel.

Generalized LoRA (Chavan et al., 2023) as LyCORIS saves it. Its first releases had the names the other way
round: W @ a2 @ a1 + b2 @ b1. Which of the two a file means is seen from its shapes.
"""

from __future__ import annotations

from fuselora.kinds.factored import factored_shape, leading
from fuselora.kinds.kind import BadParts, Kind, Part, Shape, Shapes, Suffix, need

Order = tuple[Part, Part, Part, Part]
ORDER: Order = ("a1", "a2", "b1", "b2")
OLD_ORDER: Order = ("a2", "a1", "b2", "b1")


def glora_order(shapes: Shapes) -> Order:
    """The parts as (in, rank), (rank, in), (out, rank), (rank, in, kernel ...). Raises ``BadParts``.

    Factors of a square weight may be read in both ways: the lower rank is meant.
    """
    found = {shapes[order[1]][0]: order for order in (OLD_ORDER, ORDER) if _agrees(order, shapes)}
    if not found:
        listed = ", ".join(f"{part} {list(shapes[part])}" for part in ORDER)
        raise BadParts(f"the factors of the GLoRA do not fit each other: {listed}")
    if len(found) < sum(_agrees(order, shapes) for order in (OLD_ORDER, ORDER)):
        raise BadParts(
            "the rank of the GLoRA is the size of its layer: older and newer files mean different things"
        )
    return found[min(found)]


def _agrees(order: Order, shapes: Shapes) -> bool:
    left, right, up, down = (shapes[part] for part in order)
    try:
        inner, outer = factored_shape(left, right), factored_shape(up, down)
    except BadParts:
        return False
    plain = inner[0] == inner[1] == outer[1] and all(n == 1 for n in inner[2:])
    return plain and right[0] == down[0]


def glora_shape(shapes: Shapes, base: Shape) -> Shape:
    """(out, in, kernel ...), from the pair that does not multiply the base."""
    del base
    _, _, up, down = glora_order(shapes)
    return factored_shape(shapes[up], shapes[down])


def glora_rank(shapes: Shapes) -> int | None:
    """What both pairs share; None where they fit nothing."""
    try:
        return leading(shapes[glora_order(shapes)[1]])
    except BadParts:
        return None


def both_zero(zero: frozenset[Part]) -> bool:
    """Each of the two products needs a factor of zeros to be nothing."""
    return not zero.isdisjoint({"a1", "a2"}) and not zero.isdisjoint({"b1", "b2"})


GLORA = Kind(
    name="glora",
    counted="glora",
    suffixes=tuple(Suffix("GLoRA", part, rf"\.{part}\.weight") for part in ORDER),
    needs=tuple(need(part) for part in ORDER),
    leaves=(".weight",),
    shape=glora_shape,
    rank=glora_rank,
    is_nothing=both_zero,
)
