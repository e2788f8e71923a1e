"""Watching the engine: its threads, its buffers, and a way out of a deadlock."""

from __future__ import annotations

import faulthandler
import threading
from typing import TYPE_CHECKING, Any

from fuselora.engine.buffers import Buffer, Pool
from fuselora.engine.lanes import Flow

if TYPE_CHECKING:
    from collections.abc import Iterator

DEADLOCK_SECONDS = 120


def watched() -> Iterator[None]:
    """Ends the whole run with every thread's stack if a test hangs; afterwards no thread may be left."""
    before = set(threading.enumerate())
    faulthandler.dump_traceback_later(DEADLOCK_SECONDS, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
    assert set(threading.enumerate()) <= before


class CountingPool(Pool):
    """Counts how many buffers are out, and how many were at once."""

    made: list[CountingPool] = []  # noqa: RUF012

    def __init__(self, n_buffers: int, n_bytes: int) -> None:
        super().__init__(n_buffers, n_bytes)
        self.n_buffers, self.n_bytes = n_buffers, n_bytes
        self.taken = self.most = 0
        self._count = threading.Lock()
        self.made.append(self)

    def take(self, flow: Flow) -> Buffer:
        buffer = super().take(flow)
        with self._count:
            self.taken += 1
            self.most = max(self.most, self.taken)
        return buffer

    def give_back(self, buffer: Buffer) -> None:
        with self._count:
            self.taken -= 1
        super().give_back(buffer)


class Limited:
    """``os.pread``-like calls that move a few bytes at a time, and fail with ``error`` after ``calls``."""

    def __init__(self, call: Any, *, calls: int | None = None, error: OSError | None = None) -> None:
        self._call, self._calls, self._error = call, calls, error
        self.made = 0
        self._lock = threading.Lock()

    def __call__(self, descriptor: int, *arguments: Any) -> Any:
        with self._lock:
            self.made += 1
            made = self.made
        if self._error is not None and self._calls is not None and made > self._calls:
            raise self._error
        return self._call(descriptor, *arguments)
