"""Rotations out of skew-symmetric matrices, in float64: there are few, and they turn all of a weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fuselora.delta.sums import FLOAT64

if TYPE_CHECKING:
    from fuselora.delta.sums import Sums


def wide(part: torch.Tensor) -> torch.Tensor:
    """In float64 on the CPU, as some devices have none."""
    return part.to("cpu", torch.float64)


def cayley(skew: torch.Tensor, sums: Sums) -> torch.Tensor:
    """(I + Q)^-1 (I - Q) of (..., size, size) float64: the inverse of (I + Q) (I - Q)^-1."""
    size = skew.shape[-1]
    one = torch.eye(size, dtype=skew.dtype)
    if sums.dtype is FLOAT64.dtype:
        return _eliminated((one + skew).reshape(-1, size, size), one - skew).view_as(skew)
    found: torch.Tensor = torch.linalg.solve(one + skew, one - skew)
    return found


def _eliminated(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left^-1 @ right of (n, size, size) by Gauss and Jordan, element by element: the same bits everywhere.

    No pivots are sought: the symmetric part of I + Q is I, so none is ever small.
    """
    size = left.shape[-1]
    both = torch.cat((left, right.reshape(-1, size, size)), 2)
    for i in range(size):
        active = both[:, :, i:]  # what is before is done with
        row = active[:, i : i + 1] / active[:, i : i + 1, :1]
        factor = active[:, :, :1].clone()
        factor[:, i] = 0
        active.sub_(factor * row)
        active[:, i : i + 1] = row
    return both[:, :, size:].contiguous()


def series(skew: torch.Tensor, terms: int, sums: Sums) -> torch.Tensor:
    """PEFT's Cayley-Neumann series I + 2 Q + 2 Q^2 + ... + Q^n of (n, size, size) float64.

    n is ``terms`` - 1, with 3 terms too 3; 1 term is I and 2 are I + 2 Q.
    """
    total = torch.eye(skew.shape[-1], dtype=skew.dtype).repeat(len(skew), 1, 1)
    if terms == 1:
        return total
    total.add_(skew * 2)
    power, product = skew, FLOAT64.product if sums.dtype is FLOAT64.dtype else torch.matmul
    last = 1 if terms == 2 else max(terms - 1, 3)
    for n in range(2, last + 1):
        power = product(power, skew)
        total.add_(power if n == last else power * 2)
    return total


def norms(matrices: torch.Tensor) -> torch.Tensor:
    """Of each (size, size) of (n, size, size), as (n, 1, 1)."""
    squares = (matrices * matrices).reshape(len(matrices), -1)
    return FLOAT64.row_sums(squares).sqrt_().unsqueeze(2)
