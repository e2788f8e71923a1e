"""Pairs of fused experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuselora.delta.low_rank import stacked

if TYPE_CHECKING:
    import torch

    from fuselora.delta.adders import Factors, Term
    from fuselora.delta.sums import Sums
    from fuselora.steps import Delta


def term(delta: Delta, factors: Factors, sums: Sums) -> Term:
    """Each expert's up @ down, or its transpose, one below the other.

    ``down`` (experts * rank, in) has the rows of an expert together, ``up`` (out, rank * experts) has the
    columns of all experts for the first rank, then those for the next (PEFT's ``ParamWrapper``).
    """
    n = delta.settings.experts
    downs = factors.matrix("down").chunk(n)
    up = factors.matrix("up")
    ups = tuple(up[:, expert::n].contiguous() for expert in range(n))
    if delta.settings.transposed:
        ups, downs = tuple(d.t() for d in downs), tuple(u.t() for u in ups)
    product = stacked(ups, downs, sums)
    # a row of the base may be all of an expert
    per_row = factors.shape[1] // downs[0].shape[1]

    def rows(base: torch.Tensor, first: int, last: int) -> torch.Tensor:
        return product(base, first * per_row, last * per_row).view(last - first, -1)

    return rows
