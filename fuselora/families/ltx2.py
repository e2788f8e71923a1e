"""LTX-2, in diffusers' names and in Lightricks' own: LTX-Video with a second stream, of sound.

Sources: the published checkpoints' tensor lists; diffusers' LTX2VideoTransformer3DModel and its
``convert_ltx2_transformer_to_diffusers``, which the tests hold every row against.
"""

from __future__ import annotations

from fuselora.families.family import Family
from fuselora.families.few_step import FewStep
from fuselora.families.kin import Kin, Measure, SkipRule
from fuselora.families.renames import Renames, Rows, canonical_names

BLOCK = "transformer_blocks.{n}"
ATTENTIONS = (
    "attn1",
    "attn2",
    "audio_attn1",
    "audio_attn2",
    "audio_to_video_attn",
    "video_to_audio_attn",
)
EMBEDDINGS = (
    ("adaln_single", "time_embed"),
    ("audio_adaln_single", "audio_time_embed"),
    ("av_ca_video_scale_shift_adaln_single", "av_cross_attn_video_scale_shift"),
    ("av_ca_audio_scale_shift_adaln_single", "av_cross_attn_audio_scale_shift"),
    ("av_ca_a2v_gate_adaln_single", "av_cross_attn_video_a2v_gate"),
    ("av_ca_v2a_gate_adaln_single", "av_cross_attn_audio_v2a_gate"),
    # of 2.3
    ("prompt_adaln_single", "prompt_adaln"),
    ("audio_prompt_adaln_single", "audio_prompt_adaln"),
)
LAYERS = ("emb.timestep_embedder.linear_1", "emb.timestep_embedder.linear_2", "linear")
ROWS: Rows = (
    ("patchify_proj", "proj_in"),
    ("audio_patchify_proj", "audio_proj_in"),
    *((f"{theirs}.{layer}", f"{ours}.{layer}") for theirs, ours in EMBEDDINGS for layer in LAYERS),
    (f"{BLOCK}.scale_shift_table_a2v_ca_video", f"{BLOCK}.video_a2v_cross_attn_scale_shift_table"),
    (f"{BLOCK}.scale_shift_table_a2v_ca_audio", f"{BLOCK}.audio_a2v_cross_attn_scale_shift_table"),
    *((f"{BLOCK}.{a}.{part}_norm", f"{BLOCK}.{a}.norm_{part}") for a in ATTENTIONS for part in "qk"),
)
SAME = (
    *(f"{BLOCK}.{a}.{n}" for a in ATTENTIONS for n in ("to_q", "to_k", "to_v", "to_out.0", "to_gate_logits")),
    *(f"{BLOCK}.{stream}{name}" for stream in ("", "audio_") for name in ("ff.net.0.proj", "ff.net.2")),
    *(f"{at}{stream}scale_shift_table" for at in (f"{BLOCK}.", "") for stream in ("", "audio_")),
    *(f"{stream}caption_projection.linear_{n}" for stream in ("", "audio_") for n in (1, 2)),
    *("proj_out", "audio_proj_out"),
)
CONNECTORS = SkipRule(
    reason="it is for the text connectors, which are no part of the transformer",
    modules=("text_embedding_projection.aggregate_embed", "text_proj_in"),
    witness="audio_proj_in.weight",
    axis=0,
    sizes=(2048,),
)

LTX_2 = Family(
    name="ltx-2",
    canonical="diffusers",
    layouts={"native": Renames(ROWS)},
    names=canonical_names(ROWS) | frozenset(SAME),
    block="transformer_blocks.{n}.",
    kin=(
        Kin(
            ("LTX-2-19B",),
            (),
            48,
            {"proj_in.weight": (4096, 128), "transformer_blocks.0.attn1.to_gate_logits.weight": ()},
        ),
        Kin(
            ("LTX-2.3-22B",),
            (),
            48,
            {"proj_in.weight": (4096, 128), "transformer_blocks.0.attn1.to_gate_logits.weight": (-1, 4096)},
        ),
    ),
    skips=(CONNECTORS,),
    beside=frozenset(CONNECTORS.modules),
    measures=(
        Measure(
            "dim",
            ("proj_in.weight", 0),
            {0: (f"{BLOCK}.attn1.to_q.weight", "proj_in.weight"), 1: (f"{BLOCK}.ff.net.0.proj.weight",)},
        ),
    ),
    few_step=(
        FewStep(
            name="LTX-2 distilled",
            pattern=r"ltx[-_]2(?:\.3)?[-_]\d+b[-_]distilled[-_]lora",
            # its pipelines: TI2VidTwoStagesPipeline adds the LoRA for the second stage alone
            source="Lightricks/LTX-2",
            guidance_scale=1.0,
            phase="the second stage, which refines the upsampled latents; the first samples without it",
        ),
    ),
)
