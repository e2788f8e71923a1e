"""FLUX.1: dev, schnell, Kontext, Fill and the control models, in diffusers' names and Black Forest Labs' own.

Sources: the published checkpoints' tensor lists; diffusers' FluxTransformer2DModel and its
``convert_flux_transformer_checkpoint_to_diffusers``, which the tests hold every row against. XLabs' names are
those of its attention processors (XLabs-AI/x-flux).
"""

from __future__ import annotations

from fuselora.families.family import Family, Widening
from fuselora.families.few_step import FewStep
from fuselora.families.kin import Branch, Kin, Measure, SkipRule
from fuselora.families.renames import Renames, Rows, canonical_names, norm, split, square_then_rest, swap

DOUBLE, SINGLE = "transformer_blocks.{n}", "single_transformer_blocks.{n}"
THEIR_DOUBLE, THEIR_SINGLE = "double_blocks.{n}", "single_blocks.{n}"
QKV = tuple(f"{DOUBLE}.attn.{name}" for name in ("to_q", "to_k", "to_v"))
ADDED_QKV = tuple(f"{DOUBLE}.attn.{name}" for name in ("add_q_proj", "add_k_proj", "add_v_proj"))
SINGLE_QKV = tuple(f"{SINGLE}.attn.{name}" for name in ("to_q", "to_k", "to_v"))


def embedder(theirs: str, ours: str) -> Rows:
    """The two linear layers of an embedder, which Chroma's approximator is made of too."""
    return ((f"{theirs}.in_layer", f"{ours}.linear_1"), (f"{theirs}.out_layer", f"{ours}.linear_2"))


# what FLUX.2 and Chroma have as well
SHARED_ROWS: Rows = (
    split(f"{THEIR_DOUBLE}.img_attn.qkv", *QKV),
    split(f"{THEIR_DOUBLE}.txt_attn.qkv", *ADDED_QKV),
    (f"{THEIR_DOUBLE}.img_attn.proj", f"{DOUBLE}.attn.to_out.0"),
    (f"{THEIR_DOUBLE}.txt_attn.proj", f"{DOUBLE}.attn.to_add_out"),
    *norm(f"{THEIR_DOUBLE}.img_attn.norm.query_norm", f"{DOUBLE}.attn.norm_q"),
    *norm(f"{THEIR_DOUBLE}.img_attn.norm.key_norm", f"{DOUBLE}.attn.norm_k"),
    *norm(f"{THEIR_DOUBLE}.txt_attn.norm.query_norm", f"{DOUBLE}.attn.norm_added_q"),
    *norm(f"{THEIR_DOUBLE}.txt_attn.norm.key_norm", f"{DOUBLE}.attn.norm_added_k"),
    *norm(f"{THEIR_SINGLE}.norm.query_norm", f"{SINGLE}.attn.norm_q"),
    *norm(f"{THEIR_SINGLE}.norm.key_norm", f"{SINGLE}.attn.norm_k"),
    ("img_in", "x_embedder"),
    ("txt_in", "context_embedder"),
    ("final_layer.linear", "proj_out"),
)
# what Chroma has as well
BLOCK_ROWS: Rows = (
    *SHARED_ROWS,
    (f"{THEIR_DOUBLE}.img_mlp.0", f"{DOUBLE}.ff.net.0.proj"),
    (f"{THEIR_DOUBLE}.img_mlp.2", f"{DOUBLE}.ff.net.2"),
    (f"{THEIR_DOUBLE}.txt_mlp.0", f"{DOUBLE}.ff_context.net.0.proj"),
    (f"{THEIR_DOUBLE}.txt_mlp.2", f"{DOUBLE}.ff_context.net.2"),
    split(f"{THEIR_SINGLE}.linear1", *SINGLE_QKV, f"{SINGLE}.proj_mlp", sizes=square_then_rest),
    (f"{THEIR_SINGLE}.linear2", f"{SINGLE}.proj_out"),
)
# shift and scale there, scale and shift here
LAST_MODULATION = swap("final_layer.adaLN_modulation.1", "norm_out.linear")
EMBEDDER = "time_text_embed"
OWN_ROWS: Rows = (
    *embedder("time_in", f"{EMBEDDER}.timestep_embedder"),
    *embedder("guidance_in", f"{EMBEDDER}.guidance_embedder"),
    *embedder("vector_in", f"{EMBEDDER}.text_embedder"),
    (f"{THEIR_DOUBLE}.img_mod.lin", f"{DOUBLE}.norm1.linear"),
    (f"{THEIR_DOUBLE}.txt_mod.lin", f"{DOUBLE}.norm1_context.linear"),
    (f"{THEIR_SINGLE}.modulation.lin", f"{SINGLE}.norm.linear"),
    LAST_MODULATION,
)
# ``qkv_lora1`` is of the image's attention, ``qkv_lora2`` of the text's; of a single block q, k and v alone
XLABS_ROWS = (
    split(f"{THEIR_DOUBLE}.processor.qkv_lora1", *QKV),
    split(f"{THEIR_DOUBLE}.processor.qkv_lora2", *ADDED_QKV),
    (f"{THEIR_DOUBLE}.processor.proj_lora1", f"{DOUBLE}.attn.to_out.0"),
    (f"{THEIR_DOUBLE}.processor.proj_lora2", f"{DOUBLE}.attn.to_add_out"),
    split(f"{THEIR_SINGLE}.processor.qkv_lora", *SINGLE_QKV),
    (f"{THEIR_SINGLE}.processor.proj_lora", f"{SINGLE}.proj_out"),
)


