"""Matrices given as two factors, with a Tucker core between them or without."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from fuselora.delta.adders import Factors
    from fuselora.delta.sums import Sums
    from fuselora.steps import Delta


def pair_of(
    stem: str, core: str, delta: Delta, factors: Factors, sums: Sums
) -> tuple[torch.Tensor, torch.Tensor]:
    """``stem``_a and ``stem``_b as (rows, rank) and (rank, columns), the core multiplied into the latter."""
    left, right = factors.matrix(f"{stem}_a"), factors.matrix(f"{stem}_b")
    if core not in delta.factors:
        return left, right
    return left.t().contiguous(), through_core(factors.whole(core), right, sums)


def through_core(core: torch.Tensor, right: torch.Tensor, sums: Sums) -> torch.Tensor:
    """sum_j core[i, j, k ...] * right[j, c] as (rank, columns * kernel); ``right`` is (rank, columns)."""
    n_left, n_right = core.shape[:2]
    places = core.reshape(n_left, n_right, -1)
    by_place = places.transpose(1, 2).reshape(-1, n_right)
    product = sums.product(by_place, right).view(n_left, places.shape[2], -1)
    return product.transpose(1, 2).reshape(n_left, -1)
