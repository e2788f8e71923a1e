"""Pairs: W += scale * up @ down, of linear layers and convolutions.

LoRA (Hu et al., 2021). LyCORIS' LoCon may put a Tucker core (rank, rank, kernel ...) between the two;
LongCat-Video splits ``up`` by outputs, each block with rows of ``down`` of its own; a layer that stores its
weight as (in, out) gets the product transposed.
"""

from __future__ import annotations

import math
from dataclasses import replace

from fuselora.kinds.factored import leading
from fuselora.kinds.kind import (
    MAGNITUDES,
    BadParts,
    Kind,
    Shape,
    Shapes,
    Suffix,
    all_elements,
    has_kernel,
    need,
)

BLOCKS = tuple(f"up_{k}" for k in range(8))

SUFFIXES = (
    Suffix("lora_down/up", "down", r"\.lora_down\.weight"),
    Suffix("lora_down/up", "up", r"\.lora_up\.weight"),
    Suffix("lora_A/B", "down", r"\.lora_A(?:(?:\.(?P<name>.+))?\.weight)?"),
    Suffix("lora_A/B", "up", r"\.lora_B(?:(?:\.(?P<name>.+))?\.weight)?"),
    Suffix("lora.down/up", "down", r"\.lora(?:_linear_layer)?\.down\.weight"),
    Suffix("lora.down/up", "up", r"\.lora(?:_linear_layer)?\.up\.weight"),
    Suffix("lora_down/up", "mid", r"\.lora_mid(?:\.weight)?"),
    # attention processors: what is before names the layer, with this ending
    Suffix("processor", "down", r"(?:(?<=_lora)|(?<=_lora[12]))\.down\.weight"),
    Suffix("processor", "up", r"(?:(?<=_lora)|(?<=_lora[12]))\.up\.weight"),
)


BLOCK_SUFFIXES = tuple(
    Suffix("lora_up.blocks", part, rf"\.lora_up\.blocks\.{k}\.weight") for k, part in enumerate(BLOCKS)
)


def pair_shape(shapes: Shapes, base: Shape) -> Shape:
    """``up`` (out, rank, 1 ...) and ``down`` (rank, in, kernel ...) make (out, in, kernel ...).

    The kernel is that of ``mid`` (rank, rank, kernel ...) where there is one, and ``down`` then has none.
    """
    del base
    up, down = shapes["up"], shapes["down"]
    if up[1:2] != down[:1]:
        raise BadParts(f"up {list(up)} and down {list(down)} disagree about the rank")
    if has_kernel(up) or ("mid" in shapes and has_kernel(down)):
        text = f"a pair of shapes {list(up)} and {list(down)} is no linear pair and no convolution's"
        raise BadParts(text, "unsupported")
    if "mid" not in shapes:
        return (up[0], *down[1:])
    mid = shapes["mid"]
    if len(down) < 2 or mid[:2] != (down[0], down[0]):
        raise BadParts(f"the core lora_mid {list(mid)} does not fit the rank of down {list(down)}")
    return (up[0], down[1], *mid[2:])


def pair_rank(shapes: Shapes) -> int | None:
    """The leading dimension of ``down``."""
    return leading(shapes["down"])


def pair_held(shapes: Shapes) -> int:
    """The factors, and what a core makes with ``down``: (rank, in * kernel)."""
    core = math.prod((*shapes["down"][:2], *shapes["mid"][2:])) if "mid" in shapes else 0
    return all_elements(shapes) + core


def split_shape(shapes: Shapes, base: Shape) -> Shape:
    """Blocks of ``up`` (out_k, rank), one below the other, and ``down`` (blocks * rank, in)."""
    del base
    down, blocks = shapes["down"], [part for part in BLOCKS if part in shapes]
    missing = [part for part in BLOCKS[: len(blocks)] if part not in shapes]
    if missing:
        raise BadParts(f"lora_up.blocks.{missing[0].removeprefix('up_')} is missing between the others")
    ups = [shapes[part] for part in blocks]
    if any(len(shape) != 2 for shape in (*ups, down)):
        raise BadParts("a pair with split outputs is of matrices alone", "unsupported")
    if len({up[1] for up in ups}) != 1 or len(ups) * ups[0][1] != down[0]:
        listed = ", ".join(str(list(up)) for up in ups)
        raise BadParts(f"lora_up.blocks {listed} and down {list(down)} disagree about the rank")
    return (sum(up[0] for up in ups), down[1])


def split_rank(shapes: Shapes) -> int | None:
    """The second dimension of every block of ``up``."""
    return shapes["up_0"][1] if len(shapes["up_0"]) > 1 else None


def transposed_shape(shapes: Shapes, base: Shape) -> Shape:
    """(in, out)."""
    return tuple(reversed(pair_shape(shapes, base)))


PAIR = Kind(
    name="pair",
    counted="pairs",
    suffixes=SUFFIXES,
    needs=(need("up"), need("down")),
    optional=frozenset({"mid"}) | MAGNITUDES,
    leaves=(".weight",),
    shape=pair_shape,
    rank=pair_rank,
    held=pair_held,
    not_with=frozenset({"up_0"}),
)
SPLIT_PAIR = Kind(
    name="split_pair",
    counted="pairs",
    suffixes=BLOCK_SUFFIXES,
    needs=(need("up_0"), need("down")),
    optional=frozenset(BLOCKS[1:]),
    leaves=(".weight",),
    shape=split_shape,
    rank=split_rank,
    is_nothing=lambda zero: "down" in zero,
    told_by="up_0",
)
# what a pair of matrices is where the configuration says fan_in_fan_out
TRANSPOSED = replace(PAIR, name="transposed", suffixes=(), shape=transposed_shape, outputs_last=True)
