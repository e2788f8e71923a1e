"""Public reports about rounding and dtypes: deltas rounded away, and tensors that changed kind or size."""
# ruff: noqa: N802 - cases keep their names

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.cases.builders import (
    MODULE,
    PEFT,
    PLAIN,
    WEIGHTS,
    K,
    Q,
    Tensors,
    assert_filled,
    base_of,
    full,
    fuse,
    raw,
    refuse,
    same_bytes,
    save,
    std_pair,
    std_tensors,
)

KERNELS = [[], ["--kernel", "reference"], ["--jobs", "1"]]
HALVES = [torch.float16, torch.bfloat16]
SIGNIFICANT = {torch.float16: 11, torch.bfloat16: 8}  # bits of the significand, the hidden one included

# B36


@pytest.mark.parametrize("options", KERNELS, ids=["auto", "reference", "one thread"])
def test_B36_a_delta_is_added_before_it_is_rounded(options: list[str], tmp_path: Path) -> None:
    """The delta is a little over half a step of bfloat16 at 1.0, and rounds itself to half a step."""
    delta = 2.0**-8 * (1 + 2.0**-10)
    assert delta == 0.003910064697265625
    lora = {f"{MODULE}.{PEFT[0]}": full(1, 4), f"{MODULE}.{PEFT[1]}": full(4, 1, value=delta)}
    lora[f"{MODULE}.alpha"] = torch.tensor(1.0)
    base = base_of(tmp_path / "base", {Q: full(4, 4, dtype=torch.bfloat16)})
    found = fuse(base, save(tmp_path / "x.safetensors", lora), options=options).tensors()[Q]
    assert same_bytes(found, full(4, 4, value=1.0078125, dtype=torch.bfloat16))


@pytest.mark.parametrize("options", KERNELS, ids=["auto", "reference", "one thread"])
def test_B36_products_of_halves_are_not_rounded_to_halves(options: list[str], tmp_path: Path) -> None:
    value = 1.0078125
    lora = {
        f"{MODULE}.{PEFT[0]}": full(1, 4, value=value, dtype=torch.bfloat16),
        f"{MODULE}.{PEFT[1]}": full(4, 1, value=value, dtype=torch.bfloat16),
        f"{MODULE}.alpha": torch.tensor(1.0),
    }
    base = base_of(tmp_path / "base", {Q: torch.zeros(4, 4)})
    found = fuse(base, save(tmp_path / "x.safetensors", lora), options=options).tensors()[Q]
    assert_filled(found, 1.01568603515625)


@pytest.mark.parametrize("options", KERNELS, ids=["auto", "reference", "one thread"])
@pytest.mark.parametrize("dtype", HALVES)
def test_B36_two_loras_are_summed_before_they_are_rounded(
    dtype: torch.dtype, options: list[str], tmp_path: Path
) -> None:
    """Each alone is three eighths of a step and would be lost; together they are three quarters."""
    step = 2.0 ** (1 - SIGNIFICANT[dtype])
    base = base_of(tmp_path / "base", {Q: full(4, 4, dtype=dtype)})
    first = save(tmp_path / "a.safetensors", std_pair(1, value=step * 3 / 8))
    second = save(tmp_path / "b.safetensors", {f"{MODULE}.diff": full(4, 4, value=step * 3 / 8)})
    found = fuse(base, first, second, options=options).tensors()[Q]
    assert same_bytes(found, full(4, 4, value=1 + step, dtype=dtype))


@pytest.mark.parametrize("options", KERNELS, ids=["auto", "reference", "one thread"])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("steps", "rounded"), [(0.5, 0), (1.5, 2), (2.5, 2), (0.5 + 2**-9, 1), (1.5 - 2**-9, 1), (-0.25, 0)]
)
def test_B36_halfway_goes_to_the_even_neighbour(
    steps: float, rounded: int, dtype: torch.dtype, options: list[str], tmp_path: Path
) -> None:
    step = 2.0 ** (1 - SIGNIFICANT[dtype])
    base = base_of(tmp_path / "base", {Q: full(4, 4, dtype=dtype)})
    lora = save(tmp_path / "x.safetensors", {f"{MODULE}.diff": full(4, 4, value=steps * step)})
    found = fuse(base, lora, options=options).tensors()[Q]
    assert same_bytes(found, full(4, 4, value=1 + rounded * step, dtype=dtype))


