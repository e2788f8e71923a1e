"""Stable Diffusion 1 and 2's UNet, in diffusers' names and in those of single files (SGM)."""

from __future__ import annotations

from fuselora.families.family import Family
from fuselora.families.few_step import FewStep
from fuselora.families.kin import Kin
from fuselora.families.renames import Renames
from fuselora.families.unet import MEASURES, MID_TEXT, names, sgm_rows


def _kin(*models: str, text: int, channels: int = 4) -> Kin:
    witnesses = {
        "conv_in.weight": (320, channels, 3, 3),
        MID_TEXT: (1280, text),
        "add_embedding.linear_1.weight": (),
    }
    return Kin(models, (), 4, witnesses)


SD = Family(
    name="sd",
    known_as=r"(?:stable[-_ ]diffusion[-_ ]|(?<![a-z])sd[-_ ]?)v?(?:15?|21?)(?![0-9])",
    canonical="diffusers",
    layouts={"sgm": Renames(sgm_rows((True, True, True, False)))},
    names=frozenset(names()),
    block="down_blocks.{n}.",
    blocks_alike=False,
    kin=(
        _kin("SD-1.4", "SD-1.5", text=768),
        _kin("SD-1.5-inpainting", text=768, channels=9),
        _kin("SD-2.0", "SD-2.1", text=1024),
        _kin("SD-2.0-inpainting", text=1024, channels=9),
    ),
    measures=MEASURES,
    few_step=(
        FewStep(
            name="Hyper-SD15 CFG",
            pattern=r"hyper[-_]sd15[-_][0-9]+steps?[-_]cfg",
            # the news of its model card; the steps are in the name
            source="ByteDance/Hyper-SD",
            remark="it supports guidance scales of 5 to 8",
        ),
        FewStep(
            name="Hyper-SD15",
            pattern=r"hyper[-_]sd15",
            # its model card; the steps are in the name
            source="ByteDance/Hyper-SD",
            guidance_scale=0.0,
        ),
        FewStep(
            name="LCM-LoRA for SD-1.5",
            pattern=r"lcm[-_]lora[-_]sdv1[-_]5",
            # its model card: LCMScheduler, 2 to 8 steps, no guidance or a scale of 1 to 2
            source="latent-consistency/lcm-lora-sdv1-5",
            remark="for LCMScheduler, 2 to 8 steps and a guidance scale of 1 to 2, or none",
        ),
    ),
)
