"""Numbers of things in words. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping


def many(count: int, noun: str) -> str:
    """``1 module``, ``2 modules``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def tally(counts: Mapping[str, int]) -> str:
    """``2 pairs, 1 diff``, without what there is none of. Names are as ``Kind.counted`` has them."""
    return ", ".join(f"{n} {_one(name) if n == 1 else name}" for name, n in counts.items() if n)


def _one(name: str) -> str:
    return name.removesuffix("es") if name.endswith("ses") else name.removesuffix("s")
