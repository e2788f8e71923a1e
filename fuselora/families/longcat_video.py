"""LongCat-Video. diffusers has no class for it; names are those of the published module definitions.

Source: meituan-longcat/LongCat-Video, longcat_video/modules.
"""

from __future__ import annotations

from fuselora.families.family import Family
from fuselora.families.kin import Kin, Measure

BLOCK = "blocks.{n}"
NAMES = (
    *(f"{BLOCK}.attn.{name}" for name in ("qkv", "proj", "q_norm", "k_norm")),
    *(f"{BLOCK}.cross_attn.{name}" for name in ("q_linear", "kv_linear", "proj", "q_norm", "k_norm")),
    *(f"{BLOCK}.ffn.w{n}" for n in (1, 2, 3)),
    f"{BLOCK}.adaLN_modulation.1",
    f"{BLOCK}.pre_crs_attn_norm",
    "x_embedder.proj",
    "t_embedder.mlp.0",
    "t_embedder.mlp.2",
    "y_embedder.y_proj.0",
    "y_embedder.y_proj.2",
    "final_layer.adaLN_modulation.1",
    "final_layer.linear",
)

LONGCAT_VIDEO = Family(
    name="longcat-video",
    canonical="native",
    layouts={},
    names=frozenset(NAMES),
    block="blocks.{n}.",
    kin=(Kin(("LongCat-Video",), (), 48, {"x_embedder.proj.weight": (4096, 16, 1, 2, 2)}),),
    measures=(
        Measure(
            "dim",
            ("x_embedder.proj.weight", 0),
            {0: (f"{BLOCK}.attn.proj.weight",), 1: (f"{BLOCK}.attn.qkv.weight", f"{BLOCK}.ffn.w1.weight")},
        ),
    ),
)
