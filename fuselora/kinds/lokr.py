"""LoKr: W += scale * kron(w1, w2), each of them full or a product of two factors.

As LyCORIS and PEFT save it. Of a convolution w2 is (b, d, kernel ...), or w2_a @ w2_b is (b, d * kernel),
or a Tucker core (rank, rank, kernel ...) lies between w2_a (rank, b) and w2_b (rank, d).
"""

from __future__ import annotations

import math

from fuselora.kinds.factored import factored_shape, leading, unflattened
from fuselora.kinds.kind import MAGNITUDES, BadParts, Kind, Shape, Shapes, Suffix, all_elements, need

PARTS = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2")


def lokr_shape(shapes: Shapes, base: Shape) -> Shape:
    """``w1`` (a, c) and ``w2`` (b, d, kernel ...) make (a * b, c * d, kernel ...)."""
    _refuse_mixtures(shapes)
    outer, inner = _whole_shape("lokr_w1", shapes), _whole_shape("lokr_w2", shapes)
    if len(outer) != 2 or len(inner) < 2:
        raise BadParts(f"lokr_w1 {list(outer)} and lokr_w2 {list(inner)} have no Kronecker product")
    return unflattened((outer[0] * inner[0], outer[1] * inner[1], *inner[2:]), base)


def lokr_rank(shapes: Shapes) -> int | None:
    """The leading dimension of ``w1_b`` or ``w2_b``; None with both factors full: no alpha counts then."""
    found = [leading(shapes[part]) for part in ("lokr_w1_b", "lokr_w2_b") if part in shapes]
    return found[0] if found else None


def misread_by_peft(shapes: Shapes) -> bool:
    """Whether PEFT takes another product than Kronecker's: with the full ``w2`` of a 1-D convolution.

    It aligns w1 (a, c) with the last two dimensions of w2 (b, d, kernel) (``make_kron`` of peft 0.21).
    """
    return len(shapes.get("lokr_w2", ())) == 3


def lokr_held(shapes: Shapes) -> int:
    """The parts, and what a core makes with its w_b: (rank, d * kernel)."""
    cored = "lokr_t2" in shapes and "lokr_w2_b" in shapes
    core = math.prod((*shapes["lokr_w2_b"], *shapes["lokr_t2"][2:])) if cored else 0
    return all_elements(shapes) + core


def _refuse_mixtures(shapes: Shapes) -> None:
    """Parts that say a factor a second time, or two ranks."""
    for factor, others in (("lokr_w1", ("lokr_w1_a", "lokr_w1_b")), ("lokr_w2", PARTS[4:])):
        if factor in shapes and (more := [part for part in others if part in shapes]):
            raise BadParts(f"{factor} is given whole, and there is {more[0]} beside it")
    if {"lokr_w1_b", "lokr_w2_b"} <= shapes.keys() and shapes["lokr_w1_b"][:1] != shapes["lokr_w2_b"][:1]:
        raise BadParts("lokr_w1 and lokr_w2 have different ranks")


def _whole_shape(factor: str, shapes: Shapes) -> Shape:
    if factor in shapes:
        return shapes[factor]
    core = shapes.get("lokr_t2") if factor == "lokr_w2" else None
    return factored_shape(shapes[f"{factor}_a"], shapes[f"{factor}_b"], core)


LOKR = Kind(
    name="lokr",
    counted="lokr",
    suffixes=tuple(Suffix("LoKr", part, rf"\.{part}(?:\.(?P<name>.+))?") for part in PARTS),
    needs=(need("lokr_w1", "lokr_w1_a lokr_w1_b"), need("lokr_w2", "lokr_w2_a lokr_w2_b")),
    optional=MAGNITUDES | {"lokr_t2"},
    leaves=(".weight",),
    shape=lokr_shape,
    rank=lokr_rank,
    held=lokr_held,
)
