"""Public reports about LoRA tensors that are no pair: modulations, norms and biases that were left out."""
# ruff: noqa: N802 - cases keep their names

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cases.builders import (
    MODULE,
    NATIVE_MODULE,
    NATIVE_Q,
    Q,
    assert_filled,
    base_of,
    full,
    fuse,
    refuse,
    same_bytes,
    save,
    std_base,
    std_pair,
    std_tensors,
)

CROSS = "blocks.0.cross_attn"

# B20


MODULATIONS = [("native", "blocks.0.modulation"), ("diffusers", "blocks.0.scale_shift_table")]


@pytest.mark.parametrize(("layout", "key"), MODULATIONS)
@pytest.mark.parametrize("prefix", ["", "diffusion_model.", "model.diffusion_model.", "transformer."])
@pytest.mark.parametrize(("strength", "value"), [("1", 1.5), ("2", 2.0), ("-2", 0.0)])
def test_B20_modulations_are_added(
    strength: str, value: float, prefix: str, layout: str, key: str, tmp_path: Path
) -> None:
    base = base_of(tmp_path / "base", {key: full(1, 6, 4)})
    lora = save(tmp_path / "x.safetensors", {f"{prefix}blocks.0.diff_m": full(1, 6, 4, value=0.5)})
    fused = fuse(base, f"{lora}:{strength}")
    assert same_bytes(fused.tensors()[key], full(1, 6, 4, value=value))
    assert fused.lora["applied"]["diff_m"] == 1


@pytest.mark.parametrize(("layout", "key"), MODULATIONS)
def test_B20_alpha_and_rank_are_for_pairs(layout: str, key: str, tmp_path: Path) -> None:
    native = layout == "native"
    base = base_of(tmp_path / "base", {**std_tensors(native=native), key: full(1, 6, 4)})
    lora = {
        **std_pair(64, f"diffusion_model.{NATIVE_MODULE}", alpha=8.0),
        "diffusion_model.blocks.0.diff_m": full(1, 6, 4, value=0.5),
        "diffusion_model.blocks.0.alpha": torch.tensor(8.0),
    }
    path = save(tmp_path / "x.safetensors", lora, {"alpha": "8"})
    found = fuse(base, f"{path}:2").tensors()
    assert_filled(found[key], 2.0)
    assert_filled(found[NATIVE_Q if native else Q], 1.25)


