"""What the engine leaves out of a LoRA for Wan, or takes at another strength, without an error."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fuselora.synth import base_tensors, write_lora
from tests.oracle import definition
from tests.oracle.definition import Tensors, in_diffusers_names
from tests.small import lora, noise, pair
from tests.vllm_omni.bases import SHARD_BYTES, WAN, write_wan
from tests.vllm_omni.comparison import Comparison, compare

SELF = "diffusion_model.blocks.0.self_attn"
NATIVE = tuple(spec.name for spec in base_tensors(WAN))
QKV = {f"blocks.0.attn1.to_{part}.weight" for part in "qkv"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wan(tmp_path_factory.mktemp("wan") / "base", shard_bytes=SHARD_BYTES)


def factors(module: str, seed: int, alpha: float | None = None) -> dict[str, torch.Tensor]:
    """A pair of rank 4 for a square weight."""
    up, down = noise(WAN.dim, 4, std=0.05, seed=seed), noise(4, WAN.dim, std=0.2, seed=seed + 100)
    return pair(module, up, down, alpha)


def native_deltas(file: Path) -> Tensors:
    return in_diffusers_names(definition.deltas(load_file(file), None, NATIVE))


def fused_by_both(base: Path, folder: Path, *modules: Mapping[str, torch.Tensor]) -> Comparison:
    """A LoRA of the modules given, in Wan's own names."""
    file = lora(folder / "lora.safetensors", *modules)
    found = compare(base, file, folder / "out", native_deltas(file))
    found.assert_ours()
    return found


@pytest.mark.parametrize("missing", "qkv")
def test_two_of_q_k_and_v(base: Path, tmp_path: Path, missing: str) -> None:
    """The engine stacks the three in one parameter, and fuses a LoRA of all three or none."""
    parts = [part for part in "qkvo" if part != missing]
    found = fused_by_both(base, tmp_path, *(factors(f"{SELF}.{p}", n) for n, p in enumerate(parts, start=1)))
    assert found.fused == {"blocks.0.attn1.to_out.0.weight"}
    assert found.deltas.keys() - found.fused == QKV - {f"blocks.0.attn1.to_{missing}.weight"}


def test_all_of_q_k_and_v(base: Path, tmp_path: Path) -> None:
    found = fused_by_both(base, tmp_path, *(factors(f"{SELF}.{p}", n) for n, p in enumerate("qkv", start=1)))
    assert found.fused == found.deltas.keys() == QKV
    found.assert_theirs(found.fused)


def test_a_bias_of_q_alone(base: Path, tmp_path: Path) -> None:
    bias = {f"{SELF}.{part}.diff_b": noise(WAN.dim, std=0.01, seed=9) for part in "qo"}
    found = fused_by_both(base, tmp_path, factors(f"{SELF}.o", 1), bias)
    assert found.deltas.keys() - found.fused == {"blocks.0.attn1.to_q.bias"}
    assert found.fused == {"blocks.0.attn1.to_out.0.weight", "blocks.0.attn1.to_out.0.bias"}
    found.assert_theirs(found.fused)


def test_a_bias_of_the_time_projection_without_its_weight(base: Path, tmp_path: Path) -> None:
    bias = {"diffusion_model.time_projection.1.diff_b": noise(6 * WAN.dim, std=0.01, seed=9)}
    found = fused_by_both(base, tmp_path, factors(f"{SELF}.o", 1), bias)
    assert found.deltas.keys() - found.fused == {"condition_embedder.time_proj.bias"}


@pytest.mark.parametrize("kind", ["diff", "diff_b"])
def test_differences_of_norms(base: Path, tmp_path: Path, kind: str) -> None:
    norm = {f"diffusion_model.blocks.1.norm3.{kind}": noise(WAN.dim, std=0.05, seed=9)}
    found = fused_by_both(base, tmp_path, factors(f"{SELF}.o", 1), norm)
    leaf = {"diff": "weight", "diff_b": "bias"}[kind]
    assert found.deltas.keys() - found.fused == {f"blocks.1.norm2.{leaf}"}


def test_alpha_beside_names_of_diffusers(base: Path, tmp_path: Path) -> None:
    """Alpha is half of the rank; the engine fuses at twice the strength that the file means."""
    module = "blocks.0.attn1.to_out.0"
    up, down = noise(WAN.dim, 4, std=0.05, seed=1), noise(4, WAN.dim, std=0.2, seed=2)
    tensors = {
        f"transformer.{module}.lora_A.weight": down,
        f"transformer.{module}.lora_B.weight": up,
        f"transformer.{module}.alpha": torch.tensor(2.0),
    }
    file = lora(tmp_path / "lora.safetensors", tensors)
    found = compare(base, file, tmp_path / "out", {f"{module}.weight": 0.5 * up.double() @ down.double()})
    found.assert_ours()
    assert found.fused == {f"{module}.weight"}
    found.assert_theirs(found.fused, strength=2.0)
    with pytest.raises(AssertionError):
        found.assert_theirs(found.fused)


def test_the_strength_it_is_served_with(base: Path, tmp_path: Path) -> None:
    """--lora-scale 0.5 changes nothing: the engine fuses at 1."""
    file = write_lora(tmp_path / "lora.safetensors", WAN, rank=4)
    found = compare(base, file, tmp_path / "out", native_deltas(file), strength=0.5, lora_scale=0.5)
    found.assert_ours()
    assert found.fused == found.deltas.keys()
    found.assert_theirs(found.fused, strength=2.0)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("style", ["comfy", "lightning", "trainer"])
@pytest.mark.parametrize("alpha", [None, 4])
def test_nothing_where_names_and_alpha_are_read(
    base: Path, tmp_path: Path, style: str, dtype: str, alpha: float | None
) -> None:
    """lora_down/up and lora_A/B, with alpha or without, factors of any dtype: the same but for rounding."""
    file = write_lora(tmp_path / "lora.safetensors", WAN, style=style, rank=8, alpha=alpha, dtype=dtype)
    found = compare(base, file, tmp_path / "out", native_deltas(file))
    found.assert_ours()
    assert found.fused == found.deltas.keys()
    assert len(found.fused) == 20
    found.assert_theirs(found.fused)


def test_nothing_on_a_float32_base(tmp_path: Path) -> None:
    """As Wan2.2 is published: the engine rounds the base first, fuselora the sum alone."""
    base = write_wan(tmp_path / "base", dtype="F32")
    file = write_lora(tmp_path / "lora.safetensors", WAN, rank=8)
    found = compare(base, file, tmp_path / "out", native_deltas(file), dtype="bfloat16")
    assert {found.ours[name].dtype for name in found.deltas} == {torch.bfloat16}
    found.assert_ours()
    assert found.fused == found.deltas.keys()
    found.assert_theirs(found.fused)
