"""Merges of adapters that move a weight (whole weights, DoRA, IA3, OFT, BOFT) against PEFT's own merges.

PEFT trains nothing here: its parameters are random, it saves them itself, and then merges them in float64.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import BOFTConfig, IA3Config, LoraConfig, OFTConfig, get_peft_model
from peft.tuners.boft import layer as boft_layer
from safetensors.torch import load_file
from torch import nn

import fuselora
from fuselora import steps
from tests.cases.builders import WEIGHTS, base_of, refuse
from tests.oracle.merges import Tensors, assert_near, fused

LAYERS: Mapping[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(24, 200),
    "square": lambda: nn.Linear(64, 64),
    "conv2d": lambda: nn.Conv2d(12, 160, 3),
    "conv_wide": lambda: nn.Conv2d(16, 160, 3),
    "conv_square": lambda: nn.Conv2d(12, 12, 3),
    "conv3d": lambda: nn.Conv3d(4, 72, (2, 3, 2)),
    "embedding": lambda: nn.Embedding(200, 24),
}
ALL: dict[str, Any] = {"target_modules": ["to_q"]}
FEEDFORWARD: dict[str, Any] = {**ALL, "feedforward_modules": ["to_q"]}
OUTPUTS: dict[str, Any] = {**ALL, "feedforward_modules": []}


@dataclass(frozen=True)
class Merged:
    """What PEFT saved, the tensors that it started from, and those that it made of them in float64."""

    adapter: Path
    before: Tensors
    after: Tensors


class Model(nn.Module):
    """A layer that is adapted, and others that are not."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.to_q = layer
        self.head = nn.Linear(24, 8)
        self.norm = nn.LayerNorm(24)


def peft(folder: Path, layer: str, config: Any, spread: float = 0.3) -> Merged:
    """``spread`` of the random parameters, which whole weights take instead of their own."""
    torch.manual_seed(0)
    model = Model(LAYERS[layer]())
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    before = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(model, config)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            with torch.no_grad():
                parameter.add_(torch.randn_like(parameter), alpha=spread)
    adapted.save_pretrained(folder / "adapter")
    after = adapted.double().merge_and_unload().state_dict()
    return Merged(folder / "adapter", before, {name: tensor.detach() for name, tensor in after.items()})


def merged(folder: Path, made: Merged, **options: Any) -> Tensors:
    """Options as of ``fused``."""
    return fused(folder, made.before, made.adapter, **options)


def assert_all_near(found: Tensors, wanted: Tensors) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert_near(tensor, wanted[name], name)


