"""LTX-Video, in diffusers' names and in Lightricks' own.

Sources: the published checkpoints' tensor lists; diffusers' LTXVideoTransformer3DModel and its
``convert_ltx_transformer_checkpoint_to_diffusers``, which the tests hold every row against.
"""

from __future__ import annotations

from fuselora.families.family import Family
from fuselora.families.few_step import FewStep
from fuselora.families.kin import Kin, Measure
from fuselora.families.renames import Renames, Rows, canonical_names

BLOCK = "transformer_blocks.{n}"
ATTENTIONS = ("attn1", "attn2")
ROWS: Rows = (
    ("patchify_proj", "proj_in"),
    ("adaln_single.emb.timestep_embedder.linear_1", "time_embed.emb.timestep_embedder.linear_1"),
    ("adaln_single.emb.timestep_embedder.linear_2", "time_embed.emb.timestep_embedder.linear_2"),
    ("adaln_single.linear", "time_embed.linear"),
    *((f"{BLOCK}.{a}.{part}_norm", f"{BLOCK}.{a}.norm_{part}") for a in ATTENTIONS for part in "qk"),
)
SAME = (
    *(f"{BLOCK}.{a}.{name}" for a in ATTENTIONS for name in ("to_q", "to_k", "to_v", "to_out.0")),
    *(f"{BLOCK}.{name}" for name in ("ff.net.0.proj", "ff.net.2", "scale_shift_table")),
    *("caption_projection.linear_1", "caption_projection.linear_2", "scale_shift_table", "proj_out"),
)


def _kin(*models: str, blocks: int, dim: int) -> Kin:
    return Kin(models, (), blocks, {"proj_in.weight": (dim, 128), "audio_proj_in.weight": ()})


LTX_VIDEO = Family(
    name="ltx-video",
    known_as=r"ltx[-_ ]?video|ltxv",
    canonical="diffusers",
    layouts={"native": Renames(ROWS)},
    names=canonical_names(ROWS) | frozenset(SAME),
    block="transformer_blocks.{n}.",
    kin=(
        _kin("LTX-Video-2B", blocks=28, dim=2048),
        _kin("LTX-Video-13B", blocks=48, dim=4096),
    ),
    measures=(
        Measure(
            "dim",
            ("proj_in.weight", 0),
            {
                0: (*(f"{BLOCK}.{a}.to_q.weight" for a in ATTENTIONS), "proj_in.weight"),
                1: (f"{BLOCK}.ff.net.0.proj.weight",),
            },
        ),
    ),
    few_step=(
        FewStep(
            name="LTX-Video-13B distilled",
            pattern=r"ltxv[-_]13b[-_][\d.]+[-_]distilled",
            # its news of v0.9.7: no guidance, 8 steps or fewer, which follow its own list of timesteps
            source="Lightricks/LTX-Video",
            num_inference_steps=8,
            guidance_scale=1.0,
        ),
    ),
)
