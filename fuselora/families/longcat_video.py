"""LongCat-Video, in its own names: no other layout of it is published by its makers.

Source: ``LongCatVideoTransformer3DModel`` of meituan-longcat/LongCat-Video, whose ``attn.qkv`` is q, k and v
one below the other and ``cross_attn.kv_linear`` k and v. Its LoRAs split ``lora_up`` in the same way.
"""

from __future__ import annotations

from fuselora.families.family import Family
from fuselora.families.few_step import FewStep
from fuselora.families.kin import Kin, Measure

BLOCK = (
    "adaLN_modulation.1",
    "pre_crs_attn_norm",
    *(f"attn.{name}" for name in ("qkv", "q_norm", "k_norm", "proj")),
    *(f"cross_attn.{name}" for name in ("q_linear", "kv_linear", "q_norm", "k_norm", "proj")),
    *(f"ffn.w{n}" for n in (1, 2, 3)),
)
STEM = (
    "x_embedder.proj",
    "t_embedder.mlp.0",
    "t_embedder.mlp.2",
    "y_embedder.y_proj.0",
    "y_embedder.y_proj.2",
    "final_layer.linear",
    "final_layer.adaLN_modulation.1",
)
OUT_OF_DIM = ("attn.qkv", "cross_attn.q_linear", "cross_attn.kv_linear", "ffn.w1", "ffn.w3")
SOURCE = "meituan-longcat/LongCat-Video"

LONGCAT_VIDEO = Family(
    name="longcat-video",
    known_as=r"longcat[-_ ]?video",
    canonical="native",
    layouts={},
    names=frozenset((*STEM, *(f"blocks.{{n}}.{name}" for name in BLOCK))),
    block="blocks.{n}.",
    kin=(Kin(("LongCat-Video",), (), 48, {"x_embedder.proj.weight": (4096, 16, 1, 2, 2)}),),
    measures=(
        Measure(
            "dim",
            ("x_embedder.proj.weight", 0),
            {
                0: tuple(
                    f"blocks.{{n}}.{name}.weight" for name in ("attn.proj", "cross_attn.proj", "ffn.w2")
                ),
                1: tuple(f"blocks.{{n}}.{name}.weight" for name in OUT_OF_DIM),
            },
        ),
    ),
    few_step=(
        FewStep(
            name="LongCat-Video's distillation",
            pattern=r"cfg_step_lora",
            # run_demo_text_to_video.py, which also says use_distill=True
            source=SOURCE,
            num_inference_steps=16,
            guidance_scale=1.0,
            remark="its own pipeline has to be told use_distill=True",
        ),
        FewStep(
            name="LongCat-Video's refinement",
            pattern=r"refinement_lora",
            # generate_refine in the same file
            source=SOURCE,
            num_inference_steps=50,
            phase="the refinement pass, which takes a video to 720p; the pass before samples without it",
        ),
    ),
)
