"""Safetensors dtypes as torch dtypes, and views of raw bytes. The one place that knows both."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from fuselora.header import DTYPE_BITS

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def view(buffer: bytearray | memoryview, dtype: str, n_elements: int) -> torch.Tensor:
    """``n_elements`` of ``dtype`` at the start of a writable buffer, sharing its memory."""
    return torch.frombuffer(buffer, dtype=TORCH_DTYPES[dtype], count=n_elements)


def all_finite(values: torch.Tensor) -> bool:
    """Whether no element is NaN or infinity; NaN passes through torch's minimum and maximum."""
    if values.numel() == 0:
        return True
    if values.element_size() == 1:  # torch has no float8 minimum
        values = values.float()
    low, high = torch.aminmax(values)
    return math.isfinite(low) and math.isfinite(high)


def bytes_finite(block: bytes, dtype: str) -> bool:
    """The same for raw bytes, which hold whole elements."""
    return all_finite(view(bytearray(block), dtype, len(block) * 8 // DTYPE_BITS[dtype]))
