"""Merges of low-rank adapters against the modules of PEFT and LyCORIS that saved them, in float64."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lycoris.modules.locon import LoConModule
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.pytorch_utils import Conv1D

from fuselora.verify import verify
from tests.cases.builders import Fused, base_of, fuse, refuse, save, save_json
from tests.oracle.lycoris_side import LAYERS
from tests.oracle.merges import Tensors, assert_near

KERNELS = ("auto", "reference")


class Experts(nn.Module):
    """Parameters of three dimensions, and one of two."""

    def __init__(self, is_transposed: bool = False) -> None:
        super().__init__()
        self.is_transposed = is_transposed
        swap = (0, 2, 1) if is_transposed else (0, 1, 2)
        self.gate_up_proj = nn.Parameter(torch.randn(3, 40, 12).permute(swap).contiguous())
        self.down_proj = nn.Parameter(torch.randn(3, 12, 20).permute(swap).contiguous())
        self.router = nn.Parameter(torch.randn(5, 12))


def in_and_out(inputs: int, outputs: int) -> nn.Module:
    """transformers' linear layer whose weight is (in, out)."""
    layer: nn.Module = Conv1D(outputs, inputs)  # type: ignore[no-untyped-call]
    return layer


class Model(nn.Module):
    """A layer of every sort that PEFT adapts."""

    def __init__(self, is_transposed: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 160)
        self.square = in_and_out(16, 16)
        self.wide = in_and_out(16, 24)
        self.emb = nn.Embedding(150, 16)
        self.conv1d = nn.Conv1d(12, 70, 3)
        self.conv2d = nn.Conv2d(12, 70, (3, 2))
        self.conv3d = nn.Conv3d(4, 70, (1, 2, 2))
        self.point = nn.Conv2d(24, 70, 1)
        self.experts = Experts(is_transposed)


@dataclass(frozen=True)
class Adapted:
    """A folder that PEFT saved, the base that it is for, and what PEFT merges in float64."""

    base: Path
    lora: Path
    before: Tensors
    wanted: Tensors

    def fused(self, kernel: str = "auto") -> Fused:
        options = ["--kernel", kernel]
        return fuse(self.base, self.lora, out=self.base.parent / kernel, options=options)

    @property
    def fused_ranks(self) -> list[int]:
        document = json.loads((self.base.parent / KERNELS[0] / "fused.json").read_text("utf-8"))
        ranks: list[int] = document["loras"][0]["ranks"]
        return ranks

    def check(self, *changed: str) -> None:
        """Those tensors are PEFT's, the others the base's; ``verify`` says so too."""
        for kernel in KERNELS:
            fused = self.fused(kernel)
            found = fused.tensors()
            for tensors in (self.wanted, found):
                moved = {
                    k for k, t in tensors.items() if not torch.equal(t.double(), self.before[k].double())
                }
                assert moved == {*changed}
            for key in changed:
                assert_near(found[key], self.wanted[key])
            assert verify(fused.out, base=self.base, loras=[self.lora]).findings == ()


def adapted(
    folder: Path, *, is_transposed: bool = False, dtype: torch.dtype = torch.float32, **config: Any
) -> Adapted:
    """An adapter of random numbers that PEFT itself saves."""
    torch.manual_seed(0)
    made = Model(is_transposed).to(dtype)
    before = {name: tensor.detach().clone() for name, tensor in made.state_dict().items()}
    wrapped = get_peft_model(made, LoraConfig(**config))
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter)
    wrapped.save_pretrained(str(folder / "adapter"), save_embedding_layers=False)
    wanted = wrapped.double().merge_and_unload().state_dict()
    after = {name: tensor.detach() for name, tensor in wanted.items()}
    return Adapted(base_of(folder / "base", before), folder / "adapter", before, after)


@pytest.mark.parametrize("layer", ["linear", "conv1d", "conv2d", "conv3d", "point"])
@pytest.mark.parametrize("use_rslora", [False, True])
def test_layers(layer: str, use_rslora: bool, tmp_path: Path) -> None:
    adapted(tmp_path, target_modules=[layer], r=4, lora_alpha=3, use_rslora=use_rslora).check(
        f"{layer}.weight"
    )


@pytest.mark.parametrize("layer", ["linear", "conv1d", "conv2d"])
def test_the_bias_of_a_pair(layer: str, tmp_path: Path) -> None:
    made = adapted(tmp_path, target_modules=[layer], r=4, lora_alpha=3, lora_bias=True)
    made.check(f"{layer}.weight", f"{layer}.bias")


def test_the_counts_of_every_kind(tmp_path: Path) -> None:
    layers = ["linear", "emb", "conv2d"]
    made = adapted(tmp_path, target_modules=layers, r=4, lora_alpha=3)
    assert made.fused().lora["applied"] == {
        "pairs": 2, "embeddings": 1, "diff": 0, "diff_b": 0, "diff_m": 0, "replace": 0,
    }  # fmt: skip


