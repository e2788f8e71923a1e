"""The base file, read past the page cache where the system can and the bytes are not in it already."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fuselora.engine.buffers import transfer_memory
from fuselora.header import PAGE
from fuselora.reading import changed, reading
from fuselora.steps import BLOCK_BYTES

DIRECT: int | None = getattr(os, "O_DIRECT", None)
NOWAIT: int | None = getattr(os, "RWF_NOWAIT", None)
SAMPLES = 16


class Source:
    """An open base file. ``direct`` tells whether reads pass the page cache."""

    def __init__(self, path: Path, *, direct: bool) -> None:
        self._path = path
        self._direct: int | None = None
        with reading(path):
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                self.before = os.fstat(self.descriptor)
                self._cached = _is_cached(self.descriptor, self.before.st_size)
                self._direct = _open_direct(path) if direct and not self._cached else None
                self.direct = self._direct is not None and self._is_still(self._direct)
            except BaseException:
                self.close()
                raise

    def read(self, room: memoryview, offset: int, n_bytes: int) -> memoryview:
        """``n_bytes`` from ``offset``, put where they lie within their pages. Raises ``ChangedError``.

        ``room`` starts on a page of memory and has space for all pages touched.
        """
        head = offset % PAGE
        pages = -(-(head + n_bytes) // PAGE) * PAGE
        self._fill(room[:pages], offset - head, head + n_bytes)
        self._forget(offset - head, pages)
        return room[head : head + n_bytes]

    def first(self, n_bytes: int) -> Iterator[memoryview]:
        """The file's first bytes, block by block, each in the place of the last. Raises ``ChangedError``."""
        room = transfer_memory(BLOCK_BYTES)
        for at in range(0, n_bytes, BLOCK_BYTES):
            yield self.read(room, at, min(BLOCK_BYTES, n_bytes - at))

    def close(self) -> None:
        for descriptor in (self.descriptor, self._direct):
            if descriptor is not None:
                os.close(descriptor)

    def _is_still(self, descriptor: int) -> bool:
        """Whether the second open met the same file: it could have been replaced between the two."""
        return os.path.samestat(os.fstat(descriptor), self.before)

    def _fill(self, room: memoryview, offset: int, wanted: int) -> None:
        done = 0
        while done < wanted:
            with reading(self._path):
                got = self._some(room[done:], offset + done)
            if got == 0:
                raise changed(self._path)
            done += got

    def _some(self, room: memoryview, offset: int) -> int:
        if self.direct and self._direct is not None and offset % PAGE == 0:
            try:
                return os.preadv(self._direct, [room], offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.direct = False  # it took the flag at the open, but its blocks are larger than a page
        return os.preadv(self.descriptor, [room], offset)

    def _forget(self, offset: int, n_bytes: int) -> None:
        """Bytes that were not cached before need not push others out of the cache."""
        if not self.direct and not self._cached:
            forget(self.descriptor, offset, n_bytes)


def forget(descriptor: int, offset: int, n_bytes: int) -> None:
    """Tells the page cache that a range will not be needed again, where the system listens."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # an advice that is refused changes nothing
            os.posix_fadvise(descriptor, offset, n_bytes, os.POSIX_FADV_DONTNEED)


@contextmanager
def opened(path: Path, *, direct: bool) -> Iterator[Source]:
    """Raises ``ReadError`` where the file cannot be opened."""
    source = Source(path, direct=direct)
    try:
        yield source
    finally:
        source.close()


def _open_direct(path: Path) -> int | None:
    if DIRECT is None:
        return None
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | DIRECT)
    except OSError:
        return None  # the ordinary descriptor is open, so only the flag can be what was refused


def _is_cached(descriptor: int, n_bytes: int) -> bool:
    """Whether the file can be had without waiting for a disk, by a sample of its bytes.

    Looking at a byte makes the system fetch it, so another run has to look elsewhere.
    """
    if NOWAIT is None or n_bytes == 0:
        return False
    places = random.Random()  # one of its own: the caller's sequence of random numbers stays as it is
    return all(_is_there(descriptor, places.randrange(n_bytes)) for _ in range(SAMPLES))


def _is_there(descriptor: int, offset: int) -> bool:
    try:
        return os.preadv(descriptor, [bytearray(1)], offset, NOWAIT or 0) == 1
    except OSError:  # EAGAIN: not there; EOPNOTSUPP: the file system cannot say
        return False
