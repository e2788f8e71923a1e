"""Cases of kinds that need the base's values: DoRA (B28) and whole weights (B31)."""
# ruff: noqa: N802 - cases keep their names

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cases.builders import (
    MODULE,
    PEFT,
    Q,
    Tensors,
    base_of,
    full,
    fuse,
    refuse,
    same_bytes,
    save,
    save_json,
    std_base,
    std_pair,
    std_tensors,
)

WEIGHT = torch.tensor([[3.0, 4.0], [6.0, 8.0]])
EYE = {"lora_A.weight": torch.eye(2), "lora_B.weight": torch.eye(2)}
BY_ROW = torch.tensor([[7.0710678, 7.0710678], [11.0940037, 16.6410046]])
BY_COLUMN = torch.tensor([[5.5470018, 8.1227694], [8.3205032, 18.2762318]])
MAGNITUDE = torch.tensor([10.0, 20.0])
HEAD = "proj_out.weight"


def under(module: str, parts: Tensors) -> dict[str, torch.Tensor]:
    return {f"{module}.{part}": tensor for part, tensor in parts.items()}


def dora(folder: Path, part: str, magnitude: torch.Tensor, **others: torch.Tensor) -> Path:
    parts = {**EYE, part: magnitude, "alpha": torch.tensor(2.0), **others}
    return save(folder / "x.safetensors", under(MODULE, parts))


# DoRA


@pytest.mark.parametrize(
    ("part", "magnitude", "right"),
    [
        ("lora_magnitude_vector", MAGNITUDE, BY_ROW),
        ("lora_magnitude_vector.weight", MAGNITUDE, BY_ROW),
        ("dora_scale", MAGNITUDE.view(2, 1), BY_ROW),
        ("dora_scale", MAGNITUDE.view(1, 2), BY_COLUMN),
    ],
)
@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_B28_the_magnitude_counts_along_its_own_axis(
    part: str, magnitude: torch.Tensor, right: torch.Tensor, kernel: str, tmp_path: Path
) -> None:
    base = base_of(tmp_path / "base", {Q: WEIGHT})
    fused = fuse(base, dora(tmp_path, part, magnitude), options=["--kernel", kernel])
    torch.testing.assert_close(fused.tensors()[Q], right, rtol=2e-7, atol=0)
    assert fused.lora["applied"]["pairs"] == 1


