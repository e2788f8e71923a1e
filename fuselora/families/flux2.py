"""FLUX.2, in diffusers' names and in Black Forest Labs' own.

Sources: the published checkpoint's tensor list; diffusers' Flux2Transformer2DModel and its
``convert_flux2_transformer_checkpoint_to_diffusers``, which the tests hold every row against. A copy of
fal's turbo LoRA for ComfyUI spells ``transformer_blocks`` without its beginning, beside native names
(huggingface/diffusers issue 13484).
"""

from __future__ import annotations

from fuselora.families.family import Family
from fuselora.families.few_step import FewStep
from fuselora.families.flux1 import (
    ADDED_QKV,
    DOUBLE,
    LAST_MODULATION,
    QKV,
    SHARED_ROWS,
    SINGLE,
    THEIR_DOUBLE,
    THEIR_SINGLE,
    embedder,
)
from fuselora.families.kin import Branch, Kin, Measure
from fuselora.families.renames import Renames, Rows, canonical_names

EMBEDDER = "time_guidance_embed"
ROWS: Rows = (
    *SHARED_ROWS,
    *embedder("time_in", f"{EMBEDDER}.timestep_embedder"),
    *embedder("guidance_in", f"{EMBEDDER}.guidance_embedder"),
    ("double_stream_modulation_img.lin", "double_stream_modulation_img.linear"),
    ("double_stream_modulation_txt.lin", "double_stream_modulation_txt.linear"),
    ("single_stream_modulation.lin", "single_stream_modulation.linear"),
    LAST_MODULATION,
    (f"{THEIR_DOUBLE}.img_mlp.0", f"{DOUBLE}.ff.linear_in"),
    (f"{THEIR_DOUBLE}.img_mlp.2", f"{DOUBLE}.ff.linear_out"),
    (f"{THEIR_DOUBLE}.txt_mlp.0", f"{DOUBLE}.ff_context.linear_in"),
    (f"{THEIR_DOUBLE}.txt_mlp.2", f"{DOUBLE}.ff_context.linear_out"),
    # fused in both layouts
    (f"{THEIR_SINGLE}.linear1", f"{SINGLE}.attn.to_qkv_mlp_proj"),
    (f"{THEIR_SINGLE}.linear2", f"{SINGLE}.attn.to_out"),
)
SHORTENED = tuple(
    (name.replace("transformer_blocks", "sformer_blocks"), name)
    for name in sorted(canonical_names(ROWS))
    if "transformer_blocks" in name
)
GUIDANCE = (f"{EMBEDDER}.guidance_embedder.linear_{{n}}",)
LINEAR_IN = (f"{DOUBLE}.ff.linear_in.weight", f"{DOUBLE}.ff_context.linear_in.weight")


def _kin(*models: str, dim: int, text: int, double: int, single: int, guidance: bool = False) -> Kin:
    return Kin(
        models,
        (),
        double,
        {
            "x_embedder.weight": (dim, 128),
            "context_embedder.weight": (dim, text),
            "transformer_blocks.0.ff.linear_in.weight": (6 * dim, dim),
            f"single_transformer_blocks.{single - 1}.attn.to_out.weight": (dim, 4 * dim),
            "time_guidance_embed.guidance_embedder.linear_1.weight": (dim, 256) if guidance else (),
        },
    )


FLUX2 = Family(
    name="flux.2",
    known_as=r"flux[-_. ]?2(?![0-9])",
    canonical="diffusers",
    layouts={"native": Renames(ROWS), "sformer": Renames(SHORTENED)},
    names=canonical_names(ROWS),
    block="transformer_blocks.{n}.",
    # Flux2Params, Klein9BParams and Klein4BParams of black-forest-labs/flux2
    kin=(
        _kin("FLUX.2-dev", dim=6144, text=15360, double=8, single=48, guidance=True),
        _kin("FLUX.2-klein-9B", "FLUX.2-klein-base-9B", dim=4096, text=12288, double=8, single=24),
        _kin("FLUX.2-klein-4B", "FLUX.2-klein-base-4B", dim=3072, text=7680, double=5, single=20),
    ),
    measures=(
        Measure(
            "dim",
            ("x_embedder.weight", 0),
            {
                0: (*(f"{name}.weight" for name in (*QKV, *ADDED_QKV)), "x_embedder.weight"),
                1: (*LINEAR_IN, f"{SINGLE}.attn.to_qkv_mlp_proj.weight"),
            },
        ),
        Measure("mlp", ("transformer_blocks.0.ff.linear_in.weight", 0), {0: LINEAR_IN}),
        Measure("text", ("context_embedder.weight", 1), {1: ("context_embedder.weight",)}),
        Measure("in_channels", ("x_embedder.weight", 1), {1: ("x_embedder.weight",)}),
    ),
    branches=(Branch("guidance", GUIDANCE, f"{EMBEDDER}.guidance_embedder.linear_1.weight"),),
    few_step=(
        FewStep(
            name="FLUX.2-dev-Turbo",
            pattern=r"flux\.?2[-_.](?:dev[-_.])?turbo",
            # its model card: num_inference_steps 8, guidance_scale 2.5, TURBO_SIGMAS
            source="fal/FLUX.2-dev-Turbo",
            num_inference_steps=8,
            guidance_scale=2.5,
            remark="its sigmas are 1.0, 0.6509, 0.4374, 0.2932, 0.1893, 0.1108, 0.0495 and 0.00031",
        ),
    ),
)
