"""The UNet of Stable Diffusion 1, 2 and XL: diffusers' names, and those of single files (SGM) beside them.

Source: diffusers' UNet2DConditionModel and its ``convert_ldm_unet_checkpoint``, which the tests hold every
row against.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fuselora.families.kin import Measure

RESNET = (
    ("in_layers.0", "norm1"),
    ("in_layers.2", "conv1"),
    ("emb_layers.1", "time_emb_proj"),
    ("out_layers.0", "norm2"),
    ("out_layers.3", "conv2"),
    ("skip_connection", "conv_shortcut"),
)
ENDS = (
    ("time_embed.0", "time_embedding.linear_1"),
    ("time_embed.2", "time_embedding.linear_2"),
    ("input_blocks.0.0", "conv_in"),
    ("out.0", "conv_norm_out"),
    ("out.2", "conv_out"),
)
TEXT = "attentions.{n}.transformer_blocks.{n}.attn2.to_k.weight"  # its columns are the text encoder's width
MID_TEXT = "mid_block.attentions.0.transformer_blocks.0.attn2.to_k.weight"
MEASURES = (
    Measure("in_channels", ("conv_in.weight", 1), {1: ("conv_in.weight",)}),
    Measure(
        "text_dim",
        (MID_TEXT, 1),
        {1: tuple(f"{block}.{TEXT}" for block in ("down_blocks.{n}", "mid_block", "up_blocks.{n}"))},
    ),
)
LAYERS = 2  # resnets in a level on the way down; one more on the way up


def sgm_rows(attention: Sequence[bool]) -> Iterator[tuple[str, str]]:
    """Single files' names and diffusers', level for level; ``attention``: whether a level has it, going down.

    Input and output blocks are numbered through: a resnet each, its attention and what resamples.
    """
    yield from ENDS
    for level, attends in enumerate(attention):
        yield from _down(level, attends=attends, last=level == len(attention) - 1)
    for level, attends in enumerate(reversed(attention)):
        yield from _up(level, attends=attends, last=level == len(attention) - 1)
    yield from _resnet("middle_block.0", "mid_block.resnets.0")
    yield _attention("middle_block.1", "mid_block.attentions.0")
    yield from _resnet("middle_block.2", "mid_block.resnets.1")


def _down(level: int, *, attends: bool, last: bool) -> Iterator[tuple[str, str]]:
    first, ours = 1 + level * (LAYERS + 1), f"down_blocks.{level}"
    for layer in range(LAYERS):
        yield from _resnet(f"input_blocks.{first + layer}.0", f"{ours}.resnets.{layer}")
        if attends:
            yield _attention(f"input_blocks.{first + layer}.1", f"{ours}.attentions.{layer}")
    if not last:
        yield f"input_blocks.{first + LAYERS}.0.op", f"{ours}.downsamplers.0.conv"


def _up(level: int, *, attends: bool, last: bool) -> Iterator[tuple[str, str]]:
    first, ours = level * (LAYERS + 1), f"up_blocks.{level}"
    for layer in range(LAYERS + 1):
        yield from _resnet(f"output_blocks.{first + layer}.0", f"{ours}.resnets.{layer}")
        if attends:
            yield _attention(f"output_blocks.{first + layer}.1", f"{ours}.attentions.{layer}")
    if not last:
        yield f"output_blocks.{first + LAYERS}.{1 + attends}.conv", f"{ours}.upsamplers.0.conv"


def _resnet(theirs: str, ours: str) -> Iterator[tuple[str, str]]:
    for their_layer, our_layer in RESNET:
        yield f"{theirs}.{their_layer}", f"{ours}.{our_layer}"


def _attention(theirs: str, ours: str) -> tuple[str, str]:
    return f"{theirs}.{{rest}}", f"{ours}.{{rest}}"


def names() -> Iterator[str]:
    """Patterns of all modules, by diffusers' names."""
    for block in ("down_blocks.{n}", "up_blocks.{n}", "mid_block"):
        yield from (f"{block}.resnets.{{n}}.{name}" for _, name in RESNET)
        attention = f"{block}.attentions.{{n}}"
        yield from (f"{attention}.{name}" for name in ("norm", "proj_in", "proj_out"))
        inner = f"{attention}.transformer_blocks.{{n}}"
        yield from (f"{inner}.attn{n}.to_{part}" for n in (1, 2) for part in ("q", "k", "v", "out.0"))
        yield from (f"{inner}.{name}" for name in ("ff.net.0.proj", "ff.net.2", "norm1", "norm2", "norm3"))
    yield from ("down_blocks.{n}.downsamplers.{n}.conv", "up_blocks.{n}.upsamplers.{n}.conv")
    yield from (ours for _, ours in ENDS)
