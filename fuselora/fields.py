"""The fields of a marker's JSON, each read with its type checked. Standard library only."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from fuselora.errors import MarkerError
from fuselora.escape import short
from fuselora.jsonfile import MAX_DEPTH, exact_json, is_crowded, is_nested

if TYPE_CHECKING:
    from collections.abc import Mapping

HINT = "A marker is not edited by hand: fuse again, or copy the whole folder again."


@dataclass(frozen=True, slots=True)
class Form:
    """What a text field must look like, as a pattern and in words."""

    pattern: re.Pattern[str]
    words: str


TEXT = Form(re.compile(r".+", re.DOTALL), "a text")
HEX = Form(re.compile(r"[0-9a-f]{64}"), "64 hex digits")
TAGGED = Form(re.compile(r"sha256:[0-9a-f]{64}"), "'sha256:' and 64 hex digits")
# A drive, backslashes, control characters, and the surrogates that stand for no byte of a file name.
NOT_IN_PATHS = re.compile(r"^[A-Za-z]:|[\\\x00-\x1f\x7f-\x9f\ud800-\udc7f\udd00-\udfff]")


@dataclass(frozen=True, slots=True)
class Fields:
    """One JSON object, and where it stands in its file: ``components.transformer.files[0]``.

    Every method reads one field and raises ``MarkerError``, naming it, if it is not what it has to be.
    """

    values: Mapping[str, object]
    source: str
    place: str = ""

    def text(self, name: str, form: Form = TEXT) -> str:
        value = self.values.get(name)
        if not isinstance(value, str) or not form.pattern.fullmatch(value):
            self.refuse(name, form.words)
        return value

    def text_or_none(self, name: str, form: Form = TEXT) -> str | None:
        return None if self.values.get(name) is None else self.text(name, form)

    def path(self, name: str) -> str:
        """A relative path with ``/``, spelled the one way that stays inside the folder."""
        value = self.text(name)
        parts = set(value.split("/"))
        if NOT_IN_PATHS.search(value) or parts & {"", ".", ".."}:
            self.refuse(name, "a plain relative path inside the folder", reason="path")
        return value

    def count(self, name: str) -> int:
        value = self.values.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
            self.refuse(name, "a whole number from 0")
        return value

    def number(self, name: str) -> float:
        value = self.values.get(name)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            self.refuse(name, "a number")
        # JSON spells infinity as 1e999, and integers too large for a float.
        if not abs(value) <= sys.float_info.max:
            self.refuse(name, "finite")
        return float(value)

    def items(self, name: str, *, at_least: int = 0) -> list[Fields]:
        """A list of objects."""
        value = self.values.get(name)
        if not isinstance(value, list) or len(value) < at_least:
            self.refuse(name, f"a list of {at_least} or more objects")
        return [self._child(f"{name}[{at}]", item) for at, item in enumerate(value)]

    def named(self, name: str) -> dict[str, Fields]:
        """An object of one or more objects."""
        value = self.values.get(name)
        if not isinstance(value, dict) or not value:
            self.refuse(name, "an object with one or more entries")
        return {key: self._child(f"{name}.{short(key)[1:-1]}", item) for key, item in value.items()}

    def refuse(self, name: str, words: str, *, reason: str | None = None) -> NoReturn:
        value = self.values.get(name)
        what = f"must be {words}, not {short(value)}" if name in self.values else "is missing"
        self.fail(name, what, reason=reason)

    def fail(self, name: str, what: str, hint: str = HINT, *, reason: str | None = None) -> NoReturn:
        place = self._at(name)
        facts = {"field": place, "reason": reason} if reason else {"field": place}
        broken(self.source, f"{place} {what}", hint, **facts)

    def _at(self, name: str) -> str:
        return f"{self.place}.{name}" if self.place else name

    def _child(self, name: str, item: object) -> Fields:
        if not isinstance(item, dict):
            self.fail(name, f"must be an object, not {short(item)}")
        return Fields(item, self.source, self._at(name))


def parse(text: bytes, source: str) -> Fields:
    """The object that ``text`` holds: JSON to the letter, in UTF-8, no name twice. Raises ``MarkerError``."""
    if is_crowded(text):
        broken(source, "is crowded: it holds more values than any marker does")
    try:
        document = exact_json(text)
    except (ValueError, RecursionError) as error:
        broken(source, f"is not valid JSON in UTF-8: {error}")
    if not isinstance(document, dict):
        broken(source, "is not a JSON object")
    if is_nested(document):
        broken(source, f"is nested deeper than {MAX_DEPTH}")
    return Fields(document, source)


def broken(source: str, what: str, hint: str = HINT, **facts: object) -> NoReturn:
    """Raise ``MarkerError`` about the file ``source``."""
    raise MarkerError(f"{source}: {what}", hint=hint, path=source, **facts)
