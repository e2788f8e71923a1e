"""Names with a number in them: ``{n}`` in a pattern stands for one, as in ``blocks.{n}.attn1.to_q``.

``{rest}`` stands for anything, and is for the end of a pattern.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

Shapes = Mapping[str, tuple[int, ...]]
LEAVES = ("weight", "bias")
NUMBER = re.compile(r"(?<![^.])[0-9]{1,9}(?![^.])")
FLAT_NUMBER = re.compile(r"(?<![^_])[0-9]{1,9}(?![^_])")


@cache
def compiled(pattern: str) -> re.Pattern[str]:
    """The pattern as an expression whose groups are its numbers, of nine digits at most."""
    escaped = re.escape(pattern).replace(r"\{n\}", r"([0-9]{1,9})")
    return re.compile(escaped.replace(r"\{rest\}", r"(.+)"))


@cache
def any_of(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """One expression that fits what any of the patterns fits."""
    return re.compile("|".join(compiled(pattern).pattern for pattern in patterns))


def filled(pattern: str, values: tuple[str, ...]) -> str:
    """The name that a pattern makes of the values of another's groups."""
    return pattern.replace("{n}", "{}").replace("{rest}", "{}").format(*values)


def unnumbered(name: str) -> str:
    """A name with ``{n}`` for every number between dots; of a pattern, for its literal ones too."""
    return NUMBER.sub("{n}", name)


def unnumbered_flat(name: str) -> str:
    """The same of a name in which every dot became an underscore."""
    return FLAT_NUMBER.sub("{n}", name)


def split_leaf(name: str) -> tuple[str, str]:
    """A tensor's module, and its ``.weight`` or ``.bias``; another name is a parameter's own."""
    stem, dot, leaf = name.rpartition(".")
    return (stem, dot + leaf) if leaf in LEAVES else (name, "")
