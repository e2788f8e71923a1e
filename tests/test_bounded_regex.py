"""Patterns out of configurations mean what Python's ``re`` says, and never take for ever."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuselora.bounded_regex import MAX_CHARS, BadPattern, tail_of, whole

ATOMS = st.sampled_from(["a", "b", r"\.", ".", r"\d", "[ab]", "[^a]", r"\w", r"\b", "^", "$", "to_q"])
REPEATS = st.sampled_from(["", "", "", "*", "+", "?", "{2}", "{1,2}", "{,2}", "{2,}", "*?", "+?"])
PATTERNS = st.recursive(
    st.builds(str.__add__, ATOMS, st.just("")),
    lambda inner: st.one_of(
        st.builds(lambda one, other: one + other, inner, inner),
        st.builds(lambda one, other: f"(?:{one}|{other})", inner, inner),
        st.builds(lambda one, times: f"({one}){times}", inner, REPEATS),
        st.builds(lambda one, other: f"(?={one}){other}", inner, inner),
        st.builds(lambda one, other: f"(?!{one}){other}", inner, inner),
    ),
    max_leaves=8,
)
TEXTS = st.text(alphabet="ab.1_to q\n", max_size=10)


@settings(max_examples=400, deadline=None)
@given(PATTERNS, TEXTS)
def test_a_pattern_means_what_python_says(pattern: str, text: str) -> None:
    assert whole(pattern)(text) is (re.fullmatch(pattern, text) is not None)


@settings(max_examples=200, deadline=None)
@given(PATTERNS, TEXTS)
def test_of_a_tail_as_well(pattern: str, text: str) -> None:
    assert tail_of(pattern)(text) is (re.fullmatch(rf"(.*\.)?({pattern})", text) is not None)


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("blocks.0.attn1.to_q", "blocks.0.attn1.to_q", True),
        (r".*\.layers\.\d+\.to_(q|k)", "transformer.layers.12.to_k", True),
        (r".*\.layers\.\d+\.to_(q|k)", "transformer.layers.12.to_v", False),
        (r"(?!.*text).*attn.*", "blocks.0.attn1", True),
        (r"(?!.*text).*attn.*", "text.0.attn1", False),
    ],
)
def test_patterns_as_they_are_published(pattern: str, name: str, fits: bool) -> None:
    assert whole(pattern)(name) is fits


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*b", "(a*)*b", "(.*)*x", "(a|aa)+$", "(.*a){12}b"])
def test_what_python_would_never_end_with_ends(pattern: str) -> None:
    assert whole(pattern)("a" * 400 + "!") is False
    assert tail_of(pattern)("a" * 400 + "!") is False


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(", "no regular expression"),
        ("a{2,1}", "no regular expression"),
        ("*", "no regular expression"),
        (r"(a)\1", "does not match"),
        ("(?<=a)b+", "does not match"),
        ("(?i:a)+", "does not match"),
        ("a" * (MAX_CHARS + 1), "over 2000 characters"),
        ("(((a{90}){90}){90})", "too large"),
        ("(" * 900 + "a" + ")" * 900, "nested too deep|no regular expression|too large"),
    ],
)
def test_what_is_not_matched_is_said(pattern: str, why: str) -> None:
    with pytest.raises(BadPattern, match=why):
        whole(pattern)
