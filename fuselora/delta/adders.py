"""One delta onto a chunk of rows: each kind's term, and how it is added."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

import torch

from fuselora.delta import boft, difference, dora, embedding, experts, glora, ia3, loha, lokr, low_rank, oft
from fuselora.families.runs import meeting
from fuselora.kinds.kind import MAGNITUDES

if TYPE_CHECKING:
    from fuselora.delta.sums import Sums
    from fuselora.families.runs import Runs
    from fuselora.steps import Delta

# (base rows as stored, first, last) -> the delta's rows, or the changed ones where the kind moves
Term = Callable[[torch.Tensor, int, int], torch.Tensor]
# (total, base rows as stored, first, last): changes the rows of ``total`` in place
Adder = Callable[[torch.Tensor, torch.Tensor, int, int], None]


class Factors(Protocol):
    """A delta's numbers, in the dtype of the sums and on their device."""

    @property
    def shape(self) -> tuple[int, int]:
        """Of the tensor that the delta was made for, as a matrix."""

    def whole(self, part: str) -> torch.Tensor:
        """A part in its own shape."""

    def matrix(self, part: str) -> torch.Tensor:
        """A part as (its first dimension, all others flattened)."""

    def rows(self, part: str, first: int, last: int) -> torch.Tensor:
        """Rows of a part that has the tensor's own shape, as a matrix."""

    def base(self, first: int, last: int) -> torch.Tensor:
        """Rows of the base tensor as a matrix, whichever."""


TERMS: Mapping[str, Callable[[Delta, Factors, Sums], Term]] = {
    "pair": low_rank.term,
    "split_pair": low_rank.split,
    "transposed": low_rank.transposed,
    "embedding": embedding.term,
    "experts": experts.term,
    "pair_bias": difference.term,
    "loha": loha.term,
    "lokr": lokr.term,
    "glora": glora.term,
    "diff": difference.term,
    "diff_b": difference.term,
    "diff_m": difference.term,
    "w_norm": difference.term,
    "b_norm": difference.term,
    "ia3": ia3.lycoris,
    "peft_ia3": ia3.peft,
    "peft_ia3_b": ia3.peft_bias,
    "oft": oft.over_outputs,
    "boft": boft.over_outputs,
    "peft_oft": oft.over_inputs,
    "peft_oft_embedding": oft.over_width,
    "peft_boft": boft.over_inputs,
    "set_weight": difference.term,
    "replace": difference.term,
    "replace_b": difference.term,
    "replace_scale": difference.term,
}


def adder(delta: Delta, factors: Factors, sums: Sums) -> Adder:
    """Reads what the delta keeps in memory. Raises ``ChangedError`` when a LoRA is not what it was."""
    found = _adder(delta, factors, sums)
    if delta.n_columns:
        found = to_columns(found, delta.n_columns)
    return to_rows(found, delta.rows) if delta.rows else found


def to_columns(add: Adder, n_columns: int) -> Adder:
    """The same for a base that has more columns than the delta."""
    return lambda total, base, first, last: add(total[:, :n_columns], base[:, :n_columns], first, last)


def to_rows(add: Adder, rows: Runs) -> Adder:
    """The same for a base that has the delta's rows elsewhere; ``add`` gets those of the delta."""

    def add_there(total: torch.Tensor, base: torch.Tensor, first: int, last: int) -> None:
        for at, other, n in meeting(rows, first, last):
            there = slice(at - first, at - first + n)
            add(total[there], base[there], other, other + n)

    return add_there


def _adder(delta: Delta, factors: Factors, sums: Sums) -> Adder:
    decomposes = not MAGNITUDES.isdisjoint(delta.factors)
    if delta.kind.name == "pair" and not decomposes:
        return low_rank.adder(delta, factors, sums)
    term, scale = TERMS[delta.kind.name](delta, factors, sums), delta.scale
    if decomposes:
        term = dora.decomposed(delta, term, factors, sums)
    if delta.kind.moves_with(delta.factors):
        return moved(term, delta.strength, sums)
    return lambda total, base, first, last: sums.add(total, term(base, first, last), scale)


def moved(changed: Term, strength: float, sums: Sums) -> Adder:
    """W + strength * (changed - W); at strength 1 what is alone on its tensor is the changed one exactly."""

    def add(total: torch.Tensor, base: torch.Tensor, first: int, last: int) -> None:
        wanted, wide = changed(base, first, last), base.to(sums.dtype)
        if strength == 1:
            # a sum would lose the sign of a zero
            total.copy_(torch.where(total == wide, wanted, (total - wide).add_(wanted)))
        else:
            sums.add(total, wanted - wide, strength)

    return add
