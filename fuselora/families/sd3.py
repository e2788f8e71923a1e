"""Stable Diffusion 3 and 3.5, in diffusers' names and in Stability AI's own (MMDiT).

Sources: diffusers' SD3Transformer2DModel and its ``convert_sd3_transformer_checkpoint_to_diffusers``, which
the tests hold every row against.
"""

from __future__ import annotations

from fuselora.families.family import Family
from fuselora.families.few_step import FewStep
from fuselora.families.kin import Kin, Measure
from fuselora.families.renames import Renames, Rows, canonical_names, split, swap, swap_of_two

BLOCK, THEIRS = "transformer_blocks.{n}", "joint_blocks.{n}"
QKV = tuple(f"{BLOCK}.attn.to_{part}" for part in "qkv")
ADDED_QKV = tuple(f"{BLOCK}.attn.add_{part}_proj" for part in "qkv")
# the second attention of 3.5-medium's first blocks
SECOND_QKV = tuple(f"{BLOCK}.attn2.to_{part}" for part in "qkv")
ROWS: Rows = (
    ("x_embedder.proj", "pos_embed.proj"),
    ("pos_embed", "pos_embed.pos_embed"),
    *(
        (f"{theirs}.mlp.{layer}", f"time_text_embed.{ours}.{linear}")
        for theirs, ours in (("t_embedder", "timestep_embedder"), ("y_embedder", "text_embedder"))
        for layer, linear in (("0", "linear_1"), ("2", "linear_2"))
    ),
    split(f"{THEIRS}.x_block.attn.qkv", *QKV),
    split(f"{THEIRS}.context_block.attn.qkv", *ADDED_QKV),
    split(f"{THEIRS}.x_block.attn2.qkv", *SECOND_QKV),
    *(
        (f"{THEIRS}.{theirs}", f"{BLOCK}.{ours}")
        for theirs, ours in (
            ("x_block.attn.ln_q", "attn.norm_q"),
            ("x_block.attn.ln_k", "attn.norm_k"),
            ("context_block.attn.ln_q", "attn.norm_added_q"),
            ("context_block.attn.ln_k", "attn.norm_added_k"),
            ("x_block.attn2.ln_q", "attn2.norm_q"),
            ("x_block.attn2.ln_k", "attn2.norm_k"),
            ("x_block.attn.proj", "attn.to_out.0"),
            ("context_block.attn.proj", "attn.to_add_out"),
            ("x_block.attn2.proj", "attn2.to_out.0"),
            ("x_block.adaLN_modulation.1", "norm1.linear"),
            ("x_block.mlp.fc1", "ff.net.0.proj"),
            ("x_block.mlp.fc2", "ff.net.2"),
            ("context_block.mlp.fc1", "ff_context.net.0.proj"),
            ("context_block.mlp.fc2", "ff_context.net.2"),
        )
    ),
    # the last block's has shift and scale alone, which change places
    swap_of_two(f"{THEIRS}.context_block.adaLN_modulation.1", f"{BLOCK}.norm1_context.linear"),
    swap("final_layer.adaLN_modulation.1", "norm_out.linear"),
    ("final_layer.linear", "proj_out"),
)


def _kin(*models: str, blocks: int, dim: int, second: bool = False, qk_norm: bool = True) -> Kin:
    return Kin(
        models,
        (),
        blocks,
        {
            "pos_embed.proj.weight": (dim, 16, 2, 2),
            "transformer_blocks.0.attn2.to_q.bias": (dim,) if second else (),
            "transformer_blocks.0.attn.norm_q.weight": (64,) if qk_norm else (),
        },
    )


def _hyper(steps: int, guidance: float) -> FewStep:
    """As the news of its model card have it."""
    return FewStep(
        name=f"Hyper-SD3 in {steps} steps",
        pattern=rf"hyper[-_]sd3[-_]{steps}steps?[-_]cfg",
        source="ByteDance/Hyper-SD",
        num_inference_steps=steps,
        guidance_scale=guidance,
        remark="it is published for a strength of 0.125",
    )


SD3 = Family(
    name="sd3",
    known_as=r"(?:stable[-_ ]diffusion[-_ ]|(?<![a-z])sd[-_ ]?)v?3(?![0-9])",
    canonical="diffusers",
    layouts={"native": Renames(ROWS)},
    names=canonical_names(ROWS) | {"context_embedder"},
    block="transformer_blocks.{n}.",
    kin=(
        _kin("SD3-medium", blocks=24, dim=1536, qk_norm=False),
        _kin("SD3.5-medium", blocks=24, dim=1536, second=True),
        _kin("SD3.5-large", "SD3.5-large-turbo", blocks=38, dim=2432),
    ),
    measures=(
        Measure(
            "dim",
            ("pos_embed.proj.weight", 0),
            {
                0: tuple(f"{name}.weight" for name in (*QKV, *ADDED_QKV, *SECOND_QKV)),
                1: (f"{BLOCK}.ff.net.0.proj.weight",),
            },
        ),
    ),
    few_step=(_hyper(4, 3.0), _hyper(8, 5.0), _hyper(16, 7.0)),
)
