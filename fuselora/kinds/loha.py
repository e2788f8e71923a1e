"""LoHa: W += scale * (w1_a @ w1_b) * (w2_a @ w2_b), multiplied element by element.

FedPara (Hyeon-Woo et al., 2022) as LyCORIS and PEFT save it. Of a convolution w_b is (rank, in * kernel),
or there are Tucker cores (rank, rank, kernel ...) between w_a (rank, out) and w_b (rank, in).
"""

from __future__ import annotations

import math

from fuselora.kinds.factored import factored_shape, leading, unflattened
from fuselora.kinds.kind import MAGNITUDES, BadParts, Kind, Shape, Shapes, Suffix, all_elements, need

FACTORS = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
CORES = ("hada_t1", "hada_t2")


def loha_shape(shapes: Shapes, base: Shape) -> Shape:
    """Both halves' shape, which has to be one and the same, as has the rank."""
    if len(shapes.keys() & set(CORES)) == 1:
        raise BadParts("one of hada_t1 and hada_t2 is there without the other")
    first, second = (
        factored_shape(shapes[f"hada_w{n}_a"], shapes[f"hada_w{n}_b"], shapes.get(f"hada_t{n}")) for n in "12"
    )
    if first != second:
        raise BadParts(f"the halves of the LoHa have the shapes {list(first)} and {list(second)}")
    if shapes["hada_w1_b"][0] != shapes["hada_w2_b"][0]:
        raise BadParts("the halves of the LoHa have different ranks")
    return unflattened(first, base)


def loha_rank(shapes: Shapes) -> int | None:
    """The leading dimension of ``hada_w1_b``, with cores as without."""
    return leading(shapes["hada_w1_b"])


def loha_held(shapes: Shapes) -> int:
    """The parts, and with cores what each makes with its w_b: (rank, in * kernel)."""
    cores = (
        math.prod((*shapes[f"hada_w{n}_b"], *shapes[f"hada_t{n}"][2:]))
        for n in "12"
        if f"hada_t{n}" in shapes
    )
    return all_elements(shapes) + sum(cores)


LOHA = Kind(
    name="loha",
    counted="loha",
    suffixes=tuple(Suffix("LoHa", part, rf"\.{part}(?:\.(?P<name>.+))?") for part in FACTORS + CORES),
    needs=tuple(need(part) for part in FACTORS),
    optional=MAGNITUDES.union(CORES),
    leaves=(".weight",),
    shape=loha_shape,
    rank=loha_rank,
    held=loha_held,
)