def test_B36_a_delta_that_is_lost_is_said(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", {Q: full(4, 4, dtype=torch.bfloat16)})
    lora = save(tmp_path / "x.safetensors", std_pair(4, value=2.0**-10))
    fused = fuse(base, lora)
    assert same_bytes(fused.tensors()[Q], full(4, 4, dtype=torch.bfloat16))
    warning = fused.warning("delta_lost")
    assert (warning["touched"], warning["unchanged"]) == (16, 16)


# B39


def exact(rows: int, columns: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Values of few bits, so that every sum of products is exact in float32 in any order."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(-4, 5, (rows, columns), generator=generator) / 4).to(dtype)


@pytest.mark.parametrize("options", KERNELS, ids=["auto", "reference", "one thread"])
@pytest.mark.parametrize("lora_dtype", [*HALVES, torch.float32, torch.float64])
@pytest.mark.parametrize("base_dtype", [*HALVES, torch.float32])
def test_B39_halves_need_no_gpu(
    base_dtype: torch.dtype, lora_dtype: torch.dtype, options: list[str], tmp_path: Path
) -> None:
    weight, up, down = (
        exact(80, 48, 0, base_dtype),
        exact(80, 8, 1, lora_dtype),
        exact(8, 48, 2, lora_dtype),
    )
    lora = {f"{MODULE}.{PLAIN[0]}": down, f"{MODULE}.{PLAIN[1]}": up, f"{MODULE}.alpha": torch.tensor(2.0)}
    base = base_of(tmp_path / "base", {Q: weight})
    fused = fuse(base, save(tmp_path / "x.safetensors", lora), options=options)
    expected = (weight.double() + 0.25 * (up.double() @ down.double())).float().to(base_dtype)
    assert same_bytes(fused.tensors()[Q], expected)
    assert fused.document["math"]["device"] == "cpu"


# B40


@pytest.mark.parametrize("base_dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("strength", ["0.7", "1"])
def test_B40_the_dtype_and_the_size_stay(base_dtype: torch.dtype, strength: str, tmp_path: Path) -> None:
    name = str(base_dtype).removeprefix("torch.")
    tensors = {key: tensor.to(base_dtype) for key, tensor in std_tensors().items()}
    tensors[f"{MODULE}.bias"] = full(4, dtype=base_dtype)
    base = base_of(tmp_path / "base", tensors, config={"_class_name": "X", "torch_dtype": name})
    lora = {**std_pair(4, dtype=torch.float32), f"{MODULE}.diff_b": full(4, dtype=torch.float64)}
    fused = fuse(base, f"{save(tmp_path / 'x.safetensors', lora)}:{strength}")
    found = fused.tensors()
    assert {key: (t.dtype, t.shape) for key, t in found.items()} == {
        key: (base_dtype, t.shape) for key, t in tensors.items()
    }
    assert n_bytes(found) == n_bytes(tensors)
    config = "transformer/config.json"
    assert (fused.out / config).read_bytes() == (base / config).read_bytes()
    assert fused.document["components"]["transformer"]["dtype"] == name


def n_bytes(tensors: Tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
def test_B40_the_config_follows_a_dtype_that_was_asked_for(key: str, tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", std_tensors(), config={"_class_name": "X", key: "float32", "n": 1})
    fused = fuse(base, save(tmp_path / "x.safetensors", std_pair(4)), options=["--dtype", "bfloat16"])
    found = fused.tensors()
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    config = json.loads((fused.out / "transformer" / "config.json").read_text())
    assert config == {"_class_name": "X", key: "bfloat16", "n": 1}


# B41


def from_bits(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def mixed() -> dict[str, torch.Tensor]:
    """One target in bfloat16, and everything beside it that a careless cast would change."""
    return {
        Q: full(4, 4, dtype=torch.bfloat16),
        "blocks.0.scale_shift_table": torch.randn(1, 6, 4),
        "blocks.0.norm2.weight": torch.randn(4) * 1e-30,
        f"{MODULE}.bias": full(4, value=65504.0, dtype=torch.float16),
        "position_ids": torch.tensor([[0, 1, 2**40, -1]]),
        "mask": torch.tensor([True, False]),
        "big": from_bits(0x7180),
        "payload": from_bits(0x7FC1, 0x7F81, -0x3F, 0x7F80),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(3, dtype=torch.uint8),
        "complex": torch.tensor([1 + 2j]),
        "double": torch.tensor([1e300], dtype=torch.float64),
        "fp8": torch.tensor([448.0, 0.5]).to(torch.float8_e4m3fn),
    }


def test_B41_what_is_not_fused_keeps_its_bytes(tmp_path: Path) -> None:
    tensors = mixed()
    assert tensors["big"].item() == 2.0**100
    assert bool(tensors["payload"].float().isnan()[:3].all())
    base = base_of(tmp_path / "base", tensors)
    fused = fuse(base, save(tmp_path / "x.safetensors", std_pair(4)))
    found = fused.tensors()
    assert found.keys() == tensors.keys()
    assert same_bytes(found[Q], full(4, 4, value=2.0, dtype=torch.bfloat16))
    changed = [key for key, tensor in tensors.items() if not same_bytes(found[key], tensor)]
    assert changed == [Q]
    assert fused.document["components"]["transformer"]["fused"] == 1


def test_B41_a_cast_leaves_alone_what_is_no_weight(tmp_path: Path) -> None:
    tensors = {key: tensor for key, tensor in mixed().items() if key != "payload"}
    tensors |= {f"blocks.{n}.attn2.to_q.weight": full(4, 4) for n in range(12)}  # more of Wan than not
    kept = ("blocks.0.scale_shift_table", "blocks.0.norm2.weight")
    others = ("position_ids", "mask", "empty", "scalar", "complex", "double", "fp8")
    base = base_of(tmp_path / "base", tensors)
    lora = save(tmp_path / "x.safetensors", std_pair(4))
    found = fuse(base, lora, options=["--dtype", "bfloat16"]).tensors()
    unchanged = {key for key, tensor in tensors.items() if raw(found[key]) == raw(tensor)}
    assert unchanged == {*kept, *others, "big"}
    assert found[f"{MODULE}.bias"].dtype == torch.bfloat16


def test_B41_a_target_that_holds_a_nan_is_refused(tmp_path: Path) -> None:
    weight = full(4, 4, dtype=torch.bfloat16)
    weight[0, 0] = float("nan")
    base = base_of(tmp_path / "base", {Q: weight, K: full(4, 4)})
    refuse(base, save(tmp_path / "x.safetensors", std_pair(4)), says=(WEIGHTS, Q, "NaN"))


def test_B41_a_sum_beyond_the_dtype_is_refused(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", {Q: full(4, 4, value=65504.0, dtype=torch.float16), K: full(4, 4)})
    lora = save(tmp_path / "x.safetensors", std_pair(4, value=32.0))
    refuse(base, lora, says=(WEIGHTS, Q, "not finite"))
