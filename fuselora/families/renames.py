"""How another layout spells and orders what the canonical one of a family has, a row for each tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from fuselora.families.pattern import Patterns, filled, flat_form_of, unnumbered_flat
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


def norm(theirs: str, ours: str) -> tuple[tuple[str, str], tuple[str, str]]:
    """A norm whose weight is a ``scale`` there; files that newer versions of ComfyUI saved say weight."""
    return (f"{theirs}.scale", f"{ours}.weight"), (f"{theirs}.weight", f"{ours}.weight")


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
    """The rows of one layout; a pair of patterns is a row that only renames."""

    def __init__(self, rows: Iterable[Row | tuple[str, str]]) -> None:
        self.rows = tuple(row if isinstance(row, Row) else Row(row[0], (row[1],)) for row in rows)

    def of_theirs(self, name: str, form: str) -> Spelled | None:
        """The row that speaks of this name of theirs; ``form`` is its ``form_of``."""
        return self._of_theirs(self._theirs.find(name, form))

    def of_ours(self, name: str, form: str) -> Spelled | None:
        """The row of which this canonical name is a part; ``form`` is its ``form_of``."""
        found = self._ours.find(name, form)
        if found is None:
            return None
        n, part = self._parts[found[0]]
        return _spelled(self.rows[n], found[1], part)

    def of_flat(self, flat: str) -> Spelled | None:
        """The row that speaks of this name of theirs with an underscore for every dot."""
        return self._of_theirs(self._flat_theirs.find(flat, flat_form_of(flat)))

    def _of_theirs(self, found: tuple[int, tuple[str, ...]] | None) -> Spelled | None:
        return _spelled(self.rows[found[0]], found[1]) if found else None

    @cached_property
    def _parts(self) -> tuple[tuple[int, int], ...]:
        return tuple((n, part) for n, row in enumerate(self.rows) for part in range(len(row.ours)))

    @cached_property
    def _theirs(self) -> Patterns:
        return Patterns([row.theirs for row in self.rows])

    @cached_property
    def _ours(self) -> Patterns:
        return Patterns([name for row in self.rows for name in row.ours])

    @cached_property
    def _flat_theirs(self) -> Patterns:
        return Patterns([row.theirs.replace(".", "_") for row in self.rows], unnumbered_flat)


def _spelled(row: Row, values: tuple[str, ...], part: int = 0) -> Spelled:
    ours = tuple(filled(name, values) for name in row.ours)
    return Spelled(row, filled(row.theirs, values), ours, part)
