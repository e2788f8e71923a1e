"""Rounding float64 once, by scaling to whole numbers: shares nothing with the package or with torch."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Mapping

Values = NDArray[np.float64]

# significant bits, exponent of the smallest normal number, largest number
FORMATS: Mapping[torch.dtype, tuple[int, int, float]] = {
    torch.bfloat16: (8, -126, (2 - 2.0**-7) * 2.0**127),
    torch.float16: (11, -14, 65504.0),
    torch.float32: (24, -126, (2 - 2.0**-23) * 2.0**127),
}


def ulp(values: Values, dtype: torch.dtype) -> Values:
    """The step between neighbours of ``dtype`` where ``values`` lie; subnormal steps near zero."""
    bits, lowest, _ = FORMATS[dtype]
    exponents = np.frexp(values)[1] - 1  # 2^e <= |x| < 2^(e + 1)
    found: Values = np.ldexp(1.0, np.maximum(exponents, lowest) - bits + 1)
    return np.where(values == 0, np.ldexp(1.0, lowest - bits + 1), found)


def rounded(values: Values, dtype: torch.dtype) -> Values:
    """``values`` to nearest even in ``dtype``, overflow to infinity; exact in float64."""
    step = ulp(values, dtype)
    with np.errstate(over="ignore"):
        near = np.rint(values / step) * step  # step is a power of two: both are exact
    return np.where(np.abs(near) > FORMATS[dtype][2], np.copysign(np.inf, values), near)


def rounded_fraction(value: Fraction, dtype: torch.dtype) -> Fraction | None:
    """The same for one rational number, in whole-number arithmetic; None for overflow."""
    bits, lowest, largest = FORMATS[dtype]
    size, exponent = abs(value), lowest
    while size >= Fraction(2) ** (exponent + 1):
        exponent += 1
    step = Fraction(2) ** (exponent - bits + 1)
    whole, rest = divmod(size, step)
    if 2 * rest > step or (2 * rest == step and whole % 2):
        whole += 1
    near = whole * step
    if near > Fraction(largest):
        return None
    return near if value >= 0 else -near


def exact(tensor: torch.Tensor) -> Values:
    """A tensor's values as float64."""
    found: Values = tensor.to(torch.float64).numpy()
    return found
