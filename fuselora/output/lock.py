"""One run at a time for one output: an advisory lock on a file beside the staging folder.

The kernel drops the lock with the process that holds it, so a killed run blocks nobody. Standard
library only.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import stat
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from fuselora.errors import OutputError
from fuselora.output.disk import writing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_OWNER = re.compile(rb"fuselora pid ([0-9]+) on (\S+)\n")
# What a full disk or an interruption leaves of that line.
_TORN = re.compile(rb"(fuselora pid ([0-9]+( (on?|on \S*)?)?)?)?")
# File systems that know no locks: the run goes on without one.
_UNSUPPORTED = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC
_TRIES = 50


@contextmanager
def held(path: Path) -> Iterator[int]:
    """Holds the lock file ``path``, open at the descriptor given, and removes it at the end.

    Raises ``OutputError`` if a live process holds it, or if a file that is not our lock is in its place.
    """
    refuse_foreign(path)
    with writing(path):
        descriptor = _acquire(path)
    try:
        yield descriptor
    finally:
        # Removed while it is held: whoever opened it meanwhile sees that it is no longer at its path.
        with suppress(OSError):
            if is_at(path, descriptor):
                path.unlink()
        os.close(descriptor)


def refuse_held(path: Path) -> None:
    """Raises ``OutputError`` if a live process holds the lock ``path``; writes nothing."""
    refuse_foreign(path)
    with writing(path), suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_RDONLY | _FLAGS)
        try:
            if not _locked(descriptor, fcntl.LOCK_SH):
                raise _busy(path)
        finally:
            os.close(descriptor)


def refuse_foreign(path: Path) -> None:
    """Raises ``OutputError`` if something that is not our lock file is at ``path``."""
    try:
        found = path.lstat()  # once: the one that holds it may remove it meanwhile
    except OSError:
        return  # nothing is there, or what is written next says why not
    # who holds it is written into it: a second name of a user's file is no place for that
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1 or not _is_ours(path):
        raise OutputError(
            f"{path}: is in the place of fuselora's lock file and is not one",
            hint="Move it away, or choose another --out.",
            path=str(path),
        )


def _is_ours(path: Path) -> bool:
    with writing(path), suppress(FileNotFoundError), path.open("rb") as stream:
        content = stream.read(512)
        torn = b"fuselora pid ".startswith(content) or _TORN.fullmatch(content)
        return bool(torn) or _OWNER.fullmatch(content) is not None
    return True


def _acquire(path: Path) -> int:
    for _ in range(_TRIES):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _FLAGS, 0o644)
        try:
            if not _locked(descriptor, fcntl.LOCK_EX):
                raise _busy(path)
            if is_at(path, descriptor):
                _sign(path, descriptor)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        # The former holder removed it between our open and our lock.
        os.close(descriptor)
    raise _busy(path)


def _sign(path: Path, descriptor: int) -> None:
    """Who holds it; where there is no room for that, nothing of it is left."""
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"fuselora pid {os.getpid()} on {_host()}\n".encode())
    except OSError:
        path.unlink()
        raise


def _locked(descriptor: int, kind: int) -> bool:
    """The lock was taken, or the file system has none; False if someone else holds it."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        if error.errno not in _UNSUPPORTED:
            raise
    return True


def is_at(path: Path, descriptor: int) -> bool:
    """Whether the file that is open is still what the path names, and no link to it."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _host() -> str:
    return re.sub(r"\s", "-", socket.gethostname()) or "localhost"


def _busy(path: Path) -> OutputError:
    content = b""
    with suppress(OSError):
        content = path.read_bytes()
    found = _OWNER.fullmatch(content)
    pid, host = (int(found[1]), found[2].decode(errors="replace")) if found else (None, None)
    who = f"process {pid} on {host}" if found else "another process"
    return OutputError(
        f"{path.with_suffix('')}: {who} is writing it",
        hint="Wait until it has ended, or choose another --out.",
        path=str(path),
        pid=pid,
        host=host,
    )
