"""The rest of a base or skeleton, beside its fused weights: found, and judged. Standard library only."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from fuselora.errors import CheckpointError
from fuselora.escape import short
from fuselora.fields import NOT_IN_PATHS
from fuselora.filenames import is_private
from fuselora.marker import FILE_NAME as MARKER_NAME
from fuselora.marker import JOURNAL_NAME, NEW_JOURNAL_NAME
from fuselora.reading import State, state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SHOWN = 12
MAX_DEPTH = 200  # far over all that is published, and under what Python's own functions for paths take


@dataclass(frozen=True, slots=True)
class SideFile:
    """A file of the base that is no fused weight: ``path`` relative with ``/``, ``source`` absolute.

    ``state`` is what it had when the base was looked through.
    """

    path: str
    source: Path
    state: State

    @property
    def n_bytes(self) -> int:
        return self.state.n_bytes


def survey(root: Path, *, exclude: Callable[[str], bool]) -> tuple[SideFile, ...]:
    """The files under ``root``, sorted by path, but those whose relative path ``exclude`` takes.

    Links are followed inside ``root``, and to the blobs of the Hub cache that ``root`` is in. Empty
    folders are not kept, nor a marker or journal of an earlier fusion. Raises ``CheckpointError``
    naming every entry that cannot be taken over.
    """
    bounds = _Bounds.of(root)
    found: list[SideFile] = []
    faults: list[str] = []
    for path, place in sorted(_walk(root.absolute(), bounds)):
        if path in (MARKER_NAME, JOURNAL_NAME, NEW_JOURNAL_NAME) or exclude(path):
            continue
        if fault := _fault(path, place, bounds):
            faults.append(f"{path} {fault}")
        else:
            found.append(SideFile(path, place, state(place.stat())))
    if faults:
        _refuse(root, faults)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Where links of a base may lead: ``root``, or directly into ``blobs``; both real paths."""

    root: str
    blobs: str | None

    @classmethod
    def of(cls, root: Path) -> _Bounds:
        """Hub cache: ``models--x/snapshots/<commit>/...`` links to ``models--x/blobs/<digest>``."""
        real = Path(os.path.realpath(root))
        snapshot = next((at for at in (real, *real.parents) if at.parent.name == "snapshots"), None)
        blobs = os.path.realpath(snapshot.parent.parent / "blobs") if snapshot else None
        return cls(str(real), blobs)

    def admit(self, target: str) -> bool:
        at = Path(target)
        return at.is_relative_to(self.root) or (self.blobs is not None and at.parent == Path(self.blobs))


def _walk(root: Path, bounds: _Bounds) -> Iterator[tuple[str, Path]]:
    """Everything but folders, and the links to folders that are not followed: outside, or in a circle."""
    waiting: list[tuple[Path, str, tuple[str, ...]]] = [(root, "", ())]
    while waiting:
        folder, prefix, trail = waiting.pop()
        if len(trail) > MAX_DEPTH:
            _refuse(root, [f"{short(prefix)} lies more than {MAX_DEPTH} folders deep"])
        trail = (*trail, os.path.realpath(folder))
        for place in _listed(folder):
            path, target = prefix + place.name, os.path.realpath(place)
            if is_private(path):
                continue
            if place.is_dir() and target not in trail and Path(target).is_relative_to(bounds.root):
                waiting.append((place, f"{path}/", trail))
            else:
                yield path, place


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {error.strerror}", path=str(folder)) from error


def _fault(path: str, place: Path, bounds: _Bounds) -> str | None:
    """Why the entry at ``place`` cannot be taken over."""
    target = os.path.realpath(place)
    if not place.exists():
        return f"is a link to {target}, which does not exist"
    if not bounds.admit(target):
        return f"is a link out of the folder, to {target}"
    if place.is_dir():
        return f"is a link to {target}, a folder that it lies in"
    if not place.is_file():
        return "is not a regular file"
    if not os.access(place, os.R_OK):
        return "cannot be read: Permission denied"
    return "has a name that fused.json cannot record" if NOT_IN_PATHS.search(path) else None


def _refuse(root: Path, faults: list[str]) -> NoReturn:
    more = [f"... and {len(faults) - SHOWN} more"] if len(faults) > SHOWN else []
    lines = [*faults[:SHOWN], *more]
    hint = "Put the real file there, or leave the rest of the base out with --assets skip."
    text = [f"{root}: {lines[0]}"] if len(lines) == 1 else [f"{root}:", *(f"  - {line}" for line in lines)]
    raise CheckpointError(text, hint=hint, path=str(root), faults=faults)