GUIDANCE = (f"{EMBEDDER}.guidance_embedder.linear_{{n}}",)
# FLUX.1-schnell takes no guidance: what a LoRA changes of it would be lost
NO_GUIDANCE = SkipRule(
    reason="guidance embedding of FLUX.1-dev, which this base does not have",
    modules=GUIDANCE,
    witness="x_embedder.weight",
    axis=0,
    sizes=(),
)
MLP = (f"{DOUBLE}.ff.net.0.proj", f"{DOUBLE}.ff_context.net.0.proj", f"{SINGLE}.proj_mlp")
# FLUX.2 has some of these layers by the same native names, in other sizes
MEASURES = (
    Measure(
        "dim",
        ("x_embedder.weight", 0),
        {
            0: (*(f"{name}.weight" for name in (*QKV, *ADDED_QKV, *SINGLE_QKV)), "x_embedder.weight"),
            1: tuple(f"{name}.weight" for name in MLP),
        },
    ),
    Measure("mlp", ("transformer_blocks.0.ff.net.0.proj.weight", 0), {0: tuple(f"{m}.weight" for m in MLP)}),
    Measure("text", ("context_embedder.weight", 1), {1: ("context_embedder.weight",)}),
    Measure("in_channels", ("x_embedder.weight", 1), {1: ("x_embedder.weight",)}),
)


def _kin(*models: str, channels: int = 64, guidance: bool = True) -> Kin:
    return Kin(
        models,
        (),
        19,
        {
            "x_embedder.weight": (3072, channels),
            "context_embedder.weight": (3072, 4096),
            # Chroma has none
            "time_text_embed.text_embedder.linear_1.weight": (3072, 768),
            "transformer_blocks.0.ff.net.0.proj.weight": (12288, 3072),
            "single_transformer_blocks.37.proj_out.weight": (3072, 15360),
            "time_text_embed.guidance_embedder.linear_1.bias": (3072,) if guidance else (),
        },
    )


FLUX1 = Family(
    name="flux.1",
    known_as=r"flux[-_. ]?1(?![0-9])|flux[-_. ]?(?:dev|schnell|kontext|krea)",
    canonical="diffusers",
    layouts={"native": Renames((*BLOCK_ROWS, *OWN_ROWS)), "xlabs": Renames(XLABS_ROWS)},
    names=canonical_names((*BLOCK_ROWS, *OWN_ROWS)),
    block="transformer_blocks.{n}.",
    pipelines={
        "FluxPipeline": ("FLUX.1-dev", "FLUX.1-Krea-dev", "FLUX.1-schnell"),
        "FluxKontextPipeline": ("FLUX.1-Kontext-dev",),
    },
    kin=(
        _kin("FLUX.1-dev", "FLUX.1-Kontext-dev", "FLUX.1-Krea-dev"),
        _kin("FLUX.1-schnell", guidance=False),
        _kin("FLUX.1-Depth-dev", "FLUX.1-Canny-dev", channels=128),
        _kin("FLUX.1-Fill-dev", channels=384),
    ),
    skips=(NO_GUIDANCE,),
    measures=MEASURES,
    branches=(Branch("guidance", GUIDANCE, "time_text_embed.guidance_embedder.linear_1.bias"),),
    # a control LoRA (FLUX.1-Depth-dev-lora, FLUX.1-Canny-dev-lora) reads the control image as more channels
    widens={"x_embedder.weight": Widening("in_channels", follower="out_channels")},
    few_step=(
        FewStep(
            name="FLUX.1-Turbo-Alpha",
            pattern=r"flux\.?1?[-_.]turbo[-_]alpha",
            # its model card: num_inference_steps 8, guidance_scale 3.5
            source="alimama-creative/FLUX.1-Turbo-Alpha",
            num_inference_steps=8,
            guidance_scale=3.5,
        ),
        FewStep(
            name="Hyper-FLUX.1",
            pattern=r"hyper[-_]flux\.?1?[-_]dev",
            # its model card: lora_scale 0.125, guidance_scale 3.5; the steps are in the name
            source="ByteDance/Hyper-SD",
            guidance_scale=3.5,
            remark="it is published for a strength of 0.125",
        ),
    ),
)
