"""up @ down, and what is made of such products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from fuselora.delta.factored import through_core
from fuselora.kinds.low_rank import BLOCKS

if TYPE_CHECKING:
    from fuselora.delta.adders import Adder, Factors, Term
    from fuselora.delta.sums import Sums
    from fuselora.steps import Delta


@dataclass(frozen=True, slots=True)
class Product:
    """``up`` (rows, rank) @ ``down`` (rank, columns), which are a tensor's rows from ``first`` on."""

    first: int
    up: torch.Tensor
    down: torch.Tensor

    def rows(self, first: int, last: int, sums: Sums) -> torch.Tensor:
        """Those of the tensor's rows ``first`` to ``last`` that it has."""
        rows = slice(max(first - self.first, 0), max(last - self.first, 0))
        return sums.product(self.up[rows], self.down)


def term(delta: Delta, factors: Factors, sums: Sums) -> Term:
    """``up`` (out, rank) @ ``down`` (rank, in), of a convolution (rank, in * kernel), perhaps with a core."""
    up, down = _pair(delta, factors, sums)
    return lambda base, first, last: sums.product(up[first:last], down)


def adder(delta: Delta, factors: Factors, sums: Sums) -> Adder:
    """The same, added in one operation."""
    (up, down), scale = _pair(delta, factors, sums), delta.scale

    def add(total: torch.Tensor, base: torch.Tensor, first: int, last: int) -> None:
        del base
        sums.add_product(total, up[first:last], down, scale)

    return add


def transposed(delta: Delta, factors: Factors, sums: Sums) -> Term:
    """(up @ down)^T, for a weight stored as (in, out)."""
    up, down = _pair(delta, factors, sums)
    return stacked([down.t()], [up.t()], sums)


def split(delta: Delta, factors: Factors, sums: Sums) -> Term:
    """Each block of ``up`` @ its own rows of ``down``, one below the other."""
    ups = [factors.matrix(part) for part in BLOCKS if part in delta.factors]
    return stacked(ups, factors.matrix("down").chunk(len(ups)), sums)


def stacked(ups: Sequence[torch.Tensor], downs: Sequence[torch.Tensor], sums: Sums) -> Term:
    """Products one below the other."""
    starts = accumulate((len(up) for up in ups), initial=0)
    products = [Product(*found) for found in zip(starts, ups, downs, strict=False)]

    def rows(base: torch.Tensor, first: int, last: int) -> torch.Tensor:
        del base
        there = [p for p in products if p.first < last and first < p.first + len(p.up)]
        found = [product.rows(first, last, sums) for product in there]
        return found[0] if len(found) == 1 else torch.cat(found)

    return rows


def _pair(delta: Delta, factors: Factors, sums: Sums) -> tuple[torch.Tensor, torch.Tensor]:
    up, down = factors.matrix("up"), factors.matrix("down")
    if "mid" in delta.factors:
        return up, through_core(factors.whole("mid"), down, sums)
    return up, down
