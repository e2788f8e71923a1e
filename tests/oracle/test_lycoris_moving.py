"""Merges of DoRA, IA3, OFT and BOFT against the modules of LyCORIS that save them, in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lycoris.functional.general import weight_decompose
from lycoris.modules.boft import ButterflyOFTModule
from lycoris.modules.diag_oft import DiagOFTModule
from lycoris.modules.ia3 import IA3Module
from lycoris.modules.locon import LoConModule
from lycoris.modules.loha import LohaModule
from lycoris.modules.lokr import LokrModule
from torch import nn

import fuselora
from fuselora import steps
from tests.cases.builders import base_of, refuse, save
from tests.oracle.lycoris_side import FLAT, NAME, Trained, merged
from tests.oracle.merges import assert_near

LAYERS: Mapping[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(24, 192, bias=False),
    "square": lambda: nn.Linear(64, 64, bias=False),
    "conv2d": lambda: nn.Conv2d(12, 192, (3, 2), bias=False),
    "conv_square": lambda: nn.Conv2d(16, 16, 3, bias=False),
    "conv3d": lambda: nn.Conv3d(4, 192, (2, 3, 2), bias=False),
}
DECOMPOSED = (LoConModule, LohaModule, LokrModule)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def weight_of(layer: nn.Module) -> torch.Tensor:
    found = layer.double().weight
    assert isinstance(found, torch.Tensor)
    return found.detach()


def trained(kind: type, layer: nn.Module, spread: float = 0.3, **options: Any) -> Trained:
    """A module with random parameters: those that it begins with, and as much as ``spread``."""
    module = kind("x", layer, **options)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=spread)
    saved = {name: tensor.detach().clone().contiguous() for name, tensor in module.state_dict().items()}
    weight = weight_of(layer)
    module.double()
    # LyCORIS inverts in float32 whatever its parameters are, "to prevent unsupported type"
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        changed = _decomposed(module, weight) if kind in DECOMPOSED else module.get_merged_weight(1.0)[0]
    return Trained(saved, weight, changed.detach(), module)


def _decomposed(module: Any, weight: torch.Tensor) -> torch.Tensor:
    """As it runs. LyCORIS 4.1.3 takes alpha / rank twice when it merges LoHa and LoKr, once to train them."""
    if isinstance(module, LoConModule):
        delta = module.make_weight() * module.scale
    else:
        delta = module.get_weight(weight.shape) * module.scalar
    merged = weight + delta.view_as(weight)
    found: torch.Tensor = weight_decompose(merged, module.dora_scale, 1, module.wd_on_out)
    return found


LOCON = {"lora_dim": 4, "alpha": 3.0, "weight_decompose": True}
CASES: Mapping[str, tuple[type, str, dict[str, Any]]] = {
    **{
        f"{kind.name}-{layer}-{'rows' if rows else 'columns'}": (
            kind,
            layer,
            {**LOCON, "wd_on_out": rows, **({"factor": 4, "lora_dim": 1} if kind is LokrModule else {})},
        )
        for kind in DECOMPOSED
        for layer in ("linear", "square", "conv2d", "conv3d")
        for rows in (True, False)
    },
    "locon-tucker": (LoConModule, "conv2d", {**LOCON, "use_tucker": True, "wd_on_out": False}),
    "loha-tucker": (LohaModule, "conv2d", {**LOCON, "use_tucker": True, "wd_on_out": True}),
    **{
        f"ia3-{layer}-{'inputs' if on_input else 'outputs'}": (IA3Module, layer, {"train_on_input": on_input})
        for layer in LAYERS
        for on_input in (False, True)
    },
    **{f"oft-{layer}": (DiagOFTModule, layer, {"lora_dim": 4}) for layer in LAYERS},
    "oft-large-blocks": (DiagOFTModule, "linear", {"lora_dim": 12}),
    "oft-rescaled": (DiagOFTModule, "linear", {"lora_dim": 8, "rescaled": True}),
    "oft-conv-rescaled": (DiagOFTModule, "conv2d", {"lora_dim": 8, "rescaled": True}),
    "oft-constrained": (DiagOFTModule, "linear", {"lora_dim": 8, "constraint": 0.01}),
    "oft-within-constraint": (DiagOFTModule, "linear", {"lora_dim": 8, "constraint": 1000.0}),
    **{f"boft-{layer}": (ButterflyOFTModule, layer, {"lora_dim": 6}) for layer in ("linear", "conv2d")},
    "boft-square": (ButterflyOFTModule, "square", {"lora_dim": 4}),
    "boft-conv3d": (ButterflyOFTModule, "conv3d", {"lora_dim": 12}),
    "boft-rescaled": (ButterflyOFTModule, "linear", {"lora_dim": 6, "rescaled": True}),
    "boft-constrained": (ButterflyOFTModule, "linear", {"lora_dim": 6, "constraint": 0.01}),
}


def made(case: str) -> Trained:
    kind, layer, options = CASES[case]
    return trained(kind, LAYERS[layer](), **options)


@pytest.mark.parametrize("case", CASES)
def test_the_weight_that_lycoris_merges(case: str, tmp_path: Path) -> None:
    found = made(case)
    for kernel in ("auto", "reference"):
        assert_near(merged(tmp_path / kernel, found, kernel=kernel), found.changed)


FEW = ("locon-linear-rows", "locon-conv2d-columns", "ia3-linear-inputs", "oft-rescaled", "boft-rescaled")


@pytest.mark.parametrize("strength", [-1.0, 0.5, 2.0])
@pytest.mark.parametrize("case", FEW)
def test_the_strength_is_of_the_way_from_the_base(case: str, strength: float, tmp_path: Path) -> None:
    """LyCORIS agrees for IA3 alone. Elsewhere its multiplier is no way from the base to the trained weight.

    Of DoRA it weighs the gain of the magnitude, so that 0 leaves the whole difference in; of OFT the
    rotation and not the rescale; of BOFT each stage by itself.
    """
    found = made(case)
    wanted = found.weight + strength * (found.changed - found.weight)
    assert_near(merged(tmp_path, found, strength=strength), wanted)


def test_ia3_at_a_strength_is_what_lycoris_has(tmp_path: Path) -> None:
    layer = LAYERS["linear"]()
    module = IA3Module("x", layer)
    nn.init.normal_(module.weight)
    saved = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    weight = weight_of(layer)
    wanted, _ = module.double().get_merged_weight(0.25)
    assert_near(merged(tmp_path, Trained(saved, weight, weight, module), strength=0.25), wanted.detach())


@pytest.mark.parametrize("case", [*FEW, "oft-large-blocks", "boft-conv3d"])
def test_bits_do_not_depend_on_jobs_and_hardly_on_chunks(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = made(case)
    whole = merged(tmp_path / "whole", found, dtype=torch.bfloat16, kernel="reference")
    monkeypatch.setattr(steps, "CHUNK_ELEMENTS", 1)
    assert len(steps.chunk_grid(192, 24)) > 1
    for kernel in ("auto", "reference"):
        one, two = (
            merged(tmp_path / f"{kernel}{jobs}", found, dtype=torch.bfloat16, kernel=kernel, jobs=jobs)
            for jobs in (1, 2)
        )
        assert torch.equal(one, two)
        assert_near(one, whole.double())


@pytest.mark.parametrize(
    ("case", "part", "shape"),
    [
        ("oft-linear", "oft_blocks", (48, 4, 5)),
        ("oft-linear", "oft_blocks", (47, 4, 4)),
        ("oft-rescaled", "rescale", (191, 1)),
        ("boft-linear", "oft_blocks", (6, 31, 6, 6)),
        ("boft-linear", "oft_blocks", (2, 64, 3, 3)),
        ("ia3-linear-inputs", "weight", (192,)),
        ("ia3-linear-inputs", "weight", (23,)),
        ("ia3-conv2d-outputs", "weight", (192,)),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    case: str, part: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    found = made(case)
    parts = {**found.saved, part: torch.ones(shape)}
    base = base_of(tmp_path / "base", {f"{NAME}.weight": found.weight.to(torch.float32)})
    lora = save(tmp_path / "x.safetensors", {f"{FLAT}.{name}": tensor for name, tensor in parts.items()})
    refuse(base, lora, says=["x.safetensors", FLAT, part])


def test_an_alpha_of_oft_is_no_orphan(tmp_path: Path) -> None:
    found = made("oft-constrained")
    base = base_of(tmp_path / "base", {f"{NAME}.weight": found.weight.to(torch.float32)})
    lora = save(tmp_path / "x.safetensors", {f"{FLAT}.{part}": t for part, t in found.saved.items()})
    report = fuselora.merge(base=base, loras=[str(lora)], out=tmp_path / "out")
    assert "orphan_alpha" not in {notice.code for notice in report.notices}
