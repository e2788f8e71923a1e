"""Kandinsky 5, whose published files have the names of diffusers' Kandinsky5Transformer3DModel.

The tests hold the names against the class.
"""

from __future__ import annotations

from fuselora.families.family import Family
from fuselora.families.kin import Kin, Measure

TEXT, VISUAL = "text_transformer_blocks.{n}", "visual_transformer_blocks.{n}"
ATTENTIONS = (f"{TEXT}.self_attention", f"{VISUAL}.self_attention", f"{VISUAL}.cross_attention")
ATTENTION = ("to_query", "to_key", "to_value", "out_layer", "query_norm", "key_norm")
NAMES = (
    *(f"{attention}.{name}" for attention in ATTENTIONS for name in ATTENTION),
    *(f"{block}.feed_forward.{name}" for block in (TEXT, VISUAL) for name in ("in_layer", "out_layer")),
    f"{TEXT}.text_modulation.out_layer",
    f"{VISUAL}.visual_modulation.out_layer",
    "time_embeddings.in_layer",
    "time_embeddings.out_layer",
    *(
        f"{which}.{name}"
        for which in ("text_embeddings", "pooled_text_embeddings")
        for name in ("in_layer", "norm")
    ),
    "visual_embeddings.in_layer",
    "out_layer.modulation.out_layer",
    "out_layer.out_layer",
)


def _kin(*models: str, blocks: int, dim: int, channels: int = 33) -> Kin:
    """``channels`` of a latent: 16, and with a condition (visual_cond) these twice and a mask."""
    witnesses = {
        "text_embeddings.in_layer.weight": (dim, -1),
        "visual_embeddings.in_layer.weight": (dim, 4 * channels),
    }
    return Kin(models, (), blocks, witnesses)


KANDINSKY_5 = Family(
    name="kandinsky-5",
    known_as=r"kandinsky[-_ ]?5",
    canonical="diffusers",
    layouts={},
    names=frozenset(NAMES),
    block="visual_transformer_blocks.{n}.",
    kin=(
        _kin("Kandinsky-5.0-T2V-Lite", "Kandinsky-5.0-I2V-Lite", blocks=32, dim=1792),
        _kin("Kandinsky-5.0-T2V-Pro", "Kandinsky-5.0-I2V-Pro", blocks=60, dim=4096),
        _kin("Kandinsky-5.0-T2I-Lite", blocks=50, dim=2560, channels=16),
        _kin("Kandinsky-5.0-I2I-Lite", blocks=50, dim=2560),
    ),
    pipelines={
        "Kandinsky5T2VPipeline": ("Kandinsky-5.0-T2V-Lite", "Kandinsky-5.0-T2V-Pro"),
        "Kandinsky5I2VPipeline": ("Kandinsky-5.0-I2V-Lite", "Kandinsky-5.0-I2V-Pro"),
    },
    keep_float32=frozenset({"time_embeddings", "modulation", "visual_modulation", "text_modulation"}),
    measures=(
        Measure(
            "dim",
            ("text_embeddings.in_layer.weight", 0),
            {
                0: tuple(f"{a}.to_query.weight" for a in ATTENTIONS),
                1: (f"{VISUAL}.feed_forward.in_layer.weight",),
            },
        ),
    ),
)
