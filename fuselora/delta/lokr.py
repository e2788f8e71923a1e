"""Kronecker products, some rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from fuselora.delta.factored import pair_of

if TYPE_CHECKING:
    from fuselora.delta.adders import Factors, Term
    from fuselora.delta.sums import Sums
    from fuselora.steps import Delta

# indices of rows -> these rows
Gather = Callable[[torch.Tensor], torch.Tensor]


def term(delta: Delta, factors: Factors, sums: Sums) -> Term:
    """Row i * b + k is every element of row i of w1 (a, c), times row k of w2 (b, d * kernel)."""
    _, outer = _factor("lokr_w1", delta, factors, sums)
    n_inner, inner = _factor("lokr_w2", delta, factors, sums)

    def rows(base: torch.Tensor, first: int, last: int) -> torch.Tensor:
        at = torch.arange(first, last, device=base.device)
        left, right = outer(at // n_inner), inner(at % n_inner)
        return (left.unsqueeze(2) * right.unsqueeze(1)).flatten(1)

    return rows


def _factor(name: str, delta: Delta, factors: Factors, sums: Sums) -> tuple[int, Gather]:
    """How many rows it has, and how to get some; a product is made row by row, as it may be large."""
    if name in delta.factors:
        whole = factors.matrix(name)
        return len(whole), lambda at: whole[at]
    left, right = pair_of(name, "lokr_t2" if name == "lokr_w2" else "", delta, factors, sums)
    return len(left), lambda at: sums.product(left[at], right)
