"""Chroma, made from FLUX.1 with an approximator in place of the modulation layers.

Sources: diffusers' ChromaTransformer2DModel and its ``convert_chroma_transformer_checkpoint_to_diffusers``,
which the tests hold every row against.
"""

from __future__ import annotations

from fuselora.families.family import Family
from fuselora.families.flux1 import ADDED_QKV, BLOCK_ROWS, DOUBLE, QKV, SINGLE_QKV
from fuselora.families.kin import Kin, Measure
from fuselora.families.renames import Renames, Rows, canonical_names

APPROXIMATOR = "distilled_guidance_layer"
ROWS: Rows = (
    *BLOCK_ROWS,
    (f"{APPROXIMATOR}.layers.{{n}}.in_layer", f"{APPROXIMATOR}.layers.{{n}}.linear_1"),
    (f"{APPROXIMATOR}.layers.{{n}}.out_layer", f"{APPROXIMATOR}.layers.{{n}}.linear_2"),
    (f"{APPROXIMATOR}.norms.{{n}}.scale", f"{APPROXIMATOR}.norms.{{n}}.weight"),
)
SAME = frozenset({f"{APPROXIMATOR}.in_proj", f"{APPROXIMATOR}.out_proj"})

CHROMA = Family(
    name="chroma",
    canonical="diffusers",
    layouts={"native": Renames(ROWS)},
    names=canonical_names(ROWS) | SAME,
    block="transformer_blocks.{n}.",
    kin=(
        Kin(
            ("Chroma1-Base", "Chroma1-HD"),
            (),
            19,
            {"x_embedder.weight": (3072, 64), f"{APPROXIMATOR}.in_proj.weight": (5120, 64)},
        ),
    ),
    measures=(
        Measure(
            "dim",
            ("x_embedder.weight", 0),
            {
                0: tuple(f"{name}.weight" for name in (*QKV, *ADDED_QKV, *SINGLE_QKV)),
                1: (f"{DOUBLE}.ff.net.0.proj.weight",),
            },
        ),
    ),
)
