"""What ``check`` found, as frozen values, in words and as JSON data. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fuselora.escape import short
from fuselora.fields import HINT
from fuselora.marker import FILE_NAME, NAME_HINT, POLICY, POLICY_VALUES, UNFINISHED_HINT, UPDATE_HINT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from fuselora.marker import LoraRecord, Marker

Code = Literal[
    "no-marker",  # there is no fused.json, and nothing that looks fused
    "removed",  # there is no fused.json, but a shard carries a fingerprint
    "elsewhere",  # there is no fused.json, but there is one in the folder around, or in a component's
    "unfinished",  # a journal and no fused.json: the run that writes the folder has not ended
    "marker",  # fused.json is broken, or contradicts itself
    "version",  # fused.json is of a major version that this fuselora does not know
    "path",  # fused.json lists a path that is not plainly inside the folder
    "edited",  # the seal in fused.json is not that of what it says
    "policy",  # the policy in fused.json has a name or a value that it cannot have
    "artifact",  # the identity in fused.json is not that of the digests in it
    "no-digests",  # digests were asked for, and fused.json was written without them
    "missing",  # a listed file is absent
    "unreadable",  # a listed file is not a regular file, or something cannot be read
    "outside",  # a link leaves the folder
    "size",  # a file is shorter or longer than recorded
    "header",  # a shard is not valid safetensors, or its header is not the recorded one
    "component",  # a shard says it belongs to another component, as those of swapped experts do
    "fingerprint",  # a shard says it belongs to another fusion, or to none
    "content",  # a file's sha256 is not the recorded one
    "stray",  # a weight file or index that fused.json does not list
    "unlisted",  # another file that it does not list, where a loader may read it
]
COPY_HINT = "Copy the whole folder again, or fuse again; no file in it is edited by hand."
REMOVED_HINT = "Bring fused.json back from where the folder was copied from, or fuse again."
STRAY_HINT = "Remove what does not belong to the checkpoint: an engine may load it."
HINTS: Mapping[Code, str] = {
    "no-marker": NAME_HINT,
    "removed": REMOVED_HINT,
    "elsewhere": f"Check the folder that holds {FILE_NAME}.",
    "unfinished": UNFINISHED_HINT,
    "version": UPDATE_HINT,
    **dict.fromkeys(("marker", "path", "edited", "artifact"), HINT),
    "policy": f"In {FILE_NAME}, {' and '.join(POLICY)} are each one of {', '.join(POLICY_VALUES)}.",
    "no-digests": "Merge without --no-digest to have contents that can be compared.",
    "stray": STRAY_HINT,
    "unlisted": STRAY_HINT,
}
SHOWN_FINDINGS = 20


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that does not hold; ``path`` is relative to the folder."""

    code: Code
    path: str
    message: str

    @property
    def hint(self) -> str:
        """What to do about it."""
        return HINTS.get(self.code, COPY_HINT)

    def document(self) -> dict[str, str]:
        return {"code": self.code, "path": self.path, "message": self.message, "hint": self.hint}


@dataclass(frozen=True, slots=True)
class LoraOutcome:
    """A LoRA that was asked about; ``records`` are the marker's entries with the same content.

    ``idle``: those of which nothing was added, at strength 0 or with every module left out.
    """

    path: Path
    content_sha256: str
    records: tuple[LoraRecord, ...]
    idle: tuple[LoraRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What ``check`` found.

    ``fused`` says that the folder has a marker, or shards that carry a fingerprint; ``artifact`` is
    the identity of the bytes read, None unless every file was digested; ``note`` says what engines may
    miss, and takes nothing from ``ok``. Without a ``marker`` nobody knows whether the LoRAs asked about
    are in it.
    """

    fused: bool
    marker: Marker | None
    findings: tuple[Finding, ...]
    loras: tuple[LoraOutcome, ...] = ()
    artifact: str | None = None
    note: str | None = None

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
        return self.whole and not self.already_fused

    def lines(self, folder: Path) -> Iterator[str]:
        """The report as text: the state of ``folder``, what does not hold, and what is fused in it."""
        state = "fused and whole" if self.whole else "fused, but not whole" if self.fused else "not fused"
        yield f"{folder}: {state}"
        yield from self._finding_lines()
        if self.marker and self.marker.is_newer:
            yield f"  {FILE_NAME} is {self.marker.schema}, newer than this fuselora: it may say more"
        if self.note:
            yield f"  {self.note}"
        for record in self.marker.loras if self.marker else ():
            yield f"  holds {record.text}"
        for outcome in self.loras:
            yield f"  {outcome.path}: {self._answer(outcome)}"
        if self.already_fused:
            names = ", ".join(str(outcome.path) for outcome in self.loras if outcome.records)
            yield f"{folder}: no, fusing {names} again would apply it twice; serve without it"

    def _finding_lines(self) -> Iterator[str]:
        for finding in self.findings[:SHOWN_FINDINGS]:
            yield f"  {finding.path}: {finding.message}"
        if len(self.findings) > SHOWN_FINDINGS:
            yield f"  ... and {len(self.findings) - SHOWN_FINDINGS} more (--json lists them)"
        for hint in dict.fromkeys(finding.hint for finding in self.findings):
            yield f"  hint: {hint}"

    def _answer(self, outcome: LoraOutcome) -> str:
        if self.marker is None:
            return f"nobody can tell without a sound {FILE_NAME}"
        if outcome.records:
            return f"fused already, {_places(outcome.records)}"
        policy = ", ".join(f"{name} {_policy_text(self.marker.policy[name])}" for name in POLICY)
        idle = f"is listed, {_places(outcome.idle)}, and nothing of it was added" if outcome.idle else None
        return f"{idle or 'not in it, tensor for tensor'}; the policy for other LoRAs: {policy}"

    def document(self) -> dict[str, object]:
        """The report as JSON data; of a LoRA asked about, both lists are null where nobody knows."""
        marker = self.marker
        return {
            "ok": self.ok,
            "fused": self.fused,
            "whole": self.whole,
            "schema": marker and marker.schema,
            "fingerprint": marker and marker.fingerprint,
            "artifact": marker and marker.artifact,
            "artifact_on_disk": self.artifact,
            "note": self.note,
            "findings": [finding.document() for finding in self.findings],
            "holds": [_record_document(record) for record in marker.loras] if marker else [],
            "policy": marker and dict(marker.policy),
            "loras": [self._outcome_document(outcome) for outcome in self.loras],
        }

    def _outcome_document(self, outcome: LoraOutcome) -> dict[str, object]:
        unknown = self.marker is None
        return {
            "path": str(outcome.path),
            "content_sha256": outcome.content_sha256,
            "already_fused": None if unknown else [_record_document(record) for record in outcome.records],
            "nothing_added": None if unknown else [_record_document(record) for record in outcome.idle],
        }


def _places(records: tuple[LoraRecord, ...]) -> str:
    return ", ".join(dict.fromkeys(f"on {record.component} as {record.name}" for record in records))


def _policy_text(value: object) -> str:
    return value if isinstance(value, str) and value in POLICY_VALUES else short(value)


def _record_document(record: LoraRecord) -> dict[str, object]:
    return {
        "name": record.name,
        "component": record.component,
        "strength": record.strength,
        "blocks": [{"glob": glob, "strength": factor} for glob, factor in record.blocks],
        "content_sha256": record.content_sha256,
    }
