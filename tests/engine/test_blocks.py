"""Blocks: every byte of a file's steps once, in order, cut only where the grid allows it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path, PurePosixPath
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuselora.engine.blocks import Block, Part, blocks, buffer_bytes
from fuselora.header import DTYPE_BITS, PAGE, Header
from fuselora.planning import OutputFile
from fuselora.reading import State
from fuselora.steps import BLOCK_BYTES, Copy, Fuse, Step, chunk_grid

BASE = Header(Path("base"), 0, 0, (), {}, "", State(0, 0, 0, 0, 1, 0))
Tensor = tuple[int, int, str, str, bool]  # rows, columns, dtype in the base, in the output, copied


def file_of(steps: Iterable[Step]) -> OutputFile:
    return OutputFile(PurePosixPath("out"), BASE, b"", tuple(steps), 0, 0, 0, True)


def fuse(rows: int, columns: int, source: int, target: int, dtypes: tuple[str, str] = ("F32", "F32")) -> Fuse:
    base, out = dtypes
    return Fuse(
        BASE.path,
        f"{source}",
        base,
        out,
        rows,
        columns,
        source,
        target,
        chunk_grid(rows, columns),
        (),
        columns,
    )


def laid_out(tensors: Iterable[Tensor], source: int, target: int) -> list[Step]:
    """Tensors without a gap, as a plan lays them out."""
    steps: list[Step] = []
    for rows, columns, base, out, copied in tensors:
        n_bytes = rows * columns * DTYPE_BITS[base] // 8
        steps.append(
            Copy(source, target, n_bytes) if copied else fuse(rows, columns, source, target, (base, out))
        )
        source, target = source + n_bytes, target + steps[-1].n_bytes
    return steps


def cut(steps: Iterable[Step], block_bytes: int) -> list[Block]:
    with patch("fuselora.engine.blocks.BLOCK_BYTES", block_bytes):
        return list(blocks(file_of(steps)))


dtypes = st.sampled_from(["F32", "BF16", "F16"])
tensors = st.tuples(st.integers(1, 300), st.integers(1, 50), dtypes, dtypes, st.booleans())


@settings(deadline=None, max_examples=60)
@given(st.lists(tensors, max_size=5), st.integers(0, 9000), st.integers(0, 9000), st.integers(500, 70_000))
def test_every_byte_once_and_in_order(found: list[Tensor], source: int, target: int, limit: int) -> None:
    with patch("fuselora.steps.CHUNK_ELEMENTS", 64 * 40):
        steps = laid_out(found, source, target)
    whole = cut(steps, limit)
    parts = [part for block in whole for part in block.parts]
    for before, after in pairwise(parts):
        assert before.source + before.n_bytes == after.source
        assert before.target + before.out_bytes == after.target
    if steps:
        assert (parts[0].source, parts[0].target) == (source, target)
        assert sum(part.out_bytes for part in parts) == sum(step.n_bytes for step in steps)
    for step in steps:
        check_step(step, parts)
    check_sizes(whole, limit)


def check_step(step: Step, parts: Iterable[Part]) -> None:
    """A tensor is cut between chunks of its grid only, a copied range anywhere."""
    if isinstance(step, Copy):
        ours = [p for p in parts if p.step is None and step.target <= p.target < step.target + step.n_bytes]
        assert sum(part.n_bytes for part in ours) == step.n_bytes
        assert all(part.n_bytes == part.out_bytes and part.chunks == () for part in ours)
        assert all(part.source - part.target == step.source - step.target for part in ours)
        return
    ours = [part for part in parts if part.step is step]
    assert sum((part.chunks for part in ours), ()) == step.chunks
    for part in ours:
        (first, _), (_, last) = part.chunks[0], part.chunks[-1]
        rows = step.base_bytes // step.rows, step.n_bytes // step.rows
        assert (part.source, part.n_bytes) == (step.source + first * rows[0], (last - first) * rows[0])
        assert (part.target, part.out_bytes) == (step.target + first * rows[1], (last - first) * rows[1])


def check_sizes(found: list[Block], limit: int) -> None:
    """No block is larger than it may be, unless a single chunk is, and none is smaller than it could be."""
    for block in found:
        if block.n_bytes > limit:
            (part,) = block.parts
            assert len(part.chunks) == 1
    for before, after in pairwise(found):
        last, following = before.parts[-1], after.parts[0]
        assert before.n_bytes + following.n_bytes > limit
        if last.step is not None and last.step is following.step:
            chunk = following.chunks[0]
            row = last.step.base_bytes // last.step.rows
            assert last.n_bytes + (chunk[1] - chunk[0]) * row > limit


def test_a_block_of_several_parts_knows_its_place() -> None:
    steps: list[Step] = [Copy(100, 1100, 50), fuse(10, 3, 150, 1150, ("F32", "BF16")), Copy(270, 1210, 30)]
    (block,) = cut(steps, 1000)
    assert len(block.parts) == 3
    assert (block.source, block.n_bytes) == (100, 200)
    assert (block.target, block.out_bytes) == (1100, 140)


@pytest.mark.parametrize(
    "steps",
    [
        [Copy(0, 0, 10), Copy(20, 10, 10)],  # the base jumps, as in a file whose order changed
        [Copy(10, 0, 10), Copy(0, 10, 10)],
        [Copy(0, 0, 10), Copy(10, 20, 10)],
    ],
)
def test_a_gap_on_either_side_ends_a_block(steps: list[Step]) -> None:
    assert [block.n_bytes for block in cut(steps, 1000)] == [10, 10]


def test_a_copied_range_is_cut_anywhere() -> None:
    found = cut([Copy(5, 7, 2500)], 1000)
    assert [(block.source, block.target, block.n_bytes) for block in found] == [
        (5, 7, 1000), (1005, 1007, 1000), (2005, 2007, 500),
    ]  # fmt: skip


def test_small_tensors_go_together() -> None:
    steps = laid_out([(7, 9, "F32", "F32", n % 2 == 0) for n in range(100)], 0, 0)
    assert len(cut(steps, 100 * 7 * 9 * 4)) == 1
    assert len(cut(steps, 100 * 7 * 9 * 4 - 1)) == 2


def test_a_chunk_larger_than_a_block_is_a_block() -> None:
    """64 rows are never cut: fewer would change the bits."""
    step = fuse(200, 1 << 20, 0, 0)
    found = list(blocks(file_of([Copy(0, 0, 0), step])))
    assert step.chunks == ((0, 64), (64, 128), (128, 200))
    assert [block.parts[0].chunks for block in found] == [((0, 64),), ((64, 128),), ((128, 200),)]
    assert found[0].n_bytes == 64 << 22 > BLOCK_BYTES


def test_a_file_without_steps_has_no_blocks() -> None:
    assert cut([], 1000) == []
    assert cut([Copy(8, 8, 0)], 1000) == []
    assert buffer_bytes([]) == (0, 0)


# in place


@pytest.mark.parametrize(
    ("dtypes", "shift", "in_place"),
    [
        (("BF16", "BF16"), 0, True),
        (("BF16", "BF16"), PAGE, True),
        (("BF16", "BF16"), -3 * PAGE, True),
        (("BF16", "BF16"), 1, False),
        (("BF16", "BF16"), 512, False),
        (("F32", "F32"), 0, True),
        (("F16", "BF16"), 0, True),  # another dtype of the same width
        (("F32", "BF16"), 0, False),
        (("BF16", "F32"), 0, False),
    ],
)
def test_a_result_takes_the_base_s_place_where_it_fits(
    dtypes: tuple[str, str], shift: int, in_place: bool
) -> None:
    (block,) = cut([fuse(70, 3, 20_001, 20_001 + shift, dtypes)], 10_000)
    assert block.in_place is in_place


def test_one_part_of_another_width_keeps_the_block_apart() -> None:
    """Widths that even out in the sum do not help: the parts between would lie elsewhere."""
    steps = laid_out([(8, 4, "F32", "F32", True), (8, 4, "F32", "BF16", False)], 0, 0)
    steps += [fuse(4, 4, 256, 192, ("BF16", "F32")), fuse(4, 4, 288, 256, ("BF16", "F32"))]
    (block,) = cut(steps, 1000)
    assert len(block.parts) == 4
    assert block.n_bytes == block.out_bytes
    assert not block.in_place


# buffers


def test_buffers_hold_the_largest_block_and_the_rest_of_its_pages() -> None:
    found = cut([Copy(0, 0, 700), fuse(64, 20, 700, 700), fuse(65, 20, 5820, 5820, ("F32", "BF16"))], 1000)
    assert [block.n_bytes for block in found] == [700, 5120, 5200]
    assert buffer_bytes(found) == (5200 + 2 * PAGE, 2600 + 2 * PAGE)
    assert buffer_bytes(found[:2]) == (5120 + 2 * PAGE, 0)


@settings(deadline=None, max_examples=40)
@given(st.lists(tensors, min_size=1, max_size=4), st.integers(0, 9000), st.integers(0, 9000))
def test_buffers_have_room_for_all_pages_that_are_touched(
    found: list[Tensor], source: int, target: int
) -> None:
    whole = cut(laid_out(found, source, target), 5000)
    reads, writes = buffer_bytes(whole)
    for block in whole:
        assert -(-(block.source % PAGE + block.n_bytes) // PAGE) * PAGE <= reads
        room = reads if block.in_place else writes
        assert block.target % PAGE + block.out_bytes <= room
