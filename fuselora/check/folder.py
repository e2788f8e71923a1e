"""Whether a folder is fused, is whole, and holds given LoRAs already. Standard library only."""

from __future__ import annotations

import os
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

from fuselora.check.layout import layout_note
from fuselora.check.report import CheckReport, Code, Finding, LoraOutcome
from fuselora.check.strays import stray_findings
from fuselora.digest import artifact_digest, content_sha256, sha256_file, tagged
from fuselora.errors import FormatError, InputError, MarkerError
from fuselora.escape import short
from fuselora.filenames import is_document
from fuselora.header import read_header
from fuselora.lora.grammar import is_lora_key
from fuselora.marker import (
    COMPONENT_KEY,
    FILE_NAME,
    FINGERPRINT_KEY,
    JOURNAL_NAME,
    POLICY,
    POLICY_VALUES,
    FileRecord,
    Marker,
    marker_home,
    read_marker,
)
from fuselora.reading import reading, real_path
from fuselora.selection import adapter_weights
from fuselora.shards import open_files

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

SMALL_BYTES = 64 << 20  # files below this are read and compared even without ``digest``


def check(folder: Path | str, *, loras: Sequence[Path] = (), digest: bool = False) -> CheckReport:
    """Compare a folder with its ``fused.json``: files, sizes, headers, fingerprints.

    Files under 64 MiB are read whole, and with ``digest`` every listed file. Each of ``loras``, a
    safetensors file or an adapter folder, is compared by content, so one that was renamed, or saved again
    with the same dtype and keys, is recognised. What does not hold is a finding, a broken marker too;
    raises ``InputError`` if ``folder`` is not a folder or one of ``loras`` is no LoRA.
    """
    folder = Path(folder)
    for path in loras:
        _require_lora(path)
    try:
        marker = read_marker(folder)
    except MarkerError as error:
        return _unmarked(folder, _marker_finding(error), loras)
    except InputError as error:
        error.hint = _hint_about_file(folder) or _hint_about_hub(folder) or error.hint
        error.message = re.sub("^hf:/(?!/)", "hf://", error.message)  # a path has lost a slash
        raise
    if marker is None:
        return _unmarked(folder, Finding("no-marker", FILE_NAME, "is not there"), loras)
    examined = _examine_all(folder, marker, digest=digest)
    findings = [
        *_link_findings(folder, FILE_NAME),
        *_own_findings(marker, digest=digest),
        *(finding for one in examined for finding in one.findings),
        *stray_findings(folder, marker),
    ]
    outcomes = lora_outcomes(marker, loras)
    artifact, note = _artifact(marker, examined), layout_note(folder, marker)
    return CheckReport(True, marker, tuple(findings), outcomes, artifact, note)


def lora_outcomes(marker: Marker | None, loras: Iterable[Path]) -> tuple[LoraOutcome, ...]:
    """For each LoRA, a file or an adapter folder, the marker's entries with its content.

    Those that added nothing stand apart: adding that LoRA is no second time. Raises ``InputError``.
    """
    known = marker.loras if marker else ()
    outcomes = []
    for path in loras:
        content = _content_of(path)
        same = [record for record in known if record.content_sha256 == content]
        records = tuple(record for record in same if record.adds)
        outcomes.append(LoraOutcome(path, content, records, tuple(r for r in same if not r.adds)))
    return tuple(outcomes)


def _content_of(lora: Path) -> str:
    with reading(lora):
        return content_sha256(_weights_of(lora))


def _weights_of(lora: Path) -> Path:
    return (
        lora / adapter_weights([entry.name for entry in lora.iterdir()], str(lora)) if lora.is_dir() else lora
    )


def _require_lora(lora: Path) -> None:
    """Raises ``FormatError`` for a file without a tensor that has a LoRA's name."""
    with reading(lora):
        names = [tensor.name for header in open_files(_weights_of(lora)) for tensor in header.tensors]
    if not any(map(is_lora_key, names)):
        found = (
            f"none of its {len(names)} tensors has a LoRA's name; one is {short(names[0])}"
            if names
            else "empty"
        )
        hint = "Name a LoRA: other weights are never in it."
        raise FormatError(f"{lora}: is no LoRA: {found}", hint=hint, path=str(lora))


