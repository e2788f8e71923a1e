"""Whether a folder is fused, is whole, and holds given LoRAs already. Standard library only."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Literal

from fuselora.digest import artifact_digest, content_sha256, sha256_file, tagged
from fuselora.errors import InputError, MarkerError
from fuselora.header import read_header
from fuselora.marker import (
    FILE_NAME,
    FINGERPRINT_KEY,
    JOURNAL_NAME,
    UNFINISHED,
    FileRecord,
    LoraRecord,
    Marker,
    read_marker,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

Code = Literal[
    "no-marker",  # there is no fused.json
    "unfinished",  # a journal and no fused.json: the run that writes the folder has not ended
    "marker",  # fused.json is broken, or contradicts itself
    "artifact",  # the identity in fused.json is not that of the digests in it
    "no-digests",  # digests were asked for, and fused.json was written without them
    "missing",  # a listed file is absent
    "unreadable",  # a listed file is not a regular file, or cannot be read
    "outside",  # a link leaves the folder
    "size",  # a file is shorter or longer than recorded
    "header",  # a shard is not valid safetensors, or its header is not the recorded one
    "fingerprint",  # a shard says it belongs to another fusion, or to none
    "content",  # a file's sha256 is not the recorded one
    "stray",  # a weight file or index beside a component's own that fused.json does not list
]
SMALL_BYTES = 16 << 20  # side files below this are read and compared even without ``digest``
WEIGHT_ENDINGS = (".safetensors", ".bin", ".pt", ".safetensors.index.json", ".bin.index.json")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that does not hold; ``path`` is relative to the folder."""

    code: Code
    path: str
    message: str


@dataclass(frozen=True, slots=True)
class LoraOutcome:
    """A LoRA file that was asked about; ``records`` are the marker's entries with the same content."""

    path: Path
    content_sha256: str
    records: tuple[LoraRecord, ...]


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What ``check`` found.

    ``fused`` says that the folder has a marker, or shards that carry a fingerprint; ``artifact`` is
    the identity of the bytes read, None unless every file was digested.
    """

    fused: bool
    marker: Marker | None
    findings: tuple[Finding, ...]
    loras: tuple[LoraOutcome, ...] = ()
    artifact: str | None = None

    @property
    def whole(self) -> bool:
        """There is a marker, and everything it says holds."""
        return self.marker is not None and not self.findings

    @property
    def already_fused(self) -> tuple[LoraRecord, ...]:
        """The marker's entries that the LoRAs asked about would fuse a second time."""
        return tuple(record for outcome in self.loras for record in outcome.records)

    @property
    def ok(self) -> bool:
        """Fused, whole, and with none of the LoRAs asked about."""
        return self.fused and self.whole and not self.already_fused

    def lines(self, folder: Path) -> Iterator[str]:
        """The report as text: the state of ``folder``, what does not hold, and what is fused in it."""
        state = "fused and whole" if self.whole else "fused, but not whole" if self.fused else "not fused"
        yield f"{folder}: {state}"
        for finding in self.findings:
            yield f"  {finding.path}: {finding.message}"
        for record in self.marker.loras if self.marker else ():
            yield f"  holds {record.name} on {record.component}, strength {record.strength:g}"
        for outcome in self.loras:
            yield f"  {outcome.path}: {'fused already' if outcome.records else 'not in it'}"

    def document(self) -> dict[str, object]:
        """The report as JSON data."""
        return {
            "ok": self.ok,
            "fused": self.fused,
            "whole": self.whole,
            "fingerprint": self.marker and self.marker.fingerprint,
            "artifact": self.marker and self.marker.artifact,
            "artifact_on_disk": self.artifact,
            "findings": [{"code": f.code, "path": f.path, "message": f.message} for f in self.findings],
            "loras": [_outcome_document(outcome) for outcome in self.loras],
        }


