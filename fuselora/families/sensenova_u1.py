"""SenseNova-U1 and U1.5: a language model with a second set of weights, ``_mot_gen``, that makes images.

Sources: ``NEOChatModel`` of OpenSenseNova/SenseNova-U1 (modeling_neo_chat.py, modeling_qwen3.py,
modeling_qwen3_moe.py) and the published LoRAs. There is no other layout of it. Distilled LoRAs are of the
linear layers that make images; those of U1 also of its head, which in U1.5 is one of convolutions.
"""

from __future__ import annotations

from fuselora.families.family import Family
from fuselora.families.few_step import FewStep
from fuselora.families.kin import Branch, Kin, Measure

LAYER = "language_model.model.layers.{n}"
TOWERS = ("", "_mot_gen")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
NORMS = ("q_norm", "k_norm", "q_norm_hw", "k_norm_hw")
MLP = ("gate_proj", "up_proj", "down_proj")
EMBEDDINGS = ("vision_model.embeddings", "fm_modules.vision_model_mot_gen.embeddings")
NAMES = (
    *(f"{LAYER}.self_attn.{name}{tower}" for tower in TOWERS for name in (*ATTENTION, *NORMS)),
    *(f"{LAYER}.mlp{tower}.{name}" for tower in TOWERS for name in MLP),
    # of the mixture of experts
    *(f"{LAYER}.mlp{tower}.experts.{{n}}.{name}" for tower in TOWERS for name in MLP),
    *(f"{LAYER}.mlp{tower}.gate" for tower in TOWERS),
    *(f"{LAYER}.{norm}_layernorm{tower}" for tower in TOWERS for norm in ("input", "post_attention")),
    *(f"language_model.model.norm{tower}" for tower in TOWERS),
    "language_model.model.embed_tokens",
    "language_model.lm_head",
    *(f"{tower}.{layer}_embedding" for tower in EMBEDDINGS for layer in ("patch", "dense")),
    *(f"fm_modules.{name}_embedder.mlp.{n}" for name in ("timestep", "noise_scale") for n in (0, 2)),
    *(f"fm_modules.fm_head.{name}" for name in ("0", "2", "conv1", "conv2")),
)
Q_PROJ = "language_model.model.layers.0.self_attn.q_proj_mot_gen.weight"
LINEAR_HEAD = "fm_modules.fm_head.0.weight"
GATE = "language_model.model.layers.0.mlp_mot_gen.gate.weight"


def _kin(*models: str, layers: int, dim: int, linear_head: bool, experts: bool = False) -> Kin:
    """Which head and whether there are experts tells the models apart."""
    some = (-1, -1)
    witnesses = {
        Q_PROJ: (4096, dim),
        LINEAR_HEAD: some if linear_head else (),
        GATE: some if experts else (),
    }
    return Kin(models, (), layers, witnesses)


SENSENOVA_U1 = Family(
    name="sensenova-u1",
    known_as=r"sensenova[-_ ]?u1",
    canonical="native",
    layouts={},
    names=frozenset(NAMES),
    block="language_model.model.layers.{n}.",
    kin=(
        _kin("SenseNova-U1-8B-MoT", layers=42, dim=4096, linear_head=True),
        _kin("SenseNova-U1.5-8B-MoT", layers=42, dim=4096, linear_head=False),
        _kin("SenseNova-U1-A3B-MoT", layers=48, dim=2048, linear_head=True, experts=True),
    ),
    measures=(
        Measure(
            "dim",
            (Q_PROJ, 1),
            {
                0: tuple(
                    f"{LAYER}.{n}.weight" for n in ("self_attn.o_proj_mot_gen", "mlp_mot_gen.down_proj")
                ),
                1: tuple(f"{LAYER}.self_attn.{name}_mot_gen.weight" for name in ATTENTION[:3]),
            },
        ),
    ),
    branches=(Branch("linear head", ("fm_modules.fm_head.{n}",), LINEAR_HEAD),),
    few_step=(
        FewStep(
            name="SenseNova-U1's distillation",
            pattern=r"sensenova-u1-8b-mot-(?:infographic-)?lora-8step",
            # --cfg_scale 1.0 --timestep_shift 3.0 --num_steps 8 in docs/base_vs_distill.md
            source="OpenSenseNova/SenseNova-U1",
            num_inference_steps=8,
            guidance_scale=1.0,
            flow_shift=3.0,
        ),
        FewStep(
            name="SenseNova-U1.5's distillation",
            pattern=r"sensenova-u1\.5-8b-mot-lora-8step",
            # cfg_scale=1.0, shift=3.0 in examples/sensenova_u1/model_inference
            source="modelscope/DiffSynth-Studio",
            num_inference_steps=8,
            guidance_scale=1.0,
            flow_shift=3.0,
        ),
    ),
)
