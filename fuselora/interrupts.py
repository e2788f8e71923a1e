"""Ctrl-C, raised where the command runs, and remembered for where that is lost."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
