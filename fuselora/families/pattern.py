"""Names with a number in them: ``{n}`` in a pattern stands for one, as in ``blocks.{n}.attn1.to_q``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

Shapes = Mapping[str, tuple[int, ...]]


@cache
def compiled(pattern: str) -> re.Pattern[str]:
    """The pattern as an expression whose groups are its numbers, of nine digits at most."""
    return re.compile(re.escape(pattern).replace(r"\{n\}", r"([0-9]{1,9})"))


@cache
def any_of(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """One expression that fits what any of the patterns fits."""
    return re.compile("|".join(compiled(pattern).pattern for pattern in patterns))
