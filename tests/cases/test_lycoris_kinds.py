"""Public reports about LyCORIS files: kinds that were not loaded, or only in part."""
# ruff: noqa: N802 - cases keep their names

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cases.builders import MODULE, Q, Tensors, base_of, full, fuse, refuse, same_bytes, save

FLAT = f"lora_unet_{MODULE.replace('.', '_')}"
LOHA: Tensors = {
    "hada_w1_a": torch.tensor([[1.0], [2.0]]),
    "hada_w1_b": torch.tensor([[1.0, 1.0]]),
    "hada_w2_a": torch.tensor([[3.0], [1.0]]),
    "hada_w2_b": torch.tensor([[1.0, 2.0]]),
}
# the same values with cores, whose places of the kernel are 1 and 10, and 2 and 1
CORES: Tensors = {
    "hada_w1_a": torch.tensor([[1.0, 2.0]]),
    "hada_w2_a": torch.tensor([[3.0, 1.0]]),
    "hada_t1": torch.tensor([[[1.0, 10.0]]]),
    "hada_t2": torch.tensor([[[2.0, 1.0]]]),
}
RIGHT = torch.tensor([[1.5, 3.0], [1.0, 2.0]])


def file_of(folder: Path, module: str, parts: Tensors, alpha: float | None = 0.5) -> Path:
    stored = {} if alpha is None else {"alpha": torch.tensor(alpha)}
    return save(folder / "x.safetensors", {f"{module}.{k}": v for k, v in {**parts, **stored}.items()})


