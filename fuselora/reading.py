"""What the system refuses while an input is read, said as ``ReadError``. Standard library only."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from fuselora.errors import ChangedError, ReadError

MORE_FILES = "Too many files are open: raise the limit (ulimit -n)."
HINTS: Mapping[int, str] = {
    errno.EMFILE: MORE_FILES,
    errno.ENFILE: MORE_FILES,
    errno.ENOENT: "It was moved or removed since the command began.",
    errno.EACCES: "Let this user read it.",
    errno.EPERM: "Let this user read it.",
}


class State(NamedTuple):
    """What changes when a file is edited or replaced.

    ``cp -p`` and tar give another content the same mtime; nothing but the system sets the ctime.
    """

    n_bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    n_links: int
    mode: int

    def is_same(self, now: State) -> bool:
        """Whether the content can be the same: links and permissions that come or go move the ctime too."""
        if not self.is_alike(now):
            return False
        return self.ctime_ns == now.ctime_ns or (self.n_links, self.mode) != (now.n_links, now.mode)

    def is_alike(self, now: State) -> bool:
        """Whether it is the same file of the same size and date, whatever its ctime says."""
        return (self.n_bytes, self.mtime_ns, self.inode) == (now.n_bytes, now.mtime_ns, now.inode)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Any ``OSError`` met inside becomes a ``ReadError`` about ``path``, or what it names in that folder."""
    try:
        yield
    except OSError as error:
        inside = isinstance(error.filename, str) and Path(error.filename).is_relative_to(path)
        at = error.filename if inside else str(path)
        raise ReadError(
            f"{at}: cannot be read: {error.strerror or error}",
            hint=HINTS.get(error.errno or 0, "Look to the disk or network that holds it."),
            path=at,
        ) from error


def real_path(path: Path) -> Path:
    """Absolute, links followed as far as they lead; to ``Path.resolve`` a circle is an error before 3.13."""
    return Path(os.path.realpath(path))


def named_path(path: Path) -> Path:
    """Absolute, and without ``..``; a file or folder that is a link stays where it lies."""
    return real_path(path.parent) / path.name if path.name not in ("", "..") else real_path(path)


def is_regular(path: Path) -> bool:
    """Whether it may be opened: a FIFO waits for a writer, a device has no end. Raises ``OSError``."""
    return stat.S_ISREG(path.stat().st_mode)


def start_of(path: Path, n_bytes: int) -> bytes:
    """A small file whole; of one that is over-long one byte more than ``n_bytes``. Raises ``OSError``."""
    with path.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        return stream.read(min(size, n_bytes) + 1)  # as much is set aside before it is read


def state(found: os.stat_result) -> State:
    """That of a file by its ``stat``."""
    return State(
        n_bytes=found.st_size,
        mtime_ns=found.st_mtime_ns,
        ctime_ns=found.st_ctime_ns,
        inode=found.st_ino,
        n_links=found.st_nlink,
        mode=found.st_mode,
    )


def changed(path: Path) -> ChangedError:
    """The error for an input that is not what it was when the run began."""
    return ChangedError(f"{path}: was changed while it was read", hint="Start again.", path=str(path))
