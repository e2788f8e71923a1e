"""Room on the output's file system. Standard library only."""

from __future__ import annotations

import os
import shutil
import stat
from typing import TYPE_CHECKING

from fuselora.errors import OutputError

if TYPE_CHECKING:
    from pathlib import Path

BLOCK_BYTES = 512  # what st_blocks counts, whatever the file system's own are


def require(folder: Path, n_bytes: int) -> None:
    """Raises ``OutputError`` if fewer than ``n_bytes`` are available where ``folder`` is or would be made."""
    free = available(folder)
    if free is None or n_bytes <= free:
        return
    raise OutputError(
        f"{folder}: needs {amount(n_bytes)}; its file system has {amount(free)} available",
        hint="Free some space, or choose an --out on another disk.",
        path=str(folder),
        needed=n_bytes,
        available=free,
    )


def available(folder: Path) -> int | None:
    """Bytes that this user may still write on the file system of ``folder`` or of its nearest parent.

    None where the system does not say: some network file systems report no size at all.
    """
    try:
        usage = shutil.disk_usage(nearest(folder))
    except OSError:
        return None
    return usage.free if usage.total else None


def files_left(path: Path) -> int | None:
    """How many more files the file system of ``path`` takes; None where it does not say."""
    try:
        found = os.statvfs(nearest(path))
    except OSError:
        return None
    return found.f_favail if found.f_files else None


def held(path: Path) -> int:
    """Bytes on disk of a file, holes aside, which a kill may leave in it; 0 if it is absent."""
    try:
        found = path.lstat()
    except OSError:
        return 0
    return min(found.st_size, found.st_blocks * BLOCK_BYTES) if stat.S_ISREG(found.st_mode) else 0


def nearest(path: Path) -> Path:
    """``path`` if it exists, else the closest parent that does."""
    return next((at for at in (path, *path.parents) if at.exists()), path)


def amount(n_bytes: int) -> str:
    """Bytes for people: exact, and in decimal GB where that is shorter to read."""
    return f"{n_bytes} bytes" if n_bytes < 10**8 else f"{n_bytes} bytes ({n_bytes / 1e9:.1f} GB)"
