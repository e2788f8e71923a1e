"""The rest of a base, beside its fused weights: found, and copied or linked. Standard library only."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal, NoReturn

from fuselora.digest import READ_BYTES, sha256_file
from fuselora.errors import ChangedError, CheckpointError
from fuselora.fields import NOT_IN_PATHS
from fuselora.filenames import is_private
from fuselora.marker import FILE_NAME as MARKER_NAME
from fuselora.marker import JOURNAL_NAME
from fuselora.output.disk import writing
from fuselora.reading import reading

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fuselora.specs import Assets

How = Literal["copy", "reflink", "hardlink", "symlink", "skip"]
SHOWN = 12
_FICLONE = 0x40049409  # ioctl_ficlone(2)
# Another device, a file system without hard links, too many links, or a file that the kernel protects.
_NO_HARD_LINK = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS})


@dataclass(frozen=True, slots=True)
class SideFile:
    """A file of the base that is no fused weight: ``path`` relative with ``/``, ``source`` absolute."""

    path: str
    source: Path
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Placed:
    """How a side file came to its place, and its hex sha256 where one was asked for."""

    how: How
    sha256: str | None


def survey(root: Path, *, exclude: Callable[[str], bool]) -> tuple[SideFile, ...]:
    """The files under ``root``, sorted by path, but those whose relative path ``exclude`` takes.

    Links are followed inside ``root``, and to the blobs of the Hub cache that ``root`` is in. Empty
    folders are not kept, nor a marker or journal of an earlier fusion. Raises ``CheckpointError``
    naming every entry that cannot be taken over.
    """
    bounds = _Bounds.of(root)
    found: list[SideFile] = []
    faults: list[str] = []
    for path, place in _walk(root.absolute(), "", (), bounds):
        if path in (MARKER_NAME, JOURNAL_NAME) or exclude(path):
            continue
        if fault := _fault(path, place, bounds):
            faults.append(f"{path} {fault}")
        else:
            found.append(SideFile(path, place, place.stat().st_size))
    if faults:
        _refuse(root, faults)
    return tuple(sorted(found, key=lambda side: side.path))


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Where links of a base may lead: ``root``, or directly into ``blobs``; both real paths."""

    root: str
    blobs: str | None

    @classmethod
    def of(cls, root: Path) -> _Bounds:
        """Hub cache: ``models--x/snapshots/<commit>/...`` links to ``models--x/blobs/<digest>``."""
        real = Path(os.path.realpath(root))
        snapshot = next((at for at in (real, *real.parents) if at.parent.name == "snapshots"), None)
        blobs = os.path.realpath(snapshot.parent.parent / "blobs") if snapshot else None
        return cls(str(real), blobs)

    def admit(self, target: str) -> bool:
        at = Path(target)
        return at.is_relative_to(self.root) or (self.blobs is not None and at.parent == Path(self.blobs))


def _walk(folder: Path, prefix: str, trail: tuple[str, ...], bounds: _Bounds) -> Iterator[tuple[str, Path]]:
    """Everything but folders, and the links to folders that are not followed: outside, or in a circle."""
    trail = (*trail, os.path.realpath(folder))
    try:
        names = sorted(place.name for place in folder.iterdir())
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {error.strerror}", path=str(folder)) from error
    for name in names:
        path, place = prefix + name, folder / name
        target = os.path.realpath(place)
        if is_private(path):
            continue
        if place.is_dir() and target not in trail and Path(target).is_relative_to(bounds.root):
            yield from _walk(place, f"{path}/", trail, bounds)
        else:
            yield path, place


def _fault(path: str, place: Path, bounds: _Bounds) -> str | None:
    """Why the entry at ``place`` cannot be taken over."""
    target = os.path.realpath(place)
    if not place.exists():
        return f"is a link to {target}, which does not exist"
    if not bounds.admit(target):
        return f"is a link out of the folder, to {target}"
    if place.is_dir():
        return f"is a link to {target}, a folder that it lies in"
    if not place.is_file():
        return "is not a regular file"
    if not os.access(place, os.R_OK):
        return "cannot be read: Permission denied"
    return "has a name that fused.json cannot record" if NOT_IN_PATHS.search(path) else None


def _refuse(root: Path, faults: list[str]) -> NoReturn:
    more = [f"... and {len(faults) - SHOWN} more"] if len(faults) > SHOWN else []
    lines = [*faults[:SHOWN], *more]
    text = f" {lines[0]}" if len(lines) == 1 else "".join(f"\n  - {line}" for line in lines)
    hint = "Put the real file there, or leave the rest of the base out with --assets skip."
    raise CheckpointError(f"{root}:{text}", hint=hint, path=str(root), faults=faults)


def place(side: SideFile, target: Path, mode: Assets, *, digest: bool) -> Placed:
    """Puts ``side`` at ``target`` the way of ``mode``, on disk when this returns.

    A hard link that the system refuses becomes a copy, and ``Placed.how`` says so. A copy keeps the
    source's permissions as far as the umask allows, and is always writable by its owner. Raises
    ``OutputError``; ``ReadError`` or ``ChangedError`` if the source is at fault.
    """
    if mode == "skip":
        return Placed("skip", None)
    _check(side, _status(side))
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
        _check(side, os.fstat(source.fileno()), before)
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
        return sha256_file(side.source)


def _status(side: SideFile) -> os.stat_result:
    with reading(side.source):
        return side.source.stat()


def _check(side: SideFile, now: os.stat_result, before: os.stat_result | None = None) -> None:
    """The source still has the size that was surveyed, and was not written while it was copied."""
    edited = before is not None and now.st_mtime_ns != before.st_mtime_ns
    if now.st_size != side.n_bytes or edited:
        raise ChangedError(
            f"{side.source}: was changed while it was being copied",
            hint="Run again when nothing writes to the base.",
            path=str(side.source),
        )
