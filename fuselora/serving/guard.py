"""Whether a server may load a fused checkpoint with the LoRAs it was given. Standard library only.

An engine's plugin says where the checkpoint lies and which LoRAs are asked for at start-up. What is
fused where comes from the marker, and LoRAs are compared by content, so a renamed or re-saved copy counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fuselora.check.folder import lora_outcomes
from fuselora.errors import AlreadyFused, InputError, MarkerError
from fuselora.escape import one_line, short
from fuselora.header import read_header
from fuselora.marker import FILE_NAME, FINGERPRINT_KEY, LoraRecord, Marker, read_marker
from fuselora.reading import named_path, real_path

Policy = Literal["distill_lora", "dynamic_lora"]
LOST_HINT = "Copy the whole folder again, fused.json included, or serve it without a LoRA."


@dataclass(frozen=True, slots=True)
class AskedLora:
    """A LoRA as the server's user named it, and the local files that the engine would read for it."""

    name: str
    files: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class StartUp:
    """What a server was asked to load, in its user's words.

    ``fuses`` says that the engine adds the LoRAs to the weights, and does not keep them beside;
    ``options`` are those to leave out to have no LoRA.
    """

    name: str
    loras: tuple[AskedLora, ...] = ()
    fuses: bool = False
    options: str = "the LoRA"


@dataclass(frozen=True, slots=True)
class Admission:
    """The server may go on, and logs ``line``."""

    line: str
    warning: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """What says that a checkpoint is fused: markers, and in words fused shards that none of them lists."""

    markers: tuple[Marker, ...] = ()
    lost: str | None = None


@dataclass(frozen=True, slots=True)
class _Compared:
    """A LoRA, the marker's entries with its content, and why some of it could not be compared, if so."""

    lora: AskedLora
    records: tuple[LoraRecord, ...] = ()
    unknown: str | None = None


def look(path: Path) -> Found:
    """What a checkpoint is fused with: a folder, or a file or component in one, links followed.

    Its own marker; else that of the fused folder which lists it; else those of its components. Raises
    ``MarkerError`` if one of these folders is unfinished or its marker broken; markers that are not its
    own matter only where they list it, or its shards say that they are fused.
    """
    own = (read_marker(path) if path.is_dir() else None) or _around(path)
    if own is not None:
        return Found((own,))
    if not path.is_dir():
        carries = f"it carries the fingerprint of a fusion, and no {FILE_NAME} lists it"
        return Found(lost=carries if _carries(path) else None)
    folders = sorted({shard.parent for shard in path.glob("*/*.safetensors")})
    parts = {part: _marker_of(part) for part in folders}
    markers = {marker.fingerprint: marker for marker in parts.values() if marker}
    return Found(tuple(markers.values()), _lost(path, [part for part in folders if parts[part] is None]))


def decide_lost(name: str, lost: str, *, adds: bool) -> Admission:
    """A warning about fused shards without a marker; ``adds`` says that a LoRA is asked for.

    Raises ``MarkerError`` if one is.
    """
    if adds:
        what = "Which LoRAs they hold is unknown, so none can be added"
        raise MarkerError(one_line(f"{name}: {lost}. {what}."), hint=LOST_HINT, path=name)
    return Admission(one_line(f"{name}: {lost}. No LoRA is asked for, so it is served."), warning=True)


def decide(marker: Marker, start: StartUp) -> Admission:
    """Whether a server may load what ``marker`` is about as ``start`` asks.

    Raises ``AlreadyFused`` for a LoRA that is in it, and for another one where the marker's ``policy``
    does not let it be added; a policy that is not known refuses.
    """
    if not start.loras:
        return Admission(one_line(f"{_held(marker, start)}; no LoRA is added"))
    compared = [_compare(marker, lora) for lora in start.loras]
    if any(one.records for one in compared):
        raise _refusal_of_listed(start, compared)
    return _by_policy(marker, start, compared, "distill_lora" if start.fuses else "dynamic_lora")


def _lost(path: Path, parts: Sequence[Path]) -> str | None:
    """What shows that an unmarked folder, or one of its parts without a marker, is fused."""
    carrier = next((shard for folder in (path, *parts) for shard in _carriers(folder)), None)
    if carrier is None:
        return None
    return f"{FILE_NAME} was removed: {carrier.relative_to(path)} carries the fingerprint of a fusion"


