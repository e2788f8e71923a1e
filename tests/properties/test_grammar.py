"""A key made of a module, a part and a style is read back as these."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuselora.kinds import KINDS, Suffix
from fuselora.lora.grammar import (
    COMPONENT_PREFIXES,
    FLAT_PREFIXES,
    MODIFIERS,
    PREFIXES,
    SUFFIXES,
    ParsedKey,
    parse_key,
    spellings,
)
from tests.properties.bounds import examples

WORDS = (
    "blocks",
    "transformer_blocks",
    "layers",
    "attn",
    "to_q",
    "0",
    "12",
    "ffn",
    "net",
    "proj",
    "norm1",
    "linear_in",
)
NAMES = st.sampled_from(["default", "default_0", "high-noise", "v1"])
MODULES = st.lists(st.sampled_from(WORDS), min_size=1, max_size=5).map(".".join)
DOTTED = ("", *PREFIXES, *COMPONENT_PREFIXES)
BEHIND = re.compile(r"\(\?:(?:\(\?<=[^)]*\)\|?)+\)")
ROWS = [pytest.param(row, id=f"{row.dialect} {row.part} {row.pattern}") for row in SUFFIXES]


@st.composite
def endings(draw: st.DrawFn, row: Suffix) -> tuple[str, str]:
    """A spelling of a row's suffix, and the adapter name in it."""
    name = draw(NAMES)
    plain = re.sub(r"\(\?P<name>[^)]*\)", "NAME", BEHIND.sub("", row.pattern))
    text = draw(st.from_regex(plain, fullmatch=True).filter(lambda found: "\n" not in found))
    return text.replace("NAME", name), name if "NAME" in text else ""


def module_for(row: Suffix, module: str) -> str:
    """A processor's keys end in what its layer is called."""
    return f"{module}.processor.to_q_lora" if "(?<=" in row.pattern else module


@pytest.mark.parametrize("row", ROWS)
@examples(25)
@given(data=st.data(), prefix=st.sampled_from(DOTTED), module=MODULES)
def test_a_key_of_every_row_comes_back(row: Suffix, data: st.DataObject, prefix: str, module: str) -> None:
    ending, name = data.draw(endings(row))
    whole = prefix + module_for(row, module)
    found = parse_key(whole + ending)
    assert found == ParsedKey(whole, row.part, row.dialect, name) or _same_with_another_row(
        found, whole, row, name
    )


def _same_with_another_row(found: ParsedKey | None, module: str, row: Suffix, name: str) -> bool:
    """Two rows may spell one key, if they mean the same by it."""
    return found is not None and (found.module, found.part, found.name) == (module, row.part, name)


@examples(100)
@given(prefix=st.sampled_from(DOTTED), module=MODULES)
def test_a_prefix_comes_off_and_names_its_component(prefix: str, module: str) -> None:
    readings = spellings(prefix + module)
    assert module in [reading.name for reading in readings if not reading.flat]
    assert not prefix or readings[-1].component == COMPONENT_PREFIXES.get(prefix)


@examples(100)
@given(prefix=st.sampled_from([*FLAT_PREFIXES]), module=MODULES)
def test_a_flat_name_is_kept_flat(prefix: str, module: str) -> None:
    flat = module.replace(".", "_")
    found = [reading for reading in spellings(prefix + flat) if reading.flat]
    assert [(reading.name, reading.component) for reading in found] == [(flat, FLAT_PREFIXES[prefix])]


def test_every_part_of_every_kind_has_a_spelling() -> None:
    spelled = {row.part for row in SUFFIXES}
    assert {part for kind in KINDS for part in kind.parts} - {row.part for row in MODIFIERS} <= spelled
