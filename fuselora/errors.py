"""Everything fuselora can refuse or fail with: one tree, facts as attributes, and a hint.

Standard library only. Nothing here prints; the command line decides how an error looks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, TypeVar

if TYPE_CHECKING:
    from pathlib import Path

Error = TypeVar("Error", bound="FuseloraError")


class FuseloraError(Exception):
    """Base of all expected failures.

    ``message`` says what is wrong and names the file and tensor; ``hint`` says what to do about it;
    ``facts`` holds the same as data (``path``, ``tensor``, sizes in bytes ...) for ``--json``. A message
    may be given as several lines; any other line end in it comes from a name.
    """

    exit_code: ClassVar[int] = 1
    code: ClassVar[str] = "error"

    def __init__(self, message: str | Sequence[str], *, hint: str | None = None, **facts: object) -> None:
        self._lines = () if isinstance(message, str) else tuple(message)
        self.message = message if isinstance(message, str) else "\n".join(message)
        super().__init__(self.message)
        self.hint = hint
        self.facts: Mapping[str, object] = facts

    @classmethod
    def about(cls: type[Error], path: Path, what: str, *, hint: str | None = None, **facts: object) -> Error:
        """An error whose message begins with a file or folder, which is the fact ``path``."""
        return cls(f"{path}: {what}", hint=hint, path=str(path), **facts)

    @property
    def lines(self) -> tuple[str, ...]:
        """The message, each line for itself."""
        return self._lines or (self.message,)

    def document(self) -> dict[str, object]:
        """The error as JSON data, ``{"error": ...}``."""
        own = {"code": self.code, "message": self.message, "hint": self.hint}
        return {"error": {**own, **{name: self.facts[name] for name in self.facts if name not in own}}}


class UsageError(FuseloraError):
    """The command line or the arguments of a library call make no sense."""

    exit_code = 2
    code = "usage"


class InputError(FuseloraError):
    """A file or folder that was given is not what it has to be."""

    code = "input"


class FormatError(InputError):
    """A file is not valid safetensors or JSON: broken, truncated, or something else entirely."""

    code = "format"


class CheckpointError(InputError):
    """A base or a LoRA whose index, shards and configuration do not fit together."""

    code = "checkpoint"


class HubError(InputError):
    """A Hub repository or file that is missing, gated or out of reach."""

    code = "hub"


class ReadError(InputError):
    """The disk or network failed while an input was read; a rerun may go on from there."""

    code = "read"


class ChangedError(InputError):
    """An input file was replaced or edited while it was being read."""

    code = "changed"


class MarkerError(InputError):
    """A ``fused.json`` that is broken, of an unknown major version, or at odds with its folder."""

    code = "marker"


class OutputError(FuseloraError):
    """OUT cannot be written: it exists, is not ours, or the disk refused."""

    code = "output"


class ResourceError(FuseloraError):
    """The machine gave no more memory or threads."""

    code = "resources"


class InstallationError(FuseloraError):
    """A library that fuselora needs is not installed, or cannot be loaded."""

    code = "installation"


class NumericError(FuseloraError):
    """A fused tensor came out non-finite or overflowed its dtype."""

    code = "numeric"


class AlreadyFused(FuseloraError):
    """A server was told to add a LoRA to a checkpoint that holds it already, or whose marker forbids it."""

    code = "already_fused"


@dataclass(frozen=True, slots=True)
class Fault:
    """One reason to refuse a run, found while checking; many are raised together as ``Refused``.

    ``kind`` groups faults of one sort (``"unmatched"``, ``"shape"``, ``"alpha"`` ...); ``path`` and
    ``key`` name the file and the tensor or module; ``hint`` is said once per kind.
    """

    kind: str
    message: str
    path: str | None = None
    key: str | None = None
    hint: str | None = None
    facts: Mapping[str, object] = field(default_factory=dict)

    def document(self) -> dict[str, object]:
        """The fault as JSON data."""
        own = {"kind": self.kind, "message": self.message, "path": self.path, "key": self.key}
        return {**own, **self.facts}


@dataclass(frozen=True, slots=True)
class Notice:
    """Something the user should know that refuses nothing; it is printed and kept in the marker."""

    code: str
    message: str
    facts: Mapping[str, object] = field(default_factory=dict)

    def document(self) -> dict[str, object]:
        """The notice as JSON data, in a marker too."""
        return {"code": self.code, "message": self.message, **self.facts}


class Refused(FuseloraError):
    """The inputs do not fit together; nothing was written. ``faults`` lists every reason found, once."""

    code = "refused"

    def __init__(self, faults: Iterable[Fault]) -> None:
        # One LoRA on two experts is at fault in the same words for each.
        self.faults = tuple({(f.kind, f.path, f.message): f for f in faults}.values())
        hints = (SENTENCES.split(fault.hint) for fault in self.faults if fault.hint)
        said = dict.fromkeys(sentence for hint in hints for sentence in hint)
        super().__init__(_grouped(self.faults), hint=" ".join(said) or None)

    def document(self) -> dict[str, object]:
        """The error as JSON data, ``{"error": ...}``, with all its faults."""
        own = {"code": self.code, "message": self.message, "hint": self.hint}
        return {"error": {**own, "faults": [fault.document() for fault in self.faults]}}


SHOWN = 12
SENTENCES = re.compile(r"(?<=[.:]) (?=[A-Z])")  # in hints, which are made of whole ones


def _grouped(faults: tuple[Fault, ...]) -> list[str]:
    """All faults, those of one kind and file under one another, in the order found."""
    groups: dict[tuple[str, str | None], list[Fault]] = {}
    for fault in faults:
        groups.setdefault((fault.kind, fault.path), []).append(fault)
    return [line for (_, path), members in groups.items() for line in _group_lines(path, members)]


def _group_lines(path: str | None, members: list[Fault]) -> list[str]:
    where = f"{path}: " if path else ""
    shown = [fault.message for fault in members[:SHOWN]]
    if len(members) > len(shown):
        shown.append(f"... and {len(members) - len(shown)} more of this kind")
    if len(shown) == 1:
        return [where + shown[0]]
    return [f"{where}{len(members)} faults:", *(f"  - {text}" for text in shown)]
