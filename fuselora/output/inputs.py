"""Whether OUT is tangled with what is read: compared by what the paths are, not how they are spelled.

Standard library only.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from fuselora.errors import OutputError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class Identity(NamedTuple):
    """What a path names: equal for two spellings, links and bind mounts of one file."""

    device: int
    inode: int


def refuse_inputs(places: Sequence[Path], inputs: Sequence[Path]) -> None:
    """Raises ``OutputError`` if one of ``places`` is, is inside, or contains one of ``inputs``."""
    for place in places:
        for source in inputs:
            if relation := _relation(place, source):
                raise OutputError(
                    f"{place}: {relation} the input {source}",
                    hint="Choose an --out apart from all inputs.",
                    path=str(place),
                    input=str(source),
                )


def refuse_links(out: Path, inputs: Sequence[Path]) -> None:
    """Raises ``OutputError`` if an input folder holds links into ``out``, whose files are to be replaced."""
    real = os.path.realpath(out)
    for source in inputs:
        for folder, folders, names in os.walk(source):
            paths = (os.path.join(folder, name) for name in (*folders, *names))  # noqa: PTH118
            if any(os.path.realpath(path).startswith(real + os.sep) for path in paths):
                raise OutputError(
                    f"{out}: holds files that the input {source} links to",
                    hint="Choose another --out.",
                    path=str(out),
                    input=str(source),
                )


def _relation(place: Path, source: Path) -> str | None:
    here, there = _identity(place), _identity(source)
    if there is None:
        return None
    if here == there:
        return "is"
    if there in _lineage(place):
        return "is inside"
    return "contains" if here is not None and here in _lineage(source) else None


def _lineage(path: Path) -> set[Identity]:
    """``path`` and all folders it lies in, as spelled and with its links followed."""
    spelled, real = path.absolute(), path.resolve()
    found = (_identity(at) for at in (spelled, *spelled.parents, real, *real.parents))
    return {identity for identity in found if identity is not None}


def _identity(path: Path) -> Identity | None:
    with suppress(OSError):
        status = path.stat()
        return Identity(status.st_dev, status.st_ino)
    return None
