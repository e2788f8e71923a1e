"""LTX-2, in diffusers' names and in Lightricks' own: LTX-Video with a second stream, of sound.

Sources: the published checkpoints' tensor lists; diffusers' LTX2VideoTransformer3DModel and its
``convert_ltx2_transformer_to_diffusers``, which the tests hold every row against.
"""

from __future__ import annotations

from fuselora.families.family import Family
from fuselora.families.few_step import FewStep
from fuselora.families.kin import Branch, Kin, Measure, SkipRule
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
    # of 2.3 and 2.5; diffusers' converter of checkpoints leaves these two, its script does not
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
    *(f"{BLOCK}.{stream}prompt_scale_shift_table" for stream in ("", "audio_")),
    *(f"{stream}caption_projection.linear_{n}" for stream in ("", "audio_") for n in (1, 2)),
    *("proj_out", "audio_proj_out", "keyframes_abs_pos_embedding"),
)
GATES = "transformer_blocks.0.attn1.to_gate_logits.weight"  # of 2.3 and 2.5
CAPTIONS = "caption_projection.linear_1.weight"  # of 2.0; since then the connectors do it
# of single files, where they stand beside the transformer; the first is of 2.0, the others are of 2.3 and 2.5
PROJECTIONS = tuple(
    f"text_embedding_projection.{name}"
    for name in ("aggregate_embed", "video_aggregate_embed", "audio_aggregate_embed")
)
CONNECTORS = SkipRule(
    reason="it is for the text connectors, which this base does not have",
    modules=(*PROJECTIONS, "text_proj_in", "video_text_proj_in", "audio_text_proj_in"),
    witness="audio_proj_in.weight",
    axis=0,
    sizes=(2048,),
)


def _kin(model: str, *, gates: bool, keyframes: bool) -> Kin:
    witnesses = {
        "proj_in.weight": (4096, 128),
        GATES: (-1, 4096) if gates else (),
        CAPTIONS: () if gates else (4096, 3840),
        "keyframes_abs_pos_embedding": (1, 4096) if keyframes else (),
    }
    return Kin((model,), (), 48, witnesses)


LTX_2 = Family(
    name="ltx-2",
    known_as=r"ltx[-_ ]?2(?![0-9b])",
    canonical="diffusers",
    layouts={"native": Renames(ROWS)},
    names=canonical_names(ROWS) | frozenset(SAME),
    block="transformer_blocks.{n}.",
    kin=(
        _kin("LTX-2-19B", gates=False, keyframes=False),
        _kin("LTX-2.3-22B", gates=True, keyframes=False),
        _kin("LTX-2.5-22B", gates=True, keyframes=True),
    ),
    skips=(CONNECTORS,),
    beside=frozenset(PROJECTIONS),
    measures=(
        Measure(
            "dim",
            ("proj_in.weight", 0),
            {0: (f"{BLOCK}.attn1.to_q.weight", "proj_in.weight"), 1: (f"{BLOCK}.ff.net.0.proj.weight",)},
        ),
    ),
    branches=(
        Branch("gates", tuple(f"{BLOCK}.{a}.to_gate_logits" for a in ATTENTIONS), GATES),
        Branch(
            "captions", ("caption_projection.linear_{n}", "audio_caption_projection.linear_{n}"), CAPTIONS
        ),
    ),
    few_step=(
        FewStep(
            name="LTX-2 distilled",
            pattern=r"ltx[-_]2(?:\.3)?[-_]\d+b[-_]distilled[-_]lora",
            # its pipelines: TI2VidTwoStagesPipeline adds the LoRA for the second stage alone; the model card
            # has 8 steps for the distilled model, diffusers' STAGE_2_DISTILLED_SIGMA_VALUES are 3
            source="Lightricks/LTX-2",
            guidance_scale=1.0,
            remark="the second stage takes 3 steps; a whole video by the distilled model alone takes 8",
            phase="the second stage, which refines the upsampled latents; the first samples without it",
        ),
    ),
)