def _marker_of(part: Path) -> Marker | None:
    return _trusted(part, part) or _around(part)


def _around(path: Path) -> Marker | None:
    """The marker of the folder that ``path`` lies in, by its name or where its links lead, if it lists it."""
    for place in dict.fromkeys((named_path(path), real_path(path))):
        marker = _trusted(place.parent, path)
        if marker and any(_within(place.name, record.path) for record in marker.weight_files):
            return marker
    return None


def _trusted(home: Path, part: Path) -> Marker | None:
    """The marker of ``home``; none if it is no marker of ours and nothing says that ``part`` is fused."""
    try:
        return read_marker(home)
    except MarkerError as error:
        shards = _carriers(part) if part.is_dir() else filter(_carries, [part])
        if error.facts.get("reason") == "unfinished" or any(True for _ in shards):
            raise
        return None


def _within(name: str, record: str) -> bool:
    return record == name or record.startswith(f"{name}/")


def _carriers(folder: Path) -> Iterator[Path]:
    """The shards right in a folder that say that they hold fused tensors."""
    return filter(_carries, sorted(folder.glob("*.safetensors")))


def _carries(path: Path) -> bool:
    try:
        return FINGERPRINT_KEY in read_header(path).metadata
    except InputError:
        return False


def _compare(marker: Marker, lora: AskedLora) -> _Compared:
    """File by file: one that cannot be read hides none of the others."""
    if not lora.files:
        return _Compared(lora, unknown="is no local safetensors file")
    found = [_compare_file(marker, lora, file) for file in lora.files]
    records = tuple(record for one in found for record in one.records)
    return _Compared(lora, records, next((one.unknown for one in found if one.unknown), None))


def _compare_file(marker: Marker, lora: AskedLora, file: Path) -> _Compared:
    try:
        (outcome,) = lora_outcomes(marker, [file])
    except InputError as error:
        return _Compared(lora, unknown=error.message)
    return _Compared(lora, outcome.records)


def _refusal_of_listed(start: StartUp, compared: Sequence[_Compared]) -> AlreadyFused:
    lines = [f"  - {line}" for one in compared for line in _compared_lines(one)]
    what = f"is fused already; {start.options} would add a LoRA that it holds a second time:"
    return _refusal(start, what, *lines)


def _compared_lines(one: _Compared) -> list[str]:
    name = one.lora.name
    if one.records:
        return [f"{name} is {record.text}" for record in one.records]
    return [f"{name} is not in it" if one.unknown is None else f"{name} was not compared"]


def _by_policy(marker: Marker, start: StartUp, compared: Sequence[_Compared], policy: Policy) -> Admission:
    """What the marker says about LoRAs that it does not list."""
    names = ", ".join(lora.name for lora in start.loras)
    value = marker.policy[policy]
    if value not in ("allow", "warn"):
        known = "" if value == "refuse" else ", which this fuselora does not know"
        what = f"is fused already, and {policy} in the policy of its marker is {short(value)}{known}:"
        raise _refusal(start, what, f"  - {start.options} would add {names}")
    line = f"{_held(marker, start)}; its policy lets {names} be added"
    unknown = [f"{one.lora.name} was not compared: {one.unknown}" for one in compared if one.unknown]
    return Admission(one_line("; ".join([line, *unknown])), warning=bool(unknown) or value == "warn")


def _refusal(start: StartUp, what: str, *lines: str) -> AlreadyFused:
    """How to serve instead is part of the message: of an error, engines print no more than that."""
    name = one_line(start.name)
    instead = f"Serve it as it is: leave out {start.options}."
    hint = f"To add another LoRA, fuse it offline: fuselora merge --stack --base {name} --lora FILE --out NEW"
    message = "\n".join(map(one_line, (f"{name}: {what}", *lines, instead)))
    return AlreadyFused(message, hint=hint, path=start.name, loras=[lora.name for lora in start.loras])


def _held(marker: Marker, start: StartUp) -> str:
    return f"{start.name} is fused: it holds {'; '.join(record.text for record in marker.loras)}"
