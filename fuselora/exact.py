"""One tensor recomputed in float64, the plainest way, and how far the stored result is from it.

Shares no code with the engine: the safetensors library reads the files, torch multiplies, and
rounding is a division by the unit in the last place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open

from fuselora.definitions import ALONE, changed, difference, moves
from fuselora.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from fuselora.recorded import Delta, Stored

SLAB_ELEMENTS = 1 << 19
SLACK = 2.0**-20  # how far a float32 sum may be off, relative to the sum of all magnitudes in it
MAX_OPEN = 32
MAX_READ = 1 << 28
LARGEST_ELEMENT = 8
EXPONENT_BITS = 0x7FF0_0000_0000_0000  # of a float64

Rows = Callable[[int, int], torch.Tensor]
Pair = tuple[torch.Tensor, torch.Tensor]  # values, and their magnitudes
Term = Callable[[int, int], Pair]


@dataclass(frozen=True, slots=True)
class Distance:
    """How a stored tensor compares with its float64 value, in numbers of elements.

    ``equal``: the float64 value rounded once. ``beyond``: off by more than one unit in the last place
    plus the slack of a float32 sum. ``unexplained``: not the rounding of any value within that slack.
    ``max_ulps``: the largest error in units in the last place of the stored dtype.
    """

    elements: int = 0
    equal: int = 0
    beyond: int = 0
    unexplained: int = 0
    max_ulps: float = 0.0

    def __add__(self, other: Distance) -> Distance:
        return Distance(
            self.elements + other.elements,
            self.equal + other.equal,
            self.beyond + other.beyond,
            self.unexplained + other.unexplained,
            max(self.max_ulps, other.max_ulps),
        )


class Files:
    """Safetensors files, open from one tensor to the next: each reading of a header takes its time.

    What was read of a file stays in memory while it is open, so all are closed after ``MAX_READ`` bytes.
    """

    def __init__(self) -> None:
        self._open: dict[Path, safe_open] = {}
        self._read = 0

    def rows(self, stored: Stored) -> tuple[list[int], Rows]:
        """A tensor's shape, and what reads some of its rows."""
        part = self._file(stored.path).get_slice(stored.key)  # type: ignore[no-untyped-call]
        shape = part.get_shape()
        self._read += math.prod(shape) * LARGEST_ELEMENT
        if not shape:  # a number cannot be sliced
            return shape, lambda first, last: self.whole(stored)
        return shape, lambda first, last: part[first:last]

    def whole(self, stored: Stored) -> torch.Tensor:
        found: torch.Tensor = self._file(stored.path).get_tensor(stored.key)  # type: ignore[no-untyped-call]
        self._read += found.numel() * found.element_size()
        return found

    def close_in_time(self) -> None:
        """To be called when nothing that was read is in use."""
        if self._read > MAX_READ or len(self._open) > MAX_OPEN:
            self._open.clear()
            self._read = 0

    def _file(self, path: Path) -> safe_open:
        if path not in self._open:
            self._open[path] = opened(path)
        return self._open[path]


def measure(
    base: Stored,
    out: Stored,
    deltas: Sequence[Delta],
    advance: Callable[[int], None],
    files: Files | None = None,
) -> Distance:
    """``out`` against base + deltas, in slabs of rows; ``advance`` is told the bytes of the base read."""
    distance, files = Distance(), files or Files()
    files.close_in_time()
    _, weight = files.rows(base)
    shape, result = files.rows(out)
    terms = [_term(files, base, delta) for delta in deltas]
    for first, last in slabs(shape):
        stored, found = weight(first, last), result(first, last)
        wanted = [last - first, *shape[1:]] if shape else shape
        exact = _in_shape(stored.double(), wanted)
        size = exact.abs()
        for term in terms:
            value, magnitude = (_in_shape(rows, wanted) for rows in term(first, last))
            exact, size = exact + value, size + magnitude
        if (kept := _kept(stored, found)) is not None:
            found, exact, size = (values.masked_fill(kept, 0) for values in (found, exact, size))
        distance += compare(found, exact, SLACK * size)
        advance(stored.numel() * stored.element_size())
    return distance