@pytest.mark.parametrize("module", [FLAT, MODULE, f"diffusion_model.{MODULE}"])
def test_B27_a_loha_is_added(module: str, tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", {Q: full(2, 2, value=0.0)})
    fused = fuse(base, file_of(tmp_path, module, LOHA))
    assert same_bytes(fused.tensors()[Q], RIGHT)
    assert fused.lora["applied"]["loha"] == 1
    assert fused.lora["dialect"] == "LoHa"
    assert fused.lora["ranks"] == [1]


@pytest.mark.parametrize("name", ["", ".default"])
def test_B27_a_loha_in_pefts_spelling_is_added(name: str, tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", {Q: full(2, 2, value=0.0)})
    parts = {f"{part}{name}": tensor for part, tensor in LOHA.items()}
    fused = fuse(base, file_of(tmp_path, f"base_model.model.{MODULE}", parts))
    assert same_bytes(fused.tensors()[Q], RIGHT)


def test_B27_the_strength_is_of_the_whole_product(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", {Q: full(2, 2)})
    fused = fuse(base, f"{file_of(tmp_path, MODULE, LOHA)}:-2")
    assert same_bytes(fused.tensors()[Q], 1 - 2 * RIGHT)


def test_B27_tucker_cores_are_multiplied_in(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", {Q: full(2, 2, 2, value=0.0)})
    fused = fuse(base, file_of(tmp_path, MODULE, {**LOHA, **CORES}))
    assert same_bytes(fused.tensors()[Q], torch.stack((2 * RIGHT, 10 * RIGHT), 2))


@pytest.mark.parametrize("left", ["hada_t1", "hada_t2"])
def test_B27_one_core_alone_is_refused(left: str, tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", {Q: full(2, 2, 2, value=0.0)})
    parts = {part: tensor for part, tensor in {**LOHA, **CORES}.items() if part != left}
    refuse(base, file_of(tmp_path, MODULE, parts), says=["x.safetensors", MODULE, "hada_t1 and hada_t2"])


@pytest.mark.parametrize("lost", [*LOHA])
def test_B27_a_loha_without_one_of_its_factors_is_refused(lost: str, tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", {Q: full(2, 2, value=0.0)})
    parts = {part: tensor for part, tensor in LOHA.items() if part != lost}
    refuse(base, file_of(tmp_path, MODULE, parts), says=["x.safetensors", MODULE, lost])


@pytest.mark.parametrize("others", [{}, {"lora_down.weight": full(1, 2), "lora_up.weight": full(2, 1)}])
def test_B27_a_core_that_goes_with_nothing_is_refused(others: Tensors, tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", {Q: full(2, 2, value=0.0)})
    parts = {**others, "hada_t1": full(1, 1, 1)}
    refuse(base, file_of(tmp_path, MODULE, parts), says=["x.safetensors", MODULE, "hada_t1"])


def test_a_lokr_with_both_factors_full_has_no_alpha(tmp_path: Path) -> None:
    """LyCORIS writes an alpha nonetheless, whatever rank was asked for."""
    base = base_of(tmp_path / "base", {Q: full(4, 4)})
    parts = {"lokr_w1": torch.eye(2), "lokr_w2": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
    fused = fuse(base, file_of(tmp_path, FLAT, parts, alpha=1e10))
    assert same_bytes(fused.tensors()[Q], 1 + torch.kron(torch.eye(2), parts["lokr_w2"]))
    assert fused.warning("full_factors")["as"] == "LyCORIS"
    assert fused.lora["scales"] == []


def test_an_alpha_for_a_lokr_with_both_factors_full_applies_to_nothing(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", {Q: full(4, 4)})
    lora = file_of(tmp_path, FLAT, {"lokr_w1": torch.eye(2), "lokr_w2": full(2, 2)}, alpha=None)
    refuse(base, lora, says=["--alpha 2"], options=["--alpha", "2"])


@pytest.mark.parametrize("part", ["lokr_w1_a", "lokr_w2_b", "lokr_t2"])
def test_a_lokr_that_says_a_factor_twice_is_refused(part: str, tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", {Q: full(4, 4)})
    parts = {"lokr_w1": torch.eye(2), "lokr_w2": full(2, 2), part: full(2, 2)}
    refuse(base, file_of(tmp_path, FLAT, parts), says=["x.safetensors", FLAT, part])


def test_a_glora_reads_the_base(tmp_path: Path) -> None:
    weight = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    base = base_of(tmp_path / "base", {Q: weight})
    parts = {
        "a1.weight": torch.tensor([[1.0], [0.0], [0.0]]),
        "a2.weight": torch.tensor([[0.0, 1.0, 0.0]]),
        "b1.weight": torch.tensor([[8.0], [16.0]]),
        "b2.weight": torch.tensor([[0.0, 0.0, 1.0]]),
    }
    fused = fuse(base, file_of(tmp_path, FLAT, parts))
    assert fused.tensors()[Q].tolist() == [[1.0, 2.5, 7.0], [4.0, 7.0, 14.0]]
    assert fused.lora["applied"]["glora"] == 1


def test_differences_of_norms_are_added(tmp_path: Path) -> None:
    tensors = {Q: full(4, 4), "blocks.0.norm2.weight": full(4), "blocks.0.norm2.bias": full(4, value=2.0)}
    base = base_of(tmp_path / "base", tensors)
    lora = {
        "lora_unet_blocks_0_norm2.w_norm": full(4, value=0.25),
        "lora_unet_blocks_0_norm2.b_norm": full(4),
    }
    fused = fuse(base, f"{save(tmp_path / 'x.safetensors', lora)}:2")
    assert same_bytes(fused.tensors()["blocks.0.norm2.weight"], full(4, value=1.5))
    assert same_bytes(fused.tensors()["blocks.0.norm2.bias"], full(4, value=4.0))
    assert same_bytes(fused.tensors()[Q], tensors[Q])


def test_a_norm_without_a_bias_takes_none(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", {Q: full(4, 4), "blocks.0.norm2.weight": full(4)})
    lora = save(
        tmp_path / "x.safetensors", {"blocks.0.norm2.w_norm": full(4), "blocks.0.norm2.b_norm": full(4)}
    )
    refuse(base, lora, says=["x.safetensors", "blocks.0.norm2", "no bias"])


@pytest.mark.parametrize("part", ["scalar", "bm.weight", "lokr_t1"])
def test_what_is_not_added_is_refused_by_name(part: str, tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", {Q: full(2, 2, value=0.0)})
    lora = file_of(tmp_path, FLAT, {**LOHA, part: full(1, 1)})
    refuse(base, lora, says=["x.safetensors", f"{FLAT}.{part}", "does not fuse"])
