"""Watching the engine: its threads, its buffers, its calls to the system, and a way out of a deadlock."""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import os
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fuselora.engine.buffers import Buffer, Pool, own_memory
from fuselora.engine.lanes import Flow
from fuselora.header import PAGE

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

DEADLOCK_SECONDS = 120
DIRECT = getattr(os, "O_DIRECT", 0o40000)
NOWAIT = 8
Refusal = Literal["", "open", "access", "transfer"]


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

    def __init__(self, n_buffers: int, n_bytes: int, allocate: Any = own_memory) -> None:
        super().__init__(n_buffers, n_bytes, allocate)
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
    """``os.pread``-like calls that fail with ``error`` after ``calls``."""

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


class Gauge:
    """How many threads are in a place, and how many were at once."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self._lock = threading.Lock()

    @contextmanager
    def passed(self) -> Iterator[None]:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        try:
            yield
        finally:
            with self._lock:
                self.now -= 1


class Disk:
    """The system's calls as any file system may answer them, whatever the one is that the tests run on.

    Direct transfers have to be aligned, in memory too. ``refuse`` is where direct I/O is: nowhere, at the
    open (by the file system, or by the file's mode), or at the first transfer. No call moves more than
    ``most`` bytes; ``cached`` is whether reads find what they ask for without waiting.
    """

    def __init__(
        self,
        patched: pytest.MonkeyPatch,
        *,
        refuse: Refusal = "",
        most: int | None = None,
        cached: bool = False,
    ) -> None:
        self.refuse, self.most, self.cached = refuse, most, cached
        self.opened: dict[int, Path] = {}
        self.direct: list[tuple[str, int, int]] = []  # call, offset, bytes
        self.buffered: list[tuple[str, int, int]] = []
        self.forgotten: list[tuple[int, int]] = []
        self.synced = 0
        self._flagged: set[int] = set()
        self._real = {name: getattr(os, name) for name in ("open", "close", "preadv", "pwrite")}
        for name in self._real:
            patched.setattr(os, name, getattr(self, f"_{name}"))
        patched.setattr(os, "posix_fadvise", self._fadvise, raising=False)
        patched.setattr(os, "POSIX_FADV_DONTNEED", 4, raising=False)
        patched.setattr(os, "fdatasync", self._fdatasync, raising=False)
        for room in ("source", "sink"):
            patched.setattr(f"fuselora.engine.{room}.DIRECT", DIRECT)
        patched.setattr("fuselora.engine.source.NOWAIT", NOWAIT)

    def _open(self, path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        direct = bool(flags & DIRECT)
        if direct and self.refuse in ("open", "access"):
            number = errno.EACCES if self.refuse == "access" else errno.EINVAL
            raise OSError(number, os.strerror(number))
        descriptor: int = self._real["open"](path, flags & ~DIRECT, mode, **more)
        self.opened[descriptor] = Path(path)
        if direct:
            self._flagged.add(descriptor)
        return descriptor

    def _close(self, descriptor: int) -> None:
        self.opened.pop(descriptor, None)
        self._flagged.discard(descriptor)
        self._real["close"](descriptor)

    def _preadv(self, descriptor: int, views: Any, offset: int, flags: int = 0) -> int:
        if flags & NOWAIT and not self.cached:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        (view,) = views
        if not flags:
            self._record("preadv", descriptor, view, offset)
        done: int = self._real["preadv"](descriptor, [memoryview(view)[: self.most]], offset)
        return done

    def _pwrite(self, descriptor: int, content: memoryview, offset: int) -> int:
        self._record("pwrite", descriptor, content, offset)
        done: int = self._real["pwrite"](descriptor, content[: self.most], offset)
        return done

    def _record(self, call: str, descriptor: int, view: memoryview, offset: int) -> None:
        row = (call, offset, len(view))
        if descriptor not in self._flagged:
            self.buffered.append(row)
            return
        self.direct.append(row)
        assert (offset % PAGE, len(view) % PAGE, _address(view) % PAGE) == (0, 0, 0)
        if self.refuse == "transfer":
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    def _fadvise(self, descriptor: int, offset: int, n_bytes: int, advice: int) -> None:
        assert descriptor in self.opened
        assert advice == os.POSIX_FADV_DONTNEED
        self.forgotten.append((offset, n_bytes))

    def _fdatasync(self, descriptor: int) -> None:
        assert descriptor in self.opened
        self.synced += 1


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) if view else 0