CASES: Mapping[str, tuple[str, Callable[[], Any]]] = {
    "replace": ("linear", lambda: LoraConfig(r=4, lora_alpha=6, modules_to_save=["head", "norm"], **ALL)),
    "replace-biases": ("linear", lambda: LoraConfig(r=4, lora_alpha=6, bias="all", **ALL)),
    "replace-own-bias": ("linear", lambda: LoraConfig(r=4, lora_alpha=6, bias="lora_only", **ALL)),
    "dora": ("linear", lambda: LoraConfig(r=4, lora_alpha=6, use_dora=True, **ALL)),
    "dora-square": ("square", lambda: LoraConfig(r=4, lora_alpha=6, use_dora=True, **ALL)),
    "dora-rslora": ("linear", lambda: LoraConfig(r=4, lora_alpha=6, use_dora=True, use_rslora=True, **ALL)),
    "dora-conv2d": ("conv2d", lambda: LoraConfig(r=4, lora_alpha=6, use_dora=True, **ALL)),
    "dora-conv3d": ("conv3d", lambda: LoraConfig(r=4, lora_alpha=6, use_dora=True, **ALL)),
    "dora-embedding": ("embedding", lambda: LoraConfig(r=4, lora_alpha=6, use_dora=True, **ALL)),
    "ia3": ("linear", lambda: IA3Config(**OUTPUTS)),
    "ia3-inputs": ("linear", lambda: IA3Config(**FEEDFORWARD)),
    "ia3-square": ("square", lambda: IA3Config(**OUTPUTS)),
    "ia3-square-inputs": ("square", lambda: IA3Config(**FEEDFORWARD)),
    "ia3-conv2d": ("conv2d", lambda: IA3Config(**OUTPUTS)),
    "ia3-conv2d-inputs": ("conv2d", lambda: IA3Config(**FEEDFORWARD)),
    "ia3-conv-square": ("conv_square", lambda: IA3Config(**OUTPUTS)),
    "ia3-conv-square-inputs": ("conv_square", lambda: IA3Config(**FEEDFORWARD)),
    "ia3-conv3d": ("conv3d", lambda: IA3Config(**OUTPUTS)),
    "oft": ("linear", lambda: OFTConfig(oft_block_size=8, use_cayley_neumann=False, **ALL)),
    "oft-series": ("linear", lambda: OFTConfig(oft_block_size=8, **ALL)),
    **{
        f"oft-{n}-terms": (
            "linear",
            partial(OFTConfig, oft_block_size=4, num_cayley_neumann_terms=n, **ALL),
        )
        for n in (1, 2, 3, 4, 7)
    },
    "oft-shared": (
        "linear",
        lambda: OFTConfig(oft_block_size=8, block_share=True, use_cayley_neumann=False, **ALL),
    ),
    "oft-one-block": ("linear", lambda: OFTConfig(r=1, oft_block_size=0, use_cayley_neumann=False, **ALL)),
    "oft-constrained": (
        "linear",
        lambda: OFTConfig(oft_block_size=8, coft=True, eps=0.5, use_cayley_neumann=False, **ALL),
    ),
    "oft-conv2d": ("conv2d", lambda: OFTConfig(oft_block_size=12, use_cayley_neumann=False, **ALL)),
    "oft-embedding": ("embedding", lambda: OFTConfig(oft_block_size=8, use_cayley_neumann=False, **ALL)),
    "oft-bias": ("linear", lambda: OFTConfig(oft_block_size=8, bias="oft_only", **ALL)),
    "boft": ("linear", lambda: BOFTConfig(boft_block_size=8, **ALL)),
    "boft-conv2d": ("conv2d", lambda: BOFTConfig(boft_block_size=6, **ALL)),
    "boft-bias": ("linear", lambda: BOFTConfig(boft_block_size=4, bias="boft_only", **ALL)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_weights_that_peft_merges(case: str, tmp_path: Path) -> None:
    layer, config = CASES[case]
    made = peft(tmp_path, layer, config())
    assert case == "oft-1-terms" or not torch.equal(made.after["to_q.weight"], made.before["to_q.weight"])
    for kernel in ("auto", "reference"):
        assert_all_near(merged(tmp_path / kernel, made, kernel=kernel), made.after)


@pytest.mark.parametrize("strength", [-1.0, 0.5, 2.0])
@pytest.mark.parametrize("case", ["replace", "dora", "ia3", "ia3-inputs", "oft", "boft"])
def test_the_strength_is_of_the_way_to_what_peft_merges(case: str, strength: float, tmp_path: Path) -> None:
    """PEFT has no strength for these kinds but 1, and warns when one is asked for.

    It scales DoRA's inner difference by a weight, which is no way from the base: at 0 the magnitude would
    still count.
    """
    layer, config = CASES[case]
    made = peft(tmp_path, layer, config())
    wanted = {n: b.double() + strength * (made.after[n] - b.double()) for n, b in made.before.items()}
    assert_all_near(merged(tmp_path, made, strength=strength), wanted)


@pytest.mark.parametrize("case", ["dora", "dora-embedding", "ia3", "oft", "oft-series", "boft"])
def test_bits_do_not_depend_on_jobs_and_hardly_on_chunks(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, config = CASES[case]
    made = peft(tmp_path, layer, config())
    whole = merged(tmp_path / "whole", made, dtype=torch.bfloat16, kernel="reference")
    monkeypatch.setattr(steps, "CHUNK_ELEMENTS", 1)
    assert len(steps.chunk_grid(200, 24)) > 1
    for kernel in ("auto", "reference"):
        one, two = (
            merged(tmp_path / f"{kernel}{jobs}", made, dtype=torch.bfloat16, kernel=kernel, jobs=jobs)
            for jobs in (1, 2)
        )
        assert all(torch.equal(one[name], two[name]) for name in one)
        assert_all_near(one, {name: tensor.double() for name, tensor in whole.items()})


def _diagonal(stage: torch.Tensor) -> torch.Tensor:
    return torch.block_diag(*stage)  # type: ignore[no-untyped-call,no-any-return]


class _Diagonal:
    """What PEFT's extension for CUDA computes."""

    @staticmethod
    def forward(blocks: torch.Tensor) -> list[torch.Tensor]:
        return [torch.stack([_diagonal(stage) for stage in blocks])]


@pytest.mark.parametrize("factors", [2, 3])
@pytest.mark.parametrize("layer", ["linear", "conv_wide"])
def test_butterflies_of_several_factors(
    factors: int, layer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT has these on a GPU alone, by an extension that lays blocks on a diagonal."""
    monkeypatch.setattr(boft_layer, "get_fbd_cuda", lambda: _Diagonal)
    config = BOFTConfig(boft_block_num=4, boft_block_size=0, boft_n_butterfly_factor=factors, **ALL)
    made = peft(tmp_path, layer, config)
    stages = load_file(made.adapter / "adapter_model.safetensors")["base_model.model.to_q.boft_R"]
    assert len(stages) == factors
    for kernel in ("auto", "reference"):
        assert_all_near(merged(tmp_path / kernel, made, kernel=kernel), made.after)


def test_two_doras_add_their_ways_from_the_base(tmp_path: Path) -> None:
    """PEFT multiplies what the first one made by the second one's factor, so that the order counts."""
    config = CASES["dora"][1]
    first, second = peft(tmp_path / "1", "linear", config()), peft(tmp_path / "2", "linear", config(), 0.7)
    base = base_of(tmp_path / "base", first.before)
    fuselora.merge(base=base, loras=[first.adapter, second.adapter], out=tmp_path / "out")
    wanted = {
        name: first.after[name] + second.after[name] - tensor.double()
        for name, tensor in first.before.items()
    }
    assert_all_near(load_file(tmp_path / "out" / "transformer" / WEIGHTS), wanted)


# What an adapter's file alone does not say


def without_config(made: Merged) -> Path:
    return (made.adapter / "adapter_model.safetensors").rename(made.adapter.parent / "x.safetensors")


def test_oft_without_its_configuration_is_refused(tmp_path: Path) -> None:
    made = peft(tmp_path, *_made("oft"))
    base = base_of(tmp_path / "base", made.before)
    refuse(base, without_config(made), says=["to_q", "oft_R", "adapter_config.json"])


@pytest.mark.parametrize("version", [None, "0.17.1"])
def test_the_series_of_older_versions_is_refused(version: str | None, tmp_path: Path) -> None:
    made = peft(tmp_path, *_made("oft-series"))
    path = made.adapter / "adapter_config.json"
    stated = f'"peft_version": "{_version(path)}"'
    text = path.read_text().replace(stated, f'"peft_version": "{version}"' if version else '"x": 1')
    path.write_text(text)
    refuse(base_of(tmp_path / "base", made.before), made.adapter, says=["to_q", "oft_R", "before 0.18"])


def test_a_square_convolution_s_ia3_needs_its_configuration(tmp_path: Path) -> None:
    made = peft(tmp_path, *_made("ia3-conv-square"))
    base = base_of(tmp_path / "base", made.before)
    refuse(base, without_config(made), says=["to_q", "ia3_l", "feedforward_modules"])


@pytest.mark.parametrize("case", ["ia3", "ia3-inputs", "ia3-square-inputs", "ia3-conv2d", "boft"])
def test_others_do_not(case: str, tmp_path: Path) -> None:
    made = peft(tmp_path, *_made(case))
    alone = Merged(without_config(made), made.before, made.after)
    assert_all_near(merged(tmp_path / "alone", alone), made.after)


def _made(case: str) -> tuple[str, Any]:
    layer, config = CASES[case]
    return layer, config()


def _version(path: Path) -> str:
    return str(json.loads(path.read_text())["peft_version"])
