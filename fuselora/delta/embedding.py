"""Pairs whose outputs are the base's columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuselora.delta.low_rank import stacked

if TYPE_CHECKING:
    from fuselora.delta.adders import Factors, Term
    from fuselora.delta.sums import Sums
    from fuselora.steps import Delta


def term(delta: Delta, factors: Factors, sums: Sums) -> Term:
    """(B @ A)^T of A (rank, entries) and B (width, rank)."""
    del delta
    up, down = factors.matrix("embedding_up"), factors.matrix("embedding_down")
    return stacked([down.t()], [up.t()], sums)
