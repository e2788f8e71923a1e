"""Two products, multiplied element by element."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuselora.delta.factored import pair_of

if TYPE_CHECKING:
    import torch

    from fuselora.delta.adders import Factors, Term
    from fuselora.delta.sums import Sums
    from fuselora.steps import Delta


def term(delta: Delta, factors: Factors, sums: Sums) -> Term:
    """(w1_a @ w1_b) * (w2_a @ w2_b), each perhaps with a Tucker core."""
    up1, down1 = pair_of("hada_w1", "hada_t1", delta, factors, sums)
    up2, down2 = pair_of("hada_w2", "hada_t2", delta, factors, sums)

    def rows(base: torch.Tensor, first: int, last: int) -> torch.Tensor:
        del base
        return sums.product(up1[first:last], down1).mul_(sums.product(up2[first:last], down2))

    return rows
