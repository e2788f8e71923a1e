"""Pairs of fused experts, stacked in one tensor of three dimensions: PEFT's ``target_parameters``.

The pair's key names the module that owns the parameter; only the configuration names the parameter.
``down`` is (experts * rank, in), expert by expert, and ``up`` (out, rank * experts), rank by rank. The tensor
is (experts, out, in), or (experts, in, out) where its model, or an older PEFT, has it so.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from fuselora.kinds.kind import ALPHAS, BadParts, Kind, Part, Shape, Shapes, fits, need
from fuselora.kinds.low_rank import pair_rank, pair_shape
from fuselora.kinds.settings import Settings

Layout = Literal["out, in", "in, out"]
PAIR_PARTS: frozenset[Part] = frozenset({"up", "down"})
# all that the pair of a parameter may hold
PARTS = PAIR_PARTS | ALPHAS


def layouts(shapes: Shapes, base: Shape) -> tuple[Layout, ...]:
    """The ways in which the pair fits a tensor of experts."""
    up, down = shapes["up"], shapes["down"]
    if len(base) != 3 or not len(up) == len(down) == 2 or up[1] != down[0]:
        return ()
    if not base[0] or down[0] % base[0]:
        return ()
    ways: dict[Layout, Shape] = {"out, in": (up[0], down[1]), "in, out": (down[1], up[0])}
    return tuple(way for way, shape in ways.items() if shape == base[1:])


def fits_parameter(shapes: Shapes, base: Shape) -> bool:
    """Whether a targeted parameter of this shape may be meant; one of two dimensions is a layer's weight."""
    if len(base) == 3:
        return bool(layouts(shapes, base))
    try:
        return fits(pair_shape(shapes, base), base)
    except BadParts:
        return False


def of_parameter(settings: Settings, shapes: Shapes, base: Shape) -> Settings:
    """What the parameter's shape settles."""
    n_experts = base[0] if len(base) == 3 else 0
    swapped = n_experts > 0 and layouts(shapes, base) == ("in, out",)
    return replace(settings, parameters=(), of_parameter=True, experts=n_experts, transposed=swapped)


def experts_shape(shapes: Shapes, base: Shape) -> Shape:
    """The base's own. Raises ``BadParts`` for a pair that fits it in no way, or in both."""
    found = layouts(shapes, base)
    pair = f"down {list(shapes['down'])} and up {list(shapes['up'])}"
    if not found:
        raise BadParts(f"{pair} fit experts of shape {list(base)} neither as (out, in) nor as (in, out)")
    if len(found) > 1:
        text = f"{pair} fit experts of shape {list(base)} both as (out, in) and as (in, out)"
        raise BadParts(f"{text}, and nothing in an adapter says which is meant")
    return base


EXPERTS = Kind(
    name="experts",
    counted="experts",
    suffixes=(),
    needs=(need("up"), need("down")),
    leaves=("",),
    shape=experts_shape,
    rank=pair_rank,
)