@pytest.mark.parametrize(
    ("native", "key"), [(True, "head.modulation"), (False, "scale_shift_table")], ids=["native", "diffusers"]
)
def test_B20_the_modulation_of_the_head(native: bool, key: str, tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", {**std_tensors(native=native), key: full(1, 2, 4)})
    lora = save(tmp_path / "x.safetensors", {"diffusion_model.head.diff_m": full(1, 2, 4, value=0.5)})
    assert_filled(fuse(base, f"{lora}:2").tensors()[key], 2.0)


@pytest.mark.parametrize(("layout", "key"), MODULATIONS)
@pytest.mark.parametrize("shape", [(6, 4), (1, 6, 3), (1, 1, 4), (1, 6, 1), (1,)])
def test_B20_a_modulation_of_another_shape(
    shape: tuple[int, ...], layout: str, key: str, tmp_path: Path
) -> None:
    base = base_of(tmp_path / "base", {key: full(1, 6, 4)})
    lora = save(tmp_path / "x.safetensors", {"diffusion_model.blocks.0.diff_m": full(*shape)})
    refuse(base, lora, says=("x.safetensors", key, str(list(shape)), "[1, 6, 4]"))


def test_B20_a_modulation_with_no_home(tmp_path: Path) -> None:
    lora = {**std_pair(4, MODULE), "diffusion_model.blocks.0.diff_m": full(1, 6, 4)}
    path = save(tmp_path / "x.safetensors", lora)
    refuse(std_base(tmp_path / "base"), path, says=("x.safetensors", "blocks.0", "no home"))


# B21


def cross_base(root: Path, *, native: bool = True) -> Path:
    """Cross attention's norm of 1.0, bias of 0 and weight of 1.0."""
    norm, q = cross_names(native)
    tensors = {f"{norm}.weight": full(4), f"{q}.bias": torch.zeros(4), f"{q}.weight": full(4, 4)}
    return base_of(root, tensors)


def cross_names(native: bool) -> tuple[str, str]:
    if native:
        return f"{CROSS}.norm_k", f"{CROSS}.q"
    return "blocks.0.attn2.norm_k", "blocks.0.attn2.to_q"


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("prefix", ["", "diffusion_model.", "lora_unet_"])
def test_B21_differences_are_added(prefix: str, native: bool, tmp_path: Path) -> None:
    flat = prefix.startswith("lora_")
    norm, q = (prefix + (name.replace(".", "_") if flat else name) for name in cross_names(native=True))
    lora = {
        f"{norm}.diff": full(4, value=0.25),
        f"{q}.diff_b": full(4, value=0.5),
        **std_pair(4, q, alpha=2.0),
    }
    base = cross_base(tmp_path / "base", native=native)
    fused = fuse(base, f"{save(tmp_path / 'x.safetensors', lora)}:2")
    norm, q = cross_names(native)
    found = fused.tensors()
    assert_filled(found[f"{norm}.weight"], 1.5)
    assert_filled(found[f"{q}.bias"], 1.0)
    assert_filled(found[f"{q}.weight"], 2.0)
    assert fused.lora["applied"] == {"pairs": 1, "diff": 1, "diff_b": 1, "diff_m": 0, "replace": 0}


@pytest.mark.parametrize("shape", [(4, 4), (1, 6, 4), (4, 3, 1, 2, 2)])
def test_B21_a_whole_difference_of_any_shape(shape: tuple[int, ...], tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", {**std_tensors(native=True), "patch_embedding.weight": full(*shape)})
    lora = save(tmp_path / "x.safetensors", {"diffusion_model.patch_embedding.diff": full(*shape, value=0.5)})
    assert_filled(fuse(base, f"{lora}:2").tensors()["patch_embedding.weight"], 2.0)


def test_B21_a_pair_and_a_difference_on_one_weight_add_up(tmp_path: Path) -> None:
    lora = {**std_pair(4, alpha=2.0), f"{MODULE}.diff": full(4, 4, value=0.25)}
    fused = fuse(std_base(tmp_path / "base"), f"{save(tmp_path / 'x.safetensors', lora)}:2")
    assert_filled(fused.tensors()[Q], 1 + 2 * 0.5 + 2 * 0.25)


@pytest.mark.parametrize("shape", [(3,), (1,), (4, 1), (1, 4), (4, 4), ()])
@pytest.mark.parametrize("part", ["norm_k.diff", "q.diff_b"])
def test_B21_a_difference_of_another_shape(part: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    lora = save(tmp_path / "x.safetensors", {f"{CROSS}.{part}": full(*shape)})
    key = f"{CROSS}.{'norm_k.weight' if 'norm' in part else 'q.bias'}"
    refuse(cross_base(tmp_path / "base"), lora, says=("x.safetensors", key, str(list(shape)), "[4]"))


@pytest.mark.parametrize("with_pair", [False, True])
def test_B21_no_bias_to_add_to(with_pair: bool, tmp_path: Path) -> None:
    lora = {f"{MODULE}.diff_b": full(4), **(std_pair(4) if with_pair else {})}
    path = save(tmp_path / "x.safetensors", lora)
    for options in ([], ["--allow-unmatched", "*"]):
        refuse(
            std_base(tmp_path / "base"),
            path,
            says=("x.safetensors", MODULE, "no bias to add"),
            options=options,
        )


def test_B21_a_bias_may_change_alone(tmp_path: Path) -> None:
    """Some published files hold a module's bias and not its pair."""
    lora = save(tmp_path / "x.safetensors", {f"{CROSS}.q.diff_b": full(4, value=0.5)})
    found = fuse(cross_base(tmp_path / "base"), lora).tensors()
    assert_filled(found[f"{CROSS}.q.bias"], 0.5)
    assert same_bytes(found[f"{CROSS}.q.weight"], full(4, 4))
