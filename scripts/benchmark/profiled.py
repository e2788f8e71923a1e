"""Runs a ``fuselora`` command and writes where the time went, as JSON: ``profiled FILE COMMAND...``.

For phases of the run (in the main thread) and lanes of the engine (threads of one name are summed): calls,
wall clock, of that how long they waited for an earlier lane, a core or room for factors, and CPU
seconds. The phase ``fuse`` holds all lanes and what is done after them, publishing included.
"""

from __future__ import annotations

import functools
import json
import re
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import TypeVar

from fuselora import cli
from fuselora.engine import held
from fuselora.engine.lanes import Flow, Job, Lane
from fuselora.engine.sink import Sink
from fuselora.report import Reporter

T = TypeVar("T")
IMPORTS, LAST_FSYNC = "imports", "last fsync"
LANES = ("read", "hash-base", "load", "compute", "place", "hash-out", "write", LAST_FSYNC)


@dataclass(slots=True)
class Spent:
    """Seconds, summed over calls; ``waiting`` is part of ``wall``."""

    calls: int = 0
    wall: float = 0.0
    waiting: float = 0.0
    cpu: float = 0.0


class Times:
    """What each name has spent; threads share it."""

    def __init__(self) -> None:
        self.spent: dict[str, Spent] = defaultdict(Spent)
        self._lock = threading.Lock()
        self._here = threading.local()

    def document(self, seconds: float) -> dict[str, object]:
        """``inside``: ``seconds`` of the command, without the start and the end of Python."""
        phases = [name for name in self.spent if name not in LANES]
        lanes = [name for name in LANES if name in self.spent]
        return {"inside": seconds, "phases": self._rows(phases), "lanes": self._rows(lanes)}

    def _rows(self, names: Iterable[str]) -> list[dict[str, object]]:
        return [{"name": name, **asdict(self.spent[name])} for name in names]

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Count what happens here as ``name``'s."""
        wall, cpu = time.perf_counter(), time.thread_time()
        self._here.waiting = 0.0
        try:
            yield
        finally:
            with self._lock:
                spent = self.spent[name]
                spent.calls += 1
                spent.wall += time.perf_counter() - wall
                spent.waiting += self._here.waiting
                spent.cpu += time.thread_time() - cpu

    def waiting(self, wait: Callable[..., T]) -> Callable[..., T]:
        """``wait``, its time counted as waiting."""

        @functools.wraps(wait)
        def timed(*arguments: object) -> T:
            started = time.perf_counter()
            try:
                return wait(*arguments)
            finally:
                self._here.waiting = getattr(self._here, "waiting", 0.0) + time.perf_counter() - started

        return timed


def watch(times: Times) -> None:
    """Time every lane's jobs, what they wait for, the last fsync, and the phases of a run."""
    put, phase, finish = Lane.put, Reporter.phase, Sink.finish

    def timed_put(lane: Lane, job: Job) -> None:
        def timed() -> None:
            with times.inside(_without_number(threading.current_thread().name)):
                job()

        put(lane, timed)

    @contextmanager
    def timed_phase(reporter: Reporter, name: str, n_bytes: int) -> Iterator[Callable[[int], None]]:
        with times.inside(name), phase(reporter, name, n_bytes) as advance:
            yield advance

    def timed_finish(sink: Sink) -> None:
        with times.inside(LAST_FSYNC):
            finish(sink)

    changes: tuple[tuple[type, str, Callable[..., object]], ...] = (
        (Lane, "put", timed_put),
        (Reporter, "phase", timed_phase),
        (Sink, "finish", timed_finish),
        (Flow, "wait", times.waiting(Flow.wait)),
        (held._Count, "await_at_most", times.waiting(held._Count.await_at_most)),
        (threading.BoundedSemaphore, "__enter__", times.waiting(threading.Semaphore.acquire)),
    )
    for owner, name, changed in changes:
        setattr(owner, name, changed)


def main() -> None:
    """Run the command in this process."""
    path = Path(sys.argv[1])
    sys.argv = ["fuselora", *sys.argv[2:]]
    started, times = time.perf_counter(), Times()
    watch(times)
    try:
        with times.inside(IMPORTS):
            import_module("fuselora.build")  # which imports torch
        cli.app()
    finally:
        path.write_text(json.dumps(times.document(time.perf_counter() - started)))


def _without_number(name: str) -> str:
    return re.sub(r"-\d+$", "", name)


if __name__ == "__main__":
    main()
