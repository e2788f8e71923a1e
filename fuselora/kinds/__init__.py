"""The kinds of delta, one file each: their keys, parts, shapes and scale. ``delta`` has their arithmetic.

A new kind is a row of ``KINDS`` and a row of ``delta.adders.TERMS``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from fuselora.kinds.boft import BOFT, PEFT_BOFT
from fuselora.kinds.difference import DIFF, DIFF_B, DIFF_M
from fuselora.kinds.embedding import EMBEDDING
from fuselora.kinds.experts import EXPERTS
from fuselora.kinds.glora import GLORA
from fuselora.kinds.ia3 import IA3, PEFT_IA3, PEFT_IA3_B
from fuselora.kinds.kind import BadParts, Kind, Part, Shape, Shapes, Suffix, fits
from fuselora.kinds.loha import LOHA
from fuselora.kinds.lokr import LOKR
from fuselora.kinds.low_rank import PAIR, SPLIT_PAIR, TRANSPOSED
from fuselora.kinds.norm import B_NORM, W_NORM
from fuselora.kinds.oft import OFT, PEFT_OFT, PEFT_OFT_EMBEDDING
from fuselora.kinds.pair_bias import PAIR_BIAS
from fuselora.kinds.replacement import REPLACE, REPLACE_B, REPLACE_SCALE, SET_WEIGHT
from fuselora.kinds.settings import Settings

__all__ = [
    "KINDS", "KIND_OF", "BadParts", "Kind", "Part", "Shape", "Shapes", "Suffix", "fits", "kinds_in", "meant",
]  # fmt: skip

# the most telling first: the first one in a module names its dialect, and the first spelling that fits counts
KINDS: tuple[Kind, ...] = (
    PAIR, SPLIT_PAIR, EMBEDDING, PAIR_BIAS, LOHA, LOKR, GLORA, DIFF, DIFF_B, DIFF_M, W_NORM, B_NORM,
    OFT, PEFT_OFT, PEFT_OFT_EMBEDDING, PEFT_BOFT, IA3, PEFT_IA3, PEFT_IA3_B,
    SET_WEIGHT, REPLACE_SCALE, REPLACE_B, REPLACE,
)  # fmt: skip
KIND_OF: Mapping[Part, Kind] = {part: kind for kind in KINDS for part in kind.own_parts}


def meant(kind: Kind, settings: Settings, shapes: Shapes) -> Kind:
    """The kind itself, but for what its shapes or the configuration show to be another one."""
    if kind is OFT:
        return BOFT if len(shapes.get("oft_blocks", ())) == 4 else OFT
    if kind is not PAIR or settings.experts:
        return EXPERTS if kind is PAIR else kind
    # of a convolution there is only one way
    matrices = all(len(shapes.get(part, ())) == 2 for part in PAIR.own_parts)
    return TRANSPOSED if settings.transposed and matrices else PAIR


def kinds_in(parts: Mapping[Part, object]) -> tuple[Kind, ...]:
    """The kinds that a module's parts make, whole or not."""
    return _kinds_of(frozenset(parts))


@cache  # the modules of a file have few sets of parts, and are asked again and again
def _kinds_of(parts: frozenset[Part]) -> tuple[Kind, ...]:
    return tuple(kind for kind in KINDS if kind.is_in(parts))