def _kept(stored: torch.Tensor, found: torch.Tensor) -> torch.Tensor | None:
    """Where the base's NaN and infinities are as they were, bit for bit: nothing is added to such."""
    if stored.dtype != found.dtype or stored.shape != found.shape:
        return None
    odd = ~torch.isfinite(stored)
    if not odd.any():
        return None
    n_bytes = stored.element_size()
    before, after = (t.contiguous().flatten().view(torch.uint8).view(-1, n_bytes) for t in (stored, found))
    return odd & (before == after).all(dim=1).view(odd.shape)


def _in_shape(rows: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Rows in a tensor's own shape, with zeros behind them where it has more columns."""
    if len(shape) == 2 and rows.numel() < math.prod(shape):
        rows = rows.reshape(shape[0], -1)
        return torch.nn.functional.pad(rows, (0, shape[1] - rows.shape[1]))
    return rows.reshape(list(shape))


def compare(stored: torch.Tensor, exact: torch.Tensor, slack: torch.Tensor) -> Distance:
    """``stored`` against the float64 values ``exact``, which the sum may miss by ``slack``."""
    if not stored.numel():
        return Distance()
    value, unit = stored.double(), ulp(exact, stored.dtype)
    # what equals the rounded value is within half a unit of it: only the rest can be wrong
    rest = value != torch.round(exact / unit) * unit
    return Distance(
        elements=stored.numel(),
        equal=stored.numel() - _count(rest),
        beyond=_count(_beyond(value[rest], exact[rest], unit[rest] + slack[rest])),
        unexplained=_count(_unexplained(stored[rest], exact[rest], slack[rest])),
        max_ulps=float(((value - exact).abs() / unit).nan_to_num(nan=math.inf, posinf=math.inf).max()),
    )


def ulp(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The unit in the last place of ``dtype`` at each float64 value, that of subnormals near zero."""
    info = torch.finfo(dtype)
    binade = (exact.contiguous().view(torch.int64) & EXPONENT_BITS).view(torch.float64)
    return binade.clamp(min=info.smallest_normal) * info.eps


def round_to(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The nearest value of ``dtype``, ties to even, still as float64; a value too large stays too large."""
    unit = ulp(exact, dtype)
    return torch.round(exact / unit) * unit


def slabs(shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ranges of rows that cover a tensor, each of ``SLAB_ELEMENTS`` at most where a row is not longer."""
    rows = shape[0] if shape else 1
    step = max(1, SLAB_ELEMENTS // max(1, math.prod(shape[1:])))
    for first in range(0, rows, step):
        yield first, min(first + step, rows)


def scalar(stored: Stored, files: Files) -> float:
    """A tensor of one element, of any numeric dtype."""
    return float(files.whole(stored))


def opened(path: Path) -> safe_open:
    """``path`` through the safetensors library. Raises ``InputError`` for a name that it cannot spell."""
    try:
        str(path).encode("utf-8")
    except UnicodeEncodeError as error:
        what = f"{path}: cannot be verified: its name is not UTF-8"
        raise InputError(what, hint="Rename it, or link to it by another name.", path=str(path)) from error
    return safe_open(path, "pt")


def _term(files: Files, base: Stored, delta: Delta) -> Term:
    """One delta's rows, and their magnitude: that of every product in the sum, added up.

    Pairs, differences and replacements are read slab by slab, other kinds are computed whole: two float64
    tensors of the base's shape stay until the tensor is done.
    """
    if delta.rows:
        return _moved_term(files, base, delta)
    if delta.kind.name == "pair" and delta.factors.keys() == {"up", "down"}:
        return _pair_term(files, delta)
    if len(delta.factors) == 1 and delta.kind.name in ALONE:
        return _lone_term(files, base, delta)
    return _whole_term(files, base, delta)


def _pair_term(files: Files, delta: Delta) -> Term:
    _, left = files.rows(delta.factors["up"])
    (rank, *_), right = files.rows(delta.factors["down"])
    scale, down = delta.ratio * delta.strength, right(0, rank).double().reshape(rank, -1)

    def product(first: int, last: int) -> Pair:
        up = left(first, last).double().reshape(last - first, rank)
        return scale * (up @ down), abs(scale) * (up.abs() @ down.abs())

    return product


def _lone_term(files: Files, base: Stored, delta: Delta) -> Term:
    """A part of the tensor's own shape: a difference, or what takes the tensor's place."""
    (factor,) = delta.factors.values()
    (_, part), (_, weight) = files.rows(factor), files.rows(base)
    replaces = moves(delta.kind.name, delta.factors)

    def alone(first: int, last: int) -> Pair:
        value = part(first, last).double()
        if not replaces:
            value = delta.ratio * delta.strength * value
            return value, value.abs()
        old = weight(first, last).double()
        return delta.strength * (value - old), abs(delta.strength) * (value.abs() + old.abs())

    return alone


def _whole_term(files: Files, base: Stored, delta: Delta) -> Term:
    value, size = _computed(files, _whole(files, base), delta)
    return lambda first, last: (value[first:last], size[first:last])


def _moved_term(files: Files, base: Stored, delta: Delta) -> Term:
    """A delta that was made for a layer of which the base has some rows, or has them in another order."""
    shape, _ = files.rows(base)
    theirs = torch.full((shape[0],), -1)
    for first, other, n in delta.rows:
        theirs[first : first + n] = torch.arange(other, other + n)
    if delta.kind.name == "pair" and delta.factors.keys() == {"up", "down"}:
        up = _whole(files, delta.factors["up"]).flatten(1)
        down = _whole(files, delta.factors["down"]).flatten(1)
        scale, sizes = delta.ratio * delta.strength, (up.abs(), down.abs())
        return _picked(theirs, lambda rows: (scale * up[rows] @ down, abs(scale) * sizes[0][rows] @ sizes[1]))
    there, weight = theirs >= 0, _whole(files, base)
    layer = torch.zeros(delta.shape, dtype=torch.float64)
    layer[theirs[there]] = weight[there]
    value, size = _computed(files, layer, delta)
    value, size = value.reshape(len(value), -1), size.reshape(len(size), -1)
    return _picked(theirs, lambda rows: (value[rows], size[rows]))


def _picked(theirs: torch.Tensor, rows_of: Callable[[torch.Tensor], Pair]) -> Term:
    """Of each row of the base the delta's row ``theirs``, zero where that is below zero."""

    def rows(first: int, last: int) -> Pair:
        wanted = theirs[first:last]
        there = wanted >= 0
        value, size = rows_of(wanted.clamp(min=0))
        return torch.where(there[:, None], value, 0.0), torch.where(there[:, None], size, 0.0)

    return rows


def _computed(files: Files, weight: torch.Tensor, delta: Delta) -> Pair:
    """What is added to a whole layer, and its magnitude."""
    parts = {part: _whole(files, stored) for part, stored in delta.factors.items()}
    if moves(delta.kind.name, parts):
        new = changed(delta.kind.name, parts, weight, delta.ratio, delta.settings)
        value, size = delta.strength * (new.value - weight), abs(delta.strength) * (new.size + weight.abs())
    else:
        added, scale = difference(delta.kind.name, parts, weight), delta.ratio * delta.strength
        value, size = scale * added.value, abs(scale) * added.size
    return value, size


def _whole(files: Files, stored: Stored) -> torch.Tensor:
    return files.whole(stored).double()


def _beyond(value: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    error = (value - exact).abs()
    return ~(torch.isfinite(error) & (error <= bound))


def _unexplained(stored: torch.Tensor, exact: torch.Tensor, slack: torch.Tensor) -> torch.Tensor:
    low, high = round_to(exact - slack, stored.dtype), round_to(exact + slack, stored.dtype)
    # NaN compares false with everything, so it counts as a miss
    return ~((low <= stored) & (stored <= high))


def _count(mask: torch.Tensor) -> int:
    return int(mask.sum())
