"""Ctrl-C: raised where the command runs, remembered where that is lost, put off where it would do harm."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

INTERRUPTED = 130  # 128 and the number of SIGINT, as shells have it
AGAIN_SECONDS = 1.0


class Ending:
    """What SIGINT does where there is nothing to clean up: one word, unless ``said``, and the end."""

    def __init__(self) -> None:
        self.said = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if not self.said:
            with suppress(OSError):
                os.write(2, b"interrupted\n")
        os._exit(INTERRUPTED)


class Interrupts:
    """While torch is imported, or in a callback of the garbage collector, what SIGINT raises is swallowed.

    One that follows within a second is not raised: it would cut short what the first one cleans up.
    """

    def __init__(self) -> None:
        self.seen = False
        self._raised_at = -AGAIN_SECONDS
        self._said = False
        self._before: object = None

    def check(self) -> None:
        """Raise again what was lost."""
        if self.seen:
            raise KeyboardInterrupt

    def said(self) -> None:
        """The user has been told: whatever follows neither raises nor says it again."""
        self._said = True
        if isinstance(self._before, Ending):
            self._before.said = True

    @contextmanager
    def remembered(self) -> Iterator[None]:
        """Note each SIGINT as it is raised; signals belong to the main thread, elsewhere nothing changes."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = self._before = signal.signal(signal.SIGINT, self._raise)
        told = sys.unraisablehook
        sys.unraisablehook = lambda lost: None if lost.exc_type is KeyboardInterrupt else told(lost)
        try:
            yield
        finally:
            sys.unraisablehook = told
            signal.signal(signal.SIGINT, before)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.seen = True
        now = time.monotonic()
        if not self._said and now - self._raised_at >= AGAIN_SECONDS:
            self._raised_at = now
            raise KeyboardInterrupt


class Deferred:
    """SIGINT as long as it is put off: noted, and told to whom it was for where that does no harm."""

    def __init__(self, before: Callable[[int, FrameType | None], object] | None) -> None:
        self._before, self._noted = before, False
        self._owner = threading.get_ident()

    def note(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._noted = True

    def deliver(self) -> None:
        """Raise ``KeyboardInterrupt``, or whatever the handler before does; nothing in other threads."""
        if self._noted and self._before is not None and threading.get_ident() == self._owner:
            self._noted = False
            self._before(signal.SIGINT, None)


@contextmanager
def deferred() -> Iterator[Deferred]:
    """While threads wait for each other, SIGINT is raised by ``deliver`` and at the end alone.

    Python's events and queues are written in Python: what is raised inside one, between taking its lock and
    the ``with`` that gives it back, leaves it locked, and whoever asks for it next waits for ever.
    """
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT) if is_main else None
    if not callable(before):  # the system's own ways, and threads that no signal comes to
        yield Deferred(None)
        return
    held = Deferred(before)
    signal.signal(signal.SIGINT, held.note)
    try:
        yield held
    finally:
        signal.signal(signal.SIGINT, before)
    held.deliver()  # where nothing else is raised already
