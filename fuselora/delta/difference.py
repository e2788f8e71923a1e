"""Parts of the tensor's own shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fuselora.delta.adders import Factors, Term
    from fuselora.delta.sums import Sums
    from fuselora.steps import Delta


def term(delta: Delta, factors: Factors, sums: Sums) -> Term:
    """The kind's only part, read row by row."""
    del sums
    (part,) = delta.factors
    return lambda base, first, last: factors.rows(part, first, last)
