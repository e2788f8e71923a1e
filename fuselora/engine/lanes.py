"""Threads that each do one thing in order: read ahead, hash, write. One failure stops them all."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fuselora.interrupts import Deferred, deferred

Job = Callable[[], None]
POLL_SECONDS = 0.1


class Stopped(Exception):
    """Raised inside a lane when another one failed; never leaves the engine."""


class Flow:
    """What the lanes of one file share: the first error, and the sign to stop."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self.interrupt = Deferred(None)
        self.error: BaseException | None = None
        self._lock = threading.Lock()

    def fail(self, error: BaseException) -> None:
        with self._lock:
            if self.error is None and not isinstance(error, Stopped):
                self.error = error
        self._stop.set()

    def check(self) -> None:
        """Raises ``Stopped`` once the flow has failed, and in the main thread what Ctrl-C does."""
        if self._stop.is_set():
            raise Stopped
        self.interrupt.deliver()

    def wait(self, event: threading.Event) -> None:
        """Until ``event`` is set. Raises ``Stopped`` if the flow fails first."""
        while not event.wait(POLL_SECONDS):
            self.check()


class Lane:
    """One thread and its bounded queue of jobs."""

    def __init__(self, name: str, flow: Flow, depth: int) -> None:
        self._flow = flow
        self._jobs: queue.Queue[Job | None] = queue.Queue(depth)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        """Queue a job; waits while the queue is full. Raises ``Stopped``."""
        self._put(job)

    def finish(self) -> None:
        """Let the queued jobs end. Raises ``Stopped`` if they could not."""
        self._put(None)
        self._flow.wait(self._ended)
        self.join()
        self._flow.check()

    def join(self) -> None:
        """Wait until the thread has ended, now or after the flow failed."""
        self._thread.join()

    def _put(self, job: Job | None) -> None:
        while True:
            self._flow.check()
            try:
                return self._jobs.put(job, timeout=POLL_SECONDS)
            except queue.Full:
                continue

    def _run(self) -> None:
        try:
            while (job := self._next()) is not None:
                job()
        except BaseException as error:  # it is raised again in the thread that asked for the file
            self._flow.fail(error)
        finally:
            self._ended.set()

    def _next(self) -> Job | None:
        while True:
            self._flow.check()
            try:
                return self._jobs.get(timeout=POLL_SECONDS)
            except queue.Empty:
                continue


@contextmanager
def lanes(flow: Flow, names: tuple[str, ...], depth: int) -> Iterator[tuple[Lane, ...]]:
    """Lanes that are finished on the way out, or stopped when anything fails.

    The first error of any lane, or of the body, is the one that is raised. Ctrl-C is one in ``Flow.check``
    alone, and not while lanes are stopped: a second one must not close the files that they still write to.
    """
    opened: list[Lane] = []
    with deferred() as flow.interrupt:
        try:
            opened.extend(Lane(name, flow, depth) for name in names)
            yield tuple(opened)
            for lane in opened:
                lane.finish()
        except BaseException as error:
            flow.fail(error)
            for lane in opened:
                lane.join()
            if flow.error is None:
                raise
            raise flow.error from flow.error.__cause__
