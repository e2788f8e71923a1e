from __future__ import annotations

import math

import pytest
import torch

from fuselora.engine.subnormals import ENOUGH, is_base_sound, is_pair_sound, smallest


def bf16(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).to(torch.bfloat16)


@pytest.mark.parametrize(
    ("values", "least"),
    [
        ((), math.inf),
        ((0.0, -0.0), math.inf),
        ((3.0, -2.0, 0.0), 2.0),
        ((-1.0, 5.0), 1.0),
        ((2.0**-133, 1.0), 2.0**-133),
        ((-(2.0**-133), -0.0), 2.0**-133),
        ((3.3895313892515355e38,), 3.3895313892515355e38),
        ((math.inf, 0.0), math.inf),
    ],
)
def test_the_smallest_that_is_not_zero(values: tuple[float, ...], least: float) -> None:
    found = bf16(*values)
    before = found.clone()
    assert smallest(found) == least
    assert torch.equal(found.view(torch.int16), before.view(torch.int16))


def test_nan_is_no_small_number() -> None:
    assert smallest(bf16(math.nan, 4.0)) == 4.0


def test_rows_of_a_matrix() -> None:
    assert smallest(bf16(1, 2, 3, 4).view(2, 2)[1:]) == 3.0


def test_a_base_is_sound_from_what_the_bound_needs_on() -> None:
    assert is_base_sound(bf16(0.0, ENOUGH, -1.0))
    assert not is_base_sound(bf16(1.0, -ENOUGH / 2))


@pytest.mark.parametrize(("scale", "sound"), [(1.0, True), (-1.0, True), (64.0, True), (0.5, False)])
def test_a_pair_is_sound_by_its_smallest_product(scale: float, sound: bool) -> None:
    up, down = bf16(0, 2.0**-50).view(1, 2), bf16(2.0**-55, 1, 0, 1).view(2, 2)
    assert is_pair_sound(up, down, scale) == sound


def test_a_pair_of_zeros_loses_nothing() -> None:
    assert is_pair_sound(torch.zeros(2, 2).bfloat16(), torch.zeros(2, 2).bfloat16(), 1.0)
