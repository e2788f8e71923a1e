"""The arithmetic that all kinds are made of, in float32, and in float64 with the same bits everywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Sums:
    """Operations on matrices of ``dtype``.

    ``add_product(total, up, down, scale)``: ``total`` (rows, in) += scale * up (rows, rank) @ down.
    ``add(total, delta, scale)``: ``total`` += scale * ``delta`` of the same shape.
    ``product(up, down)``: up @ down, of as many matrices as there are.
    ``row_sums(matrix)``: (rows, columns) -> (rows, 1).
    """

    dtype: torch.dtype
    add_product: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], None]
    add: Callable[[torch.Tensor, torch.Tensor, float], None]
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    row_sums: Callable[[torch.Tensor], torch.Tensor]


def _add_product(total: torch.Tensor, up: torch.Tensor, down: torch.Tensor, scale: float) -> None:
    total.addmm_(up, down, alpha=scale)


def _add(total: torch.Tensor, delta: torch.Tensor, scale: float) -> None:
    total.add_(delta, alpha=scale)


def _row_sums(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.sum(1, keepdim=True)


def _exact_product(up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Elementwise in rank order.

    Products of float32 values are exact in float64, so neither fused multiply-add nor a BLAS can
    change a bit of the sums: the result is the same on every machine.
    """
    product = up.new_zeros((*down.shape[:-2], up.shape[-2], down.shape[-1]))
    for k in range(up.shape[-1]):
        # Two steps: one fused operation would round differently where the CPU has FMA.
        product.add_(up[..., k : k + 1] * down[..., k : k + 1, :])
    return product


def _add_exactly(total: torch.Tensor, delta: torch.Tensor, scale: float) -> None:
    total.add_(delta * scale)


def _add_product_exactly(total: torch.Tensor, up: torch.Tensor, down: torch.Tensor, scale: float) -> None:
    _add_exactly(total, _exact_product(up, down), scale)


def _exact_row_sums(matrix: torch.Tensor) -> torch.Tensor:
    """By halves: torch's own order depends on the CPU's vectors."""
    while matrix.shape[1] > 1:
        half, odd = divmod(matrix.shape[1], 2)
        halves = matrix[:, :half] + matrix[:, half : 2 * half]
        matrix = torch.cat((halves, matrix[:, 2 * half :]), 1) if odd else halves
    return matrix


FLOAT32 = Sums(torch.float32, _add_product, _add, torch.matmul, _row_sums)
FLOAT64 = Sums(torch.float64, _add_product_exactly, _add_exactly, _exact_product, _exact_row_sums)
