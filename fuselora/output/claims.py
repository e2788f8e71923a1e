"""What in a folder is fuselora's own, by its marker and journal: nothing else is ever removed.

Standard library only.
"""

from __future__ import annotations

from contextlib import suppress
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from fuselora.errors import InputError
from fuselora.folders import entries, folders
from fuselora.jsonfile import is_crowded, object_in
from fuselora.marker import FILE_NAME as MARKER_NAME
from fuselora.marker import JOURNAL_NAME, NEW_JOURNAL_NAME, read_marker
from fuselora.reading import start_of

if TYPE_CHECKING:
    from collections.abc import Collection

JOURNAL_FAMILY = "fuselora.journal/"
MAX_JOURNAL_BYTES = 64 << 20  # 100,000 shards need less
CONTROL_NAMES = (MARKER_NAME, NEW_JOURNAL_NAME, JOURNAL_NAME)  # in the order they may be removed


def files_in(folder: Path, *, skip: Collection[str] = ()) -> list[str]:
    """Relative paths, with ``/``, of all that is not a real folder, sorted; links are not followed.

    ``skip`` names entries of ``folder`` itself that are left out.
    """
    found = (entry for entry in entries(folder, skip=skip) if not entry.is_dir(follow_symlinks=False))
    return sorted(Path(entry.path).relative_to(folder).as_posix() for entry in found)


def journal_lines(folder: Path) -> list[dict[str, object]]:
    """The whole lines of the journal in ``folder``, header first, up to a torn or broken one.

    Empty if there is no journal, one longer than any of ours, or its first line is not a header of any
    version of fuselora.
    """
    path = folder / JOURNAL_NAME
    if not _is_plain_file(path):
        return []
    raw = start_of(path, MAX_JOURNAL_BYTES)
    if len(raw) > MAX_JOURNAL_BYTES or is_crowded(raw):
        return []
    lines: list[dict[str, object]] = []
    for text in BytesIO(raw):
        # What follows the last newline was cut off by a kill.
        line = object_in(text) if text.endswith(b"\n") else None
        if line is None:
            break
        lines.append(line)
    return lines if lines and str(lines[0].get("schema")).startswith(JOURNAL_FAMILY) else []


def marked_files(folder: Path) -> frozenset[str] | None:
    """The files that the marker of ``folder`` lists; None without a valid marker of our own."""
    sizes = marked_sizes(folder)
    return None if sizes is None else frozenset(sizes)


def marked_sizes(folder: Path) -> dict[str, int] | None:
    """The same, with the bytes of each."""
    if not _is_plain_file(folder / MARKER_NAME):
        return None
    try:
        marker = read_marker(folder)
    except InputError:
        return None
    return None if marker is None else {record.path: record.n_bytes for record in marker.files}


def is_marked(folder: Path) -> bool:
    """``folder`` is a real folder and holds a valid marker."""
    return is_real_folder(folder) and marked_files(folder) is not None


def claimed(folder: Path) -> frozenset[str]:
    """Every path in ``folder`` that its marker or its journal lists, and those two files themselves."""
    lines, marked = journal_lines(folder), marked_files(folder)
    own = {name for name in (NEW_JOURNAL_NAME, JOURNAL_NAME) if _is_plain_file(folder / name)}
    if lines or marked is not None:
        own.add(MARKER_NAME)
    return frozenset(own) | (marked or frozenset()) | _journaled(lines)


def _journaled(lines: list[dict[str, object]]) -> frozenset[str]:
    if not lines:
        return frozenset()
    listed = lines[0].get("files")
    paths = [*(listed if isinstance(listed, list) else ()), *(line.get("path") for line in lines[1:])]
    return frozenset(path for path in paths if isinstance(path, str) and is_inside(path))


def strangers(folder: Path, *, skip: Collection[str] = ()) -> list[str]:
    """The files of ``folder`` that are not ours, sorted."""
    own = claimed(folder)
    return [path for path in files_in(folder, skip=skip) if path not in own]


def clear(folder: Path, *, keep: Collection[str] = (), skip: Collection[str] = ()) -> None:
    """Removes our own files from ``folder`` but those in ``keep``, and then the empty folders in it.

    Marker and journal go last, so that a kill on the way leaves a folder that is still ours.
    """
    own = claimed(folder) - set(keep)
    present = files_in(folder, skip=skip)
    for path in present:
        if path in own and path not in CONTROL_NAMES:
            (folder / path).unlink()
    for name in CONTROL_NAMES:
        if name in own and name in present:
            (folder / name).unlink()
    prune(folder, skip=skip)


def remove(folder: Path) -> None:
    """Removes our own files from ``folder`` and, if nothing else is left, ``folder``."""
    clear(folder)
    with suppress(OSError):
        folder.rmdir()


def prune(folder: Path, *, skip: Collection[str] = ()) -> None:
    """Removes the folders inside ``folder`` that hold no file."""
    for inner in reversed(folders(folder, skip=skip)):
        with suppress(OSError):
            inner.rmdir()


def is_inside(path: str) -> bool:
    """``path`` is relative and stays in the folder it is relative to."""
    pure = PurePosixPath(path)
    return bool(pure.parts) and not pure.is_absolute() and ".." not in pure.parts


def is_real_folder(path: Path) -> bool:
    """A folder, and not a link to one."""
    return path.is_dir() and not path.is_symlink()


def _is_plain_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()
