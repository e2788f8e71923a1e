"""Rotations in several stages, each of which turns other rows or columns together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fuselora import steps
from fuselora.delta.cayley import cayley, wide
from fuselora.delta.oft import constrained, turned_inputs

if TYPE_CHECKING:
    from fuselora.delta.adders import Factors, Term
    from fuselora.delta.sums import Sums
    from fuselora.steps import Delta


def over_outputs(delta: Delta, factors: Factors, sums: Sums) -> Term:
    """rescale * B W: each row needs all rows of the base, so the whole result is made at once, and held."""
    stages = factors.whole("oft_blocks")
    turns = cayley(constrained(stages, delta.settings.alpha, factors.shape[0]), sums).mT.to(stages)
    n_rows, n_columns = factors.shape
    whole = torch.empty((n_rows, n_columns), dtype=turns.dtype, device=turns.device)
    for first, last in steps.chunk_grid(n_rows, n_columns):
        whole[first:last] = factors.base(first, last)
    for strip in torch.split(whole, max(1, steps.CHUNK_ELEMENTS // n_rows), 1):
        strip.copy_(_butterfly(turns, strip, sums))
    if "rescale" in delta.factors:
        whole.mul_(factors.matrix("rescale"))
    return lambda base, first, last: whole[first:last]


def _butterfly(turns: torch.Tensor, columns: torch.Tensor, sums: Sums) -> torch.Tensor:
    """Stage i turns rows that are 2^i * size / 2 apart."""
    n_rows, n_columns = columns.shape
    size = turns.shape[-1]
    for i, turn in enumerate(turns):
        apart = size // 2 << i
        side_by_side = columns.reshape(-1, 2, apart, n_columns).transpose(1, 2)
        found = sums.product(turn, side_by_side.reshape(-1, size, n_columns))
        columns = found.view(-1, apart, 2, n_columns).transpose(1, 2).reshape(n_rows, n_columns)
    return columns


def over_inputs(delta: Delta, factors: Factors, sums: Sums) -> Term:
    """s * W B^T, B of PEFT's stages, the first one first."""
    stages, gain = factors.whole("boft_r"), factors.whole("boft_s").reshape(-1, 1)
    given = wide(stages)
    turns = cayley((given - given.mT) * 0.5, sums).mT.to(stages)
    moves = [_stage(turns, i, factors, sums) for i in range(len(turns))]

    def rows(base: torch.Tensor, first: int, last: int) -> torch.Tensor:
        for move in moves:
            base = move(base, first, last)
        return base * gain[first:last]

    return rows


def _stage(turns: torch.Tensor, i: int, factors: Factors, sums: Sums) -> Term:
    """Columns in the stage's order, turned, and back in their own."""
    turned = turned_inputs(turns[i], factors, sums)
    if len(turns) == 1:
        return turned
    n_blocks, size = turns.shape[1:3]
    order = _order(n_blocks * size, n_blocks >> i, size // 2).to(turns.device)
    back = torch.argsort(order)
    return lambda base, first, last: turned(base[:, back].contiguous(), first, last)[:, order]


def _order(n_columns: int, n_groups: int, half: int) -> torch.Tensor:
    """In each group the even runs of ``half`` columns, then the odd ones."""
    runs = torch.arange(n_columns).view(n_groups, -1, half)
    return torch.cat((runs[:, 0::2], runs[:, 1::2]), 1).flatten()
