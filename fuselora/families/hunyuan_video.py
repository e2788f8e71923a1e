"""HunyuanVideo, in diffusers' names, in Tencent's own and in those of ComfyUI.

Sources: the published checkpoints' tensor lists; diffusers' HunyuanVideoTransformer3DModel and its
``convert_hunyuan_video_transformer_to_diffusers``, which the tests hold every row against. ComfyUI renames
Tencent's names when it loads them, and saves LoRAs under its own.
"""

from __future__ import annotations

from fuselora.families.family import Family
from fuselora.families.few_step import FewStep
from fuselora.families.kin import Kin, Measure
from fuselora.families.renames import Renames, Row, Rows, canonical_names, norm, split, square_then_rest, swap

DOUBLE, SINGLE = "transformer_blocks.{n}", "single_transformer_blocks.{n}"
REFINER = "context_embedder.token_refiner.refiner_blocks.{n}"
THEIR_REFINER = "txt_in.individual_token_refiner.blocks.{n}"
QKV = tuple(f"{DOUBLE}.attn.{name}" for name in ("to_q", "to_k", "to_v"))
ADDED_QKV = tuple(f"{DOUBLE}.attn.{name}" for name in ("add_q_proj", "add_k_proj", "add_v_proj"))
SINGLE_QKV = tuple(f"{SINGLE}.attn.{name}" for name in ("to_q", "to_k", "to_v"))
# what HunyuanVideo-1.5 has as well
SHARED_ROWS: Rows = (
    *(
        (f"txt_in.t_embedder.mlp.{layer}", f"context_embedder.time_text_embed.timestep_embedder.{linear}")
        for layer, linear in (("0", "linear_1"), ("2", "linear_2"))
    ),
    *(
        (f"txt_in.c_embedder.{linear}", f"context_embedder.time_text_embed.text_embedder.{linear}")
        for linear in ("linear_1", "linear_2")
    ),
    ("txt_in.input_embedder", "context_embedder.proj_in"),
    split(f"{THEIR_REFINER}.self_attn_qkv", *(f"{REFINER}.attn.to_{part}" for part in "qkv")),
    (f"{THEIR_REFINER}.self_attn_proj", f"{REFINER}.attn.to_out.0"),
    (f"{THEIR_REFINER}.norm1", f"{REFINER}.norm1"),
    (f"{THEIR_REFINER}.norm2", f"{REFINER}.norm2"),
    (f"{THEIR_REFINER}.mlp.fc1", f"{REFINER}.ff.net.0.proj"),
    (f"{THEIR_REFINER}.mlp.fc2", f"{REFINER}.ff.net.2"),
    # two gates: no shift and scale to change places
    (f"{THEIR_REFINER}.adaLN_modulation.1", f"{REFINER}.norm_out.linear"),
    ("img_in.proj", "x_embedder.proj"),
    *(
        (f"double_blocks.{{n}}.{stream}_{theirs}", f"{DOUBLE}.{ours}")
        for stream, theirs, ours in (
            ("img", "attn_q_norm", "attn.norm_q"),
            ("img", "attn_k_norm", "attn.norm_k"),
            ("txt", "attn_q_norm", "attn.norm_added_q"),
            ("txt", "attn_k_norm", "attn.norm_added_k"),
            ("img", "attn_proj", "attn.to_out.0"),
            ("txt", "attn_proj", "attn.to_add_out"),
            ("img", "mod.linear", "norm1.linear"),
            ("txt", "mod.linear", "norm1_context.linear"),
            ("img", "mlp.fc1", "ff.net.0.proj"),
            ("img", "mlp.fc2", "ff.net.2"),
            ("txt", "mlp.fc1", "ff_context.net.0.proj"),
            ("txt", "mlp.fc2", "ff_context.net.2"),
        )
    ),
    ("final_layer.linear", "proj_out"),
    # shift and scale there, scale and shift here
    swap("final_layer.adaLN_modulation.1", "norm_out.linear"),
)
ROWS: Rows = (
    *SHARED_ROWS,
    *(
        (f"{theirs}.{layer}", f"time_text_embed.{ours}.{linear}")
        for theirs, ours, layers in (
            ("time_in", "timestep_embedder", ("mlp.0", "mlp.2")),
            ("guidance_in", "guidance_embedder", ("mlp.0", "mlp.2")),
            ("vector_in", "text_embedder", ("in_layer", "out_layer")),
        )
        for layer, linear in zip(layers, ("linear_1", "linear_2"), strict=True)
    ),
    split("double_blocks.{n}.img_attn_qkv", *QKV),
    split("double_blocks.{n}.txt_attn_qkv", *ADDED_QKV),
    split("single_blocks.{n}.linear1", *SINGLE_QKV, f"{SINGLE}.proj_mlp", sizes=square_then_rest),
    ("single_blocks.{n}.linear2", f"{SINGLE}.proj_out"),
    ("single_blocks.{n}.q_norm", f"{SINGLE}.attn.norm_q"),
    ("single_blocks.{n}.k_norm", f"{SINGLE}.attn.norm_k"),
    ("single_blocks.{n}.modulation.linear", f"{SINGLE}.norm.linear"),
)
# what ComfyUI makes of Tencent's names, in this order; a norm's weight becomes a scale
COMFY = (
    ("txt_in.t_embedder.mlp.0", "txt_in.t_embedder.in_layer"),
    ("txt_in.t_embedder.mlp.2", "txt_in.t_embedder.out_layer"),
    ("txt_in.c_embedder.linear_1", "txt_in.c_embedder.in_layer"),
    ("txt_in.c_embedder.linear_2", "txt_in.c_embedder.out_layer"),
    ("_mod.linear", "_mod.lin"),
    ("_attn_qkv", "_attn.qkv"),
    ("_attn_proj", "_attn.proj"),
    ("mlp.fc1", "mlp.0"),
    ("mlp.fc2", "mlp.2"),
    (".modulation.linear", ".modulation.lin"),
    ("_in.mlp.0", "_in.in_layer"),
    ("_in.mlp.2", "_in.out_layer"),
)
COMFY_NORMS = tuple(
    (before.format(short), after.format(long))
    for before, after in (("_attn_{}_norm", "_attn.norm.{}_norm"), (".{}_norm", ".norm.{}_norm"))
    for short, long in (("q", "query"), ("k", "key"))
)


