"""Runs of rows: where the rows of one tensor lie in another, after splitting, stacking and reordering."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple


class Run(NamedTuple):
    """``n`` rows of one tensor from ``first`` on, which are those of another from ``other`` on."""

    first: int
    other: int
    n: int


Runs = tuple[Run, ...]
# how many rows each part has, and how many columns -> for each part, the runs of the whole that are its rows
Order = Callable[[Sequence[int], int], tuple[Runs, ...]]


def stacked(sizes: Sequence[int], columns: int = 0) -> tuple[Runs, ...]:
    """The parts one below the other."""
    del columns
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    return tuple((Run(start, 0, size),) for start, size in zip(starts, sizes, strict=True))


def swapped(sizes: Sequence[int], columns: int = 0) -> tuple[Runs, ...]:
    """Of each part its second half first, the parts one below the other.

    Raises ``ValueError`` for an odd number of rows.
    """
    del columns
    found = []
    for (whole,), size in zip(stacked(sizes), sizes, strict=True):
        half = size // 2
        if size % 2:
            raise ValueError(f"{size} rows have no halves")
        found.append((Run(whole.first, half, half), Run(whole.first + half, 0, half)))
    return tuple(found)


def two_swapped(sizes: Sequence[int], columns: int) -> tuple[Runs, ...]:
    """As ``swapped`` where the part is two square matrices, one above the other; else as it is."""
    return swapped(sizes) if list(sizes) == [2 * columns] else stacked(sizes)


def per_head(head: int) -> Order:
    """Of every head ``head`` rows of each part in turn. Raises ``ValueError`` if rows are no whole heads."""

    def order(sizes: Sequence[int], columns: int = 0) -> tuple[Runs, ...]:
        del columns
        if len(set(sizes)) != 1 or sizes[0] % head:
            raise ValueError(f"{list(sizes)} rows are not as many heads of {head} in each part")
        n_heads, n_parts = sizes[0] // head, len(sizes)
        return tuple(
            tuple(Run((h * n_parts + part) * head, h * head, head) for h in range(n_heads))
            for part in range(n_parts)
        )

    return order


def inverse(runs: Runs) -> Runs:
    """The same, seen from the other tensor."""
    return tuple(Run(run.other, run.first, run.n) for run in runs)


def through(left: Runs, right: Runs) -> Runs:
    """``left`` from a to b, ``right`` from b to c: the runs from a to c."""
    found = []
    for one in left:
        for two in right:
            first, last = max(one.other, two.first), min(one.other + one.n, two.first + two.n)
            if first < last:
                run = Run(one.first + first - one.other, two.other + first - two.first, last - first)
                found.append(run)
    return tuple(found)


def joined(runs: Iterable[Run]) -> Runs:
    """In the order of their first rows, neighbours that go on in both tensors as one."""
    found: list[Run] = []
    for run in sorted(runs):
        last = found[-1] if found else None
        if last and last.first + last.n == run.first and last.other + last.n == run.other:
            found[-1] = Run(last.first, last.other, last.n + run.n)
        else:
            found.append(run)
    return tuple(found)


def meeting(runs: Runs, first: int, last: int) -> Iterator[Run]:
    """What of the runs lies in rows ``first`` to ``last``."""
    for run in runs:
        low, high = max(first, run.first), min(last, run.first + run.n)
        if low < high:
            yield Run(low, low - run.first + run.other, high - low)
