"""The settings of torch that a run fixes and gives back: it may be a guest in a larger program."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

HIGHEST = "highest"  # anything less lets a CPU take float32 products in bfloat16


_told = threading.local()


def one_thread() -> None:
    """torch computes in the calling thread alone, as blocks are what is computed side by side.

    A new thread takes over whether subnormals are flushed; here they are not.
    """
    if not getattr(_told, "done", False):
        torch.set_num_threads(1)
        torch.set_flush_denormal(False)
        _told.done = True


def flushes() -> bool:
    """Whether the calling thread takes subnormal float32 numbers for zero; torch does not tell."""
    tiny = torch.full((1,), 2.0**-127, dtype=torch.float32, device="cpu")
    return tiny.mul(1.0).view(torch.int32).item() == 0


class _Users:
    """Threads inside ``exact_settings``: the first one in saves what the last one out gives back."""

    lock = threading.Lock()
    count = 0
    threads = 1
    restore_precision: Callable[[], None]


_inside = threading.local()


@contextmanager
def exact_settings() -> Iterator[None]:
    """float32 sums in float32, subnormals too, each in the thread that asks for it.

    Several threads may be inside at once.
    """
    if getattr(_inside, "exact", False):
        yield
        return
    threads, flushed = _enter(), flushes()
    torch.set_flush_denormal(False)
    _inside.exact = True
    try:
        yield
    finally:
        _inside.exact = False
        torch.set_flush_denormal(flushed)
        _leave(threads)


def cpu_type() -> str:
    """The instructions that torch computes with, those for bfloat16 included, which change bits."""
    found = [torch.backends.cpu.get_cpu_capability().lower()]
    for name in ("avx512_bf16", "amx_tile"):
        supported = getattr(torch.cpu, f"_is_{name}_supported", None)
        if supported is not None and supported():
            found.append(name.rpartition("_")[2])
    return "_".join(found)


def _enter() -> int:
    """The number of threads that the calling thread goes back to."""
    with _Users.lock:
        threads = torch.get_num_threads()
        if _Users.count == 0:
            _Users.threads, _Users.restore_precision = threads, _saved_precision()
            torch.set_float32_matmul_precision(HIGHEST)
        elif threads == 1:  # a new thread begins with what another one has set
            threads = _Users.threads
        torch.set_num_threads(1)  # torch keeps the number for each thread
        _Users.count += 1
        return threads


def _leave(threads: int) -> None:
    with _Users.lock:
        torch.set_num_threads(threads)
        _Users.count -= 1
        if _Users.count == 0:
            _Users.restore_precision()


def _saved_precision() -> Callable[[], None]:
    """What gives the present precision back."""
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # torch 2.9 and newer, when it was set for one backend alone
        return _saved_by_backend()
    return lambda: torch.set_float32_matmul_precision(precision)


def _saved_by_backend() -> Callable[[], None]:
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    saved = [(backend, backend.fp32_precision) for backend in backends]

    def restore() -> None:
        for backend, precision in saved:
            backend.fp32_precision = precision

    return restore
