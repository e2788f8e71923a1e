"""How many threads a run has, and what may be under way at once. No torch: a plan estimates from it."""

from __future__ import annotations

import os

READERS = 2
WRITERS = 2
MAX_WORKERS = 8  # one computes as fast as a disk writes
FACTOR_ELEMENTS = 12 << 20  # of all tensors under way: 24 MiB in bfloat16, 48 in float32


def cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def workers(jobs: int) -> int:
    """Threads that compute."""
    return max(1, min(jobs, MAX_WORKERS))


def blocks_under_way(jobs: int) -> int:
    """One for each thread that reads, computes or writes, and two for those that hash."""
    return READERS + workers(jobs) + WRITERS + 2
