"""Whether a server may load a fused checkpoint with the LoRAs it was given. Standard library only.

An engine's plugin says where the checkpoint lies and which LoRAs are asked for at start-up. What is
fused where comes from the marker, and LoRAs are compared by content, so a renamed or re-saved copy counts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fuselora.errors import AlreadyFused, InputError, MarkerError
from fuselora.fields import short
from fuselora.header import read_header
from fuselora.integrity import check, lora_outcomes
from fuselora.marker import FILE_NAME, FINGERPRINT_KEY, LoraRecord, Marker, read_marker

Policy = Literal["distill_lora", "dynamic_lora"]
DEFAULTS: Mapping[Policy, str] = {"distill_lora": "refuse", "dynamic_lora": "allow"}
# What vLLM-Omni tells a FastH3 release by: it goes into the weights whatever the LoRA backend.
FAST_H3_FORMAT, FAST_H3_MODEL = "fastvideo-lora-v2", ("fastvideo/", "fasth3")
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
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
class _Compared:
    """A LoRA, the marker's entries with its content, and why it could not be compared, if so."""

    lora: AskedLora
    records: tuple[LoraRecord, ...] = ()
    unknown: str | None = None


def find_marker(path: Path) -> Marker | None:
    """The marker of a folder, or the one that lists ``path``, a file or component in a fused folder.

    None if it has none. Raises ``MarkerError`` if the marker is broken or the folder is unfinished.
    """
    path = Path(os.path.abspath(path))  # noqa: PTH100  # not resolve(): the Hub's cache is made of links
    marker = read_marker(path) if path.is_dir() else None
    if marker is None and os.path.lexists(path.parent / FILE_NAME):
        around = read_marker(path.parent)
        if around is not None and any(_within(path.name, record.path) for record in around.weight_files):
            return around
    return marker


def refuse_lost_marker(name: str, path: Path) -> None:
    """Raises ``MarkerError`` if shards of an unmarked checkpoint say that they hold fused tensors."""
    lost = _lost(path)
    if lost is not None:
        what = "Which LoRAs they hold is unknown, so none can be added"
        raise MarkerError(f"{_shown(name)}: {lost}. {what}.", hint=LOST_HINT, path=name)


def decide(marker: Marker, start: StartUp) -> Admission:
    """Whether a server may load what ``marker`` is about as ``start`` asks.

    Raises ``AlreadyFused`` for a LoRA that is in it, and for another one where the marker's ``policy``
    does not let it be added; a policy that is not known refuses.
    """
    if not start.loras:
        return Admission(f"{_held(marker, start)}; no LoRA is added")
    compared = [_compare(marker, lora) for lora in start.loras]
    if any(one.records for one in compared):
        raise _refusal_of_listed(start, compared)
    fuses = start.fuses or any(_is_fast_h3(lora) for lora in start.loras)
    return _by_policy(marker, start, compared, "distill_lora" if fuses else "dynamic_lora")


def _within(name: str, record: str) -> bool:
    return record == name or record.startswith(f"{name}/")


def _lost(path: Path) -> str | None:
    """What shows that a checkpoint without a marker is fused."""
    if path.is_dir():
        report = check(path)
        found = report.findings[0]
        return f"{found.path} {found.message}" if report.fused else None
    try:
        carries = FINGERPRINT_KEY in read_header(path).metadata
    except InputError:
        return None
    return f"it carries the fingerprint of a fusion, and no {FILE_NAME} lists it" if carries else None


def _compare(marker: Marker, lora: AskedLora) -> _Compared:
    if not lora.files:
        return _Compared(lora, unknown="is no local safetensors file")
    try:
        outcomes = lora_outcomes(marker, lora.files)
    except InputError as error:
        return _Compared(lora, unknown=error.message)
    return _Compared(lora, tuple(record for outcome in outcomes for record in outcome.records))


def _is_fast_h3(lora: AskedLora) -> bool:
    start, within = FAST_H3_MODEL
    for path in lora.files:
        try:
            metadata = read_header(path).metadata
        except InputError:
            continue
        model = metadata.get("finetuned_model", "").lower()
        if metadata.get("format") == FAST_H3_FORMAT and model.startswith(start) and within in model:
            return True
    return False


def _refusal_of_listed(start: StartUp, compared: Sequence[_Compared]) -> AlreadyFused:
    lines = [f"  - {line}" for one in compared for line in _compared_lines(one)]
    what = f"is fused already; {start.options} would add a LoRA that it holds a second time:"
    return _refusal(start, what, *lines)


def _compared_lines(one: _Compared) -> list[str]:
    name = _shown(one.lora.name)
    if one.records:
        return [f"{name} is {_record(record)}" for record in one.records]
    return [f"{name} is not in it" if one.unknown is None else f"{name} was not compared"]


def _by_policy(marker: Marker, start: StartUp, compared: Sequence[_Compared], policy: Policy) -> Admission:
    """What the marker says about LoRAs that it does not list."""
    names = ", ".join(_shown(lora.name) for lora in start.loras)
    value = _policy(marker, policy)
    if value not in ("allow", "warn"):
        known = "" if value == "refuse" else ", which this fuselora does not know"
        what = f"is fused already, and {policy} in the policy of its marker is {short(value)}{known}:"
        raise _refusal(start, what, f"  - {start.options} would add {names}")
    line = f"{_held(marker, start)}; its policy lets {names} be added"
    unknown = [f"{_shown(one.lora.name)} was not compared: {one.unknown}" for one in compared if one.unknown]
    return Admission("; ".join([line, *unknown]), warning=bool(unknown) or value == "warn")


def _policy(marker: Marker, policy: Policy) -> object:
    values = marker.raw.get("policy", {})
    return values.get(policy, DEFAULTS[policy]) if isinstance(values, Mapping) else values


def _refusal(start: StartUp, what: str, *lines: str) -> AlreadyFused:
    """How to serve instead is part of the message: of an error, engines print no more than that."""
    name = _shown(start.name)
    instead = f"Serve it as it is: leave out {start.options}."
    hint = f"To add another LoRA, fuse it offline: fuselora merge --stack --base {name} --lora FILE --out NEW"
    message = "\n".join([f"{name}: {what}", *lines, instead])
    return AlreadyFused(message, hint=hint, path=start.name, loras=[lora.name for lora in start.loras])


def _held(marker: Marker, start: StartUp) -> str:
    records = "; ".join(_record(record) for record in marker.loras)
    return f"{_shown(start.name)} is fused: it holds {records}"


def _record(record: LoraRecord) -> str:
    return _shown(f"{record.name} on {record.component}, strength {record.strength:g}")


def _shown(text: str) -> str:
    """Names come from files and users: control characters would forge lines in a log."""
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)
