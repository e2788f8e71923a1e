"""Memory, threads, libraries and the folder that the machine does not give, said as ``ResourceError``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from fuselora.errors import ResourceError

FEWER = "Give it more memory (ulimit -v, the container's limit), or ask for less with --jobs 1."
# How Python and torch word what is neither a MemoryError nor an OSError.
SHORTAGES = ("can't start new thread", "can't allocate memory", "DefaultCPUAllocator")


@contextmanager
def enough() -> Iterator[None]:
    """What runs out inside becomes a ``ResourceError``; so does a library that cannot be loaded."""
    try:
        yield
    except MemoryError as error:
        raise ResourceError(_text("the machine gives no more memory", error), hint=FEWER) from error
    except RuntimeError as error:
        if not any(words in str(error) for words in SHORTAGES):
            raise
        raise ResourceError(
            _text("the machine gives no more memory or threads", error), hint=FEWER
        ) from error
    except ImportError as error:
        hint = "Install fuselora again, or give it more memory (ulimit -v, the container's limit)."
        raise ResourceError(_text("a library cannot be loaded", error), hint=hint) from error


def current_folder() -> None:
    """Raises ``ResourceError`` where it was removed: torch's libraries would end the process then."""
    try:
        os.getcwd()  # noqa: PTH109 - nothing but whether it is there
    except OSError as error:
        hint = "Go to a folder that exists, with cd, and run the same command there."
        raise ResourceError(f"the current folder is gone: {error.strerror}", hint=hint) from error


def _text(what: str, error: Exception) -> str:
    return f"{what}: {error}" if str(error) else what
