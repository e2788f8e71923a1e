"""What is known about each model family, as data: names in both layouts, kept dtypes, harmless skips."""

from __future__ import annotations

from fuselora.families.family import Branch, Family, Kin, Layout, Measure, SkipRule
from fuselora.families.wan import WAN

FAMILIES: tuple[Family, ...] = (WAN,)

__all__ = ["FAMILIES", "Branch", "Family", "Kin", "Layout", "Measure", "SkipRule"]
