"""HunyuanVideo-1.5, in diffusers' names and Tencent's own: HunyuanVideo's blocks with q, k and v apart.

Sources: diffusers' HunyuanVideo15Transformer3DModel and its conversion script
``scripts/convert_hunyuan_video1_5_to_diffusers.py``, which the tests have by hand. ComfyUI's model has the
blocks of HunyuanVideo: in its repacks and in LoRAs made there q, k and v are one layer again.
"""

from __future__ import annotations

from fuselora.families.family import Family
from fuselora.families.few_step import FewStep
from fuselora.families.hunyuan_video import ADDED_QKV, DOUBLE, QKV, SHARED_ROWS, in_comfy
from fuselora.families.kin import Kin, Measure
from fuselora.families.renames import Renames, Rows, canonical_names, split

OWN_ROWS: Rows = (
    *SHARED_ROWS,
    ("time_in.mlp.0", "time_embed.timestep_embedder.linear_1"),
    ("time_in.mlp.2", "time_embed.timestep_embedder.linear_2"),
    # of the models distilled with mean flow
    ("time_r_in.mlp.0", "time_embed.timestep_embedder_r.linear_1"),
    ("time_r_in.mlp.2", "time_embed.timestep_embedder_r.linear_2"),
    ("byt5_in.layernorm", "context_embedder_2.norm"),
    *((f"byt5_in.fc{n}", f"context_embedder_2.linear_{n}") for n in (1, 2, 3)),
    ("vision_in.proj.0", "image_embedder.norm_in"),
    ("vision_in.proj.1", "image_embedder.linear_1"),
    ("vision_in.proj.3", "image_embedder.linear_2"),
    ("vision_in.proj.4", "image_embedder.norm_out"),
    ("cond_type_embedding", "cond_type_embed"),
)
ROWS: Rows = (
    *OWN_ROWS,
    *zip((f"double_blocks.{{n}}.img_attn_{part}" for part in "qkv"), QKV, strict=True),
    *zip((f"double_blocks.{{n}}.txt_attn_{part}" for part in "qkv"), ADDED_QKV, strict=True),
)
COMFY_ROWS: Rows = (
    *in_comfy(OWN_ROWS),
    split("double_blocks.{n}.img_attn.qkv", *QKV),
    split("double_blocks.{n}.txt_attn.qkv", *ADDED_QKV),
)


def _kin(*models: str, channels: int, meanflow: bool | None) -> Kin:
    """``meanflow``: whether it has a second time embedding, None if that is not told."""
    witnesses: dict[str, tuple[int, ...]] = {"x_embedder.proj.weight": (2048, channels, 1, 1, 1)}
    if meanflow is not None:
        witnesses["time_embed.timestep_embedder_r.linear_1.weight"] = (-1, -1) if meanflow else ()
    return Kin(models, (), 54, witnesses)


HUNYUAN_VIDEO_15 = Family(
    name="hunyuan-video-1.5",
    known_as=r"hunyuan[-_ ]?video[-_ ]?1[-_.]?5",
    canonical="diffusers",
    layouts={"native": Renames(ROWS), "comfy": Renames(COMFY_ROWS)},
    names=canonical_names(ROWS),
    block="transformer_blocks.{n}.",
    kin=(
        _kin("HunyuanVideo-1.5-T2V", "HunyuanVideo-1.5-I2V", channels=65, meanflow=False),
        _kin("HunyuanVideo-1.5-I2V step-distilled", channels=65, meanflow=True),
        # the latents of the small video and a second mask beside
        _kin("HunyuanVideo-1.5-SR", channels=98, meanflow=None),
    ),
    pipelines={
        "HunyuanVideo15Pipeline": ("HunyuanVideo-1.5-T2V",),
        "HunyuanVideo15ImageToVideoPipeline": (
            "HunyuanVideo-1.5-I2V",
            "HunyuanVideo-1.5-I2V step-distilled",
        ),
    },
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
    few_step=(
        FewStep(
            name="HunyuanVideo-1.5 LightX2V",
            pattern=r"hunyuanvideo1\.5[-_]t2v[-_]480p[-_]lightx2v[-_]4step",
            # configs/hunyuan_video_15/hunyuan_video_t2v_480p_distill.json: no guidance
            source="ModelTC/LightX2V",
            num_inference_steps=4,
            guidance_scale=1.0,
            flow_shift=5.0,
        ),
    ),
)
