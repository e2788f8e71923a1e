"""JSON out of files: small side files (an index, a config), and what none may be. Standard library only."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NoReturn

from fuselora.errors import FormatError
from fuselora.escape import short
from fuselora.reading import is_regular, start_of

if TYPE_CHECKING:
    from pathlib import Path

MAX_BYTES = 32 << 20  # an index of 250,000 tensors needs less
MAX_VALUES = 1_000_000  # of up to some 200 bytes each, once they are read
MAX_DEPTH = 64  # what is deeper may be read, and then not be compared, shown or written


def read_json(path: Path) -> dict[str, object]:
    """The JSON object in ``path``. Raises ``FormatError`` naming the file."""
    try:
        if not is_regular(path):
            raise FormatError(f"{path}: is not a regular file", path=str(path))
        raw = start_of(path, MAX_BYTES)
        if len(raw) > MAX_BYTES or is_crowded(raw):
            raise FormatError(f"{path}: is too long for a JSON side file", path=str(path))
        document = json.loads(raw)
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(f"{path}: cannot be read as JSON: {error}", path=str(path)) from error
    if not isinstance(document, dict):
        raise FormatError(f"{path}: is not a JSON object", path=str(path))
    if is_nested(document):
        raise FormatError(f"{path}: is nested deeper than {MAX_DEPTH}", path=str(path))
    return document


def object_in(text: str | bytes) -> dict[str, object] | None:
    """The JSON object that ``text`` is; None for anything else, and for what is nested or crowded."""
    try:
        raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        document = None if is_crowded(raw) else json.loads(raw.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) and not is_nested(document) else None


def exact_json(text: bytes) -> object:
    """JSON to the letter, in UTF-8: no name twice in an object, no NaN.

    Raises ``ValueError``, and ``RecursionError`` for what is nested too deep.
    """
    # json itself would take UTF-16, and UTF-8 that is not valid
    return json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)


def is_crowded(raw: bytes) -> bool:
    """Whether it may hold so many values that they would need far more memory than the text does."""
    return sum(map(raw.count, (b",", b"[", b"{"))) > MAX_VALUES


def is_nested(document: object) -> bool:
    """Whether lists and objects lie in one another over ``MAX_DEPTH`` deep."""
    level = [document]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return False
    return True


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the name {short(name)} appears twice")
            seen.add(name)
    return found


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _inside(value: object) -> list[object]:
    """The lists and objects directly in a list or an object."""
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [inner for inner in values if isinstance(inner, (dict, list))]
