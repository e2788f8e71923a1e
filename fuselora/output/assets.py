"""Side files copied or linked into the output. Standard library only."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, Literal

from fuselora.digest import READ_BYTES, sha256_file
from fuselora.output.disk import writing
from fuselora.reading import changed, reading, state

if TYPE_CHECKING:
    from pathlib import Path

    from fuselora.side_files import SideFile
    from fuselora.specs import Assets

How = Literal["copy", "reflink", "hardlink", "symlink", "skip"]
_FICLONE = 0x40049409  # ioctl_ficlone(2)
# Another device, a file system without hard links, too many links, or a file that the kernel protects.
_NO_HARD_LINK = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS})


@dataclass(frozen=True, slots=True)
class Placed:
    """How a side file came to its place, and its hex sha256 where one was asked for."""

    how: How
    sha256: str | None


def place(side: SideFile, target: Path, mode: Assets, *, digest: bool) -> Placed:
    """Puts ``side`` at ``target`` the way of ``mode``, on disk when this returns.

    A hard link that the system refuses becomes a copy, and ``Placed.how`` says so. A copy keeps the
    source's permissions as far as the umask allows, and is always writable by its owner. Raises
    ``OutputError``; ``ReadError`` or ``ChangedError`` if the source is at fault.
    """
    if mode == "skip":
        return Placed("skip", None)
    _check_in_place(side)
    with writing(target, side.n_bytes):
        target.parent.mkdir(parents=True, exist_ok=True)
        # A link left at the path must not be written through: it may lead into the base.
        target.unlink(missing_ok=True)
        if mode == "symlink":
            target.symlink_to(os.path.realpath(side.source))
            return Placed("symlink", _source_digest(side) if digest else None)
        if mode == "hardlink" and _linked(side, target):
            return Placed("hardlink", _source_digest(side) if digest else None)
        return _copy(side, target, digest=digest)


def _linked(side: SideFile, target: Path) -> bool:
    try:
        os.link(os.path.realpath(side.source), target)
    except OSError as error:
        if error.errno not in _NO_HARD_LINK:
            raise
        return False
    return True


def _copy(side: SideFile, target: Path, *, digest: bool) -> Placed:
    with _opened(side) as source:
        before = os.fstat(source.fileno())
        mode = stat.S_IMODE(before.st_mode) & 0o777 | 0o600
        descriptor = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "w+b", buffering=0) as copy:
            how: How = "reflink" if _cloned(source, copy) else "copy"
            sha256 = None if how == "reflink" else _stream(side, source, copy, digest=digest)
            os.fsync(copy.fileno())
        _check(side, os.fstat(source.fileno()))
    return Placed(how, sha256_file(target) if digest and sha256 is None else sha256)


def _cloned(source: BinaryIO, copy: BinaryIO) -> bool:
    """The file system shares the source's blocks with the copy, until one of them is changed."""
    try:
        fcntl.ioctl(copy.fileno(), _FICLONE, source.fileno())
    except OSError:
        return False
    return True


def _stream(side: SideFile, source: BinaryIO, copy: BinaryIO, *, digest: bool) -> str | None:
    hasher = hashlib.sha256()
    while block := _read(side, source):
        if digest:
            hasher.update(block)
        rest = memoryview(block)
        while rest:
            rest = rest[copy.write(rest) :]
    return hasher.hexdigest() if digest else None


def _opened(side: SideFile) -> BinaryIO:
    with reading(side.source):
        return side.source.open("rb", buffering=0)


def _read(side: SideFile, source: BinaryIO) -> bytes:
    with reading(side.source):
        return source.read(READ_BYTES)


def _source_digest(side: SideFile) -> str:
    with reading(side.source):
        sha256 = sha256_file(side.source)
    _check_in_place(side)
    return sha256


def _check(side: SideFile, now: os.stat_result) -> None:
    """The source is as it was when the base was looked through.

    Its ctime may differ: hard links to it, as ``--assets hardlink`` makes them, come and go.
    """
    if not side.state.is_alike(state(now)):
        raise changed(side.source)


def _check_in_place(side: SideFile) -> None:
    with reading(side.source):
        found = side.source.stat()
    _check(side, found)