def _hint_about_file(path: Path) -> str | None:
    """Of a file that was given for a folder: whether it is a fused shard, and which folder to name."""
    with suppress(OSError):
        if not path.is_file():
            return None
    home = next((at for at in list(path.absolute().parents)[:2] if (at / FILE_NAME).exists()), None)
    name = f"Name the folder that holds {FILE_NAME}{f', {home}' if home else ''}."
    with suppress(InputError):
        if fingerprint := read_header(path).metadata.get(FINGERPRINT_KEY):
            return f"It is a shard of the fused checkpoint {fingerprint}. {name}"
    return f"{name} What a file is, fuselora inspect says."


def _hint_about_hub(path: Path) -> str | None:
    """Of what could be a repository: how to fetch it."""
    repo = path.as_posix().removeprefix("hf:/")
    if os.path.lexists(path) or not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", repo):
        return None
    name = repo.partition("/")[2]
    return f"check takes a folder on this machine; of a Hub repository: hf download {repo} --local-dir {name}"


def _marker_finding(error: MarkerError) -> Finding:
    reason = error.facts.get("reason")
    if reason == "unfinished":
        what = f"stands without a {FILE_NAME}: the merge that writes the folder has not ended"
        return Finding("unfinished", JOURNAL_NAME, what)
    code = cast(Code, reason) if reason in get_args(Code) else "marker"
    return Finding(code, FILE_NAME, error.message.removeprefix(f"{error.facts.get('path')}: "))


def _unmarked(folder: Path, finding: Finding, loras: Iterable[Path]) -> CheckReport:
    carrier = next(_fingerprint_carriers(folder), None)
    if finding.code == "no-marker" and carrier:
        carries = f"{carrier} carries the fingerprint of a fusion"
        home = marker_home(folder, folder / carrier)
        finding = (
            Finding("elsewhere", FILE_NAME, f"is not here but in {home}; {carries}")
            if home
            else Finding("removed", FILE_NAME, f"was removed: {carries}")
        )
    fused = carrier is not None or finding.code not in ("no-marker", "unfinished")
    return CheckReport(fused, None, (finding,), lora_outcomes(None, loras))


def _fingerprint_carriers(folder: Path) -> Iterator[str]:
    """Shards in the folder or one level down whose header says that they hold fused tensors."""
    found: list[Path] = []
    with suppress(OSError):  # a folder in it that cannot be searched
        found += sorted([*folder.glob("*.safetensors"), *folder.glob("*/*.safetensors")])
    for path in found:
        with suppress(InputError):
            if FINGERPRINT_KEY in read_header(path).metadata:
                yield path.relative_to(folder).as_posix()


def _own_findings(marker: Marker, *, digest: bool) -> Iterator[Finding]:
    """What the marker alone shows."""
    for part in marker.components.values():
        fused = sum(record.fused for record in part.files)
        if fused != part.fused:
            what = f"counts {part.fused} fused tensors in {part.name}, and {fused} in its files"
            yield Finding("marker", FILE_NAME, what)
    yield from _policy_findings(marker)
    digests = {record.path: record.sha256 for record in marker.files}
    known = [(path, sha256) for path, sha256 in digests.items() if sha256 is not None]
    if marker.artifact is None and not known:
        if digest:
            what = "was written without digests: contents cannot be compared"
            yield Finding("no-digests", FILE_NAME, what)
    elif marker.artifact is None or len(known) < len(digests):
        yield Finding("artifact", FILE_NAME, "has some digests and lacks others")
    elif tagged(artifact_digest(known)) != marker.artifact:
        yield Finding("artifact", FILE_NAME, "has an artifact that is not the digest of the files it lists")


def _policy_findings(marker: Marker) -> Iterator[Finding]:
    """It is edited by hand; a server goes by the default for a misspelled name, and refuses for a value."""
    for name, value in marker.policy.items():
        if name not in POLICY:
            if not marker.is_newer:
                yield Finding("policy", FILE_NAME, f"has a policy for {short(name)}, which does not exist")
        elif value not in POLICY_VALUES:
            what = f"has the policy {name} {short(value)}; it is one of {', '.join(POLICY_VALUES)}"
            yield Finding("policy", FILE_NAME, what)


