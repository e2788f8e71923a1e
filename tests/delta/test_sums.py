from __future__ import annotations

import numpy as np
import pytest
import torch

from fuselora.delta.sums import FLOAT32, FLOAT64
from tests.delta.reference import exact
from tests.small import noise

F64 = torch.float64


def by_hand(total: torch.Tensor, up: torch.Tensor, down: torch.Tensor, scale: float) -> list[list[float]]:
    """Rank by rank in Python's own float64, which never fuses a multiply and an add."""
    rows, ups, downs = total.tolist(), up.tolist(), down.tolist()
    for i, row in enumerate(rows):
        for j in range(len(row)):
            product = 0.0
            for k in range(len(downs)):
                product += ups[i][k] * downs[k][j]
            row[j] += product * scale
    return rows


@pytest.mark.parametrize(("rows", "rank", "columns"), [(5, 1, 7), (9, 16, 33), (64, 3, 5), (1, 8, 65)])
@pytest.mark.parametrize("scale", [1.0, 0.125, 1 / 3, -0.7])
def test_the_exact_sum_is_the_plain_loop(rows: int, rank: int, columns: int, scale: float) -> None:
    total = noise(rows, columns, seed=1).to(F64)
    up, down = noise(rows, rank, seed=2).to(F64), noise(rank, columns, seed=3).to(F64)
    wanted = by_hand(total, up, down, scale)
    FLOAT64.add_product(total, up, down, scale)
    assert total.tolist() == wanted


@pytest.mark.parametrize(("rows", "rank", "columns"), [(3, 1000, 70), (70, 30, 3)])
def test_the_exact_product_is_the_plain_loop_where_a_library_s_is_not(
    rows: int, rank: int, columns: int
) -> None:
    """Ranks beyond what it sums at once, and numbers of 53 bits, whose products are not exact."""
    random = torch.Generator().manual_seed(0)
    up, down = (torch.randn(shape, generator=random, dtype=F64) for shape in ((rows, rank), (rank, columns)))
    wanted = by_hand(torch.zeros(rows, columns, dtype=F64), up, down, 1.0)
    assert FLOAT64.product(up, down).tolist() == wanted


def test_the_exact_sum_of_a_difference_is_the_plain_loop() -> None:
    total, diff = noise(9, 70, seed=1).to(F64), noise(9, 70, seed=2).to(F64)
    wanted = [
        [t + d * 0.3 for t, d in zip(*rows, strict=True)]
        for rows in zip(total.tolist(), diff.tolist(), strict=True)
    ]
    FLOAT64.add(total, diff, 0.3)
    assert total.tolist() == wanted


@pytest.mark.parametrize("threads", [1, 2])
def test_the_exact_sum_is_the_same_on_any_number_of_threads(threads: int) -> None:
    total = noise(128, 700, seed=1).to(F64)
    up, down = noise(128, 9, seed=2).to(F64), noise(9, 700, seed=3).to(F64)
    wanted = exact(total).copy()
    product = np.zeros_like(wanted)
    for k in range(9):
        product += exact(up)[:, k : k + 1] * exact(down)[k : k + 1]
    wanted += product * 0.7
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        FLOAT64.add_product(total, up, down, 0.7)
    finally:
        torch.set_num_threads(before)
    assert np.array_equal(exact(total), wanted)


def test_float32_sums_are_near_the_exact_ones_and_in_place() -> None:
    total, up, down = noise(96, 130, seed=1), noise(96, 8, seed=2), noise(8, 130, seed=3)
    diff = noise(96, 130, seed=4)
    want = total.to(F64)
    FLOAT64.add_product(want, up.to(F64), down.to(F64), 0.25)
    FLOAT64.add(want, diff.to(F64), -0.5)
    address = total.data_ptr()
    FLOAT32.add_product(total, up, down, 0.25)
    FLOAT32.add(total, diff, -0.5)
    assert total.data_ptr() == address
    size = noise(96, 130, seed=1).abs() + 0.25 * up.abs() @ down.abs() + 0.5 * diff.abs()
    assert bool(((total.to(F64) - want).abs() <= 2.0**-20 * size).all())
