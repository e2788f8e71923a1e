"""NaN, infinity and overflow: kept where nothing is added, refused by name everywhere else."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from fuselora.errors import FuseloraError, NumericError, Refused
from tests.small import lora, noise, pair, raw, tree, verified_merge, write

if TYPE_CHECKING:
    from pathlib import Path

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
BF16_MAX = torch.finfo(BF16).max
PAIR = pair("a", noise(4, 1), noise(1, 4, seed=1))
ODD = (math.nan, math.inf, -math.inf)


def filled(value: float, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.full((4, 4), value, dtype=dtype)


def merge(
    folder: Path,
    base: dict[str, torch.Tensor],
    one: dict[str, torch.Tensor],
    strength: str = "",
    **options: Any,
) -> dict[str, torch.Tensor]:
    stored = write(folder / "base.safetensors", {"a.weight": filled(1.0), **base})
    path = lora(folder / "l.safetensors", one)
    verified_merge(stored, path, folder / "out", strength, **options)
    return load_file(folder / "out" / "base.safetensors")


def refused(
    folder: Path,
    base: dict[str, torch.Tensor],
    one: dict[str, torch.Tensor],
    *says: str,
    strength: str = "",
    **options: Any,
) -> FuseloraError:
    """What a merge says that must not begin to write."""
    with pytest.raises((NumericError, Refused)) as caught:
        merge(folder, base, one, strength, **options)
    assert tree(folder).keys() == {"base.safetensors", "l.safetensors"}
    for word in says:
        assert word in caught.value.message
    return caught.value


# in the base


def odd_numbers() -> dict[str, torch.Tensor]:
    """NaNs with payloads and of both signs, infinities, negative zeros: of every float that files hold."""
    bits16 = torch.tensor([0x7FC1, 0x7F81, -0x3F, 0x7F80, -0x80, -0x8000], dtype=torch.int16)
    bits32 = torch.tensor([0x7FC00001, 0x7F800001, -1, 0x7F800000, -0x800000], dtype=torch.int32)
    return {
        "bf16": bits16.view(BF16),
        "f16": torch.tensor([0x7E01, 0x7C01, -1, 0x7C00], dtype=torch.int16).view(F16),
        "f32": bits32.view(F32),
        "f64": torch.tensor([math.nan, -math.inf, 5e-324, -0.0], dtype=F64),
        "e4m3": torch.tensor([0x7F, 0xFF, 0x80, 1], dtype=torch.uint8).view(torch.float8_e4m3fn),
        "e5m2": torch.tensor([0x7C, 0x7D, 0xFF, 1], dtype=torch.uint8).view(torch.float8_e5m2),
    }


@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_what_is_beside_a_fused_tensor_keeps_its_bits(tmp_path: Path, kernel: str) -> None:
    tensors = odd_numbers()
    found = merge(tmp_path, tensors, PAIR, kernel=kernel)
    assert {name: raw(found[name]) for name in tensors} == {name: raw(t) for name, t in tensors.items()}
    assert not found["a.weight"].equal(filled(1.0))


@pytest.mark.parametrize("value", ODD)
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_a_fused_tensor_that_holds_one_is_refused(tmp_path: Path, dtype: torch.dtype, value: float) -> None:
    weight = filled(1.0, dtype)
    weight[3, 3] = value
    one = {name: tensor.to(dtype) for name, tensor in PAIR.items()}
    error = refused(tmp_path, {"a.weight": weight}, one, "base.safetensors", "a.weight", "NaN or infinity")
    assert error.hint == "The base itself is broken."


@pytest.mark.parametrize("value", ODD)
def test_a_cast_tensor_that_holds_one_is_refused(tmp_path: Path, value: float) -> None:
    base = {"b": torch.tensor([1.0, value])}
    says = "b: the tensor cast to BF16 is not finite: the base itself holds NaN or infinity there"
    refused(tmp_path, base, PAIR, says, dtype="bfloat16")


@pytest.mark.parametrize("strength", [":0", ""])
def test_one_that_nothing_is_added_to_keeps_its_bits(tmp_path: Path, strength: str) -> None:
    """A zero delta, or one at strength 0, is no sum."""
    one = PAIR if strength else {"a.diff": torch.zeros(4, 4)}
    weight = filled(math.nan)
    assert raw(merge(tmp_path, {"a.weight": weight}, one, strength)["a.weight"]) == raw(weight)


# in a LoRA

FACTORS = [
    *((dtype, value) for dtype in (F16, BF16, F32, F64, torch.float8_e5m2) for value in ODD),
    (torch.float8_e4m3fn, math.nan),  # it has no infinity
]


@pytest.mark.parametrize(("dtype", "value"), FACTORS)
@pytest.mark.parametrize("part", ["lora_up.weight", "lora_down.weight"])
def test_a_factor_that_holds_one_is_refused(
    tmp_path: Path, part: str, dtype: torch.dtype, value: float
) -> None:
    one = {name: tensor.to(dtype) for name, tensor in PAIR.items()}
    wide = PAIR[f"a.{part}"].clone()
    wide.view(-1)[-1] = value
    one[f"a.{part}"] = wide.to(dtype)
    refused(tmp_path, {}, one, "l.safetensors", f"a.{part} holds NaN or infinity")


@pytest.mark.parametrize("value", ODD)
@pytest.mark.parametrize("strength", ["", ":0"])
def test_a_difference_that_holds_one_is_refused(tmp_path: Path, strength: str, value: float) -> None:
    refused(tmp_path, {}, {"a.diff": filled(value)}, "a.diff holds NaN or infinity", strength=strength)


@pytest.mark.parametrize("value", ODD)
def test_an_alpha_that_is_one_is_refused(tmp_path: Path, value: float) -> None:
    refused(tmp_path, {}, {**PAIR, "a.alpha": torch.tensor(value)}, "a.alpha", "not a finite number")


def test_one_in_a_module_that_is_left_out_is_refused(tmp_path: Path) -> None:
    one = {**PAIR, "q.diff": filled(math.nan)}
    refused(tmp_path, {}, one, "q.diff holds NaN or infinity", allow_unmatched=["q"])


# overflow

SUMS = [
    (F16, 65504.0, 15.99, 16.0),  # half a step beyond the largest number
    (BF16, BF16_MAX, 2.0**118, 2.0**119),
    (F32, torch.finfo(F32).max, 2.0**102, 2.0**103),
]


@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("dtype", "largest", "fits", "beyond"), SUMS)
def test_half_a_step_beyond_the_largest_number(
    tmp_path: Path, dtype: torch.dtype, largest: float, fits: float, beyond: float, sign: int, kernel: str
) -> None:
    base = {"a.weight": filled(sign * largest, dtype)}
    for name in ("fits", "beyond"):
        (tmp_path / name).mkdir()
    found = merge(tmp_path / "fits", base, {"a.diff": filled(sign * fits)}, kernel=kernel)
    assert found["a.weight"].equal(base["a.weight"])
    one = {"a.diff": filled(sign * beyond)}
    refused(tmp_path / "beyond", base, one, "base.safetensors", "a.weight", "does not fit", kernel=kernel)


CASTS = [
    (F32, "float16", 65519.0, 65520.0),
    (BF16, "float16", 65280.0, 65536.0),
    (F32, "bfloat16", BF16_MAX + 2.0**118, BF16_MAX + 2.0**119),
]


@pytest.mark.parametrize(("stored", "dtype", "fits", "beyond"), CASTS)
def test_a_cast_that_overflows_is_refused(
    tmp_path: Path, stored: torch.dtype, dtype: str, fits: float, beyond: float
) -> None:
    for name in ("fits", "beyond"):
        (tmp_path / name).mkdir()
    found = merge(tmp_path / "fits", {"b": torch.tensor([fits, -fits]).to(stored)}, PAIR, dtype=dtype)["b"]
    assert found.isfinite().all() and found.dtype == getattr(torch, dtype)
    base = {"b": torch.tensor([1.0, -beyond]).to(stored)}
    error = refused(tmp_path / "beyond", base, PAIR, "b: the tensor cast to", "does not fit", dtype=dtype)
    assert error.hint is not None and "--dtype keep" in error.hint
    assert ("more range than float16" in error.hint) == (dtype == "float16")


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_a_product_that_overflows_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    one = pair("a", torch.full((4, 1), 1e30, dtype=dtype), torch.full((1, 4), 1e30, dtype=dtype))
    refused(tmp_path, {"a.weight": filled(1.0, dtype)}, one, "a.weight", "does not fit")


@pytest.mark.parametrize(("alpha", "says"), [(1e300, "does not fit float32"), (3e38, "does not fit F32")])
def test_a_scale_that_overflows_is_refused(tmp_path: Path, alpha: float, says: str) -> None:
    one = {**pair("a", torch.full((4, 1), 2.0), torch.ones(1, 4)), "a.alpha": torch.tensor(alpha, dtype=F64)}
    refused(tmp_path, {}, one, "a", says)


@pytest.mark.parametrize("alpha", [1e-38, -1e-40, 1e-300])
def test_a_scale_that_underflows_is_refused(tmp_path: Path, alpha: float) -> None:
    """Large factors make even such a delta a large one, and float32 has too few digits of the scale."""
    one = {
        **pair("a", torch.full((4, 1), 1e19), torch.full((1, 4), 1e19)),
        "a.alpha": torch.tensor(alpha, dtype=F64),
    }
    refused(tmp_path, {}, one, "a", "does not fit float32")


def test_the_smallest_scale_is_right(tmp_path: Path) -> None:
    one = {
        **pair("a", torch.full((4, 1), 2.0**64), torch.full((1, 4), 2.0**63)),
        "a.alpha": torch.tensor(2.0**-126, dtype=F64),
    }
    assert merge(tmp_path, {}, one)["a.weight"].equal(filled(3.0))


def test_float64_beyond_float32_is_refused_or_right(tmp_path: Path) -> None:
    """1e300 is infinite in float32 sums; float64's get it right."""
    one = pair("a", torch.full((4, 1), 1e300, dtype=F64), torch.full((1, 4), 1e-300, dtype=F64))
    refused(tmp_path, {}, one, "a.weight", "does not fit F32")
    (tmp_path / "reference").mkdir()
    assert merge(tmp_path / "reference", {}, one, kernel="reference")["a.weight"].equal(filled(2.0))
