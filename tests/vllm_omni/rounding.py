"""How far a sum of a weight and a delta in bfloat16 may lie from the exact one, element by element."""

from __future__ import annotations

import torch

HALF_ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}  # shares of the value
SLACK = 1.001  # of second order, and of float32 sums
TINY = 2.0**-24  # float16 has no smaller numbers


def once(exact: torch.Tensor) -> torch.Tensor:
    """After the one rounding of a float64 sum to bfloat16."""
    return HALF_ULP[torch.bfloat16] * exact.abs() * SLACK + TINY


def twice(base: torch.Tensor, delta: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """After two roundings to bfloat16: of the delta, and of its sum with the base.

    A delta whose factors have another ``dtype`` was rounded to that first, and a float32 base to
    bfloat16: by how much is known.
    """
    of_base = (base.bfloat16().double() - base.double()).abs()
    of_factors = 0.0 if dtype is torch.bfloat16 else HALF_ULP[dtype]
    of_delta = (HALF_ULP[torch.bfloat16] + of_factors) * delta.abs()
    total = (base.double() + delta).abs() + of_base + of_delta
    return (of_base + of_delta + HALF_ULP[torch.bfloat16] * total) * SLACK + TINY
