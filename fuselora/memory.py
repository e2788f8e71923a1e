"""How much memory a plan needs at its peak: a resident part, fixed buffers, and one tensor's factors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuselora.header import DTYPE_BITS
from fuselora.planning import COPY_BYTES, Factor, Fuse, LowRank

if TYPE_CHECKING:
    from fuselora.planning import FusePlan, OutputFile

RESIDENT_BYTES = 320 << 20  # Python, torch and its thread pools
N_BUFFERS = 4  # read ahead, and as many written behind
FLOAT32_BYTES = 4


def peak_memory(plan: FusePlan) -> int:
    """Resident bytes at the peak: it follows the largest chunk and pair of factors, not the model's size."""
    return RESIDENT_BYTES + max((_file_memory(file) for file in plan.files), default=0)


def _file_memory(file: OutputFile) -> int:
    fused = [step for step in file.steps if isinstance(step, Fuse)]
    buffers = N_BUFFERS * COPY_BYTES
    return buffers + max((_step_memory(step) for step in fused), default=0)


def _step_memory(step: Fuse) -> int:
    """Buffers of one chunk, its float32 sum and a scratch copy, and the factors in float32 and as stored."""
    elements = max((last - first for first, last in step.chunks), default=0) * step.columns
    item_bytes = (DTYPE_BITS[step.base_dtype] + DTYPE_BITS[step.dtype]) // 8
    factors = [f for d in step.deltas if isinstance(d, LowRank) for f in (d.up, d.down)]
    return elements * (N_BUFFERS * item_bytes + 2 * FLOAT32_BYTES) + sum(map(_factor_memory, factors))


def _factor_memory(factor: Factor) -> int:
    n_elements = factor.n_bytes * 8 // DTYPE_BITS[factor.dtype]
    return factor.n_bytes + n_elements * FLOAT32_BYTES
