"""LoRA tensors, read from their file when a step needs them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from fuselora.engine.buffers import own_memory
from fuselora.header import DTYPE_BITS
from fuselora.reading import changed, reading
from fuselora.tensors import view

if TYPE_CHECKING:
    from fuselora.planning import Factor

READ_ELEMENTS = 1 << 20


def read_factor(factor: Factor, dtype: torch.dtype) -> torch.Tensor:
    """A LoRA tensor in ``dtype`` and its own shape. Raises ``ChangedError`` if the file grew short."""
    return _read(factor, 0, math.prod(factor.shape), dtype).view(factor.shape)


def read_joined(factors: Sequence[Factor], dtype: torch.dtype, dim: int) -> torch.Tensor:
    """Matrices side by side (``dim`` 1) or one below the other (0). Raises ``ChangedError`` as above."""
    if len(factors) == 1:
        return read_factor(factors[0], dtype)
    shape = list(factors[0].shape)
    shape[dim] = sum(factor.shape[dim] for factor in factors)
    joined, at = _empty(math.prod(shape), dtype).view(shape), 0
    for factor in factors:
        joined.narrow(dim, at, factor.shape[dim]).copy_(read_factor(factor, dtype))
        at += factor.shape[dim]
    return joined


def read_rows(factor: Factor, columns: int, first: int, last: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows ``first`` to ``last`` of a LoRA tensor seen as a matrix of ``columns``."""
    return _read(factor, first * columns, (last - first) * columns, dtype).view(-1, columns)


def _read(factor: Factor, first: int, n_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Converted block by block, so that a large factor is not in memory twice."""
    item_bytes = DTYPE_BITS[factor.dtype] // 8
    found = _empty(n_elements, dtype)
    raw = memoryview(bytearray(min(n_elements, READ_ELEMENTS) * item_bytes))
    with reading(factor.path), factor.path.open("rb") as stream:
        stream.seek(factor.offset + first * item_bytes)
        for block in torch.split(found, READ_ELEMENTS):
            n_bytes = len(block) * item_bytes
            if stream.readinto(raw[:n_bytes]) != n_bytes:
                raise changed(factor.path)
            block.copy_(view(raw, factor.dtype, len(block)))
    return found


def _empty(n_elements: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(own_memory(n_elements * dtype.itemsize), dtype=dtype, count=n_elements)