def check(folder: Path | str, *, loras: Sequence[Path] = (), digest: bool = False) -> CheckReport:
    """Compare a folder with its ``fused.json``: files, sizes, headers, fingerprints, small digests.

    ``digest`` reads every listed file. Each of ``loras`` is compared by content, so a renamed or
    re-saved file is recognised. What does not hold is a finding, a broken marker too; raises
    ``InputError`` if ``folder`` is not a folder or one of ``loras`` is not safetensors.
    """
    folder = Path(folder)
    try:
        marker = read_marker(folder)
    except MarkerError as error:
        code: Code = "unfinished" if error.facts.get("reason") == UNFINISHED else "marker"
        name = JOURNAL_NAME if code == "unfinished" else FILE_NAME
        return _unmarked(folder, Finding(code, name, error.message), loras)
    if marker is None:
        return _unmarked(folder, Finding("no-marker", FILE_NAME, "there is no fused.json"), loras)
    examined = _examine_all(folder, marker, digest=digest)
    findings = [
        *_link_findings(folder, FILE_NAME),
        *_marker_findings(marker, digest=digest),
        *(finding for one in examined for finding in one.findings),
        *_stray_findings(folder, marker),
    ]
    outcomes = lora_outcomes(marker, loras)
    return CheckReport(True, marker, tuple(findings), outcomes, _artifact(marker, examined))


def _outcome_document(outcome: LoraOutcome) -> dict[str, object]:
    return {
        "path": str(outcome.path),
        "content_sha256": outcome.content_sha256,
        "already_fused": [
            {"name": record.name, "component": record.component, "strength": record.strength}
            for record in outcome.records
        ],
    }


def lora_outcomes(marker: Marker | None, loras: Iterable[Path]) -> tuple[LoraOutcome, ...]:
    """For each LoRA file, the marker's entries with its content. Raises ``InputError``."""
    known = marker.loras if marker else ()
    outcomes = []
    for path in loras:
        content = content_sha256(path)
        records = tuple(record for record in known if record.content_sha256 == content)
        outcomes.append(LoraOutcome(path, content, records))
    return tuple(outcomes)


def _unmarked(folder: Path, finding: Finding, loras: Iterable[Path]) -> CheckReport:
    carriers = list(_fingerprint_carriers(folder))
    if finding.code == "no-marker" and carriers:
        message = f"there is no fused.json, yet {carriers[0]} carries a fingerprint: the marker was removed"
        finding = Finding("no-marker", FILE_NAME, message)
    return CheckReport(bool(carriers), None, (finding,), lora_outcomes(None, loras))


