"""Memory, threads, libraries and the folder that there are not: ``ResourceError``, ``InstallationError``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from fuselora.errors import FuseloraError, InstallationError, ResourceError

FEWER = "Give it more memory (ulimit -v, the container's limit), or ask for less with --jobs 1."
# How Python and torch word what is neither a MemoryError nor an OSError.
SHORTAGES = ("can't start new thread", "can't allocate memory", "DefaultCPUAllocator")
# and how the dynamic linker does
UNMAPPED = ("failed to map segment", "cannot map zero-fill pages", "Cannot allocate memory")


@contextmanager
def enough() -> Iterator[None]:
    """What runs out inside becomes a ``ResourceError``.

    A library that is absent or broken becomes an ``InstallationError``, unless memory is what it lacks.
    """
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
        if (error.name or "").partition(".")[0] == "fuselora":
            raise  # our own bug
        raise _not_loaded(error) from error
    except OSError as error:
        # as ctypes, by which torch loads its libraries, says it
        if error.errno is not None or ".so" not in str(error):
            raise
        raise _not_loaded(error) from error


def _not_loaded(error: ImportError | OSError) -> FuseloraError:
    """Why a library was not loaded, as the loader and Python word it."""
    if any(words in said for words in UNMAPPED for said in _chain(error)):
        return ResourceError(_text("the machine gives no more memory for a library", error), hint=FEWER)
    name = (getattr(error, "name", None) or "").partition(".")[0]
    if isinstance(error, ModuleNotFoundError):
        hint = "Install fuselora again, with what it needs: pip install --upgrade fuselora"
        return InstallationError(_text(f"{name or 'a library'} is not installed", error), hint=hint)
    again = f": pip install --force-reinstall {name}" if name else "."
    hint = f"It, or something that it needs, is broken or of another version. Install it again{again}"
    return InstallationError(_text(f"{name or 'a library'} cannot be loaded", error), hint=hint)


def _chain(error: BaseException | None) -> Iterator[str]:
    """What it says, and what it was raised from."""
    while error is not None:
        yield str(error)
        error = error.__cause__ or error.__context__


def require_current_folder() -> None:
    """Raises ``ResourceError`` where it was removed: torch's libraries would end the process then."""
    try:
        os.getcwd()  # noqa: PTH109 - nothing but whether it is there
    except OSError as error:
        hint = "Go to a folder that exists, with cd, and run the same command there."
        raise ResourceError(f"the current folder is gone: {error.strerror}", hint=hint) from error


def _text(what: str, error: Exception) -> str:
    return f"{what}: {error}" if str(error) else what
