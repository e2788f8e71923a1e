"""Names and texts from files as they may be shown, in a terminal or a log. Standard library only."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

SHORT_CHARS = 80
# Control characters, line ends but ``\n``, and what turns the direction of the text around it.
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def shown(text: object) -> str:
    """``text`` with escapes for control characters and lone surrogates; it keeps its line ends."""
    plain = _CONTROL.sub(lambda found: ascii(found[0])[1:-1], str(text))
    return plain.encode("utf-8", "backslashreplace").decode("utf-8")


def one_line(text: object) -> str:
    """``shown``, with escapes for line ends too: in a name they would forge lines."""
    return shown(text).replace("\n", "\\n")


def short(value: object) -> str:
    """A value from a file as Python writes it: ASCII, no control characters, 80 characters at most."""
    try:
        text = ascii(value)
    except (RecursionError, ValueError):  # nested deeper than can be written, or a number too long for it
        text = f"a {type(value).__name__} that cannot be written"
    return text if len(text) <= SHORT_CHARS else text[: SHORT_CHARS - 3] + "..."


def json_text(document: Mapping[str, object]) -> str:
    """JSON in ASCII with a final newline, in which no control character stands as it is."""
    return json.dumps(document, indent=2).replace("\x7f", "\\u007f") + "\n"
