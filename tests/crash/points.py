"""The system calls by which a process writes, counted as it makes them, and one of them cut short.

Calls that name a path are seen by an audit hook, the rest by functions put in their places. Nothing
is put back: this is for a forked child.
"""

from __future__ import annotations

import errno
import io
import itertools
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fuselora.engine import sink
from fuselora.header import PAGE
from fuselora.output import staging, volume
from fuselora.output.exchange import exchange

# https://docs.python.org/3/library/audit_events.html
EVENTS = {
    "os.mkdir": "mkdir", "os.rmdir": "rmdir", "os.remove": "unlink", "os.rename": "rename",
    "os.link": "link", "os.symlink": "symlink", "os.truncate": "truncate", "os.chmod": "chmod",
    "fcntl.flock": "flock", "fcntl.ioctl": "ioctl",
}  # fmt: skip
CREATES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
# What a full disk lets through: room is needed only for what is new.
GROWS = frozenset({"open", "write", "pwrite", "fallocate", "truncate", "mkdir", "link", "symlink"})
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_write_out = os.write


class Point(NamedTuple):
    """One call: its number from 0, its name, and the path or descriptor's file that it is about."""

    number: int
    name: str
    path: str


@dataclass(frozen=True, slots=True)
class Cut:
    """What happens at call number ``at``: a signal to this process, or an error of the system.

    ``lasting`` is an error that each later call of its kind meets too.
    """

    at: int
    signal: int = 0
    error: int = 0
    lasting: bool = False

    def hits(self, number: int, name: str) -> bool:
        if number == self.at:
            return True
        return self.lasting and number > self.at and (self.error not in FULL or name in GROWS)


NEVER = Cut(-1)


class Points:
    """Counts the calls of this process and writes each as a line to the descriptor ``trace``."""

    def __init__(self, cut: Cut, trace: int) -> None:
        self._cut, self._trace = cut, trace
        self._numbers = itertools.count()  # the next number is taken by one thread alone

    def install(self, *, exchanges: bool, mounted: bool) -> None:
        """From here on; without ``exchanges`` the system has no renameat2; OUT may be a mount point."""
        patch, claim = pytest.MonkeyPatch(), sink.claim
        write, pwrite = os.write, os.pwrite

        def fallocate(descriptor: int, n_bytes: int) -> None:
            self._reach("fallocate", descriptor)
            claim(descriptor, n_bytes)

        def swap(first: Path, second: Path) -> bool:
            self._reach("exchange", first)
            return exchanges and exchange(first, second)

        def synced(descriptor: int) -> None:
            # counted, not done: no test cuts the power, and a disk takes its time
            self._reach("fsync", descriptor)

        def pwritten(descriptor: int, data: bytes, offset: int) -> int:
            self._reach("pwrite", descriptor, lambda: pwrite(descriptor, _half(data, offset), offset))
            return pwrite(descriptor, data, offset)

        def written(descriptor: int, data: bytes) -> int:
            self._reach("write", descriptor, lambda: write(descriptor, _half(data)))
            return write(descriptor, data)

        patch.setattr(os, "write", written)
        patch.setattr(os, "pwrite", pwritten)
        patch.setattr(os, "fsync", synced)
        patch.setattr(os, "fdatasync", synced)
        patch.setattr(sink, "claim", fallocate)
        patch.setattr(staging, "exchange", swap)
        if mounted:
            patch.setattr(volume, "is_mount", lambda path: path.name == "out")
        self._install_files(patch)
        sys.addaudithook(self._heard)

    def _install_files(self, patch: pytest.MonkeyPatch) -> None:
        reached, io_open = self._reach, io.open

        class Counted(io.FileIO):
            def write(self, data: Any, /) -> int:
                reached("write", self.fileno(), lambda: io.FileIO.write(self, _half(data)))
                return super().write(data)

        def opened(file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **options: Any) -> Any:
            if not set(mode) & set("wxa+"):
                return io_open(file, mode, buffering, *rest, **options)
            assert "b" in mode, f"{file} is written as text"
            raw = Counted(file, mode.replace("b", ""))
            return raw if buffering == 0 else io.BufferedWriter(raw)

        patch.setattr(io, "open", opened)
        patch.setattr(Path, "open", lambda self, *rest, **options: opened(self, *rest, **options))

    def _heard(self, event: str, values: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = values
            if not isinstance(path, int) and flags & CREATES and path != os.devnull:
                self._reach("open", path)
        elif event in EVENTS:
            self._reach(EVENTS[event], values[0])

    def _reach(self, name: str, about: object, half: Callable[[], object] = lambda: None) -> None:
        """A call is about to be made; at the cut only ``half`` of it is done."""
        if isinstance(about, int) and about <= 2:
            return
        number = next(self._numbers)
        line = f"{number}\t{name}\t{_named(about)}\n"
        _write_out(self._trace, os.fsencode(line))
        if not self._cut.hits(number, name):
            return
        if number == self._cut.at:
            half()
        if self._cut.error:
            file = None if isinstance(about, int) else _named(about)
            raise OSError(self._cut.error, os.strerror(self._cut.error), file)
        os.kill(os.getpid(), self._cut.signal)
        if self._cut.signal != signal.SIGINT:
            signal.sigtimedwait([], 0.05)  # until it has arrived


def _half(data: Any, offset: int = 0) -> memoryview:
    """Of direct I/O whole pages, of the rest whole bytes."""
    view = memoryview(data).cast("B")
    n_bytes = len(view) // 2
    whole = len(view) % PAGE == 0 and offset % PAGE == 0
    return view[: n_bytes // PAGE * PAGE if whole else n_bytes]


def _named(about: object) -> str:
    if isinstance(about, int):
        return str(Path(f"/proc/self/fd/{about}").readlink())
    return os.fsdecode(about) if isinstance(about, (str, bytes, os.PathLike)) else str(about)
