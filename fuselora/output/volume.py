"""OUT that is a mount point, as a container's volume is: it cannot be renamed, so files move up into it.

From the first move to the last, OUT holds the journal and no marker, which readers take as
unfinished; the marker goes last. A kill on the way is rolled back by the next run. Standard library only.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from fuselora.filenames import BESIDE
from fuselora.marker import FILE_NAME as MARKER_NAME
from fuselora.marker import JOURNAL_NAME
from fuselora.output import claims
from fuselora.output.disk import sync_folder, sync_tree

if TYPE_CHECKING:
    from collections.abc import Iterable

_MOUNTS = Path("/proc/self/mountinfo")


def is_mount(path: Path) -> bool:
    """``path`` is a mount point, one of the same device (a bind mount) included where Linux tells."""
    return path.is_mount() or os.fsencode(path) in set(_mount_points())


def _mount_points() -> Iterable[bytes]:
    """https://docs.kernel.org/filesystems/proc.html, mountinfo: the fifth field, blanks in octal."""
    try:
        lines = _MOUNTS.read_bytes().splitlines()
    except OSError:
        return ()
    fields = [line.split(b" ") for line in lines]
    return [_unescaped(row[4]) for row in fields if len(row) > 4]


def _unescaped(field: bytes) -> bytes:
    return re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8) & 255]), field)


def move_up(folder: Path, out: Path, former: Path) -> None:
    """Publishes the staged ``folder`` into ``out``; a former output there goes to ``former``.

    Once ``out`` is synced, ``sweep`` removes that. Raises ``OSError``, with everything back where it
    was if that can be done.
    """
    try:
        _move_all_up(folder, out, former)
    except BaseException:
        with suppress(OSError):
            roll_back(folder, out, former)
        raise


def _move_all_up(folder: Path, out: Path, former: Path) -> None:
    files = claims.marked_files(folder) or frozenset()
    (folder / JOURNAL_NAME).touch()
    _move(folder, out, [JOURNAL_NAME])
    sync_folder(out)
    if (replaced := claims.marked_files(out)) is not None:
        _move(out, former, [MARKER_NAME, *sorted(replaced)])
    _move(folder, out, sorted(files))
    _sync_published(out)
    _move(folder, out, [MARKER_NAME])


def roll_back(folder: Path, out: Path, former: Path) -> None:
    """After a kill inside ``move_up``: the state before it, or, once the marker is in place, after it."""
    if not (out / JOURNAL_NAME).exists():
        return
    staged = claims.marked_files(folder)
    if staged is None:
        sync_folder(out)
        sweep(folder, out, former)
        return
    # A path still in the stage was not moved up yet: the one in OUT is the former output's.
    _move(out, folder, [path for path in sorted(staged) if not os.path.lexists(folder / path)])
    if claims.is_real_folder(former):
        replaced = [path for path in claims.files_in(former) if path != MARKER_NAME]
        _move(former, out, [*replaced, MARKER_NAME])
        former.rmdir()
    _move(out, folder, [JOURNAL_NAME])
    claims.prune(out, skip=BESIDE)


def _move(source: Path, target: Path, paths: Iterable[str]) -> None:
    """Renames those of ``paths`` that exist."""
    for path in paths:
        if os.path.lexists(source / path):
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            (source / path).rename(target / path)
    claims.prune(source, skip=BESIDE)


def _sync_published(out: Path) -> None:
    with os.scandir(out) as entries:
        folders = [Path(e.path) for e in entries if e.is_dir(follow_symlinks=False) and e.name not in BESIDE]
    for folder in folders:
        sync_tree(folder)
    sync_folder(out)


def sweep(folder: Path, out: Path, former: Path) -> None:
    """The new marker is in place: what only the way there needed goes. Raises ``OSError``."""
    for leftover in (former, folder):
        if claims.is_real_folder(leftover):
            claims.remove(leftover)
    # Last: while it is there, the next run sweeps what this one could not.
    (out / JOURNAL_NAME).unlink(missing_ok=True)
    sync_folder(out)
