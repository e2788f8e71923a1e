"""The bias of a pair's second layer (PEFT's ``lora_bias``): b += scale * bias, scaled as its pair is."""

from __future__ import annotations

from fuselora.kinds.factored import leading
from fuselora.kinds.kind import MAGNITUDES, BadParts, Kind, Shape, Shapes, Suffix, need, no_elements


def bias_shape(shapes: Shapes, base: Shape) -> Shape:
    """The part's own. Raises ``BadParts`` without the pair, whose rank scales it."""
    del base
    if "down" not in shapes:
        raise BadParts("lora_B.bias is there without its pair, whose rank scales it")
    if not MAGNITUDES.isdisjoint(shapes):
        raise BadParts("lora_B.bias beside a DoRA magnitude has no definition", "unsupported")
    return shapes["pair_bias"]


def bias_rank(shapes: Shapes) -> int | None:
    """The pair's: the leading dimension of ``down``."""
    return leading(shapes["down"]) if "down" in shapes else None


PAIR_BIAS = Kind(
    name="pair_bias",
    counted="pair_biases",
    suffixes=(Suffix("lora_A/B", "pair_bias", r"\.lora_B(?:\.(?P<name>.+))?\.bias"),),
    needs=(need("pair_bias"),),
    leaves=(".bias",),
    shape=bias_shape,
    rank=bias_rank,
    held=no_elements,
)
