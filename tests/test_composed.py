"""Rotations and factors beside other deltas: the sum is what is fused, and it is said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cases.builders import MODULE, Q, base_of, fuse, save, save_json, std_base, std_pair

SCALED = {f"{MODULE}.ia3_l": torch.tensor([[1.0], [2.0], [3.0], [4.0]])}


def ia3(folder: Path) -> Path:
    save(folder / "adapter_model.safetensors", SCALED)
    save_json(folder / "adapter_config.json", {"peft_type": "IA3", "feedforward_modules": []})
    return folder


@pytest.mark.parametrize("order", [1, -1])
def test_ia3_beside_a_pair_adds_and_is_said(tmp_path: Path, order: int) -> None:
    pair = save(tmp_path / "pair.safetensors", std_pair(2))
    loras = [str(ia3(tmp_path / "ia3")), str(pair)][::order]
    fused = fuse(std_base(tmp_path / "base"), *loras)
    # W * l and W + 1 of a base of ones: (l - 1) + 1 more than 1
    assert fused.tensors()[Q][:, 0].tolist() == [2.0, 3.0, 4.0, 5.0]
    said = fused.warning("not_composed")
    assert (said["component"], said["tensors"]) == ("transformer", 1)
    assert "PEFT and ComfyUI apply one to what the other has made" in said["message"]


def test_alone_or_on_other_tensors_there_is_nothing_to_say(tmp_path: Path) -> None:
    base = std_base(tmp_path / "base")
    other = save(tmp_path / "pair.safetensors", std_pair(2, "blocks.0.attn1.to_k"))
    assert "not_composed" not in fuse(base, str(ia3(tmp_path / "ia3")), str(other)).codes


def test_two_pairs_are_composed_by_their_sum(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", {Q: torch.ones(4, 4)})
    loras = [save(tmp_path / f"{n}.safetensors", std_pair(n, value=float(n))) for n in (1, 2)]
    assert "not_composed" not in fuse(base, *map(str, loras)).codes
