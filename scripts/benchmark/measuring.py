"""Timing: one command, commands in turn, and the state that each of them finds."""

from __future__ import annotations

import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Literal

from benchmark.commands import HASH_BYTES, environment
from benchmark.machine import unused_memory

if TYPE_CHECKING:
    import resource
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path
    from typing import IO

    from benchmark.commands import Command

Cache = Literal["cold", "warm"]
MOST = 0.9
TOUCH = "import mmap as m; m.mmap(-1, {}, flags=m.MAP_PRIVATE | m.MAP_ANONYMOUS | m.MAP_POPULATE)"
PEAK_UNIT = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of a command: wall clock, CPU seconds of all its threads, peak resident bytes.

    A peak is at least that of this Python (some 30 MB), from which the command was started.
    """

    seconds: float
    cpu_seconds: float
    peak_bytes: int


@dataclass(slots=True)
class Row:
    """A command and its samples; ``left_out`` says why it has none, or no more."""

    command: Command
    samples: list[Sample] = field(default_factory=list)
    left_out: str | None = None


class CommandFailed(Exception):
    """A command ended with an error; ``why`` is the last one that it wrote."""

    def __init__(self, command: Command, why: str) -> None:
        super().__init__(f"{command.name}: {why}")
        self.why = why


def timed(command: Command, limit: float) -> Sample:
    """Run a command to its end. Raises ``CommandFailed``, also after ``limit`` seconds."""
    with tempfile.TemporaryFile() as said:
        started, own_cpu = time.perf_counter(), time.process_time()
        usage = _run(command, said, limit)
        if command.then is not None:
            command.then()
        seconds = time.perf_counter() - started
        cpu = usage.ru_utime + usage.ru_stime + time.process_time() - own_cpu
    return Sample(seconds, cpu, usage.ru_maxrss * PEAK_UNIT)


@dataclass(frozen=True, slots=True)
class Turns:
    """How often each command runs; peers in the first rounds only. ``limit``: seconds of one run."""

    rounds: int
    peer_rounds: int
    limit: float

    def take(
        self, rows: Sequence[Row], settle: Callable[[Command], None], done: Callable[[Row], None]
    ) -> None:
        """Every command once in each round, in another order each time, the same in every run.

        ``settle`` comes before a command, ``done`` after it, while its output is there. A peer that
        fails is left out from then on; raises ``CommandFailed`` for any other command.
        """
        for number in range(self.rounds):
            for row in Random(number).sample(rows, len(rows)):
                if not row.left_out and (number < self.peer_rounds or not row.command.peer):
                    settle(row.command)
                    self._measure(row)
                    done(row)

    def _measure(self, row: Row) -> None:
        try:
            row.samples.append(timed(row.command, self.limit))
        except CommandFailed as error:
            if row.command.peer is None:
                raise
            row.left_out = f"failed: {error.why}"


def settle(out: Path | None, files: Iterable[Path], cache: Cache, *, touched: int = 0) -> None:
    """The last output is gone, nothing waits to be written, and the inputs are cached or are not.

    ``touched``: bytes of free memory to touch.
    """
    if out is not None and out.exists():
        shutil.rmtree(out)
    os.sync()
    touch(touched)
    for path in files:
        (_forget if cache == "cold" else _read)(path)


def touch(n_bytes: int) -> None:
    """Take that much memory, or most of what is free, and give it back, in a process of its own.

    A host takes back what its virtual machine leaves free. To get it again costs more than to copy
    a file into it, and which command has to pay for it would depend on what ran before.
    """
    n_bytes = min(n_bytes, int(unused_memory() * MOST))
    if n_bytes > 0:
        subprocess.run((sys.executable, "-c", TOUCH.format(n_bytes)), check=True)


def can_touch() -> bool:
    """Whether memory can be taken without a long walk through its pages."""
    return hasattr(mmap, "MAP_POPULATE")


def can_forget() -> bool:
    """Whether files can be dropped from the page cache here."""
    return hasattr(os, "posix_fadvise")


def _forget(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _read(path: Path) -> None:
    room = bytearray(HASH_BYTES)
    with path.open("rb", buffering=0) as stream:
        while stream.readinto(room):
            pass


def _run(command: Command, said: IO[bytes], limit: float) -> resource.struct_rusage:
    process = subprocess.Popen(
        command.argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said, env=environment()
    )
    timer = threading.Timer(limit, os.kill, (process.pid, signal.SIGKILL))
    timer.start()
    try:
        _, status, usage = os.wait4(process.pid, 0)
    except BaseException:
        process.kill()
        process.wait()
        raise
    finally:
        timer.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise CommandFailed(command, _why(process.returncode, said))
    return usage


def _why(code: int, said: IO[bytes]) -> str:
    """The last error that was written, or the last line."""
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    said.seek(0)
    lines = [line.strip() for line in said.read().decode(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "rror" in line]
    return (errors or lines or [f"exit status {code}"])[-1]