@pytest.mark.parametrize("strength", [-1.0, 0.5, 2.0])
def test_B28_the_strength_is_of_the_way_from_the_base(strength: float, tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", {Q: WEIGHT})
    fused = fuse(base, f"{dora(tmp_path, 'dora_scale', MAGNITUDE.view(2, 1))}:{strength}")
    torch.testing.assert_close(fused.tensors()[Q], WEIGHT + strength * (BY_ROW - WEIGHT), rtol=1e-6, atol=0)


def test_B28_two_doras_each_start_from_the_base(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", {Q: WEIGHT})
    first = dora(tmp_path, "dora_scale", MAGNITUDE.view(2, 1))
    second = dora(tmp_path / "other", "dora_scale", MAGNITUDE.view(1, 2))
    fused = fuse(base, first, f"{second}:0.5")
    right = WEIGHT + (BY_ROW - WEIGHT) + 0.5 * (BY_COLUMN - WEIGHT)
    torch.testing.assert_close(fused.tensors()[Q], right, rtol=1e-6, atol=0)


def test_B28_a_dora_whose_pair_is_zero_still_changes_the_weight(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", {Q: WEIGHT})
    zero = {"lora_A.weight": torch.eye(2), "lora_B.weight": torch.zeros(2, 2)}
    lora = save(tmp_path / "x.safetensors", under(MODULE, {**zero, "lora_magnitude_vector": MAGNITUDE}))
    fused = fuse(base, lora)
    torch.testing.assert_close(fused.tensors()[Q], torch.tensor([[6.0, 8.0], [12.0, 16.0]]))
    assert "zero_delta" not in fused.codes


@pytest.mark.parametrize("part", ["lora_magnitude_vector", "dora_scale"])
def test_B28_a_magnitude_without_a_delta_is_refused(part: str, tmp_path: Path) -> None:
    tensors = {**std_pair(4, "blocks.0.attn1.to_k"), f"{MODULE}.{part}": full(4, 1)}
    refuse(std_base(tmp_path / "base"), save(tmp_path / "x.safetensors", tensors), says=[MODULE, "without"])


@pytest.mark.parametrize(
    "parts",
    [
        {"lora_magnitude_vector": full(3)},
        {"lora_magnitude_vector": full(2, 2)},
        {"dora_scale": full(3, 1)},
        {"dora_scale": full(2, 2)},
        {"dora_scale": full(2)},
        {"dora_scale": torch.tensor(1.0)},
        {"dora_scale": full(2, 1), "lora_magnitude_vector": full(2)},
    ],
)
def test_B28_a_magnitude_that_does_not_fit_is_refused(parts: Tensors, tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", {Q: WEIGHT})
    lora = save(tmp_path / "x.safetensors", under(MODULE, {**EYE, **parts}))
    refuse(base, lora, says=["x.safetensors", MODULE, next(iter(parts)).split("_")[-1]])


# Whole weights


def adapter(folder: Path, tensors: Tensors, **config: object) -> Path:
    """A PEFT adapter folder."""
    save(folder / "adapter_model.safetensors", tensors)
    save_json(folder / "adapter_config.json", {"peft_type": "LORA", "r": 4, "lora_alpha": 4, **config})
    return folder


def with_head(folder: Path) -> Path:
    tensors = {**std_tensors(), HEAD: full(4, 4, value=3.0), "proj_out.bias": full(4, value=-1.0)}
    return base_of(folder / "base", tensors)


HEAD_KEYS = (
    "base_model.model.proj_out.weight",
    "base_model.model.proj_out.modules_to_save.weight",
    "base_model.model.proj_out.modules_to_save.default.weight",
    "base_model.model.proj_out.base_layer.weight",
)


@pytest.mark.parametrize("key", HEAD_KEYS)
def test_B31_a_whole_weight_takes_the_place_of_the_base_s(key: str, tmp_path: Path) -> None:
    tensors = {key: full(4, 4, value=7.0), **std_pair(4, f"base_model.model.{MODULE}", style=PEFT)}
    lora = adapter(tmp_path / "lora", tensors, modules_to_save=["proj_out"])
    fused = fuse(with_head(tmp_path), lora)
    assert same_bytes(fused.tensors()[HEAD], full(4, 4, value=7.0))
    assert same_bytes(fused.tensors()[Q], full(4, 4, value=2.0))
    assert fused.lora["applied"]["replace"] == 1
    assert "replace_strength" not in fused.codes


def test_B31_comfyui_says_that_a_weight_is_set(tmp_path: Path) -> None:
    tensors = {"diffusion_model.proj_out.set_weight": full(4, 4, value=7.0)}
    fused = fuse(with_head(tmp_path), save(tmp_path / "x.safetensors", tensors))
    assert same_bytes(fused.tensors()[HEAD], full(4, 4, value=7.0))
    assert fused.lora["applied"]["replace"] == 1


@pytest.mark.parametrize(("strength", "right"), [(0.5, 5.0), (-1.0, -1.0), (2.0, 11.0), (0.0, 3.0)])
def test_B31_at_another_strength_it_is_a_mixture_and_said(
    strength: float, right: float, tmp_path: Path
) -> None:
    tensors = {"proj_out.weight": full(4, 4, value=7.0), **std_pair(4)}
    fused = fuse(with_head(tmp_path), f"{save(tmp_path / 'x.safetensors', tensors)}:{strength}")
    assert same_bytes(fused.tensors()[HEAD], full(4, 4, value=right))
    if strength:
        assert fused.warning("replace_strength")["modules"] == 1


def test_B31_trained_biases_are_replaced_too(tmp_path: Path) -> None:
    """PEFT's bias="all" saves every bias of the model, with or without a pair beside it."""
    base = base_of(tmp_path / "base", {**std_tensors(), f"{MODULE}.bias": full(4), "norm.bias": full(4)})
    tensors = {
        **std_pair(4, f"base_model.model.{MODULE}", style=("lora_A.default.weight", "lora_B.default.weight")),
        f"base_model.model.{MODULE}.base_layer.bias": full(4, value=5.0),
        "base_model.model.norm.bias": full(4, value=6.0),
    }
    found = fuse(base, adapter(tmp_path / "lora", tensors, bias="all")).tensors()
    assert same_bytes(found[f"{MODULE}.bias"], full(4, value=5.0))
    assert same_bytes(found["norm.bias"], full(4, value=6.0))
    assert same_bytes(found[Q], full(4, 4, value=2.0))


def test_B31_a_wider_replacement_is_rounded_once(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", {HEAD: full(4, 4, dtype=torch.bfloat16), **std_tensors()})
    exact = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    exact[0, 0] = -0.0
    fused = fuse(base, save(tmp_path / "x.safetensors", {HEAD: exact, **std_pair(4)}))
    assert same_bytes(fused.tensors()[HEAD], exact.bfloat16())


def test_B31_zeros_replace_as_well(tmp_path: Path) -> None:
    tensors = {HEAD: full(4, 4, value=0.0), **std_pair(4)}
    fused = fuse(with_head(tmp_path), save(tmp_path / "x.safetensors", tensors))
    assert same_bytes(fused.tensors()[HEAD], full(4, 4, value=0.0))


def test_B31_a_pair_on_a_replaced_weight_is_added_to_it(tmp_path: Path) -> None:
    tensors = {Q: full(4, 4, value=8.0), **std_pair(4)}
    fused = fuse(std_base(tmp_path / "base"), save(tmp_path / "x.safetensors", tensors))
    assert same_bytes(fused.tensors()[Q], full(4, 4, value=9.0))


def test_B31_a_file_of_whole_weights_alone_is_a_checkpoint(tmp_path: Path) -> None:
    base, lora = with_head(tmp_path), save(tmp_path / "x.safetensors", {HEAD: full(4, 4), Q: full(4, 4)})
    refuse(base, lora, says=["x.safetensors", "full weight", "checkpoint, not a LoRA"])


def test_B31_whole_weights_that_a_configuration_names_are_none(tmp_path: Path) -> None:
    lora = adapter(tmp_path / "lora", {HEAD: full(4, 4, value=7.0)}, modules_to_save=["proj_out"])
    assert same_bytes(fuse(with_head(tmp_path), lora).tensors()[HEAD], full(4, 4, value=7.0))


def test_B31_a_whole_weight_without_a_home_or_of_another_shape_is_refused(tmp_path: Path) -> None:
    base = with_head(tmp_path)
    homeless = save(tmp_path / "a.safetensors", {"head.weight": full(4, 4), **std_pair(4)})
    refuse(base, homeless, says=["a.safetensors", "head has no home"])
    wide = save(tmp_path / "b.safetensors", {HEAD: full(4, 5), **std_pair(4)})
    refuse(base, wide, says=["b.safetensors", "proj_out", "[4, 5]"])


def test_two_replacements_of_one_tensor_are_refused(tmp_path: Path) -> None:
    tensors = {HEAD: full(4, 4), "proj_out.set_weight": full(4, 4), **std_pair(4)}
    refuse(with_head(tmp_path), save(tmp_path / "x.safetensors", tensors), says=["proj_out", "twice"])


@pytest.mark.parametrize("shape", [[4, 4], [4, 8]])
def test_a_shape_to_widen_to_may_be_the_base_s_own(shape: list[int], tmp_path: Path) -> None:
    tensors = {**std_pair(4), f"{MODULE}.reshape_weight": torch.tensor(shape)}
    base, lora = std_base(tmp_path / "base"), save(tmp_path / "x.safetensors", tensors)
    if shape == [4, 4]:
        assert same_bytes(fuse(base, lora).tensors()[Q], full(4, 4, value=2.0))
    else:
        refuse(base, lora, says=[MODULE, "reshape_weight", "[4, 8]"])
