"""Stable Diffusion XL's UNet, in diffusers' names and in those of single files (SGM).

Sources: the published checkpoints' tensor lists; diffusers' UNet2DConditionModel and its
``convert_ldm_unet_checkpoint``, which the tests hold every row against. The text encoders' names are those of
``fuselora.text_encoders``.
"""

from __future__ import annotations

from collections.abc import Iterator

from fuselora.families.family import Family
from fuselora.families.few_step import FewStep
from fuselora.families.kin import Kin, Measure
from fuselora.families.renames import Renames

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
    ("label_emb.0.0", "add_embedding.linear_1"),
    ("label_emb.0.2", "add_embedding.linear_2"),
    ("input_blocks.0.0", "conv_in"),
    ("out.0", "conv_norm_out"),
    ("out.2", "conv_out"),
)
LEVELS, LAYERS = 3, 2  # of the UNet, and resnets in a level on the way down; one more on the way up


def _resnet(theirs: str, ours: str) -> Iterator[tuple[str, str]]:
    for their_layer, our_layer in RESNET:
        yield f"{theirs}.{their_layer}", f"{ours}.{our_layer}"


def _attention(theirs: str, ours: str) -> tuple[str, str]:
    return f"{theirs}.{{rest}}", f"{ours}.{{rest}}"


def _blocks() -> Iterator[tuple[str, str]]:
    """Input and output blocks are numbered through: a resnet each, its attention and what resamples."""
    for level in range(LEVELS):
        for layer in range(LAYERS):
            block, down = f"input_blocks.{1 + level * (LAYERS + 1) + layer}", f"down_blocks.{level}"
            yield from _resnet(f"{block}.0", f"{down}.resnets.{layer}")
            if level:
                yield _attention(f"{block}.1", f"{down}.attentions.{layer}")
        for layer in range(LAYERS + 1):
            block, up = f"output_blocks.{level * (LAYERS + 1) + layer}", f"up_blocks.{level}"
            yield from _resnet(f"{block}.0", f"{up}.resnets.{layer}")
            if level < LEVELS - 1:
                yield _attention(f"{block}.1", f"{up}.attentions.{layer}")
        if level < LEVELS - 1:
            last_in, last_out = (level + 1) * (LAYERS + 1), level * (LAYERS + 1) + LAYERS
            yield f"input_blocks.{last_in}.0.op", f"down_blocks.{level}.downsamplers.0.conv"
            yield f"output_blocks.{last_out}.2.conv", f"up_blocks.{level}.upsamplers.0.conv"
    yield from _resnet("middle_block.0", "mid_block.resnets.0")
    yield _attention("middle_block.1", "mid_block.attentions.0")
    yield from _resnet("middle_block.2", "mid_block.resnets.1")


def _names() -> Iterator[str]:
    for block in ("down_blocks.{n}", "up_blocks.{n}", "mid_block"):
        yield from (f"{block}.resnets.{{n}}.{name}" for _, name in RESNET)
        attention = f"{block}.attentions.{{n}}"
        yield from (f"{attention}.{name}" for name in ("norm", "proj_in", "proj_out"))
        inner = f"{attention}.transformer_blocks.{{n}}"
        yield from (f"{inner}.attn{n}.to_{part}" for n in (1, 2) for part in ("q", "k", "v", "out.0"))
        yield from (f"{inner}.{name}" for name in ("ff.net.0.proj", "ff.net.2", "norm1", "norm2", "norm3"))
    yield from ("down_blocks.{n}.downsamplers.{n}.conv", "up_blocks.{n}.upsamplers.{n}.conv")
    yield from (ours for _, ours in ENDS)


SDXL = Family(
    name="sdxl",
    canonical="diffusers",
    layouts={"sgm": Renames((*ENDS, *_blocks()))},
    names=frozenset(_names()),
    block="down_blocks.{n}.",
    kin=(
        Kin(
            ("SDXL-base-1.0",),
            (),
            3,
            {"conv_in.weight": (320, 4, 3, 3), "add_embedding.linear_1.weight": (1280, 2816)},
        ),
        Kin(
            ("SDXL-inpainting-0.1",),
            (),
            3,
            {"conv_in.weight": (320, 9, 3, 3), "add_embedding.linear_1.weight": (1280, 2816)},
        ),
    ),
    measures=(
        Measure("in_channels", ("conv_in.weight", 1), {1: ("conv_in.weight",)}),
        Measure(
            "text_dim",
            ("mid_block.attentions.0.transformer_blocks.0.attn2.to_k.weight", 1),
            {
                1: tuple(
                    f"{b}.attentions.{{n}}.transformer_blocks.{{n}}.attn2.to_k.weight"
                    for b in ("down_blocks.{n}", "mid_block")
                )
            },
        ),
    ),
    few_step=(
        FewStep(
            name="SDXL-Lightning",
            pattern=r"sdxl[-_]lightning",
            # its model card: no guidance, and timesteps spaced to the end; the steps are in the name
            source="ByteDance/SDXL-Lightning",
            guidance_scale=0.0,
            remark='its scheduler spaces timesteps "trailing"',
        ),
        FewStep(
            name="Hyper-SDXL",
            pattern=r"hyper[-_]sdxl",
            # its model card; the steps are in the name
            source="ByteDance/Hyper-SD",
            guidance_scale=0.0,
        ),
        FewStep(
            name="DMD2",
            pattern=r"dmd2[-_]sdxl",
            # its model card: LCM scheduler, timesteps 999, 749, 499, 249
            source="tianweiy/DMD2",
            num_inference_steps=4,
            guidance_scale=0.0,
            remark="the timesteps are 999, 749, 499 and 249",
        ),
    ),
)
