"""What is known about each model family, as data: names, rows, kept dtypes, skips, few-step LoRAs."""

from __future__ import annotations

from fuselora.families.chroma import CHROMA
from fuselora.families.family import Family, Layout, RowOrder, Sign, Widening
from fuselora.families.few_step import FewStep
from fuselora.families.flux1 import FLUX1
from fuselora.families.flux2 import FLUX2
from fuselora.families.hunyuan_video import HUNYUAN_VIDEO
from fuselora.families.hunyuan_video_15 import HUNYUAN_VIDEO_15
from fuselora.families.kandinsky5 import KANDINSKY_5
from fuselora.families.kin import Branch, Kin, Measure, SkipRule
from fuselora.families.longcat_video import LONGCAT_VIDEO
from fuselora.families.ltx2 import LTX_2
from fuselora.families.ltx_video import LTX_VIDEO
from fuselora.families.minimax_h3 import MINIMAX_H3
from fuselora.families.qwen_image import QWEN_IMAGE
from fuselora.families.sd import SD
from fuselora.families.sd3 import SD3
from fuselora.families.sdxl import SDXL
from fuselora.families.sensenova_u1 import SENSENOVA_U1
from fuselora.families.wan import WAN
from fuselora.families.z_image import Z_IMAGE

FAMILIES: tuple[Family, ...] = (
    WAN,
    QWEN_IMAGE,
    FLUX1,
    FLUX2,
    Z_IMAGE,
    CHROMA,
    SD3,
    SD,  # before SDXL, which has its names and more
    SDXL,
    HUNYUAN_VIDEO,
    HUNYUAN_VIDEO_15,
    LTX_VIDEO,
    LTX_2,
    MINIMAX_H3,
    SENSENOVA_U1,
    LONGCAT_VIDEO,
    KANDINSKY_5,
)

__all__ = [
    "FAMILIES",
    "Branch",
    "Family",
    "FewStep",
    "Kin",
    "Layout",
    "Measure",
    "RowOrder",
    "Sign",
    "SkipRule",
    "Widening",
]
