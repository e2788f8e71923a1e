"""LoRA tensors, read from their file when a step needs them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fuselora.engine.buffers import own_memory
from fuselora.header import DTYPE_BITS
from fuselora.reading import changed, reading
from fuselora.tensors import view

if TYPE_CHECKING:
    from fuselora.steps import Delta, Factor

READ_ELEMENTS = 1 << 20
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Read:
    """A delta's factors on the device that sums them; ``base_tensor`` is what they are for.

    It need not have the shape of the layer that the delta was made for.
    """

    delta: Delta
    base_tensor: Factor
    dtype: torch.dtype
    device: torch.device = CPU

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.base_tensor.matrix
        return self.delta.n_rows or rows, self.delta.n_columns or columns

    def whole(self, part: str) -> torch.Tensor:
        return read_factor(self.delta.factors[part], self.dtype).to(self.device)

    def matrix(self, part: str) -> torch.Tensor:
        found = self.whole(part)
        return found.view(found.shape[0], -1)

    def rows(self, part: str, first: int, last: int) -> torch.Tensor:
        columns = self.shape[1]
        return read_rows(self.delta.factors[part], columns, first, last, self.dtype).to(self.device)

    def base(self, first: int, last: int) -> torch.Tensor:
        columns = self.base_tensor.shape[1]
        return read_rows(self.base_tensor, columns, first, last, self.dtype).to(self.device)


def read_factor(factor: Factor, dtype: torch.dtype) -> torch.Tensor:
    """A LoRA tensor in ``dtype`` and its own shape. Raises ``ChangedError`` if the file grew short."""
    return _read(factor, 0, math.prod(factor.shape), dtype).view(factor.shape)


def read_joined(factors: Sequence[Factor], dtype: torch.dtype, dim: int) -> torch.Tensor:
    """Matrices side by side (``dim`` 1) or one below the other (0). Raises ``ChangedError`` as above."""
    if len(factors) == 1:
        return read_matrix(factors[0], dtype)
    shape = list(factors[0].matrix)
    shape[dim] = sum(factor.matrix[dim] for factor in factors)
    joined, at = _empty(math.prod(shape), dtype).view(shape), 0
    for factor in factors:
        joined.narrow(dim, at, factor.matrix[dim]).copy_(read_matrix(factor, dtype))
        at += factor.matrix[dim]
    return joined


def read_matrix(factor: Factor, dtype: torch.dtype) -> torch.Tensor:
    """A LoRA tensor as (its first dimension, all others flattened)."""
    return read_factor(factor, dtype).view(factor.matrix)


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
