"""Zeros of either sign in each dtype, and what only looks like one."""

from __future__ import annotations

import pytest
import torch

from fuselora.tensors import TORCH_DTYPES
from fuselora.zeros import SIGNED, all_zero


def stored(dtype: str, *values: float) -> bytes:
    return torch.tensor(values).to(TORCH_DTYPES[dtype]).view(torch.uint8).numpy().tobytes()


def test_every_dtype_that_factors_have_is_signed() -> None:
    assert TORCH_DTYPES.keys() == SIGNED


@pytest.mark.parametrize("dtype", sorted(SIGNED))
def test_zeros_of_both_signs(dtype: str) -> None:
    assert all_zero(stored(dtype, 0.0, -0.0, 0.0, -0.0), dtype)
    assert all_zero(b"", dtype)
    for value in (1.0, -1.0, -2.0, 2.0**-9, float("nan")):
        assert not all_zero(stored(dtype, -0.0, value, 0.0), dtype)


@pytest.mark.parametrize("dtype", sorted(SIGNED))
def test_the_bits_of_a_sign_elsewhere_are_no_zero(dtype: str) -> None:
    n_bytes = len(stored(dtype, 0.0))
    for at in range(n_bytes - 1):
        block = bytearray(n_bytes)
        block[at] = 0x80
        assert not all_zero(bytes(block), dtype)


@pytest.mark.parametrize("dtype", ["I8", "U8", "I64", "BOOL", "F8_E4M3FNUZ", "F8_E8M0"])
def test_elsewhere_that_bit_is_a_value(dtype: str) -> None:
    assert all_zero(bytes(8), dtype)
    assert not all_zero(bytes(7) + b"\x80", dtype)
