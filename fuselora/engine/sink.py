"""The output file: space claimed first, whole pages written past the page cache, the rest at the end."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fuselora.engine.source import DIRECT, forget
from fuselora.header import PAGE

# the answers of file systems that cannot preallocate
NO_FALLOCATE = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
FLUSH_BYTES = 64 << 20  # of dirty pages, where direct I/O cannot be had


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes to be written at ``offset``; on both ends at page borders, the file's end aside."""

    content: memoryview
    offset: int


class Sink:
    """A new output file that is given its bytes in order, each lot where it lies within its first page.

    ``direct`` tells whether writes pass the page cache.
    """

    def __init__(self, path: Path, n_bytes: int, mode: int, *, direct: bool) -> None:
        path.unlink(missing_ok=True)  # of an earlier try: it may be read-only, or lead elsewhere
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._direct: int | None = None
        try:
            self._direct = _open_direct(path) if direct else None
            # as far as the umask allows, and not before the second open, which a read-only mode refuses
            os.fchmod(self.descriptor, mode & os.fstat(self.descriptor).st_mode)
            _reserve(self.descriptor, n_bytes)
        except BaseException:
            self.close()
            raise
        self.direct = self._direct is not None
        self._rest = b""
        self._position = 0
        self._lock = threading.Lock()
        self._dirty = 0

    def place(self, room: memoryview, n_bytes: int) -> Segment:
        """What can be written once the next ``n_bytes`` of the file are in ``room``.

        They stand behind as many bytes as the file's position is into its page; those are filled
        in from what the last call left. ``room`` starts on a page of memory.
        """
        head = len(self._rest)
        room[:head] = self._rest
        end = head + n_bytes
        whole = end // PAGE * PAGE
        segment = Segment(room[:whole], self._position - head)
        self._rest = bytes(room[whole:end])
        self._position += n_bytes
        return segment

    def write(self, segment: Segment) -> None:
        """Any number of threads may write segments, in any order."""
        done = 0
        while done < len(segment.content):
            done += self._some(segment.content[done:], segment.offset + done)
        if not self.direct and segment.content:
            self._flush(len(segment.content))

    def finish(self) -> None:
        """The last, incomplete page; then everything is on disk."""
        self.write_rest()
        os.fsync(self.descriptor)
        if not self.direct:
            forget(self.descriptor, 0, 0)

    def write_rest(self) -> None:
        rest, offset = memoryview(self._rest), self._position - len(self._rest)
        done = 0
        while done < len(rest):
            done += os.pwrite(self.descriptor, rest[done:], offset + done)

    def close(self) -> None:
        try:
            if self._direct is not None:
                os.close(self._direct)
        finally:  # a network's file system may tell of a failed write as late as this
            os.close(self.descriptor)

    def _some(self, content: memoryview, offset: int) -> int:
        if self.direct and self._direct is not None and offset % PAGE == 0:  # so is its end
            try:
                return os.pwrite(self._direct, content, offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.direct = False  # it took the flag at the open, but its blocks are larger than a page
        return os.pwrite(self.descriptor, content, offset)

    def _flush(self, n_bytes: int) -> None:
        """Dirty pages go out while work goes on, not all at the end, and leave the cache."""
        with self._lock:
            self._dirty += n_bytes
            if self._dirty < FLUSH_BYTES:
                return
            self._dirty = 0
        getattr(os, "fdatasync", os.fsync)(self.descriptor)
        forget(self.descriptor, 0, 0)


@contextmanager
def created(path: Path, n_bytes: int, mode: int, *, direct: bool) -> Iterator[Sink]:
    """A file of ``n_bytes`` in place of what was there. Raises ``OSError`` as the system gives it."""
    sink = Sink(path, n_bytes, mode, direct=direct)
    try:
        yield sink
    finally:
        sink.close()


def _open_direct(path: Path) -> int | None:
    if DIRECT is None:
        return None
    try:
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC | DIRECT)
    except OSError:
        return None  # the flag is refused, or a umask denies its own user the second open


def _reserve(out: int, n_bytes: int) -> None:
    """Claim the space now, so that a full disk is met before the work and not after it."""
    try:
        claim(out, n_bytes)
    except OSError as error:
        if error.errno not in NO_FALLOCATE:
            raise
        os.ftruncate(out, n_bytes)


def claim(out: int, n_bytes: int) -> None:
    """Linux' ``fallocate(2)``; ``posix_fallocate`` writes to every block where a file system cannot.

    Raises ``OSError``, one of ``NO_FALLOCATE`` where space cannot be claimed.
    """
    fallocate = _fallocate()
    if fallocate is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    while fallocate(out, 0, 0, n_bytes) != 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


@cache
def _fallocate() -> Callable[[int, int, int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    function = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return function
