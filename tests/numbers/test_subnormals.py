"""Numbers below the normal ones are kept, and results there are float64's, rounded once, to the bit."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from fuselora.delta.rounding import round_once
from tests.small import lora, pair, raw, verified_merge, write

if TYPE_CHECKING:
    from pathlib import Path

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
STEPS = {BF16: -133, F16: -24, F32: -149}  # exponents of the smallest numbers
ROWS, COLUMNS = 128, 96
KERNELS = ["auto", "reference"]


def steps(high: int, seed: int, *shape: int) -> torch.Tensor:
    """Whole numbers up to ``high`` of either sign, in float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-high, high + 1, shape, generator=generator).double()


def merged(folder: Path, weight: torch.Tensor, one: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    base = write(folder / "base.safetensors", {"a.weight": weight})
    verified_merge(base, lora(folder / "l.safetensors", one), folder / "out", **options)
    return load_file(folder / "out" / "base.safetensors")["a.weight"]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("stored", "factors"), list(itertools.product(STEPS, STEPS)))
def test_sums_of_pairs(tmp_path: Path, stored: torch.dtype, factors: torch.dtype, kernel: str) -> None:
    """Products of a few steps each: float32 holds every sum, so there is one right answer."""
    half = STEPS[stored] // 2
    weight = (steps(16, 1, ROWS, COLUMNS) * 2.0 ** STEPS[stored]).to(stored)
    up, down = steps(3, 2, ROWS, 2), steps(3, 3, 2, COLUMNS)
    up, down = (up * 2.0**half).to(factors), (down * 2.0 ** (STEPS[stored] - half)).to(factors)
    wanted = round_once(weight.double() + up.double() @ down.double(), stored)
    found = merged(tmp_path, weight, pair("a", up, down), kernel=kernel)
    assert raw(found + 0.0) == raw(wanted + 0.0)  # zeros of both signs are one number


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("stored", [BF16, F16])
def test_ties_and_their_neighbours(tmp_path: Path, stored: torch.dtype, kernel: str) -> None:
    """Quarters of the smallest number: half goes to even, a hair more or less to its own side."""
    quarters = steps(40, 4, ROWS, COLUMNS) * 2.0 ** (STEPS[stored] - 2)
    weight = (steps(16, 1, ROWS, COLUMNS) * 2.0 ** STEPS[stored]).to(stored)
    wanted = round_once(weight.double() + quarters, stored)
    found = merged(tmp_path, weight, {"a.diff": quarters.float()}, kernel=kernel)
    assert raw(found + 0.0) == raw(wanted + 0.0)


@pytest.mark.parametrize("stored", STEPS)
def test_rows_that_a_pair_does_not_reach_keep_their_values(tmp_path: Path, stored: torch.dtype) -> None:
    weight = (steps(100, 1, ROWS, COLUMNS).abs() + 1) * 2.0 ** STEPS[stored]
    up = torch.zeros(ROWS, 1)
    up[0] = 1
    one = pair("a", up.to(stored), torch.ones(1, COLUMNS, dtype=stored))
    found = merged(tmp_path, weight.to(stored), one)
    assert found[1:].double().equal(weight[1:]) and found[0].eq(1).all()


@pytest.mark.parametrize("stored", STEPS)
def test_tensors_beside_a_fused_one_keep_their_bytes(tmp_path: Path, stored: torch.dtype) -> None:
    tensors = {
        "a.weight": torch.ones(4, 4),
        "b": (steps(100, 1, ROWS, COLUMNS) * 2.0 ** STEPS[stored]).to(stored),
    }
    base = write(tmp_path / "base.safetensors", tensors)
    one = lora(tmp_path / "l.safetensors", pair("a", torch.ones(4, 1), torch.ones(1, 4)))
    verified_merge(base, one, tmp_path / "out")
    assert raw(load_file(tmp_path / "out" / "base.safetensors")["b"]) == raw(tensors["b"])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_cast_to_fewer_bits_rounds_them_once(tmp_path: Path, dtype: str) -> None:
    narrow: torch.dtype = getattr(torch, dtype)
    tensors = {
        "a.weight": torch.ones(4, 4),
        "b": (steps(400, 1, ROWS, COLUMNS) * 2.0 ** (STEPS[narrow] - 3)).float(),
    }
    base = write(tmp_path / "base.safetensors", tensors)
    one = lora(tmp_path / "l.safetensors", pair("a", torch.ones(4, 1), torch.ones(1, 4)))
    verified_merge(base, one, tmp_path / "out", dtype=dtype)
    found = load_file(tmp_path / "out" / "base.safetensors")["b"]
    assert raw(found) == raw(round_once(tensors["b"].double(), narrow))
    assert found.count_nonzero() > found.numel() // 2


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_program_that_flushes_them_gets_the_same_bytes(tmp_path: Path, jobs: int) -> None:
    """``torch.set_flush_denormal``, or a library built with -ffast-math, sets it for threads to come."""
    weight = (steps(100, 1, ROWS, COLUMNS).abs() + 1).float() * 2.0**-149
    base = write(tmp_path / "base.safetensors", {"a.weight": weight})
    one = lora(tmp_path / "l.safetensors", {"a.diff": torch.full((ROWS, COLUMNS), 2.0**-149)})
    torch.set_flush_denormal(True)
    try:
        verified_merge(base, one, tmp_path / "out", jobs=jobs)
    finally:
        torch.set_flush_denormal(False)
    found = load_file(tmp_path / "out" / "base.safetensors")["a.weight"]
    assert raw(found) == raw(weight + 2.0**-149)
