"""The settings of torch that a run fixes and gives back: it may be a guest in a larger program."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

HIGHEST = "highest"  # anything less lets a CPU take float32 products in bfloat16


_told = threading.local()


def one_thread() -> None:
    """torch computes in the calling thread alone, as blocks are what is computed side by side."""
    if not getattr(_told, "done", False):
        torch.set_num_threads(1)
        _told.done = True


@contextmanager
def exact_settings() -> Iterator[None]:
    """float32 sums in float32, each in the thread that asks for it."""
    threads, precision = torch.get_num_threads(), _matmul_precision()
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision(HIGHEST)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)


def cpu_type() -> str:
    """The instructions that torch computes with, those for bfloat16 included, which change bits."""
    found = [torch.backends.cpu.get_cpu_capability().lower()]
    for name in ("avx512_bf16", "amx_tile"):
        supported = getattr(torch.cpu, f"_is_{name}_supported", None)
        if supported is not None and supported():
            found.append(name.rpartition("_")[2])
    return "_".join(found)


def _matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # torch 2.9 and newer, when it was set for one backend alone
        return HIGHEST
