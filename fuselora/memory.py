"""How much memory a plan needs at its peak: a resident part, blocks under way and their factors. No torch."""

from __future__ import annotations

from collections import ChainMap, deque
from typing import TYPE_CHECKING

from fuselora.engine.blocks import Block, blocks, buffer_bytes
from fuselora.engine.threads import FACTOR_ELEMENTS, blocks_under_way, cores, workers
from fuselora.steps import Fuse

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from fuselora.planning import FusePlan, OutputFile
    from fuselora.specs import Kernel

RESIDENT_BYTES = 320 << 20  # Python, torch and the stacks of its threads
# of an element of a factor; a kernel that takes them as they are needs less
ITEM_BYTES: Mapping[Kernel, int] = {"auto": 4, "reference": 8}
# of an element of a chunk, measured: its sum, its rounded copy and the sample that rounding is counted on;
# in float64 the terms of a sum and what rounding compares too
SCRATCH_BYTES: Mapping[Kernel, int] = {"auto": 24, "reference": 120}


def peak_memory(plan: FusePlan) -> int:
    """Resident bytes at the peak: they follow chunks, factors and threads, not the model's size."""
    jobs = plan.request.jobs or cores()
    return RESIDENT_BYTES + max((_file_memory(f, plan.request.kernel, jobs) for f in plan.files), default=0)


def _file_memory(file: OutputFile, kernel: Kernel, jobs: int) -> int:
    cut, n_blocks = tuple(blocks(file)), blocks_under_way(jobs)
    buffers = n_blocks * sum(buffer_bytes(cut))
    scratch = workers(jobs) * _largest_chunk(file) * SCRATCH_BYTES[kernel]
    return buffers + scratch + _factors(cut, n_blocks) * ITEM_BYTES[kernel]


def _largest_chunk(file: OutputFile) -> int:
    """Its elements."""
    fused = (step for step in file.steps if isinstance(step, Fuse))
    return max((step.chunk_elements for step in fused), default=0)


def _factors(cut: Iterable[Block], n_blocks: int) -> int:
    """The elements of all factors that are held at once, each tensor's once."""
    under_way: deque[dict[str, int]] = deque(maxlen=n_blocks)
    most = 0
    for found in map(_factors_of, cut):
        news = found and not (under_way and found == under_way[-1])
        under_way.append(found)
        if news:
            held = sum(ChainMap(*under_way).values())
            most = max(most, min(held, max(FACTOR_ELEMENTS, sum(found.values()))))
    return most


def _factors_of(block: Block) -> dict[str, int]:
    """base_key -> elements of its pairs."""
    fused = {part.step.base_key: part.step for part in block.parts if part.step}
    return {key: step.factor_elements for key, step in fused.items() if step.factor_elements}
