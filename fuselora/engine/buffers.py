"""A fixed number of reused, page-aligned buffers: what bounds the engine's memory."""

from __future__ import annotations

import mmap
import queue
import threading
import weakref
from contextlib import suppress
from ctypes import addressof, c_char
from typing import TYPE_CHECKING

from fuselora.engine.lanes import POLL_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from fuselora.engine.lanes import Flow

Memory = mmap.mmap | memoryview
HUGE_PAGE = 2 << 20  # of x86-64, and of arm64 with pages of 4 KiB


def own_memory(n_bytes: int) -> mmap.mmap:
    """Page-aligned memory that goes back to the system when it is let go; freed parts of the heap stay.

    Raises ``MemoryError`` when there is none.
    """
    try:
        return mmap.mmap(-1, max(n_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:  # which would be taken for the disk's
        raise MemoryError(f"{n_bytes} bytes: {error.strerror}") from error


def transfer_memory(n_bytes: int) -> memoryview:
    """Memory for direct I/O: huge pages where the system has them. Raises ``MemoryError``.

    A request to a disk names each stretch of memory that it touches, and holds only so many of them:
    from pages of 4 KiB large transfers go out in pieces.
    """
    held = own_memory(n_bytes + HUGE_PAGE)
    start = -addressof(c_char.from_buffer(held)) % HUGE_PAGE
    whole = n_bytes // HUGE_PAGE * HUGE_PAGE  # the rest would take one more, for a page or two
    if whole and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without them
            held.madvise(mmap.MADV_HUGEPAGE, start, whole)
    return memoryview(held)[start : start + n_bytes]


class Buffer:
    """One buffer of a pool. It returns to the pool when every holder has released it."""

    def __init__(self, pool: Pool, memory: Memory) -> None:
        # weak, or the memory of a finished file would wait for the garbage collector
        self._pool = weakref.ref(pool)
        self._memory = memory
        self._lock = threading.Lock()
        self._holders = 0

    @property
    def room(self) -> memoryview:
        """All of it; starts on a page of memory."""
        return memoryview(self._memory)

    def hold(self, n_holders: int) -> None:
        with self._lock:
            self._holders += n_holders

    def release(self) -> None:
        with self._lock:
            self._holders -= 1
            free = self._holders == 0
        pool = self._pool()
        if free and pool is not None:
            pool.give_back(self)


class Pool:
    """``n_buffers`` buffers of ``n_bytes`` each, allocated once."""

    def __init__(
        self, n_buffers: int, n_bytes: int, allocate: Callable[[int], Memory] = transfer_memory
    ) -> None:
        self._free: queue.SimpleQueue[Buffer] = queue.SimpleQueue()
        for _ in range(n_buffers):
            self._free.put(Buffer(self, allocate(n_bytes)))

    def take(self, flow: Flow) -> Buffer:
        """A free buffer, held once. Raises ``Stopped`` when the flow failed while waiting."""
        while True:
            flow.check()
            try:
                buffer = self._free.get(timeout=POLL_SECONDS)
            except queue.Empty:
                continue
            buffer.hold(1)
            return buffer

    def give_back(self, buffer: Buffer) -> None:
        self._free.put(buffer)