def _fingerprint_carriers(folder: Path) -> Iterator[str]:
    """Shards in the folder or one level down whose header says that they hold fused tensors."""
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*/*.safetensors")]):
        try:
            metadata = read_header(path).metadata
        except InputError:
            continue
        if FINGERPRINT_KEY in metadata:
            yield path.relative_to(folder).as_posix()


def _marker_findings(marker: Marker, *, digest: bool) -> Iterator[Finding]:
    """What the marker alone shows."""
    for part in marker.components.values():
        fused = sum(record.fused for record in part.files)
        if fused != part.fused:
            what = f"{part.name} counts {part.fused} fused tensors, and its files {fused}"
            yield Finding("marker", FILE_NAME, what)
    digests = {record.path: record.sha256 for record in marker.files}
    known = [(path, sha256) for path, sha256 in digests.items() if sha256 is not None]
    if marker.artifact is None and not known:
        if digest:
            what = "it was written without digests: contents cannot be compared"
            yield Finding("no-digests", FILE_NAME, what)
    elif marker.artifact is None or len(known) < len(digests):
        yield Finding("artifact", FILE_NAME, "it has some digests and lacks others")
    elif tagged(artifact_digest(known)) != marker.artifact:
        yield Finding("artifact", FILE_NAME, "artifact is not the digest of the files listed")


@dataclass(frozen=True, slots=True)
class _Examined:
    """One listed file: its record, what does not hold, and its digest if it was read."""

    record: FileRecord
    findings: tuple[Finding, ...]
    sha256: str | None = None


def _examine_all(folder: Path, marker: Marker, *, digest: bool) -> list[_Examined]:
    """All listed files, in the marker's order. hashlib lets go of the interpreter, so threads help."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        weights = pool.map(partial(_examine_weights, folder, marker, digest), marker.weight_files)
        side_files = pool.map(partial(_examine_side_file, folder, digest), marker.side_files)
        return [*weights, *side_files]


def _examine_weights(folder: Path, marker: Marker, digest: bool, record: FileRecord) -> _Examined:
    findings = [*_presence_findings(folder, record)]
    if not findings and record.path.endswith(".safetensors"):
        findings += _header_findings(folder, marker, record)
    return _with_digest(folder, record, findings, read=digest)


def _examine_side_file(folder: Path, digest: bool, record: FileRecord) -> _Examined:
    findings = [*_presence_findings(folder, record)]
    return _with_digest(folder, record, findings, read=digest or record.n_bytes < SMALL_BYTES)


def _presence_findings(folder: Path, record: FileRecord) -> Iterator[Finding]:
    """It is there, in the folder, a file, and of the recorded size."""
    try:
        info = (folder / record.path).stat()
    except FileNotFoundError:
        yield Finding("missing", record.path, "is missing")
        return
    except (OSError, ValueError) as error:  # ValueError: a name that this file system cannot spell
        yield Finding("unreadable", record.path, f"cannot be read: {error}")
        return
    if record.link != "symlink":
        yield from _link_findings(folder, record.path)
    if not stat.S_ISREG(info.st_mode):
        yield Finding("unreadable", record.path, "is not a regular file")
    elif info.st_size != record.n_bytes:
        yield Finding("size", record.path, f"has {info.st_size} bytes; {FILE_NAME} says {record.n_bytes}")


def _link_findings(folder: Path, path: str) -> Iterator[Finding]:
    real = (folder / path).resolve()
    if not any(real.is_relative_to(root) for root in _roots(folder)):
        yield Finding("outside", path, "is a link that leaves the folder")


def _roots(folder: Path) -> list[Path]:
    """Where listed files may lie: in the folder, or in the blobs of the Hub cache that it is part of."""
    real = folder.resolve()
    return [real, *(parent.parent / "blobs" for parent in real.parents if parent.name == "snapshots")]


def _header_findings(folder: Path, marker: Marker, record: FileRecord) -> Iterator[Finding]:
    try:
        header = read_header(folder / record.path)
    except InputError as error:
        yield Finding("header", record.path, error.message)
        return
    if record.header_sha256 not in (None, header.sha256):
        yield Finding("header", record.path, "has another header than the one recorded: another file")
    carried = header.metadata.get(FINGERPRINT_KEY)
    if carried == marker.fingerprint or _may_differ(marker, record, carried):
        return
    what = "carries no fingerprint" if carried is None else "carries the fingerprint of another fusion"
    yield Finding("fingerprint", record.path, f"{what}: it is not the shard that was written")


def _may_differ(marker: Marker, record: FileRecord, carried: str | None) -> bool:
    """A shard without a fused tensor keeps the base's bytes; that base may be a fused one."""
    return record.fused == 0 and (carried is None or marker.stacked_on is not None)


def _with_digest(folder: Path, record: FileRecord, findings: list[Finding], *, read: bool) -> _Examined:
    """Digests the file, unless it has been found wrong already."""
    if findings or not read or record.sha256 is None:
        return _Examined(record, tuple(findings))
    try:
        sha256 = sha256_file(folder / record.path)
    except OSError as error:
        return _Examined(record, (Finding("unreadable", record.path, f"cannot be read: {error.strerror}"),))
    if sha256 == record.sha256:
        return _Examined(record, (), sha256)
    what = f"was changed: its sha256 is not the one in {FILE_NAME}"
    return _Examined(record, (Finding("content", record.path, what),), sha256)


def _artifact(marker: Marker, examined: Iterable[_Examined]) -> str | None:
    """The identity of the bytes on disk, if all of them were read."""
    known = [(one.record.path, one.sha256) for one in examined if one.sha256 is not None]
    return tagged(artifact_digest(known)) if len(known) == len(marker.files) else None


def _stray_findings(folder: Path, marker: Marker) -> Iterator[Finding]:
    """Engines glob a component's folder: what lies there beside its own files may be loaded too."""
    listed = {record.path for record in marker.files}
    homes = {PurePosixPath(record.path).parent for record in marker.weight_files}
    for home in sorted(homes):
        present = (folder / home).iterdir() if (folder / home).is_dir() else ()
        for name in sorted((home / path.name).as_posix() for path in present):
            if name.endswith(WEIGHT_ENDINGS) and name not in listed:
                yield Finding("stray", name, f"is a weight file that {FILE_NAME} does not list")
