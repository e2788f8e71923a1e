"""How another layout spells and orders what the canonical one of a family has, a row for each tensor."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from fuselora.families.pattern import compiled, filled
from fuselora.families.runs import Order, Runs, per_head, stacked, swapped, two_swapped

Shape = tuple[int, ...]
# shape of a fused weight, number of parts -> rows of each part
Sizes = Callable[[Shape, int], tuple[int, ...]]


def equal(shape: Shape, n_parts: int) -> tuple[int, ...]:
    """As many rows in each part. Raises ``ValueError`` where that does not come out even."""
    if not shape or shape[0] % n_parts:
        raise ValueError(f"{list(shape)} has no {n_parts} equal parts")
    return (shape[0] // n_parts,) * n_parts


def square_then_rest(shape: Shape, n_parts: int) -> tuple[int, ...]:
    """As many rows as columns in each part but the last. Raises ``ValueError`` if no rows are left."""
    columns = shape[1] if len(shape) > 1 else 0
    rest = shape[0] - (n_parts - 1) * columns
    if not columns or rest <= 0:
        raise ValueError(f"{list(shape)} has no {n_parts - 1} square parts and a rest")
    return (*[columns] * (n_parts - 1), rest)


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor of another layout, ``theirs``, and the canonical ones that its rows are, ``ours``.

    Both are patterns, of modules or of whole tensor names. ``order`` says which rows are whose, and
    ``sizes``, by the shape of the weight, how many each has.
    """

    theirs: str
    ours: tuple[str, ...]
    order: Order = stacked
    sizes: Sizes = equal

    @property
    def is_plain(self) -> bool:
        """Whether only the name differs."""
        return len(self.ours) == 1 and self.order is stacked


def split(theirs: str, *ours: str, sizes: Sizes = equal) -> Row:
    """``ours`` one below the other, such as q, k and v."""
    return Row(theirs, ours, stacked, sizes)


def swap(theirs: str, ours: str) -> Row:
    """The same rows, second half first, such as scale and shift."""
    return Row(theirs, (ours,), swapped)


def swap_of_two(theirs: str, ours: str) -> Row:
    """The same where there are just two parts, such as scale and shift without more, each square."""
    return Row(theirs, (ours,), two_swapped)


def heads(theirs: str, *ours: str, head: int) -> Row:
    """``ours`` interleaved: of every head ``head`` rows of each in turn."""
    return Row(theirs, ours, per_head(head))


Rows = tuple[Row | tuple[str, str], ...]


def canonical_names(rows: Rows) -> frozenset[str]:
    """The canonical modules and parameters that some rows lead to."""
    ours = (name for row in rows for name in (row.ours if isinstance(row, Row) else row[1:]))
    return frozenset(name.removesuffix(".weight") for name in ours)


@dataclass(frozen=True, slots=True)
class Spelled:
    """A row found by a name: its names with the numbers in. ``part`` is the one that was found by."""

    row: Row
    theirs: str
    ours: tuple[str, ...]
    part: int = 0

    def runs(self, sizes: Sequence[int], columns: int) -> tuple[Runs, ...]:
        """For each of ``ours``, the rows of ``theirs`` that are its own. Raises ``ValueError``."""
        return self.row.order(sizes, columns)


class Renames:
    """The rows of one layout; a pair of patterns is a row that only renames. Compiled when first asked."""

    def __init__(self, rows: Iterable[Row | tuple[str, str]]) -> None:
        self.rows = tuple(row if isinstance(row, Row) else Row(row[0], (row[1],)) for row in rows)

    def of_theirs(self, stem: str) -> Spelled | None:
        """The row that speaks of this name of theirs."""
        found = self._theirs.fullmatch(stem)
        if found is None:
            return None
        row, values = self.rows[_which(found)], _values(found)
        return Spelled(row, stem, tuple(filled(name, values) for name in row.ours))

    def of_ours(self, stem: str) -> Spelled | None:
        """The row of which this canonical name is a part."""
        found = self._ours.fullmatch(stem)
        if found is None:
            return None
        n, part = self._parts[_which(found)]
        row, values = self.rows[n], _values(found)
        ours = tuple(filled(name, values) for name in row.ours)
        return Spelled(row, filled(row.theirs, values), ours, part)

    def of_flat(self, flat: str) -> Spelled | None:
        """The row that speaks of this name of theirs with an underscore for every dot."""
        found = self._flat_theirs.fullmatch(flat)
        if found is None:
            return None
        row, values = self.rows[_which(found)], _values(found)
        return Spelled(row, filled(row.theirs, values), tuple(filled(name, values) for name in row.ours))

    @cached_property
    def _parts(self) -> tuple[tuple[int, int], ...]:
        return tuple((n, part) for n, row in enumerate(self.rows) for part in range(len(row.ours)))

    @cached_property
    def _theirs(self) -> re.Pattern[str]:
        return _numbered([row.theirs for row in self.rows])

    @cached_property
    def _ours(self) -> re.Pattern[str]:
        return _numbered([name for row in self.rows for name in row.ours])

    @cached_property
    def _flat_theirs(self) -> re.Pattern[str]:
        return _numbered([row.theirs.replace(".", "_") for row in self.rows])


def _numbered(patterns: Sequence[str]) -> re.Pattern[str]:
    """One pattern that tells by its outermost group, ``r<row>``, which of ``patterns`` fits."""
    return re.compile("|".join(f"(?P<r{n}>{compiled(p).pattern})" for n, p in enumerate(patterns)))


def _which(found: re.Match[str]) -> int:
    assert found.lastgroup is not None
    return int(found.lastgroup[1:])


def _values(found: re.Match[str]) -> tuple[str, ...]:
    """What its placeholders stand for, in their order."""
    assert found.lastindex is not None
    return tuple(value for value in found.groups()[found.lastindex :] if value is not None)
