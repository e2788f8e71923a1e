"""Names from files, made harmless for terminals and logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuselora.escape import one_line, shown

NASTY = "evil\x1b[2J\x07\x00\x9b31m\u202egnp.\n\terror: x"


def test_shown_keeps_line_ends_and_one_line_does_not() -> None:
    assert shown(NASTY) == "evil\\x1b[2J\\x07\\x00\\x9b31m\\u202egnp.\n\\terror: x"
    assert one_line(NASTY) == "evil\\x1b[2J\\x07\\x00\\x9b31m\\u202egnp.\\n\\terror: x"


def test_text_stays_as_it_is_and_lone_surrogates_become_escapes() -> None:
    assert shown("ü 中 é \\x1b") == "ü 中 é \\x1b"
    assert shown("\udcff") == "\\udcff"
    assert shown(Path("a\x7fb")) == "a\\x7fb"


@pytest.mark.parametrize("end", [*"\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"])
def test_whatever_ends_a_line_is_escaped(end: str) -> None:
    assert one_line(f"a{end}b").splitlines() == [f"a{ascii(end)[1:-1]}b"]


@pytest.mark.parametrize(
    "mark", [*map(chr, (0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)))]
)
def test_whatever_turns_the_direction_is_escaped(mark: str) -> None:
    assert shown(f"a{mark}b") == f"a{ascii(mark)[1:-1]}b"


def test_escaping_twice_changes_nothing() -> None:
    assert one_line(one_line(NASTY)) == one_line(NASTY)
