"""Names are looked up among patterns by what they are without their numbers."""

from __future__ import annotations

import re

import pytest

from fuselora.families import FAMILIES, Family
from fuselora.families.family import forms_of
from fuselora.families.pattern import (
    Patterns,
    compiled,
    filled,
    flat_form_of,
    form_of,
    unnumbered_flat,
)

PATTERNS = ("a.{n}.b", "a.0.b", "a.{n}.b.0", "in.{rest}", "in.4.{rest}", "in.5.x")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("a.7.b", (0, ("7",))),
        ("a.0.b", (0, ("0",))),
        ("a.7.b.0", (2, ("7",))),
        ("a.7.b.1", None),
        ("a.b.b", None),
        ("a.1234567890.b", None),
        ("in.4.x", (3, ("4.x",))),
        ("in.5.x", (3, ("5.x",))),
        ("in.", None),
        ("a.{n}.b", None),
        ("a..b", None),
        ("xa.7.b", None),
        ("", None),
    ],
)
def test_the_first_pattern_that_fits_the_whole_name(name: str, found: object) -> None:
    assert Patterns(PATTERNS).find(name, form_of(name)) == found


def test_a_flattened_name() -> None:
    patterns = Patterns([pattern.replace(".", "_") for pattern in PATTERNS], unnumbered_flat)
    assert patterns.find("a_12_b_0", flat_form_of("a_12_b_0")) == (2, ("12",))
    assert patterns.find("in_4_x_y", flat_form_of("in_4_x_y")) == (3, ("4_x_y",))
    assert patterns.find("a_{n}_b", flat_form_of("a_{n}_b")) is None


def test_the_blocks_of_a_model_have_one_form() -> None:
    """Each family is asked about forms: as often of a model of thousands of blocks as of a small one."""
    of_one, of_many = (forms_of(f"blocks.{b}.ffn.{n}.weight" for b in range(9, 9 + n_blocks) for n in (0, 2))
                       for n_blocks in (1, 4000))  # fmt: skip
    assert of_one.keys() == of_many.keys()
    assert (len(of_one), sum(of_many.values())) == (1, 8000)


def rows_of(family: Family) -> list[str]:
    rows = (row for renames in family.layouts.values() for row in renames.rows)
    return [pattern for row in rows for pattern in (row.theirs, *row.ours)]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_row_of_every_family_is_found_as_a_search_through_all_finds_it(family: Family) -> None:
    for renames in family.layouts.values():
        theirs = [row.theirs for row in renames.rows]
        patterns = Patterns(theirs)
        for pattern in theirs:
            values = ("3", "17", "5")[: pattern.count("{")]
            name = filled(pattern, values)
            first = next(n for n, other in enumerate(theirs) if compiled(other).fullmatch(name))
            found = patterns.find(name, form_of(name))
            assert found is not None
            assert found[0] == first


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_numbers_and_rests_of_rows_are_whole_parts_of_a_name(family: Family) -> None:
    """Else a name without its numbers is not the pattern without them."""
    for pattern in rows_of(family):
        assert all(re.fullmatch(r"\{n\}|\{rest\}|[^{}]*", part) for part in pattern.split("."))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_braces_in_a_name_are_no_pattern(family: Family) -> None:
    numbered = [pattern for pattern in (*family.names, *rows_of(family)) if "{n}" in pattern]
    assert numbered
    assert family.share(numbered) == family.share(["{n}", "blocks.{rest}", "(.+)", "[0-9]"]) == 0
    for pattern in (pattern for pattern in numbered if "{rest}" not in pattern):
        for layout in family.all_layouts:
            assert family.canonical_name(pattern, layout) == pattern
            assert family.spelled_in(pattern, layout) == pattern
