"""HunyuanVideo-1.5, in diffusers' names and Tencent's own: HunyuanVideo's blocks with q, k and v apart.

Sources: diffusers' HunyuanVideo15Transformer3DModel and its conversion script
``scripts/convert_hunyuan_video1_5_to_diffusers.py``, which the tests have by hand.
"""

from __future__ import annotations

from fuselora.families.family import Family
from fuselora.families.hunyuan_video import ADDED_QKV, DOUBLE, QKV, SHARED_ROWS, in_comfy
from fuselora.families.kin import Kin, Measure
from fuselora.families.renames import Renames, Rows, canonical_names

ROWS: Rows = (
    *SHARED_ROWS,
    ("time_in.mlp.0", "time_embed.timestep_embedder.linear_1"),
    ("time_in.mlp.2", "time_embed.timestep_embedder.linear_2"),
    # of the models distilled with mean flow
    ("time_r_in.mlp.0", "time_embed.timestep_embedder_r.linear_1"),
    ("time_r_in.mlp.2", "time_embed.timestep_embedder_r.linear_2"),
    *zip((f"double_blocks.{{n}}.img_attn_{part}" for part in "qkv"), QKV, strict=True),
    *zip((f"double_blocks.{{n}}.txt_attn_{part}" for part in "qkv"), ADDED_QKV, strict=True),
    ("byt5_in.layernorm", "context_embedder_2.norm"),
    *((f"byt5_in.fc{n}", f"context_embedder_2.linear_{n}") for n in (1, 2, 3)),
    ("vision_in.proj.0", "image_embedder.norm_in"),
    ("vision_in.proj.1", "image_embedder.linear_1"),
    ("vision_in.proj.3", "image_embedder.linear_2"),
    ("vision_in.proj.4", "image_embedder.norm_out"),
    ("cond_type_embedding", "cond_type_embed"),
)

HUNYUAN_VIDEO_15 = Family(
    name="hunyuan-video-1.5",
    canonical="diffusers",
    layouts={"native": Renames(ROWS), "comfy": Renames(in_comfy(ROWS))},
    names=canonical_names(ROWS),
    block="transformer_blocks.{n}.",
    kin=(Kin(("HunyuanVideo-1.5",), (), 54, {"x_embedder.proj.weight": (2048, 65, 1, 1, 1)}),),
    measures=(
        Measure(
            "dim",
            ("x_embedder.proj.weight", 0),
            {
                0: tuple(f"{name}.weight" for name in (*QKV, *ADDED_QKV)),
                1: (f"{DOUBLE}.ff.net.0.proj.weight",),
            },
        ),
    ),
)
