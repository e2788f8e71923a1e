"""Differences whose sum with the base is brought to a trained magnitude."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuselora.kinds.dora import EPSILON, axis_of, magnitude_of
from fuselora.steps import chunk_grid

if TYPE_CHECKING:
    import torch

    from fuselora.delta.adders import Factors, Term
    from fuselora.delta.sums import Sums
    from fuselora.steps import Delta


def decomposed(delta: Delta, difference: Term, factors: Factors, sums: Sums) -> Term:
    """m * V / |V| where V = W + ratio * difference; |V| of each row, or of each input column of all rows."""
    part = magnitude_of({name: factor.shape for name, factor in delta.factors.items()})
    assert part is not None
    shape, (n_rows, _) = delta.factors[part].shape, factors.shape
    merged = _merged(difference, delta.ratio, sums)
    magnitude = factors.whole(part).reshape(-1, 1)
    epsilon = EPSILON if part == "dora_scale" else 0.0
    if axis_of(part, shape, n_rows, delta.kind.outputs_last) == "columns":
        gain = magnitude.div_(_column_norms(merged, len(magnitude), factors, sums).add_(epsilon))
        return _with_columns(merged, gain, factors.shape[1] // len(gain))

    def rows(base: torch.Tensor, first: int, last: int) -> torch.Tensor:
        total = merged(base, first, last)
        norms = sums.row_sums(total * total).sqrt_().add_(epsilon)
        return total.mul_(magnitude[first:last] / norms)

    return rows


def _merged(difference: Term, ratio: float, sums: Sums) -> Term:
    def rows(base: torch.Tensor, first: int, last: int) -> torch.Tensor:
        total = base.to(sums.dtype, copy=True)
        sums.add(total, difference(base, first, last), ratio)
        return total

    return rows


def _column_norms(merged: Term, n_inputs: int, factors: Factors, sums: Sums) -> torch.Tensor:
    """(in, 1), over all outputs and places of the kernel; reads the whole base, a chunk at a time."""
    squares = None
    for first, last in chunk_grid(*factors.shape):
        total = merged(factors.base(first, last), first, last)
        places = sums.row_sums((total * total).t())
        found = sums.row_sums(places.reshape(n_inputs, -1))
        squares = found if squares is None else squares.add_(found)
    assert squares is not None
    return squares.sqrt_()


def _with_columns(merged: Term, gain: torch.Tensor, n_places: int) -> Term:
    columns = gain.repeat_interleave(n_places).view(1, -1)
    return lambda base, first, last: merged(base, first, last).mul_(columns)
