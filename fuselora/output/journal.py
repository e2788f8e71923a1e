"""The journal of a run: which shards are finished, so that a killed run goes on where it stopped.

One JSON object a line. The first is a header: schema, the plan's fingerprint, the tool's version and
every path that the run may write. Each further line is one finished shard. Standard library only.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING

from fuselora import __version__
from fuselora.digest import sha256_file
from fuselora.marker import JOURNAL_NAME, NEW_JOURNAL_NAME
from fuselora.output import claims
from fuselora.output.claims import JOURNAL_FAMILY
from fuselora.output.disk import sync_folder, write_file, writing

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

SCHEMA = f"{JOURNAL_FAMILY}1"
NUMBERS = ("n_bytes", "touched", "unchanged")
BASE_NUMBERS = ("n_bytes", "mtime_ns", "ctime_ns", "inode")


@dataclass(frozen=True, slots=True)
class BaseState:
    """The base file that a shard was made from, as it was when it was read; ``n_bytes`` is its size."""

    sha256: str
    n_bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result, sha256: str) -> BaseState:
        """From a ``stat`` taken before the file was read: an edit during the read then shows later."""
        return cls(sha256, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)

    def matches(self, status: os.stat_result) -> bool:
        """Size, times and inode are still the same; the content is not read.

        Stricter than within a run (``State.is_same``): a shard that is made again costs no more than time.
        """
        return self == BaseState.of(status, self.sha256)


@dataclass(frozen=True, slots=True)
class Entry:
    """One finished shard: ``path`` relative to the folder, size and hex sha256 of what was written.

    ``touched`` and ``unchanged``: of a sample, elements with a delta, and those that stayed as they were.
    """

    path: str
    n_bytes: int
    sha256: str
    base: BaseState
    touched: int = 0
    unchanged: int = 0


class Journal:
    """An open journal; ``close`` it, or use it in a ``with``."""

    def __init__(self, folder: Path, descriptor: int, entries: Mapping[str, Entry]) -> None:
        self._path = folder / JOURNAL_NAME
        self._descriptor = descriptor
        self._entries = dict(entries)

    @classmethod
    def open(cls, folder: Path, fingerprint: str, *, files: Iterable[str]) -> Journal:
        """The journal of ``folder``, begun anew unless the one there is of the same fingerprint.

        ``fingerprint`` names the plan, and the machine where the bytes depend on it.

        ``files`` are all relative paths that this run may write, side files and indexes included;
        only what is listed can be removed after a kill. Everything of ours in ``folder`` that is not
        a shard finished by the same plan is removed now. Raises ``OutputError``.
        """
        listed = sorted(set(files))
        with writing(folder / JOURNAL_NAME):
            known = frozenset(listed)
            kept = {path: entry for path, entry in read(folder, fingerprint).items() if path in known}
            claims.clear(folder, keep={*kept, JOURNAL_NAME})
            _begin(folder, fingerprint, listed, kept.values())
            flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            return cls(folder, os.open(folder / JOURNAL_NAME, flags), kept)

    def record(self, entry: Entry) -> None:
        """Adds a finished shard, whose file is on disk; durable when this returns. Raises ``OutputError``."""
        line = _encode(_document(entry))
        with writing(self._path, len(line)):
            self._append(line)
        self._entries[entry.path] = entry

    def _append(self, line: bytes) -> None:
        before = os.fstat(self._descriptor).st_size
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
            os.fsync(self._descriptor)
        except OSError:
            # Half a line would hide whatever is recorded after it.
            with suppress(OSError):
                os.ftruncate(self._descriptor, before)
            raise

    def finished(self) -> Mapping[str, Entry]:
        """The finished shards by path. A file is not trusted yet: see ``reusable``."""
        return MappingProxyType(self._entries)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read(folder: Path, fingerprint: str) -> dict[str, Entry]:
    """The finished shards in the journal of ``folder``; none if it is of another schema, version or plan.

    A torn line, left by a kill, and all after it are ignored.
    """
    lines = claims.journal_lines(folder)
    header = lines[0] if lines else {}
    if [header.get(name) for name in ("schema", "tool", "fingerprint")] != [SCHEMA, __version__, fingerprint]:
        return {}
    entries = (_entry(line) for line in lines[1:])
    return {entry.path: entry for entry in entries if entry is not None and claims.is_inside(entry.path)}


def has_finished(folder: Path) -> bool:
    """Whether the journal of ``folder`` lists a finished shard, of whichever plan and version."""
    return len(claims.journal_lines(folder)) > 1


def reusable(entry: Entry, file: Path, base_file: Path) -> bool:
    """``base_file`` is the same by size, times and inode; ``file``, read whole, has the recorded sha256."""
    try:
        if file.is_symlink() or not file.is_file() or file.stat().st_size != entry.n_bytes:
            return False
        return entry.base.matches(base_file.stat()) and sha256_file(file) == entry.sha256
    except OSError:
        return False


def _begin(folder: Path, fingerprint: str, files: list[str], kept: Iterable[Entry]) -> None:
    """Replaces the journal in one step, so that a kill leaves the former or the new one whole."""
    header = {"schema": SCHEMA, "fingerprint": fingerprint, "tool": __version__, "files": files}
    lines = [_encode(header), *(_encode(_document(entry)) for entry in kept)]
    write_file(folder / NEW_JOURNAL_NAME, b"".join(lines))
    (folder / NEW_JOURNAL_NAME).replace(folder / JOURNAL_NAME)
    sync_folder(folder)


def _encode(document: Mapping[str, object]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode("ascii") + b"\n"


def _document(entry: Entry) -> dict[str, object]:
    base = {"sha256": entry.base.sha256, **{name: getattr(entry.base, name) for name in BASE_NUMBERS}}
    own = {"path": entry.path, "sha256": entry.sha256, "base": base}
    return {**own, **{name: getattr(entry, name) for name in NUMBERS}}


def _entry(line: Mapping[str, object]) -> Entry | None:
    """The shard of one line; None if it is not as ``_document`` writes it."""
    base = line.get("base")
    if not isinstance(base, dict):
        return None
    path, sha256, base_sha256 = line.get("path"), line.get("sha256"), base.get("sha256")
    numbers, base_numbers = _numbers(line, NUMBERS), _numbers(base, BASE_NUMBERS)
    if not isinstance(path, str) or not isinstance(sha256, str) or not isinstance(base_sha256, str):
        return None
    if numbers is None or base_numbers is None:
        return None
    return Entry(path, sha256=sha256, base=BaseState(base_sha256, **base_numbers), **numbers)


def _numbers(document: Mapping[str, object], names: Sequence[str]) -> dict[str, int] | None:
    """These fields; None unless every one is there and a whole number."""
    found = {name: value for name in names if type(value := document.get(name)) is int}
    return found if len(found) == len(names) else None
