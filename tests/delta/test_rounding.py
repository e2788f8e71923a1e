"""``round_once`` around every number of both 16-bit formats, against rounding in whole numbers."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from fuselora.delta.rounding import round_once
from tests.delta.reference import FORMATS, Values, exact, rounded, rounded_fraction

HALVES = (torch.bfloat16, torch.float16)
LARGEST = np.finfo(np.float64).max


def numbers(dtype: torch.dtype) -> Values:
    """Every finite number of a 16-bit ``dtype`` from 0 up."""
    found = exact(torch.arange(0, 1 << 15, dtype=torch.int16).view(dtype))
    return found[np.isfinite(found)]


def assert_rounded(values: Values, dtype: torch.dtype) -> None:
    """Same numbers, zeros of the same sign, of ``values`` and of their negatives."""
    for signed in (values, -values):
        found = round_once(torch.from_numpy(signed), dtype)
        assert found.dtype == dtype
        wanted = rounded(signed, dtype)
        assert np.array_equal(exact(found), wanted)
        assert np.array_equal(np.signbit(exact(found)), np.signbit(signed))


def test_the_reference_agrees_with_rational_arithmetic() -> None:
    random = np.random.default_rng(1)
    for dtype, (bits, lowest, largest) in FORMATS.items():
        edge = np.array(
            [largest, np.nextafter(largest, np.inf), np.ldexp(1.0, lowest), np.ldexp(1.0, lowest - bits)]
        )
        spread = random.normal(size=60) * np.ldexp(1.0, random.integers(lowest - bits - 2, 17, 60))
        ties = np.ldexp(random.integers(1, 1 << bits, 60) * 2.0 + 1, random.integers(-20, 3, 60))
        values = np.concatenate([edge, edge * 1.5, edge * (1 + 2.0**-bits), spread, ties])
        for value, found in zip(values.tolist(), rounded(values, dtype).tolist(), strict=True):
            wanted = rounded_fraction(Fraction(value), dtype)
            assert wanted == (None if np.isinf(found) else Fraction(found))


@pytest.mark.parametrize("dtype", HALVES)
def test_numbers_of_the_format_stay(dtype: torch.dtype) -> None:
    values = numbers(dtype)
    assert len(values) > 30_000
    assert_rounded(values, dtype)
    assert np.array_equal(rounded(values, dtype), values)


@pytest.mark.parametrize("dtype", HALVES)
def test_ties_go_to_the_even_neighbour(dtype: torch.dtype) -> None:
    values = numbers(dtype)
    ties = (values[:-1] + values[1:]) / 2
    assert_rounded(ties, dtype)
    index = np.arange(len(ties))
    assert np.array_equal(exact(round_once(torch.from_numpy(ties), dtype)), values[index + index % 2])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("ulps", [1, 2, 3, 1 << 20, 1 << 28, 1 << 29, (1 << 29) + 1])
def test_a_hair_beside_a_tie(dtype: torch.dtype, ulps: int) -> None:
    """2^29 float64 steps are one float32 step: nearer than that, float32 alone cannot tell."""
    values = numbers(dtype)
    ties = ((values[:-1] + values[1:]) / 2).view(np.int64)
    for beside in (ties - ulps, ties + ulps):
        assert_rounded(beside.view(np.float64), dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("part", [0.001, 0.25, 0.499999, 0.500001, 0.75, 0.999])
def test_between_neighbours(dtype: torch.dtype, part: float) -> None:
    values = numbers(dtype)
    assert_rounded(values[:-1] + part * np.diff(values), dtype)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_hair_beside_a_number(dtype: torch.dtype) -> None:
    values = numbers(dtype)[1:]
    assert_rounded(np.nextafter(values, np.inf), dtype)
    assert_rounded(np.nextafter(values, 0), dtype)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_overflow_begins_half_a_step_beyond_the_largest(dtype: torch.dtype) -> None:
    bits, _, largest = FORMATS[dtype]
    half = largest / ((1 << bits) - 1) / 2
    fits = np.array([largest, largest + half / 2, np.nextafter(largest + half, 0)])
    beyond = np.array([largest + half, largest + 2 * half, 2 * largest, 3.5e38, 1e39, 1e300, LARGEST, np.inf])
    assert_rounded(fits, dtype)
    assert_rounded(beyond, dtype)
    assert np.all(np.isfinite(exact(round_once(torch.from_numpy(fits), dtype))))
    assert np.all(np.isinf(exact(round_once(torch.from_numpy(beyond), dtype))))


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_what_is_too_small_keeps_its_sign(dtype: torch.dtype) -> None:
    bits, lowest, _ = FORMATS[dtype]
    half = np.ldexp(1.0, lowest - bits)
    tiny = np.array([0.0, 5e-324, 1e-300, 1e-60, 2.0**-150, half / 2, np.nextafter(half, 0), half])
    small = np.array([np.nextafter(half, 1), 1.5 * half, 2 * half, 3 * half, 5 * half])
    assert_rounded(tiny, dtype)
    assert_rounded(small, dtype)
    assert np.all(exact(round_once(torch.from_numpy(tiny), dtype)) == 0)
    assert np.all(exact(round_once(torch.from_numpy(small), dtype)) > 0)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64])
def test_nan_stays_nan(dtype: torch.dtype) -> None:
    assert bool(torch.isnan(round_once(torch.tensor([float("nan")], dtype=torch.float64), dtype)).all())


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_random_numbers_of_every_size(dtype: torch.dtype) -> None:
    bits, lowest, _ = FORMATS[dtype]
    random = np.random.default_rng(2)
    highest = 129 if lowest == -126 else 18
    exponents = random.integers(lowest - bits - 4, highest, 400_000)
    assert_rounded(np.ldexp(random.uniform(0.5, 1, len(exponents)), exponents), dtype)


def test_float64_is_not_rounded() -> None:
    values = torch.tensor([1 / 3, 1e-320, -1e308], dtype=torch.float64)
    assert torch.equal(round_once(values, torch.float64), values)


def test_by_way_of_float32_would_round_twice() -> None:
    """What this function is for: the plain conversion gets these wrong."""
    value = torch.tensor([1 + 2**-8 + 2**-40], dtype=torch.float64)
    assert value.to(torch.float32).to(torch.bfloat16).item() == 1.0
    assert round_once(value, torch.bfloat16).item() == 1 + 2**-7


def test_the_argument_is_left_alone() -> None:
    values = torch.linspace(-1, 1, 1001, dtype=torch.float64)
    before = values.clone()
    round_once(values, torch.bfloat16)
    assert torch.equal(values, before)
