"""How much memory a plan needs at its peak: a resident part, fixed buffers, and one tensor's factors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fuselora.header import DTYPE_BITS
from fuselora.planning import COPY_BYTES, Fuse, LowRank

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fuselora.planning import FusePlan, OutputFile
    from fuselora.specs import Kernel

RESIDENT_BYTES = 320 << 20  # Python, torch and its thread pools
N_BUFFERS = 4  # read ahead, and as many written behind
ITEM_BYTES: Mapping[Kernel, int] = {"auto": 4, "reference": 8}
# for each element of a chunk, measured: the sum and a copy; in float64 its terms and what rounding compares
SCRATCH_BYTES: Mapping[Kernel, int] = {"auto": 8, "reference": 120}


def peak_memory(plan: FusePlan) -> int:
    """Resident bytes at the peak: it follows the largest chunk and pair of factors, not the model's size."""
    kernel = plan.request.kernel
    return RESIDENT_BYTES + max((_file_memory(file, kernel) for file in plan.files), default=0)


def _file_memory(file: OutputFile, kernel: Kernel) -> int:
    fused = [step for step in file.steps if isinstance(step, Fuse)]
    buffers = N_BUFFERS * COPY_BYTES
    return buffers + max((_step_memory(step, kernel) for step in fused), default=0)


def _step_memory(step: Fuse, kernel: Kernel) -> int:
    """Buffers of one chunk, what its sum needs, and all factors in the dtype of the sums."""
    elements = max((last - first for first, last in step.chunks), default=0) * step.columns
    item_bytes = (DTYPE_BITS[step.base_dtype] + DTYPE_BITS[step.dtype]) // 8
    factors = [f for d in step.deltas if isinstance(d, LowRank) for f in (d.up, d.down)]
    in_factors = sum(math.prod(factor.shape) for factor in factors)
    return elements * (N_BUFFERS * item_bytes + SCRATCH_BYTES[kernel]) + in_factors * ITEM_BYTES[kernel]
