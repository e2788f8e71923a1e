"""Chroma, made from FLUX.1 with an approximator in place of the modulation layers.

Sources: diffusers' ChromaTransformer2DModel and its ``convert_chroma_transformer_checkpoint_to_diffusers``,
which the tests hold every row against.
"""

from __future__ import annotations

from fuselora.families.family import Family
from fuselora.families.flux1 import BLOCK_ROWS, MEASURES, OWN_ROWS, embedder
from fuselora.families.kin import Branch, Kin, SkipRule
from fuselora.families.renames import Renames, Row, Rows, canonical_names, norm

APPROXIMATOR = "distilled_guidance_layer"
ROWS: Rows = (
    *BLOCK_ROWS,
    *embedder(f"{APPROXIMATOR}.layers.{{n}}", f"{APPROXIMATOR}.layers.{{n}}"),
    *norm(f"{APPROXIMATOR}.norms.{{n}}", f"{APPROXIMATOR}.norms.{{n}}"),
)
SAME = frozenset({f"{APPROXIMATOR}.in_proj", f"{APPROXIMATOR}.out_proj"})
# What is published for Chroma of FLUX.1's LoRAs has these keys taken out (croquelois/forgeChroma issue 4), so
# a file that has them was made for another model, and what it changes there would be lost.
MODULATION = SkipRule(
    reason="modulation of FLUX.1, which Chroma computes in its distilled_guidance_layer",
    modules=tuple(
        name for row in OWN_ROWS for name in ((row.theirs, *row.ours) if isinstance(row, Row) else row)
    ),
    witness="x_embedder.weight",
    axis=0,
    sizes=(),
)

CHROMA = Family(
    name="chroma",
    known_as=r"(?<![a-z])chroma(?![a-z])",
    canonical="diffusers",
    layouts={"native": Renames(ROWS)},
    names=canonical_names(ROWS) | SAME,
    block="transformer_blocks.{n}.",
    kin=(
        Kin(
            ("Chroma1-Base", "Chroma1-HD", "Chroma1-Flash"),
            (),
            19,
            {
                "x_embedder.weight": (3072, 64),
                "context_embedder.weight": (3072, 4096),
                "transformer_blocks.0.ff.net.0.proj.weight": (12288, 3072),
                "single_transformer_blocks.37.proj_out.weight": (3072, 15360),
                f"{APPROXIMATOR}.in_proj.weight": (5120, 64),
                "time_text_embed.timestep_embedder.linear_1.bias": (),
            },
        ),
    ),
    skips=(MODULATION,),
    measures=MEASURES,
    # a LoRA that has them is FLUX.1's
    branches=(
        Branch(
            "modulation", tuple(canonical_names(OWN_ROWS)), "time_text_embed.timestep_embedder.linear_1.bias"
        ),
    ),
)
