"""Stable Diffusion XL's UNet, in diffusers' names and in those of single files (SGM).

The text encoders' names are those of ``fuselora.text_encoders``.
"""

from __future__ import annotations

from fuselora.families.family import Family
from fuselora.families.few_step import FewStep
from fuselora.families.kin import Kin
from fuselora.families.renames import Renames
from fuselora.families.unet import MEASURES, MID_TEXT, names, sgm_rows

ADDED = (
    ("label_emb.0.0", "add_embedding.linear_1"),
    ("label_emb.0.2", "add_embedding.linear_2"),
)


SDXL = Family(
    name="sdxl",
    known_as=r"(?:stable[-_ ]diffusion[-_ ]|(?<![a-z])sd[-_ ]?)xl",
    canonical="diffusers",
    layouts={"sgm": Renames((*ADDED, *sgm_rows((False, True, True))))},
    names=frozenset(names()) | {ours for _, ours in ADDED},
    block="down_blocks.{n}.",
    blocks_alike=False,
    kin=(
        Kin(
            ("SDXL-base-1.0",),
            (),
            3,
            {
                "conv_in.weight": (320, 4, 3, 3),
                "add_embedding.linear_1.weight": (1280, 2816),
                MID_TEXT: (1280, 2048),
            },
        ),
        Kin(
            ("SDXL-inpainting-0.1",),
            (),
            3,
            {
                "conv_in.weight": (320, 9, 3, 3),
                "add_embedding.linear_1.weight": (1280, 2816),
                MID_TEXT: (1280, 2048),
            },
        ),
    ),
    measures=MEASURES,
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
            name="Hyper-SDXL CFG",
            pattern=r"hyper[-_]sdxl[-_][0-9]+steps?[-_]cfg",
            # the news of its model card; the steps are in the name
            source="ByteDance/Hyper-SD",
            remark="it supports guidance scales of 5 to 8",
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
        FewStep(
            name="LCM-LoRA for SDXL",
            pattern=r"lcm[-_]lora[-_]sdxl",
            # its model card: LCMScheduler, 2 to 8 steps, no guidance or a scale of 1 to 2
            source="latent-consistency/lcm-lora-sdxl",
            remark="for LCMScheduler, 2 to 8 steps and a guidance scale of 1 to 2, or none",
        ),
    ),
)
