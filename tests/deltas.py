"""Deltas of a plan, made from stored factors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuselora.kinds.difference import DIFF
from fuselora.kinds.low_rank import PAIR
from fuselora.steps import Delta

if TYPE_CHECKING:
    from fuselora.steps import Factor


def low_rank(up: Factor, down: Factor, scale: float) -> Delta:
    """A pair whose alpha is its rank."""
    return Delta(PAIR, {"up": up, "down": down}, 1.0, scale)


def full(diff: Factor, scale: float) -> Delta:
    return Delta(DIFF, {"diff": diff}, 1.0, scale)
