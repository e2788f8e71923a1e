"""What is known about each model family, as data: names, kept dtypes, harmless skips, few-step LoRAs."""

from __future__ import annotations

from fuselora.families.family import Family, Layout, Sign
from fuselora.families.few_step import FewStep
from fuselora.families.kin import Branch, Kin, Measure, SkipRule
from fuselora.families.wan import WAN

FAMILIES: tuple[Family, ...] = (WAN,)

__all__ = ["FAMILIES", "Branch", "Family", "FewStep", "Kin", "Layout", "Measure", "Sign", "SkipRule"]
