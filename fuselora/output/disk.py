"""Durable writes, and what the disk refuses said as ``OutputError``. Standard library only."""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fuselora.errors import OutputError
from fuselora.folders import folders
from fuselora.output.space import amount, available, files_left
from fuselora.reading import MORE_FILES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_FREE_SPACE = "Free some space and run the same command again, or choose another --out."
_WRITABLE = "Choose an --out that this user can write."
HINTS: Mapping[int, str] = {
    errno.ENOSPC: _FREE_SPACE,
    errno.EDQUOT: f"The user's or project's quota is used up. {_FREE_SPACE}",
    errno.EROFS: _WRITABLE,
    errno.EACCES: _WRITABLE,
    errno.EPERM: _WRITABLE,
    errno.EFBIG: "The file system (or ulimit -f) does not take files of this size; choose another --out.",
    errno.EMFILE: MORE_FILES,
    errno.ENFILE: MORE_FILES,
    errno.EIO: "The disk reports an error: look at the system's log before trusting it again.",
}
# What file systems that cannot sync a folder say.
_NO_FOLDER_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EBADF})


@contextmanager
def writing(path: Path, n_bytes: int | None = None) -> Iterator[None]:
    """Any ``OSError`` met inside becomes an ``OutputError`` about ``path``.

    ``n_bytes`` is how much was to be written; the error says it beside what is available.
    """
    try:
        yield
    except OSError as error:
        raise refusal(path, error, n_bytes) from error


def refusal(path: Path, error: OSError, n_bytes: int | None = None) -> OutputError:
    """``error`` as the user should read it: the path, what was needed and what there was."""
    reason = error.strerror or str(error)
    if error.errno == errno.ENOSPC and files_left(path) == 0:
        text = f"{path}: cannot be written: its file system takes no more files (no inodes left)"
        hint = "Remove files that are not needed, or choose another --out."
        return OutputError(text, hint=hint, path=str(path), errno="ENOSPC")
    free = available(path) if n_bytes is not None or error.errno in _FULL else None
    rows = (("to write", n_bytes), ("available", free))
    known = [f"{amount(value)} {what}" for what, value in rows if value is not None]
    facts = {"errno": errno.errorcode.get(error.errno or 0), "needed": n_bytes, "available": free}
    return OutputError(
        f"{path}: cannot be written: {reason}" + (f" ({', '.join(known)})" if known else ""),
        hint=HINTS.get(error.errno or 0),
        path=str(path),
        **{name: value for name, value in facts.items() if value is not None},
    )


def write_file(path: Path, content: bytes) -> None:
    """A small file, new, on disk when this returns. Raises ``OutputError``."""
    with writing(path, len(content)):
        path.parent.mkdir(parents=True, exist_ok=True)
        # A link left at the path must not be written through: it may lead into the base.
        path.unlink(missing_ok=True)
        with path.open("xb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Makes the names in ``folder`` durable, where the file system can."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)


def sync_tree(root: Path) -> None:
    """``sync_folder`` for every folder under ``root``, each after those in it, and ``root`` last."""
    for folder in reversed((root, *folders(root))):
        sync_folder(folder)