@pytest.mark.parametrize("use_dora", [False, True])
def test_an_embedding(use_dora: bool, tmp_path: Path) -> None:
    adapted(tmp_path, target_modules=["emb"], r=4, lora_alpha=3, use_dora=use_dora).check("emb.weight")


@pytest.mark.parametrize("layer", ["square", "wide"])
@pytest.mark.parametrize("use_dora", [False, True])
def test_a_layer_that_stores_in_and_out(layer: str, use_dora: bool, tmp_path: Path) -> None:
    made = adapted(
        tmp_path, target_modules=[layer], r=4, lora_alpha=3, fan_in_fan_out=True, use_dora=use_dora
    )
    made.check(f"{layer}.weight")


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("names", [["gate_up_proj"], ["down_proj"], ["gate_up_proj", "down_proj"]])
@pytest.mark.parametrize("prefix", ["", "experts."])
def test_parameters_of_experts(prefix: str, names: list[str], is_transposed: bool, tmp_path: Path) -> None:
    """Of several parameters PEFT nests the pairs, and only their shapes tell whose they are."""
    made = adapted(
        tmp_path, is_transposed=is_transposed, r=2, lora_alpha=3, target_modules=[],
        target_parameters=[prefix + name for name in names],
        alpha_pattern={"experts.down_proj": 5}, rank_pattern={"experts.down_proj": 3},
    )  # fmt: skip
    made.check(*(f"experts.{name}" for name in names))
    ranks = {"gate_up_proj": 2, "down_proj": 3}
    assert made.fused_ranks == sorted(ranks[name] for name in names)


@pytest.mark.parametrize("use_rslora", [False, True])
def test_parameters_that_are_matrices(use_rslora: bool, tmp_path: Path) -> None:
    made = adapted(
        tmp_path, r=2, lora_alpha=3, target_modules=["conv2d"], use_rslora=use_rslora,
        target_parameters=["experts.router", "linear.weight"],
    )  # fmt: skip
    made.check("experts.router", "linear.weight", "conv2d.weight")


def test_parameters_beside_layers(tmp_path: Path) -> None:
    made = adapted(
        tmp_path, r=2, lora_alpha=3, target_modules=["linear", "emb"],
        target_parameters=["gate_up_proj", "router", "down_proj"],
    )  # fmt: skip
    made.check(
        "linear.weight", "emb.weight", *(f"experts.{n}" for n in ("gate_up_proj", "router", "down_proj"))
    )


def test_a_configuration_that_does_not_name_the_parameter(tmp_path: Path) -> None:
    made = adapted(tmp_path, r=2, lora_alpha=3, target_modules=[], target_parameters=["down_proj"])
    save_json(made.lora / "adapter_config.json", {"peft_type": "LORA", "r": 2, "lora_alpha": 3})
    refuse(made.base, made.lora, says=["experts"])


@pytest.mark.parametrize("layer", ["linear", "emb", "conv2d", "wide"])
def test_16_bit_weights_are_rounded_once(layer: str, tmp_path: Path) -> None:
    made = adapted(
        tmp_path,
        dtype=torch.bfloat16,
        target_modules=[layer],
        r=4,
        lora_alpha=3,
        fan_in_fan_out=layer == "wide",
    )
    wanted = made.wanted[f"{layer}.weight"]
    found = made.fused().tensors()[f"{layer}.weight"]
    assert_near(found, wanted)
    assert float((found == wanted.bfloat16()).double().mean()) > 0.999


# LyCORIS


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("tucker", [False, True])
@pytest.mark.parametrize("strength", [1.0, -1.5])
def test_locon_of_lycoris(strength: float, tucker: bool, layer: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = LAYERS[layer]()
    module = LoConModule("x", made, lora_dim=4, alpha=3.0, use_tucker=tucker)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    saved = {f"lora_unet_to_q.{name}": t.detach().clone() for name, t in module.state_dict().items()}
    assert ("lora_unet_to_q.lora_mid.weight" in saved) == (
        tucker and layer.startswith("conv") and layer != "conv1x1"
    )
    base = base_of(tmp_path / "base", {"to_q.weight": made.weight.detach().clone()})
    lora = save(tmp_path / "x.safetensors", saved)
    module.double()
    wanted, _ = module.get_merged_weight(strength)
    for kernel in KERNELS:
        fused = fuse(base, f"{lora}:{strength}", out=tmp_path / kernel, options=["--kernel", kernel])
        assert_near(fused.tensors()["to_q.weight"], wanted.detach())
        assert verify(fused.out, base=base, loras=[lora]).findings == ()
