"""Files in a fused folder that its ``fused.json`` does not list and a loader may take. Standard library only.

Engines glob: a weight file in a component's folder, a new folder or the root may be loaded beside or
instead of the listed ones, and a config or a tokenizer file changes what the weights are used for.
"""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from fuselora.check.report import Finding
from fuselora.filenames import BESIDE, DOCUMENT_NAMES, is_index, is_private, is_weight_file
from fuselora.marker import FILE_NAME
from fuselora.specs import PIPELINE_COMPONENTS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fuselora.marker import Marker

MAX_ENTRIES = 100_000  # a pipeline has some dozens
# Of the root, which people share with loaders, these are read: model_index.json by every pipeline.
ROOT_NAMES = ("model_index.json", "config.json")


def stray_findings(folder: Path, marker: Marker) -> Iterator[Finding]:
    """Weight files and indexes anywhere; other files where loaders read some; links to folders.

    A folder that is called as a component and has nothing listed in it as well, whatever it holds: its
    name alone can make an engine build another model.

    Left alone: hidden files that are no weights, what ``git`` and ``huggingface_hub`` keep for themselves,
    documents, other files of the root, and all but weights beside the components' own where the marker
    lists weights alone (``--assets skip``: the rest is for others to add).
    """
    listed = {record.path for record in marker.files}
    homes = _folders(record.path for record in marker.weight_files)
    weights_only = listed == {record.path for record in marker.weight_files} | _indexes(marker)
    known = homes if weights_only else _folders(listed) | {"."}
    for n_entries, (path, kind) in enumerate(_entries(folder, listed)):
        if n_entries == MAX_ENTRIES:
            yield Finding("stray", path, f"is one entry too many: over {MAX_ENTRIES} are not searched")
            return
        home = str(PurePosixPath(path).parent)
        if kind == "unreadable":
            yield Finding("unreadable", path, "is a folder that cannot be searched")
        elif path in PIPELINE_COMPONENTS and not any(name.startswith(f"{path}/") for name in listed):
            yield Finding("stray", path, f"is called as a component, and {FILE_NAME} lists nothing in it")
        elif weights_only and home not in homes:
            continue
        elif kind == "link":
            yield Finding("stray", path, f"is a link to a folder, and {FILE_NAME} lists nothing in it")
        elif kind == "file" and path not in listed:
            yield from _file_findings(path, home, known, weights_only=weights_only)


def _file_findings(path: str, home: str, known: set[str], *, weights_only: bool) -> Iterator[Finding]:
    name = PurePosixPath(path).name
    if is_weight_file(name) or is_index(name):
        yield Finding("stray", path, f"is a weight file or index that {FILE_NAME} does not list")
    elif not weights_only and home in known and _is_read(name, home):
        yield Finding("unlisted", path, f"is not in {FILE_NAME}, and loaders read what lies there")


def _is_read(name: str, home: str) -> bool:
    if home == ".":
        return name in ROOT_NAMES or name.endswith(".py")
    return not name.startswith((".", *DOCUMENT_NAMES)) and not name.endswith(".md")


def _folders(paths: Iterator[str] | set[str]) -> set[str]:
    return {str(PurePosixPath(path).parent) for path in paths}


def _indexes(marker: Marker) -> set[str]:
    return {part.index for part in marker.components.values() if part.index is not None}


def _entries(folder: Path, listed: set[str]) -> Iterator[tuple[str, str]]:
    """Relative paths under ``folder`` and their kinds; only real folders are searched.

    A "file" is all that is no folder; a "link" leads to a folder and has nothing listed in it; a
    "folder" is there to be counted, and one that cannot be searched is "unreadable".
    """
    pending = deque([""])
    while pending:
        prefix = pending.popleft()
        try:
            with os.scandir(folder / prefix) as found:
                entries = sorted(found, key=lambda entry: entry.name)
        except OSError:
            yield prefix.rstrip("/") or ".", "unreadable"
            continue
        for entry in entries:
            path = f"{prefix}{entry.name}"
            if is_private(path) or path in BESIDE:
                continue
            kind = _kind(entry)
            if kind == "folder":
                pending.append(f"{path}/")
            if kind != "link" or not any(name.startswith(f"{path}/") for name in listed):
                yield path, kind


def _kind(entry: os.DirEntry[str]) -> str:
    try:
        is_folder = entry.is_dir()
    except OSError:  # a circle of links
        is_folder = False
    return "file" if not is_folder else "link" if entry.is_symlink() else "folder"