@dataclass(frozen=True, slots=True)
class _Examined:
    """One listed file: its record, what does not hold, and its digest if it was read."""

    record: FileRecord
    findings: tuple[Finding, ...]
    sha256: str | None = None


def _examine_all(folder: Path, marker: Marker, *, digest: bool) -> list[_Examined]:
    """All listed files, in the marker's order. hashlib lets go of the interpreter, so threads help."""
    own = [(part.name, record) for part in marker.components.values() for record in part.files]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        weights = pool.map(partial(_examine_weights, folder, marker, digest), own)
        side_files = pool.map(partial(_examine_side_file, folder, digest), marker.side_files)
        return [*weights, *side_files]


def _examine_weights(folder: Path, marker: Marker, digest: bool, own: tuple[str, FileRecord]) -> _Examined:
    component, record = own
    findings = [*_presence_findings(folder, record)]
    if not findings and record.path.endswith(".safetensors"):
        findings += _header_findings(folder, marker, component, record)
    return _with_digest(folder, record, findings, read=digest or record.n_bytes < SMALL_BYTES)


def _examine_side_file(folder: Path, digest: bool, record: FileRecord) -> _Examined:
    findings = [*_presence_findings(folder, record)]
    examined = _with_digest(folder, record, findings, read=digest or record.n_bytes < SMALL_BYTES)
    return replace(examined, findings=()) if is_document(record.path) else examined


def _presence_findings(folder: Path, record: FileRecord) -> Iterator[Finding]:
    """It is there, in the folder, a file, and of the recorded size."""
    try:
        info = (folder / record.path).stat()
    except FileNotFoundError:
        yield Finding("missing", record.path, "is missing")
        return
    except OSError as error:
        yield Finding("unreadable", record.path, f"cannot be read: {error.strerror}")
        return
    except ValueError as error:  # a name that this file system cannot spell
        yield Finding("unreadable", record.path, f"cannot be read: {error}")
        return
    if record.link != "symlink":
        yield from _link_findings(folder, record.path)
    if not stat.S_ISREG(info.st_mode):
        yield Finding("unreadable", record.path, "is not a regular file")
    elif info.st_size != record.n_bytes:
        yield Finding("size", record.path, f"has {info.st_size} bytes; {FILE_NAME} says {record.n_bytes}")


def _link_findings(folder: Path, path: str) -> Iterator[Finding]:
    real = real_path(folder / path)
    if not any(real.is_relative_to(root) for root in _roots(folder)):
        yield Finding("outside", path, "is a link that leaves the folder")


def _roots(folder: Path) -> list[Path]:
    """Where listed files may lie: in the folder, or in the blobs of the Hub cache that it is part of."""
    real = real_path(folder)
    snapshots = (parent for parent in real.parents if parent.name == "snapshots")
    return [real, *(real_path(parent.parent / "blobs") for parent in snapshots)]


def _header_findings(folder: Path, marker: Marker, component: str, record: FileRecord) -> Iterator[Finding]:
    path = folder / record.path
    try:
        header = read_header(path)
    except InputError as error:
        yield Finding("header", record.path, error.message.removeprefix(f"{path}: "))
        return
    owner = header.metadata.get(COMPONENT_KEY, component)
    if record.fused and owner != component:
        yield Finding("component", record.path, f"is a shard of {owner}, in the place of one of {component}")
    elif record.header_sha256 not in (None, header.sha256):
        yield Finding("header", record.path, "has another header than the one recorded: another file")
    yield from _fingerprint_findings(marker, record, header.metadata)


def _fingerprint_findings(
    marker: Marker, record: FileRecord, metadata: Mapping[str, str]
) -> Iterator[Finding]:
    carried = metadata.get(FINGERPRINT_KEY)
    # A shard without a fused tensor keeps the base's bytes; that base may be a fused one.
    kept = record.fused == 0 and (carried is None or marker.stacked_on is not None)
    if carried != marker.fingerprint and not kept:
        what = "carries no fingerprint" if carried is None else "carries the fingerprint of another fusion"
        yield Finding("fingerprint", record.path, f"{what}: it is not the shard that was written")


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
