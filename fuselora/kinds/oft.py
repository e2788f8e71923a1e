"""OFT: blocks of a weight's outputs or inputs, each turned by a rotation of its own.

Orthogonal finetuning (Qiu et al., 2023). The rotations are Cayley transforms of skew-symmetric matrices.
LyCORIS' diag-OFT and kohya's trainers save ``oft_blocks`` (blocks, size, size) for the outputs, perhaps a
``rescale`` of each output, and as alpha the constraint: a limit to the norm of all blocks. PEFT saves
``oft_R`` (blocks, numbers above a diagonal) for the inputs, and how its numbers make rotations is in its
``adapter_config.json`` alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from fuselora.kinds.kind import BadParts, Kind, Shape, Shapes, Suffix, all_elements, need, never
from fuselora.kinds.settings import Settings

ShapeOf = Callable[[Shapes, Shape], Shape]
Asks = Callable[[Settings, Shapes, Shape], None]
# the elimination is in float64, with the right-hand side beside the matrix, and a product for each step
WORK = 8


def block_size(n_numbers: int) -> int | None:
    """Of the matrix that has so many numbers above its diagonal; None if there is none."""
    size = (1 + math.isqrt(1 + 8 * n_numbers)) // 2
    return size if size * (size - 1) // 2 == n_numbers else None


def outputs_shape(shapes: Shapes, base: Shape) -> Shape:
    """The base's own; blocks (..., number, size, size) cover its outputs."""
    blocks, rescale = shapes["oft_blocks"], shapes.get("rescale")
    if len(blocks) not in (3, 4) or blocks[-1] != blocks[-2]:
        raise BadParts(f"oft_blocks {list(blocks)} are no square blocks")
    if base and blocks[-3] * blocks[-2] != base[0]:
        raise BadParts(f"oft_blocks {list(blocks)} do not cover the {base[0]} outputs of {list(base)}")
    if base and rescale is not None and (rescale[:1] != base[:1] or math.prod(rescale) != base[0]):
        raise BadParts(f"rescale {list(rescale)} is not one number for each output of {list(base)}")
    return base


def inputs_shape(part: str) -> ShapeOf:
    """The base's own, of blocks of its inputs."""

    def shape(shapes: Shapes, base: Shape) -> Shape:
        found = shapes[part]
        if len(found) != 2 or block_size(found[1]) is None:
            raise BadParts(f"oft_R {list(found)} is not what is above the diagonals of square blocks")
        return base

    return shape


def ask_rotation(part: str) -> Asks:
    """The configuration, and that blocks so shared cover the inputs."""

    def ask(settings: Settings, shapes: Shapes, base: Shape) -> None:
        if settings.rotation is None:
            raise BadParts(f"oft_R cannot be read: {settings.unread}", "unsupported")
        n_blocks, n_numbers = shapes[part]
        size, n_inputs = block_size(n_numbers) or 1, math.prod(base[1:])
        shared = settings.rotation.shared and n_blocks == 1 and n_inputs % size == 0
        if not shared and n_blocks * size != n_inputs:
            text = f"oft_R {list(shapes[part])}, blocks of {size}, do not cover the {n_inputs} inputs"
            raise BadParts(f"{text} of {list(base)}")

    return ask


def outputs_held(shapes: Shapes) -> int:
    """The blocks while they become rotations."""
    return WORK * all_elements(shapes)


def inputs_held(part: str) -> Callable[[Shapes], int]:
    """The same of blocks that are saved by halves."""

    def held(shapes: Shapes) -> int:
        n_blocks, n_numbers = shapes[part]
        return WORK * n_blocks * (block_size(n_numbers) or 0) ** 2

    return held


def inputs_kind(name: str, part: str, key: str) -> Kind:
    """PEFT's, of blocks of the inputs."""
    return Kind(
        name=name,
        counted="oft",
        suffixes=(Suffix("OFT", part, rf"\.{key}(?:\.(?P<name>.+?))??\.weight"),),
        needs=(need(part),),
        leaves=(".weight",),
        shape=inputs_shape(part),
        held=inputs_held(part),
        moves=True,
        asks=ask_rotation(part),
    )


OFT = Kind(
    name="oft",
    counted="oft",
    suffixes=(
        Suffix("OFT", "oft_blocks", r"\.oft_blocks"),
        Suffix("OFT", "rescale", r"\.rescale"),
    ),
    needs=(need("oft_blocks"),),
    optional=frozenset({"rescale"}),
    leaves=(".weight",),
    shape=outputs_shape,
    held=outputs_held,
    is_nothing=never,
    moves=True,
    mixes_rows=True,
    takes_alpha=True,
)
PEFT_OFT = inputs_kind("peft_oft", "oft_r", "oft_R")
# an embedding's outputs are what the next layer takes in
PEFT_OFT_EMBEDDING = inputs_kind("peft_oft_embedding", "oft_embedding_r", "oft_embedding_R")
