"""The tensors of a Wan transformer: names in either layout, shapes, and how large their values are.

Shapes and names: the published checkpoints and diffusers' WanTransformer3DModel.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fuselora.families.wan import WAN
from fuselora.synth.sizes import PATCH, VACE_CHANNELS
from fuselora.synth.values import Spec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fuselora.families.family import Layout
    from fuselora.synth.sizes import WanSize
    from fuselora.synth.values import Shape


def base_tensors(
    size: WanSize, layout: Layout = "native", *, dtype: str = "F32", mixed: bool = False, prefix: str = ""
) -> tuple[Spec, ...]:
    """Every tensor of one transformer, in the order of diffusers' state dict.

    ``mixed``: what the model class keeps in float32 stays F32 beside another ``dtype``.
    """
    specs = []
    for name, shape in _native_shapes(size):
        std, mean = _moments(name, shape)
        stored = "F32" if mixed and WAN.keeps_float32(name, "native") else dtype
        specs.append(Spec(prefix + in_layout(name, layout), stored, shape, std, mean, key=name))
    return tuple(specs)


def in_layout(native: str, layout: Layout) -> str:
    """A native module or tensor name, spelled as in ``layout``."""
    # norm2 and norm3 are names in both layouts, so a native name must not be translated "to native".
    return WAN.translate(native, "native", layout)


def _native_shapes(size: WanSize) -> Iterator[tuple[str, Shape]]:
    dim = size.dim
    yield "head.modulation", (1, 2, dim)
    yield from _weight_and_bias("patch_embedding", (dim, size.in_channels, *PATCH))
    if size.vace_blocks:
        yield from _weight_and_bias("vace_patch_embedding", (dim, VACE_CHANNELS, *PATCH))
    yield from _weight_and_bias("time_embedding.0", (dim, size.freq_dim))
    yield from _weight_and_bias("time_embedding.2", (dim, dim))
    yield from _weight_and_bias("time_projection.1", (6 * dim, dim))
    yield from _weight_and_bias("text_embedding.0", (dim, size.text_dim))
    yield from _weight_and_bias("text_embedding.2", (dim, dim))
    if size.image_dim:
        yield from _image_embedding(dim, size.image_dim)
    for number in range(size.blocks):
        yield from _block(f"blocks.{number}", size)
    for number in range(size.vace_blocks):
        yield from _vace_block(f"vace_blocks.{number}", size, first=number == 0)
    yield from _weight_and_bias("head.head", (size.out_channels * math.prod(PATCH), dim))


def _image_embedding(dim: int, image_dim: int) -> Iterator[tuple[str, Shape]]:
    yield from _weight_and_bias("img_emb.proj.0", (image_dim,))
    yield from _weight_and_bias("img_emb.proj.1", (image_dim, image_dim))
    yield from _weight_and_bias("img_emb.proj.3", (dim, image_dim))
    yield from _weight_and_bias("img_emb.proj.4", (dim,))


def _block(block: str, size: WanSize) -> Iterator[tuple[str, Shape]]:
    yield f"{block}.modulation", (1, 6, size.dim)
    yield from _attention(f"{block}.self_attn", size.dim, image=False)
    yield from _attention(f"{block}.cross_attn", size.dim, image=bool(size.image_dim))
    yield from _weight_and_bias(f"{block}.norm3", (size.dim,))
    yield from _weight_and_bias(f"{block}.ffn.0", (size.ffn, size.dim))
    yield from _weight_and_bias(f"{block}.ffn.2", (size.dim, size.ffn))


def _vace_block(block: str, size: WanSize, *, first: bool) -> Iterator[tuple[str, Shape]]:
    modulation, *rest = _block(block, size)
    yield modulation
    if first:
        yield from _weight_and_bias(f"{block}.before_proj", (size.dim, size.dim))
    yield from rest
    yield from _weight_and_bias(f"{block}.after_proj", (size.dim, size.dim))


def _attention(name: str, dim: int, *, image: bool) -> Iterator[tuple[str, Shape]]:
    for linear in "qkvo":
        yield from _weight_and_bias(f"{name}.{linear}", (dim, dim))
    yield f"{name}.norm_q.weight", (dim,)
    yield f"{name}.norm_k.weight", (dim,)
    if image:
        yield from _weight_and_bias(f"{name}.k_img", (dim, dim))
        yield from _weight_and_bias(f"{name}.v_img", (dim, dim))
        yield f"{name}.norm_k_img.weight", (dim,)


def _weight_and_bias(module: str, shape: Shape) -> Iterator[tuple[str, Shape]]:
    yield f"{module}.weight", shape
    yield f"{module}.bias", shape[:1]


def _moments(name: str, shape: Shape) -> tuple[float, float]:
    """(std, mean): weights keep the size of what they multiply, norms lie near one."""
    if name.endswith(".bias"):
        return 0.02, 0.0
    if name.endswith("modulation"):
        return shape[-1] ** -0.5, 0.0
    if len(shape) == 1:
        return 0.1, 1.0
    return math.prod(shape[1:]) ** -0.5, 0.0
