"""The steps of a file cut into blocks: what is read, computed, hashed and written as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fuselora.header import DTYPE_BITS, PAGE
from fuselora.steps import BLOCK_BYTES, Fuse

if TYPE_CHECKING:
    from fuselora.planning import OutputFile
    from fuselora.steps import Copy


@dataclass(frozen=True, slots=True)
class Part:
    """One move of bytes: of a copied range (``step`` None), or some chunks of rows of a tensor.

    ``source`` and ``target`` are offsets in the base file and in the output, in bytes.
    """

    source: int
    n_bytes: int
    target: int
    out_bytes: int
    step: Fuse | None = None
    chunks: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Block:
    """Neighbouring parts, without a gap in the base or in the output."""

    parts: tuple[Part, ...]

    @property
    def source(self) -> int:
        return self.parts[0].source

    @property
    def target(self) -> int:
        return self.parts[0].target

    @property
    def n_bytes(self) -> int:
        return self.parts[-1].source + self.parts[-1].n_bytes - self.source

    @property
    def out_bytes(self) -> int:
        return self.parts[-1].target + self.parts[-1].out_bytes - self.target

    @property
    def in_place(self) -> bool:
        """The result can take the place of the base's bytes: same widths, same place within a page."""
        same_widths = all(part.n_bytes == part.out_bytes for part in self.parts)
        return same_widths and self.source % PAGE == self.target % PAGE


def blocks(file: OutputFile) -> Iterator[Block]:
    """The file's steps in output order, in blocks of ``BLOCK_BYTES`` of base bytes or one part."""
    parts: list[Part] = []
    for part in _parts(file):
        if parts and not _fits(parts, part):
            yield Block(tuple(parts))
            parts = []
        parts.append(part)
    if parts:
        yield Block(tuple(parts))


def buffer_bytes(cut: Iterable[Block]) -> tuple[int, int]:
    """The bytes of the largest block read, and of the largest that is not computed in place.

    Both with room for the rest of the first and last page.
    """
    reads = writes = 0
    for block in cut:
        reads = max(reads, block.n_bytes + 2 * PAGE)
        if not block.in_place:
            writes = max(writes, block.out_bytes + 2 * PAGE)
    return reads, writes


def _fits(parts: list[Part], part: Part) -> bool:
    last = parts[-1]
    adjoins = last.source + last.n_bytes == part.source and last.target + last.out_bytes == part.target
    return adjoins and part.source + part.n_bytes - parts[0].source <= BLOCK_BYTES


def _parts(file: OutputFile) -> Iterator[Part]:
    for step in file.steps:
        yield from _rows(step) if isinstance(step, Fuse) else _ranges(step)


def _ranges(step: Copy) -> Iterator[Part]:
    for at in range(0, step.n_bytes, BLOCK_BYTES):
        n_bytes = min(BLOCK_BYTES, step.n_bytes - at)
        yield Part(step.source + at, n_bytes, step.target + at, n_bytes)


def _rows(step: Fuse) -> Iterator[Part]:
    """As many chunks of the grid as a block holds, or one."""
    base_row = step.base_columns * DTYPE_BITS[step.base_dtype] // 8
    out_row = step.columns * DTYPE_BITS[step.dtype] // 8
    first = 0
    while first < len(step.chunks):
        start, last = step.chunks[first][0], first + 1
        while last < len(step.chunks) and (step.chunks[last][1] - start) * base_row <= BLOCK_BYTES:
            last += 1
        n_rows = step.chunks[last - 1][1] - start
        yield Part(
            step.source + start * base_row, n_rows * base_row,
            step.target + start * out_row, n_rows * out_row, step, step.chunks[first:last],
        )  # fmt: skip
        first = last
