"""What is in a folder, however deep it lies; links are not followed. Standard library only."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path


def entries(root: Path, *, skip: Collection[str] = (), strict: bool = True) -> Iterator[os.DirEntry[str]]:
    """Everything below ``root``, each folder before what is in it.

    ``skip`` names entries of ``root`` itself that are left out, with what is in them. Raises ``OSError``
    for a folder that cannot be read, which is taken for an empty one if not ``strict``.
    """
    waiting = [os.fspath(root)]
    while waiting:
        listed = [entry for entry in _listed(waiting.pop(), strict=strict) if entry.name not in skip]
        skip = ()
        yield from listed
        waiting += [entry.path for entry in listed if entry.is_dir(follow_symlinks=False)]


def folders(root: Path, *, skip: Collection[str] = (), strict: bool = True) -> list[Path]:
    """The folders below ``root``, each before those in it. Raises as ``entries`` does."""
    found = entries(root, skip=skip, strict=strict)
    return [Path(entry.path) for entry in found if entry.is_dir(follow_symlinks=False)]


def _listed(folder: str, *, strict: bool) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:
        if strict:
            raise
        return []
