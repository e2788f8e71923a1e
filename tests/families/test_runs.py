"""Rows of one tensor in another, held against arrays of row numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuselora.families.runs import (
    Order,
    Run,
    Runs,
    inverse,
    joined,
    meeting,
    per_head,
    stacked,
    swapped,
    through,
)

ORDERS = {"stacked": stacked, "swapped": swapped, "per head": per_head(2)}


def gathered(runs: Runs, rows: list[str], n: int) -> list[str]:
    """The tensor of ``n`` rows that has ``rows`` where the runs lead."""
    found = [""] * n
    for first, other, count in runs:
        found[first : first + count] = rows[other : other + count]
    return found


def parts(sizes: tuple[int, ...]) -> list[list[str]]:
    return [[f"{name}{row}" for row in range(size)] for name, size in zip("qkv", sizes, strict=False)]


@pytest.mark.parametrize(
    ("order", "whole"),
    [
        ("stacked", "q0 q1 q2 q3 k0 k1 k2 k3 v0 v1 v2 v3"),
        ("swapped", "q2 q3 q0 q1 k2 k3 k0 k1 v2 v3 v0 v1"),
        ("per head", "q0 q1 k0 k1 v0 v1 q2 q3 k2 k3 v2 v3"),
    ],
)
def test_orders(order: str, whole: str) -> None:
    sizes = (4, 4, 4)
    found = [""] * 12
    for runs, rows in zip(ORDERS[order](sizes, 0), parts(sizes), strict=True):
        found = [new or old for new, old in zip(gathered(runs, rows, 12), found, strict=True)]
    assert " ".join(found) == whole


@pytest.mark.parametrize(("order", "sizes"), [("swapped", (3,)), ("per head", (4, 2)), ("per head", (3, 3))])
def test_rows_that_have_no_such_order(order: str, sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="rows"):
        ORDERS[order](sizes, 0)


@given(st.sampled_from(sorted(ORDERS)), st.sampled_from(sorted(ORDERS)), st.integers(1, 4))
def test_one_order_through_another_is_what_rows_say(one: str, two: str, half_heads: int) -> None:
    """q, k and v in the order ``one``, seen from a tensor that has them in the order ``two``."""
    sizes = (4 * half_heads,) * 3
    n = sum(sizes)
    left: Order = ORDERS[one]
    right: Order = ORDERS[two]
    whole = {name: [""] * n for name in ("one", "two")}
    for name, order in (("one", left), ("two", right)):
        for runs, rows in zip(order(sizes, 0), parts(sizes), strict=True):
            whole[name] = [a or b for a, b in zip(gathered(runs, rows, n), whole[name], strict=True)]
    runs = joined(
        run for a, b in zip(left(sizes, 0), right(sizes, 0), strict=True) for run in through(a, inverse(b))
    )
    assert gathered(runs, whole["two"], n) == whole["one"]
    assert runs == (Run(0, 0, n),) if one == two else len(runs) > 1


@given(st.integers(0, 12), st.integers(0, 12))
def test_what_meets_a_range(first: int, last: int) -> None:
    runs = (Run(0, 6, 4), Run(6, 0, 5))
    rows = [(at + i, other + i) for at, other, n in meeting(runs, first, last) for i in range(n)]
    all_rows = [(at + i, other + i) for at, other, n in runs for i in range(n)]
    assert rows == [(at, other) for at, other in all_rows if first <= at < last]
