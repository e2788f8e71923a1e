"""MiniMax-H3, in diffusers' names, in those of single files, and as MiniMax's own shards have it.

Sources: diffusers' MiniMaxH3Transformer3DModel, convert_minimax_h3_to_diffusers.py of its scripts, and its
``convert_minimax_h3_transformer_checkpoint_to_diffusers``, which the tests hold every row against. The shards
and the single files made of them have the same names and shapes: of ``qkv_proj`` the shards have q, k and v
of each head in turn, the single files all of q, of k and of v. ``rope.inv_freq``, which the shards hold,
tells. Most LoRAs in these names are for the single files; DiffSynth's and FlashGen's are for the shards.
"""

from __future__ import annotations

from fuselora.families.family import Family, Sign
from fuselora.families.few_step import FewStep
from fuselora.families.kin import Kin, Measure
from fuselora.families.renames import Renames, Row, Rows, canonical_names, heads, split, swap

HEAD = 128  # of every published model
# theirs, ours
BLOCKS = (
    ("blocks.{n}", "transformer_blocks.{n}"),
    ("token_refiner.blocks.{n}", "token_refiner.refiner_blocks.{n}"),
)
SAME: Rows = (
    ("video_patch_proj", "proj_in"),
    ("audio_patch_proj", "audio_proj_in"),
    ("condition_proj", "context_embedder"),
    ("time_embedder.proj_in", "time_embedder.linear_1"),
    ("time_embedder.proj_out", "time_embedder.linear_2"),
    ("final_layer.norm", "norm_out.norm"),
    ("final_layer.adaln_proj.linear", "norm_out.linear"),
    ("final_layer.video_out", "proj_out"),
    ("final_layer.audio_out", "audio_proj_out"),
    *(
        row
        for theirs, ours in BLOCKS
        for row in (
            (f"{theirs}.norm1", f"{ours}.norm1"),
            (f"{theirs}.norm2", f"{ours}.norm2"),
            (f"{theirs}.attn.q_norm", f"{ours}.attn.norm_q"),
            (f"{theirs}.attn.k_norm", f"{ours}.attn.norm_k"),
            (f"{theirs}.attn.out_proj", f"{ours}.attn.to_out.0"),
            (f"{theirs}.attn.to_gate_compress", f"{ours}.attn.to_gate_compress"),  # of FastVideo's VSA models
            swap(f"{theirs}.mlp.fc1", f"{ours}.ff.net.0.proj"),  # gate and value
            (f"{theirs}.mlp.fc2", f"{ours}.ff.net.2"),
        )
    ),
    ("blocks.{n}.adaln_proj.linear", "transformer_blocks.{n}.adaln_proj.linear"),
)


def _qkv(theirs: str, ours: str) -> tuple[str, ...]:
    return (f"{theirs}.attn.qkv_proj", *(f"{ours}.attn.to_{part}" for part in "qkv"))


STACKED: tuple[Row, ...] = tuple(split(*_qkv(*block)) for block in BLOCKS)
INTERLEAVED: tuple[Row, ...] = tuple(heads(*_qkv(*block), head=HEAD) for block in BLOCKS)
QKV = tuple(name for row in STACKED for name in row.ours)

# MiniMaxH3Scheduler.set_timesteps makes num_inference_steps - 1 steps
REMARK = "for the audio the shift is 3; diffusers wants one more than the steps, for the end of the last"
FEW_STEP = (
    FewStep(
        name="LightX2V's MiniMax-H3 Turbo (768p)",
        pattern=r"minimax_h3_\w+_turbo_\dstep_v1\.\d_768p",
        # the table and commands of its README: shifts 6 / 3, --lora-alpha 128; enable_cfg false in
        # configs/minimax_h3/dmd of ModelTC/LightX2V
        source="ModelTC/Minimax-H3-Turbo",
        guidance_scale=1.0,
        flow_shift=6.0,
        alpha=128.0,
        remark=REMARK,
    ),
    FewStep(
        name="LightX2V's MiniMax-H3 Turbo (544p)",
        pattern=r"minimax_h3_fl2v_(?:lightx2v_)?turbo_(?:4step_v0\.1|8step_v1\.0)(?!_768p)",
        # the same table: shifts 12 / 3; inference_minimax_h3.py has 8 as --lora-alpha where none is given
        source="ModelTC/Minimax-H3-Turbo",
        guidance_scale=1.0,
        flow_shift=12.0,
        alpha=8.0,
        remark=REMARK,
    ),
)

MINIMAX_H3 = Family(
    name="minimax-h3",
    known_as=r"minimax[-_ ]?h3",
    canonical="diffusers",
    layouts={"native": Renames((*STACKED, *SAME)), "raw": Renames((*INTERLEAVED, *SAME))},
    names=canonical_names((*STACKED, *SAME)) | {"token_refiner.final_norm", "rope.inv_freq"},
    block="transformer_blocks.{n}.",
    kin=(
        Kin(
            ("MiniMax-H3",),
            (),
            50,
            {"proj_in.weight": (5376, 96), "audio_proj_in.weight": (5376, 32)},
        ),
    ),
    measures=(
        Measure(
            "dim",
            ("proj_in.weight", 0),
            {
                0: (*(f"{ours}.attn.to_out.0.weight" for _, ours in BLOCKS), "proj_in.weight"),
                1: tuple(f"{name}.weight" for name in QKV),
            },
        ),
    ),
    # MiniMaxH3Transformer3DModel._keep_in_fp32_modules
    keep_float32=frozenset(
        {"proj_in", "audio_proj_in", "time_embedder", "proj_out", "audio_proj_out", "rope"}
    ),
    few_step=FEW_STEP,
    signs=(
        Sign(
            "raw",
            says="of MiniMax's own shards, q, k and v of each head in turn; native, of repacks, all q first",
            base_has="rope.inv_freq",
            lora_key=r"attn\.qkv_proj\.lora_[AB]\.default\.",
            lora_metadata=("qkv_layout", "grouped"),
        ),
    ),
)
