"""The steps that fill an output file: byte ranges to copy, tensors to compute with their deltas. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fuselora.header import DTYPE_BITS
from fuselora.kinds import Kind, Part
from fuselora.kinds.settings import UNSAID, Settings

if TYPE_CHECKING:
    from fuselora.families.runs import Runs

CHUNK_ELEMENTS = 1 << 20  # a chunk and its float32 copy stay in a core's cache
UNIT_ROWS = 64  # fewer rows were seen to change the bits of a matrix product
BLOCK_BYTES = 8 << 20  # base bytes that are read, computed and written as one


@dataclass(frozen=True, slots=True)
class Factor:
    """A LoRA tensor on disk: ``offset`` from the start of the file, in bytes."""

    path: Path
    key: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int

    @property
    def matrix(self) -> tuple[int, int]:
        """Its first dimension, and all others flattened."""
        return matrix_of(self.shape)


@dataclass(frozen=True, slots=True)
class Delta:
    """What one hit does to a tensor: the kind's arithmetic on ``factors``.

    ``ratio`` is alpha / rank, ``strength`` the user's; a difference is added times both. ``rows`` lead from
    the base's to the delta's where they are not the same, and the delta then is of ``n_rows``. It is of the
    first ``n_columns`` where the tensor grew.
    """

    kind: Kind
    factors: Mapping[Part, Factor]
    ratio: float
    strength: float
    settings: Settings = UNSAID
    rows: Runs = ()
    n_rows: int = 0
    n_columns: int = 0

    @property
    def scale(self) -> float:
        return self.strength * self.ratio

    @property
    def held_elements(self) -> int:
        """In memory while the tensor is computed."""
        return self.kind.held({part: factor.shape for part, factor in self.factors.items()})


@dataclass(frozen=True, slots=True)
class Copy:
    """Bytes taken over as they are, from ``source`` in the base file to ``target`` in the output."""

    source: int
    target: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Fuse:
    """One tensor computed anew: ``rows`` x ``columns`` elements, in the chunks of rows given.

    Without deltas it is only cast. ``base_dtype`` and ``dtype`` are safetensors codes. Where the base has
    fewer columns, the others are zero before the deltas are added.
    """

    base_path: Path
    base_key: str
    base_dtype: str
    dtype: str
    rows: int
    columns: int
    source: int
    target: int
    chunks: tuple[tuple[int, int], ...]
    deltas: tuple[Delta, ...]
    base_columns: int

    @property
    def n_elements(self) -> int:
        return self.rows * self.columns

    @property
    def chunk_elements(self) -> int:
        """Of the largest chunk."""
        return max((last - first for first, last in self.chunks), default=0) * self.columns

    @property
    def n_bytes(self) -> int:
        return self.n_elements * DTYPE_BITS[self.dtype] // 8

    @property
    def base_bytes(self) -> int:
        return self.rows * self.base_columns * DTYPE_BITS[self.base_dtype] // 8

    @property
    def factor_elements(self) -> int:
        """Of all deltas, in memory while the tensor is computed."""
        copies = sum(delta.kind.copies for delta in self.deltas)
        return sum(delta.held_elements for delta in self.deltas) + copies * self.n_elements

    @property
    def base(self) -> Factor:
        """The base tensor as a matrix, for what needs more of it than the rows at hand."""
        shape = (self.rows, self.base_columns)
        return Factor(self.base_path, self.base_key, self.base_dtype, shape, self.source, self.base_bytes)


Step = Copy | Fuse


def chunk_grid(rows: int, columns: int) -> tuple[tuple[int, int], ...]:
    """Row ranges that cover ``rows``: a function of the shape alone, each of 64 rows or more.

    Ranges are whole multiples of 64 rows but the last, which takes the remainder as well.
    """
    per_chunk = max(1, CHUNK_ELEMENTS // max(1, columns) // UNIT_ROWS) * UNIT_ROWS
    n_chunks = max(1, rows // per_chunk)
    starts = [i * per_chunk for i in range(n_chunks)]
    return tuple(zip(starts, [*starts[1:], rows], strict=True))


def matrix_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """(out, in) of a matrix, everything after the first dimension flattened; a vector is one column."""
    return (shape[0] if shape else 1), math.prod(shape[1:])
