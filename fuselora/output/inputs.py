"""Whether OUT is tangled with what is read: compared by what the paths are, not how they are spelled.

Standard library only.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fuselora.errors import OutputError
from fuselora.folders import entries, folders
from fuselora.reading import real_path

if TYPE_CHECKING:
    from collections.abc import Sequence


class Identity(NamedTuple):
    """What a path names: equal for two spellings, links and bind mounts of one file."""

    device: int
    inode: int


def refuse_inputs(places: Sequence[Path], inputs: Sequence[Path]) -> None:
    """Raises ``OutputError`` if one of ``places`` is, is inside, or contains one of ``inputs``."""
    for source in inputs:
        inside = _folders(source)
        for place in places:
            if relation := _relation(place, source, inside):
                raise OutputError(
                    f"{place}: {relation} the input {source}",
                    hint="Choose an --out apart from all inputs.",
                    path=str(place),
                    input=str(source),
                )


def refuse_links(places: Sequence[Path], inputs: Sequence[Path]) -> None:
    """Raises ``OutputError`` if an input shares a folder with one of ``places``, or links into it.

    What is in ``places`` is to be removed or replaced. Those that are absent are passed over.
    """
    for place in filter(Path.is_dir, places):
        for source in inputs:
            if what := _shared(place, source):
                raise OutputError(
                    f"{place}: holds {what}",
                    hint="Choose another --out.",
                    path=str(place),
                    input=str(source),
                )


def _shared(place: Path, source: Path) -> str | None:
    """What in ``place`` belongs to ``source`` too: a folder bound into both, or files linked to."""
    if _folders(place) & _folders(source):
        return f"a folder of the input {source}"
    real = os.path.realpath(place) + os.sep
    linked = any(os.path.realpath(entry.path).startswith(real) for entry in entries(source, strict=False))
    return f"files that the input {source} links to" if linked else None


def _relation(place: Path, source: Path, inside: set[Identity]) -> str | None:
    """``inside`` are the folders of ``source``: one of them may be mounted at another place as well."""
    here, there = _identity(place), _identity(source)
    if there is None:
        return None
    if here == there:
        return "is"
    if ({there} | inside) & _lineage(place):
        return "is inside"
    return "contains" if here is not None and here in _lineage(source) else None


def _folders(path: Path) -> set[Identity]:
    """``path`` and every folder in it; empty for a file and for what is absent. Links are not followed."""
    found = map(_identity, (path, *folders(path, strict=False)) if path.is_dir() else ())
    return {identity for identity in found if identity is not None}


def _lineage(path: Path) -> set[Identity]:
    """``path`` and all folders it lies in, as spelled and with its links followed."""
    spelled, real = path.absolute(), real_path(path)
    found = (_identity(at) for at in (spelled, *spelled.parents, real, *real.parents))
    return {identity for identity in found if identity is not None}


def _identity(path: Path) -> Identity | None:
    with suppress(OSError):
        status = path.stat()
        return Identity(status.st_dev, status.st_ino)
    return None
