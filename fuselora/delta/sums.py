"""Add one delta to a chunk of rows, in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def add_low_rank(total: torch.Tensor, up: torch.Tensor, down: torch.Tensor, scale: float) -> None:
    """``total`` (rows, in) += scale * ``up`` (rows, rank) @ ``down`` (rank, in), all float32."""
    total.addmm_(up, down, alpha=scale)


def add_full(total: torch.Tensor, diff: torch.Tensor, scale: float) -> None:
    """``total`` (rows, columns) += scale * ``diff`` of the same shape, both float32."""
    total.add_(diff, alpha=scale)


def add_low_rank_exactly(total: torch.Tensor, up: torch.Tensor, down: torch.Tensor, scale: float) -> None:
    """The same in float64, elementwise in rank order.

    Products of float32 values are exact in float64, so neither fused multiply-add nor a BLAS can
    change a bit of the sums: the result is the same on every machine.
    """
    product = total.new_zeros(total.shape)
    for k in range(up.shape[1]):
        product.add_(up[:, k : k + 1] * down[k : k + 1])
    # Two steps: one fused operation would round differently where the CPU has FMA.
    product.mul_(scale)
    total.add_(product)


def add_full_exactly(total: torch.Tensor, diff: torch.Tensor, scale: float) -> None:
    """The same in float64, product and sum rounded apart."""
    total.add_(diff * scale)
