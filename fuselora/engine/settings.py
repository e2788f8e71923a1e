"""The settings of torch that a run fixes and gives back: it may be a guest in a larger program."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

HIGHEST = "highest"  # anything less lets a CPU take float32 products in bfloat16


@contextmanager
def exact_settings(jobs: int | None) -> Iterator[None]:
    """float32 sums in float32, on ``jobs`` threads (None: as many as before)."""
    threads, precision = torch.get_num_threads(), _matmul_precision()
    torch.set_num_threads(jobs or threads)
    torch.set_float32_matmul_precision(HIGHEST)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)


def _matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # torch 2.9 and newer, when it was set for one backend alone
        return HIGHEST
