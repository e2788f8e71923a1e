"""Qwen-Image, Edit, Edit-Plus (2509, 2511) and 2512, whose published files all have diffusers' names.

Source: diffusers' QwenImageTransformer2DModel, which the tests hold the names against.
"""

from __future__ import annotations

from fuselora.families.family import Family
from fuselora.families.few_step import FewStep
from fuselora.families.kin import Kin, Measure

BLOCK = "transformer_blocks.{n}"
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
NAMES = (
    *(f"{BLOCK}.attn.{name}" for name in (*ATTENTION, "norm_q", "norm_k", "norm_added_q", "norm_added_k")),
    *(
        f"{BLOCK}.{stream}_{part}"
        for stream in ("img", "txt")
        for part in ("mod.1", "mlp.net.0.proj", "mlp.net.2")
    ),
    "time_text_embed.timestep_embedder.linear_1",
    "time_text_embed.timestep_embedder.linear_2",
    "txt_norm",
    "img_in",
    "txt_in",
    "norm_out.linear",
    "proj_out",
)

QWEN_IMAGE = Family(
    name="qwen-image",
    known_as=r"qwen[-_ ]?image",
    canonical="diffusers",
    layouts={},
    names=frozenset(NAMES),
    block="transformer_blocks.{n}.",
    kin=(
        Kin(
            (
                "Qwen-Image",
                "Qwen-Image-2512",
                "Qwen-Image-Edit",
                "Qwen-Image-Edit-2509",
                "Qwen-Image-Edit-2511",
            ),
            (),
            60,
            {"img_in.weight": (3072, 64), "txt_in.weight": (3072, 3584)},
        ),
    ),
    pipelines={
        "QwenImagePipeline": ("Qwen-Image", "Qwen-Image-2512"),
        "QwenImageEditPipeline": ("Qwen-Image-Edit",),
        "QwenImageEditPlusPipeline": ("Qwen-Image-Edit-2509", "Qwen-Image-Edit-2511"),
    },
    measures=(
        Measure(
            "dim",
            ("img_in.weight", 0),
            {
                0: (*(f"{BLOCK}.attn.{name}.weight" for name in ATTENTION), "img_in.weight"),
                1: tuple(f"{BLOCK}.{stream}_mlp.net.0.proj.weight" for stream in ("img", "txt")),
            },
        ),
    ),
    few_step=(
        FewStep(
            name="Qwen-Image-Lightning",
            pattern=r"qwen[-_]image[-_](?:\w+[-_])*lightning",
            # its README's examples; the steps are in the name
            source="ModelTC/Qwen-Image-Lightning",
            remark="its examples set true_cfg_scale to 1.0",
        ),
    ),
)
