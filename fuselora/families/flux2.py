"""FLUX.2, in diffusers' names and in Black Forest Labs' own.

Sources: the published checkpoint's tensor list; diffusers' Flux2Transformer2DModel and its
``convert_flux2_transformer_checkpoint_to_diffusers``, which the tests hold every row against. A copy of
fal's turbo LoRA for ComfyUI spells ``transformer_blocks`` without its beginning, beside native names
(huggingface/diffusers issue 13484).
"""

from __future__ import annotations

from fuselora.families.family import Family
from fuselora.families.few_step import FewStep
from fuselora.families.flux1 import ADDED_QKV, DOUBLE, QKV, SINGLE, THEIR_DOUBLE, THEIR_SINGLE
from fuselora.families.kin import Kin, Measure
from fuselora.families.renames import Renames, Rows, canonical_names, split, swap

EMBEDDER = "time_guidance_embed"
ROWS: Rows = (
    *(
        (f"{theirs}.{layer}", f"{EMBEDDER}.{ours}.{linear}")
        for theirs, ours in (("time_in", "timestep_embedder"), ("guidance_in", "guidance_embedder"))
        for layer, linear in (("in_layer", "linear_1"), ("out_layer", "linear_2"))
    ),
    ("img_in", "x_embedder"),
    ("txt_in", "context_embedder"),
    ("double_stream_modulation_img.lin", "double_stream_modulation_img.linear"),
    ("double_stream_modulation_txt.lin", "double_stream_modulation_txt.linear"),
    ("single_stream_modulation.lin", "single_stream_modulation.linear"),
    ("final_layer.linear", "proj_out"),
    swap("final_layer.adaLN_modulation.1", "norm_out.linear"),
    split(f"{THEIR_DOUBLE}.img_attn.qkv", *QKV),
    split(f"{THEIR_DOUBLE}.txt_attn.qkv", *ADDED_QKV),
    (f"{THEIR_DOUBLE}.img_attn.proj", f"{DOUBLE}.attn.to_out.0"),
    (f"{THEIR_DOUBLE}.txt_attn.proj", f"{DOUBLE}.attn.to_add_out"),
    (f"{THEIR_DOUBLE}.img_attn.norm.query_norm.scale", f"{DOUBLE}.attn.norm_q.weight"),
    (f"{THEIR_DOUBLE}.img_attn.norm.key_norm.scale", f"{DOUBLE}.attn.norm_k.weight"),
    (f"{THEIR_DOUBLE}.txt_attn.norm.query_norm.scale", f"{DOUBLE}.attn.norm_added_q.weight"),
    (f"{THEIR_DOUBLE}.txt_attn.norm.key_norm.scale", f"{DOUBLE}.attn.norm_added_k.weight"),
    (f"{THEIR_DOUBLE}.img_mlp.0", f"{DOUBLE}.ff.linear_in"),
    (f"{THEIR_DOUBLE}.img_mlp.2", f"{DOUBLE}.ff.linear_out"),
    (f"{THEIR_DOUBLE}.txt_mlp.0", f"{DOUBLE}.ff_context.linear_in"),
    (f"{THEIR_DOUBLE}.txt_mlp.2", f"{DOUBLE}.ff_context.linear_out"),
    # fused in both layouts
    (f"{THEIR_SINGLE}.linear1", f"{SINGLE}.attn.to_qkv_mlp_proj"),
    (f"{THEIR_SINGLE}.linear2", f"{SINGLE}.attn.to_out"),
    (f"{THEIR_SINGLE}.norm.query_norm.scale", f"{SINGLE}.attn.norm_q.weight"),
    (f"{THEIR_SINGLE}.norm.key_norm.scale", f"{SINGLE}.attn.norm_k.weight"),
)
SHORTENED = (
    ("sformer_blocks.{n}.{rest}", "transformer_blocks.{n}.{rest}"),
    ("single_sformer_blocks.{n}.{rest}", "single_transformer_blocks.{n}.{rest}"),
)


def _kin(*models: str, dim: int, text: int, double: int, guidance: bool) -> Kin:
    return Kin(
        models,
        (),
        double,
        {
            "x_embedder.weight": (dim, 128),
            "context_embedder.weight": (dim, text),
            "time_guidance_embed.guidance_embedder.linear_1.weight": (dim, 256) if guidance else (),
        },
    )


FLUX2 = Family(
    name="flux.2",
    canonical="diffusers",
    layouts={"native": Renames(ROWS), "sformer": Renames(SHORTENED)},
    names=canonical_names(ROWS),
    block="transformer_blocks.{n}.",
    kin=(_kin("FLUX.2-dev", dim=6144, text=15360, double=8, guidance=True),),
    measures=(
        Measure(
            "dim",
            ("x_embedder.weight", 0),
            {
                0: (*(f"{name}.weight" for name in (*QKV, *ADDED_QKV)), "x_embedder.weight"),
                1: (f"{DOUBLE}.ff.linear_in.weight", f"{SINGLE}.attn.to_qkv_mlp_proj.weight"),
            },
        ),
    ),
    few_step=(
        FewStep(
            name="FLUX.2-dev-Turbo",
            pattern=r"flux\.?2[-_.](?:dev[-_.])?turbo",
            # its model card: 8 steps, guidance_scale 2.5
            source="fal/FLUX.2-dev-Turbo",
            num_inference_steps=8,
            guidance_scale=2.5,
        ),
    ),
)
