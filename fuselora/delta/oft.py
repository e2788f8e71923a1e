"""Blocks of a weight's outputs or inputs, each turned by a rotation of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fuselora.delta.cayley import cayley, norms, series, wide
from fuselora.kinds.oft import block_size

if TYPE_CHECKING:
    from fuselora.delta.adders import Factors, Term
    from fuselora.delta.sums import Sums
    from fuselora.kinds.settings import Rotation
    from fuselora.steps import Delta


def over_outputs(delta: Delta, factors: Factors, sums: Sums) -> Term:
    """rescale * R^T W, R = (I + Q) (I - Q)^-1 of each block: a row needs the other rows of its block."""
    blocks = factors.whole("oft_blocks")
    turns = cayley(constrained(blocks, delta.settings.alpha, factors.shape[0]), sums).to(blocks)
    rescale = factors.matrix("rescale") if "rescale" in delta.factors else None
    size = turns.shape[-1]

    def rows(base: torch.Tensor, first: int, last: int) -> torch.Tensor:
        low, high = first // size * size, -(-last // size) * size
        near = [base.to(sums.dtype)]
        near = [factors.base(low, first), *near] if low < first else near
        near = [*near, factors.base(last, high)] if last < high else near
        found = _turned(turns, torch.cat(near), low, first, last, sums)
        return found if rescale is None else found.mul_(rescale[first:last])

    return rows


def _turned(
    turns: torch.Tensor, near: torch.Tensor, low: int, first: int, last: int, sums: Sums
) -> torch.Tensor:
    """Rows ``first`` to ``last`` of the blocks of ``near``, which begins with row ``low`` of the base."""
    size, found = turns.shape[-1], []
    for at in range(low, last, size):
        inside = slice(max(first - at, 0), min(last - at, size))
        found.append(sums.product(turns[at // size, inside], near[at - low : at - low + size]))
    return torch.cat(found)


def constrained(blocks: torch.Tensor, alpha: float | None, n_outputs: int) -> torch.Tensor:
    """A - A^T of (..., size, size), in float64, its norm over all of it alpha * outputs at most.

    Without an alpha, or with one of 0, there is no limit.
    """
    given = wide(blocks)
    skew, most = given - given.mT, (alpha or 0.0) * n_outputs
    norm = float(norms(skew.reshape(1, -1, skew.shape[-1]))) + 1e-8
    return skew * (most / norm) if 0 < most < norm else skew


def over_inputs(delta: Delta, factors: Factors, sums: Sums) -> Term:
    """W R^T, R of PEFT's blocks."""
    return turned_inputs(_peft_rotations("oft_r", delta, factors, sums).mT, factors, sums)


def over_width(delta: Delta, factors: Factors, sums: Sums) -> Term:
    """W R, of an embedding."""
    return turned_inputs(_peft_rotations("oft_embedding_r", delta, factors, sums), factors, sums)


def turned_inputs(turns: torch.Tensor, factors: Factors, sums: Sums) -> Term:
    """Each block of columns times its matrix of (n, size, size), or all times the only one."""
    size = turns.shape[-1]
    whole = turns.to(sums.dtype).expand(factors.shape[1] // size, -1, -1)

    def rows(base: torch.Tensor, first: int, last: int) -> torch.Tensor:
        del first, last
        by_block = base.to(sums.dtype).view(len(base), -1, size).transpose(0, 1)
        return sums.product(by_block, whole).transpose(0, 1).reshape(len(base), -1)

    return rows


def _peft_rotations(part: str, delta: Delta, factors: Factors, sums: Sums) -> torch.Tensor:
    """(n, size, size), on the device of the sums."""
    rotation, upper = delta.settings.rotation, factors.whole(part)
    assert rotation is not None
    skew = _limited(_skew(wide(upper)), rotation)
    turns = cayley(skew, sums) if rotation.terms is None else series(skew, rotation.terms, sums)
    return turns.to(upper)


def _skew(upper: torch.Tensor) -> torch.Tensor:
    """Matrices that have these numbers above their diagonals, row by row."""
    size = block_size(upper.shape[1]) or 1
    rows, columns = torch.triu_indices(size, size, 1)
    matrices = upper.new_zeros((len(upper), size, size))
    matrices[:, rows, columns] = upper
    return matrices - matrices.mT


def _limited(skew: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """The constrained variant's: no norm above eps / sqrt(blocks)."""
    if rotation.eps is None:
        return skew
    norm, most = norms(skew), rotation.eps / len(skew) ** 0.5
    return torch.where(norm <= most, skew, skew * (most / norm))
