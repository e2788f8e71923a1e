"""BOFT: OFT in several stages, each of which turns other numbers together, as the stages of a butterfly do.

Orthogonal butterflies (Liu et al., 2023). LyCORIS saves ``oft_blocks`` (stages, blocks, size, size) for the
outputs, as its OFT does, and every row of the result needs all rows of the base. PEFT saves ``boft_R``
(stages, blocks, size, size) for the inputs, and ``boft_s``, one number for each output.
"""

from __future__ import annotations

import math
from dataclasses import replace

from fuselora.kinds.kind import BadParts, Kind, Shape, Shapes, Suffix, need, never
from fuselora.kinds.oft import OFT, WORK, outputs_shape


def stages_shape(shapes: Shapes, base: Shape) -> Shape:
    """The base's own; stage i turns runs of size / 2 that are 2^i of them apart."""
    n_stages, n_blocks, size = shapes["oft_blocks"][:3]
    if size % 2 or n_blocks % 2 ** (n_stages - 1):
        raise BadParts(f"oft_blocks {list(shapes['oft_blocks'])} make no butterfly")
    return outputs_shape(shapes, base)


def peft_shape(shapes: Shapes, base: Shape) -> Shape:
    """The base's own; the blocks of each stage cover its inputs, the numbers its outputs."""
    blocks, gain = shapes["boft_r"], shapes["boft_s"]
    if len(blocks) != 4 or blocks[2] != blocks[3] or 0 in blocks:
        raise BadParts(f"boft_R {list(blocks)} are no stages of square blocks")
    n_stages, n_blocks, size = blocks[:3]
    if n_stages > 1 and (size % 2 or n_blocks % 2 ** (n_stages - 1)):
        raise BadParts(f"boft_R {list(blocks)} make no butterfly")
    if base and n_blocks * size != math.prod(base[1:]):
        raise BadParts(f"boft_R {list(blocks)} do not cover the {math.prod(base[1:])} inputs of {list(base)}")
    if base and (math.prod(gain) != base[0] or base[0] not in gain):
        raise BadParts(f"boft_s {list(gain)} is not one number for each output of {list(base)}")
    return base


def peft_held(shapes: Shapes) -> int:
    """The blocks while they become rotations."""
    return WORK * math.prod(shapes["boft_r"]) + math.prod(shapes["boft_s"])


# what ``oft_blocks`` of four dimensions are
BOFT = replace(OFT, name="boft", counted="boft", suffixes=(), shape=stages_shape, copies=1)
PEFT_BOFT = Kind(
    name="peft_boft",
    counted="boft",
    suffixes=(
        Suffix("BOFT", "boft_r", r"\.boft_R(?:\.(?P<name>.+))?"),
        Suffix("BOFT", "boft_s", r"\.boft_s(?:\.(?P<name>.+))?"),
    ),
    needs=(need("boft_r"), need("boft_s")),
    leaves=(".weight",),
    shape=peft_shape,
    held=peft_held,
    is_nothing=never,
    moves=True,
)