def in_comfy(rows: Rows) -> Rows:
    """The same rows from ComfyUI's names."""
    whole = (row if isinstance(row, Row) else Row(row[0], (row[1],)) for row in rows)
    return tuple(found for row in whole for found in _in_comfy(row))


def _in_comfy(row: Row) -> Rows:
    for before, after in COMFY_NORMS:
        if row.theirs.endswith(before):
            (ours,) = row.ours
            return norm(row.theirs.removesuffix(before) + after, ours)
    theirs = row.theirs
    for before, after in COMFY:
        theirs = theirs.replace(before, after)
    return (Row(theirs, row.ours, row.order, row.sizes),)


def _kin(*models: str, channels: int = 16, guidance: bool = True) -> Kin:
    return Kin(
        models,
        (),
        20,
        {
            "x_embedder.proj.weight": (3072, channels, 1, 2, 2),
            "time_text_embed.guidance_embedder.linear_1.bias": (3072,) if guidance else (),
        },
    )


HUNYUAN_VIDEO = Family(
    name="hunyuan-video",
    known_as=r"(?:hunyuan[-_ ]?|hy)video(?![-_ ]?1[-_.]?5)|fasthunyuan|framepack",
    canonical="diffusers",
    layouts={"native": Renames(ROWS), "comfy": Renames(in_comfy(ROWS))},
    names=canonical_names(ROWS),
    block="transformer_blocks.{n}.",
    kin=(
        _kin("HunyuanVideo", "HunyuanVideo-I2V"),
        _kin("HunyuanVideo-I2V (latent concat)", channels=33, guidance=False),
    ),
    pipelines={
        "HunyuanVideoPipeline": ("HunyuanVideo",),
        "HunyuanVideoImageToVideoPipeline": ("HunyuanVideo-I2V", "HunyuanVideo-I2V (latent concat)"),
    },
    measures=(
        Measure(
            "dim",
            ("x_embedder.proj.weight", 0),
            {
                0: tuple(f"{name}.weight" for name in (*QKV, *ADDED_QKV, *SINGLE_QKV)),
                1: (f"{DOUBLE}.ff.net.0.proj.weight",),
            },
        ),
    ),
    few_step=(
        FewStep(
            name="FastHunyuan",
            pattern=r"hyvideo[-_]fastvideo[-_]lora|fasthunyuan[-_]lora",
            # the model card of what it was extracted from
            source="FastVideo/FastHunyuan",
            num_inference_steps=6,
            flow_shift=17.0,
            remark="its authors sample with the embedded guidance above 6",
        ),
    ),
)
