"""Kernels: how one chunk of one tensor is computed, and the factors it needs, read per tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fuselora.delta.rounding import round_once
from fuselora.delta.sums import add_full, add_full_exactly, add_low_rank, add_low_rank_exactly
from fuselora.engine.buffers import own_memory
from fuselora.errors import NumericError
from fuselora.header import DTYPE_BITS
from fuselora.planning import UNIT_ROWS, Factor, Full, Fuse, LowRank
from fuselora.reading import changed, reading
from fuselora.tensors import all_finite, view

if TYPE_CHECKING:
    from fuselora.specs import Kernel as KernelName

READ_ELEMENTS = 1 << 20
Add = Callable[[torch.Tensor, int, int], None]


@dataclass(frozen=True, slots=True)
class Lost:
    """On a sample of rows: elements that the deltas touched, and those that rounding left as they were."""

    touched: int = 0
    unchanged: int = 0

    def __add__(self, other: Lost) -> Lost:
        return Lost(self.touched + other.touched, self.unchanged + other.unchanged)


@dataclass(frozen=True, slots=True)
class Kernel:
    """Arithmetic in one dtype: ``name`` goes into the marker."""

    name: str
    dtype: torch.dtype
    low_rank: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], None]
    full: Callable[[torch.Tensor, torch.Tensor, float], None]
    rounded: Callable[[torch.Tensor, torch.dtype], torch.Tensor]

    def load(self, step: Fuse) -> LoadedStep:
        """Read the step's factors. Raises ``ChangedError`` when a LoRA is not what it was."""
        return LoadedStep(self, step, tuple(self._adder(delta, step.columns) for delta in step.deltas))

    def _adder(self, delta: LowRank | Full, columns: int) -> Add:
        scale = delta.scale
        if isinstance(delta, LowRank):
            up, down = read_factor(delta.up, self.dtype), read_factor(delta.down, self.dtype)
            return lambda total, first, last: self.low_rank(total, up[first:last], down, scale)
        diff = delta.diff
        return lambda total, first, last: self.full(
            total, read_rows(diff, columns, first, last, self.dtype), scale
        )


@dataclass(frozen=True, slots=True)
class LoadedStep:
    """A step with its factors in memory."""

    kernel: Kernel
    step: Fuse
    adders: Sequence[Add]

    def fuse(self, source: memoryview, target: memoryview, first: int, last: int) -> Lost:
        """Compute rows ``first`` to ``last`` from base bytes into output bytes.

        Raises ``NumericError`` if any element is not finite.
        """
        shape = (last - first, self.step.columns)
        n_elements = shape[0] * shape[1]
        base = view(source, self.step.base_dtype, n_elements).view(shape)
        out = view(target, self.step.dtype, n_elements).view(shape)
        total = base.to(self.kernel.dtype, copy=True)
        for add in self.adders:
            add(total, first, last)
        out.copy_(self.kernel.rounded(total, out.dtype))
        if not all_finite(out):
            raise _non_finite(self.step, base)
        return _lost(base, total, out) if first == 0 and self.adders else Lost()


FLOAT32 = Kernel("float32", torch.float32, add_low_rank, add_full, lambda total, dtype: total.to(dtype))
REFERENCE = Kernel("reference", torch.float64, add_low_rank_exactly, add_full_exactly, round_once)


def choose(name: KernelName) -> Kernel:
    """The kernel that ``--kernel`` asks for."""
    return REFERENCE if name == "reference" else FLOAT32


def read_factor(factor: Factor, dtype: torch.dtype) -> torch.Tensor:
    """A LoRA tensor in ``dtype`` and its own shape. Raises ``ChangedError`` if the file grew short."""
    return _read(factor, 0, math.prod(factor.shape), dtype).view(factor.shape)


def read_rows(factor: Factor, columns: int, first: int, last: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows ``first`` to ``last`` of a LoRA tensor seen as a matrix of ``columns``."""
    return _read(factor, first * columns, (last - first) * columns, dtype).view(-1, columns)


def _read(factor: Factor, first: int, n_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Converted block by block, so that a large factor is not in memory twice."""
    item_bytes = DTYPE_BITS[factor.dtype] // 8
    found = torch.frombuffer(own_memory(n_elements * dtype.itemsize), dtype=dtype, count=n_elements)
    raw = memoryview(bytearray(min(n_elements, READ_ELEMENTS) * item_bytes))
    with reading(factor.path), factor.path.open("rb") as stream:
        stream.seek(factor.offset + first * item_bytes)
        for block in torch.split(found, READ_ELEMENTS):
            n_bytes = len(block) * item_bytes
            if stream.readinto(raw[:n_bytes]) != n_bytes:
                raise changed(factor.path)
            block.copy_(view(raw, factor.dtype, len(block)))
    return found


def _lost(base: torch.Tensor, total: torch.Tensor, out: torch.Tensor) -> Lost:
    sample = slice(0, UNIT_ROWS)
    before = base[sample]
    touched = total[sample] != before.to(total.dtype)
    unchanged = touched & (out[sample] == before.to(out.dtype))
    return Lost(int(touched.sum()), int(unchanged.sum()))


def _non_finite(step: Fuse, base: torch.Tensor) -> NumericError:
    if not all_finite(base):
        what = "the base itself holds NaN or infinity there"
    else:
        what = f"the sum does not fit {step.dtype}"
    return NumericError(
        f"{step.base_key}: the fused tensor is not finite: {what}",
        hint="Check the strength and alpha; --dtype bfloat16 or float32 has more range than float16.",
        tensor=step.base_key,
    )
