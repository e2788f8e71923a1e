"""stdout and stderr as they may be: closed, full, or a pipe that nobody reads any more."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from io import TextIOWrapper
from typing import TextIO, cast


class Tolerant:
    """A text stream whose failures end nothing: what cannot be written is dropped, the first one kept.

    Characters that the stream cannot spell become escapes.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.failure: OSError | None = None
        self.encoding = getattr(stream, "encoding", None) or "utf-8"
        self.errors = "backslashreplace"
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=self.errors)

    def write(self, text: str) -> int:
        self._try(lambda stream: stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(lambda stream: stream.flush())

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def fileno(self) -> int:
        """Raises ``OSError`` where there is no file behind it."""
        if self._stream is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return self._stream.fileno()

    def lost(self) -> OSError | None:
        """What kept a reader from the text; a pipe that was closed, as ``head`` does, had enough of it."""
        return None if isinstance(self.failure, BrokenPipeError) else self.failure

    def _try(self, write: Callable[[TextIO], object]) -> None:
        if self._stream is None or self.failure is not None:
            return
        try:
            write(self._stream)
        except OSError as error:
            self.failure = error


def tolerant(stream: TextIO | None) -> Tolerant:
    """The stream itself where it is tolerant already: it knows what was lost before."""
    return stream if isinstance(stream, Tolerant) else Tolerant(stream)


def tolerate() -> None:
    """Make stdout and stderr tolerant for all who write, such as the libraries that show help and usage."""
    sys.stdout, sys.stderr = (cast("TextIO", tolerant(stream)) for stream in (sys.stdout, sys.stderr))


def fill_gaps() -> None:
    """Standard streams that were closed lead nowhere, so that no file opened later takes their numbers.

    What a library writes to number 2 would end in an output file.
    """
    # in the order of their numbers, as the lowest free one is taken
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115, PTH123
