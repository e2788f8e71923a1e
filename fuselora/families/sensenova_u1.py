"""SenseNova-U1 and U1.5, whose distilled LoRAs are for the generation tower of the language model.

There is no diffusers class; names are those of the published files. Only what LoRAs touch is listed here:
the layers that end in ``_mot_gen``, and U1's flow-matching head.
"""

from __future__ import annotations

from fuselora.families.family import Family
from fuselora.families.few_step import FewStep
from fuselora.families.kin import Kin, Measure

LAYER = "language_model.model.layers.{n}"
ATTENTION = tuple(f"{LAYER}.self_attn.{part}_proj_mot_gen" for part in "qkvo")
MLP = tuple(f"{LAYER}.mlp_mot_gen.{part}_proj" for part in ("gate", "up", "down"))

SENSENOVA_U1 = Family(
    name="sensenova-u1",
    canonical="native",
    layouts={},
    names=frozenset((*ATTENTION, *MLP)),
    block="language_model.model.layers.{n}.",
    kin=(
        Kin(
            ("SenseNova-U1-8B-MoT", "SenseNova-U1.5-8B-MoT"),
            (),
            42,
            {"language_model.model.layers.0.self_attn.q_proj_mot_gen.weight": (4096, 4096)},
        ),
    ),
    measures=(
        Measure(
            "dim",
            ("language_model.model.layers.0.self_attn.q_proj_mot_gen.weight", 1),
            {0: (ATTENTION[3] + ".weight",), 1: (ATTENTION[0] + ".weight",)},
        ),
    ),
    few_step=(
        FewStep(
            name="SenseNova-U1 8step",
            pattern=r"sensenova[-_]u1(?:\.5)?[-_]8b[-_]mot[-_]lora",
            source="sensenova/SenseNova-U1-8B-MoT-LoRAs",
            num_inference_steps=8,
        ),
    ),
)
