"""Rounding float64 to a narrower dtype once."""

from __future__ import annotations

import torch


def round_once(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float64 -> ``dtype``, to nearest even, in one rounding.

    torch goes to 16-bit dtypes by way of float32, which rounds twice. Rounding to odd in float32
    first keeps what the second rounding needs to know (Boldo and Melquiond, 2008).
    """
    if dtype in (torch.float64, torch.float32):
        return exact.to(dtype)
    return _to_odd_float32(exact).to(dtype)


def _to_odd_float32(exact: torch.Tensor) -> torch.Tensor:
    """float64 -> float32, truncated, with the last bit set wherever something was cut off."""
    near = exact.to(torch.float32)
    back = near.to(torch.float64)
    inexact = (back != exact) & torch.isfinite(near)
    beyond = inexact & (back.abs() > exact.abs())
    bits = near.view(torch.int32) - beyond.to(torch.int32)
    return torch.where(inexact, bits | 1, bits).view(torch.float32)
