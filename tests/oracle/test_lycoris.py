"""Merges of LoHa, LoKr, GLoRA and norms against the modules of LyCORIS and PEFT that saved them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lycoris.functional.loha import diff_weight as loha_weight
from lycoris.functional.lokr import diff_weight as lokr_weight
from lycoris.modules.full import FullModule
from lycoris.modules.norms import NormModule
from peft import LoHaConfig, LoKrConfig
from torch import nn

from tests.cases.builders import base_of, fuse, refuse, save
from tests.oracle.lycoris_side import FLAT, LAYERS, MODULES, NAME, Layer, Trained, lycoris, merged, peft
from tests.oracle.merges import Tensors, assert_near

KINDS: list[tuple[str, dict[str, Any]]] = [
    ("loha", {"lora_dim": 4}),
    ("loha", {"lora_dim": 4, "use_tucker": True}),
    ("loha", {"lora_dim": 4, "rs_lora": True}),
    ("lokr", {"lora_dim": 1, "factor": 4}),
    ("lokr", {"lora_dim": 1, "factor": 4, "use_tucker": True}),
    ("lokr", {"lora_dim": 1, "factor": 4, "decompose_both": True}),
    ("lokr", {"lora_dim": 2, "decompose_both": True, "use_tucker": True}),
    ("lokr", {"lora_dim": 3, "factor": 8, "unbalanced_factorization": True}),
    ("lokr", {"lora_dim": 8, "full_matrix": True}),
    ("lokr", {"lora_dim": 100000, "factor": 4}),
    ("glora", {"lora_dim": 4}),
]
IDS = [f"{kind}-{'-'.join(map(str, options))}" for kind, options in KINDS]

LOKR_PARTS = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(("kind", "options"), KINDS, ids=IDS)
def test_the_weight_that_lycoris_runs_with(
    kind: str, options: Mapping[str, Any], layer: str, tmp_path: Path
) -> None:
    trained = lycoris(kind, LAYERS[layer](), alpha=3.0, **options)
    for kernel in ("auto", "reference"):
        assert_near(merged(tmp_path / kernel, trained, kernel=kernel), trained.changed)


@pytest.mark.parametrize("layer", ["linear", "conv2d"])
@pytest.mark.parametrize("kind", MODULES)
def test_the_layer_answers_as_the_module_did(kind: str, layer: str, tmp_path: Path) -> None:
    made = LAYERS[layer]()
    trained = lycoris(kind, made, lora_dim=4, alpha=2.0)
    source = torch.randn((3, 24) if layer == "linear" else (3, 12, 9, 9), dtype=torch.float64)
    wanted = trained.output(source).detach()
    fused = LAYERS[layer]().double()
    fused.weight = nn.Parameter(merged(tmp_path, trained).double())
    found = fused(source).detach()
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 2.0**-18


@pytest.mark.parametrize("kind", MODULES)
def test_what_use_scalar_has_learned_is_in_the_saved_factors(kind: str, tmp_path: Path) -> None:
    trained = lycoris(kind, LAYERS["linear"](), lora_dim=4, alpha=2.0, scalar=0.375)
    assert "scalar" not in trained.saved
    assert_near(merged(tmp_path, trained), trained.changed)


@pytest.mark.parametrize("kind", MODULES)
def test_the_weight_that_lycoris_merges_where_alpha_is_the_rank(kind: str, tmp_path: Path) -> None:
    layer = LAYERS["linear"]()
    module = MODULES[kind]("x", layer, lora_dim=4, alpha=4)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    saved = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    module.double()
    weight = layer.double().weight.detach()
    wanted, _ = module.get_merged_weight(1.0, weight.shape, weight.device)
    assert_near(merged(tmp_path, Trained(saved, weight, wanted, module)), wanted.detach())


def test_the_functions_of_lycoris_agree(tmp_path: Path) -> None:
    """They take alpha, of LoHa divided by the rank, and scale once."""
    loha = lycoris("loha", LAYERS["conv2d"](), lora_dim=4, alpha=2.0, use_tucker=True)
    names = ("hada_w1_b", "hada_w1_a", "hada_w2_b", "hada_w2_a", "hada_t1", "hada_t2")
    parts = [loha.saved[name].double() for name in names]
    wanted = loha.weight + loha_weight(*parts, gamma=torch.tensor(2.0 / 4))
    assert_near(merged(tmp_path / "loha", loha), wanted)
    lokr = lycoris("lokr", LAYERS["linear"](), lora_dim=1, alpha=3.0, factor=4, decompose_both=True)
    found = [lokr.saved.get(name) for name in LOKR_PARTS]
    delta = lokr_weight(*(None if part is None else part.double() for part in found), gamma=3.0)
    assert_near(merged(tmp_path / "lokr", lokr), lokr.weight + delta)


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=IDS)
def test_strengths(kind: str, options: Mapping[str, Any], tmp_path: Path) -> None:
    trained = lycoris(kind, LAYERS["conv2d"](), alpha=3.0, **options)
    wanted = trained.weight - 1.5 * (trained.changed - trained.weight)
    assert_near(merged(tmp_path, trained, strength=-1.5), wanted)


@pytest.mark.parametrize("kind", MODULES)
def test_bits_do_not_depend_on_jobs(kind: str, tmp_path: Path) -> None:
    trained = lycoris(kind, nn.Linear(1024, 2100, bias=False), lora_dim=16, alpha=2.0)
    bf16 = Trained(
        {k: t.bfloat16() for k, t in trained.saved.items()}, trained.weight, trained.changed, nn.Identity()
    )
    one, two = (merged(tmp_path / str(n), bf16, dtype=torch.bfloat16, jobs=n) for n in (1, 2))
    assert torch.equal(one, two)
    wide = merged(tmp_path / "wide", trained, jobs=2)
    assert_near(wide, trained.weight.float().double() + (trained.changed - trained.weight))


# Norms, and differences of whole tensors


def test_norms(tmp_path: Path) -> None:
    layer = nn.LayerNorm(24)
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    module = NormModule("x", layer, 1.0)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    name = "blocks.0.norm2"
    base = base_of(tmp_path / "base", {f"{name}.{k}": t.detach() for k, t in layer.named_parameters()})
    saved = {f"lora_unet_blocks_0_norm2.{k}": t.detach() for k, t in module.state_dict().items()}
    found = fuse(base, f"{save(tmp_path / 'x.safetensors', saved)}:0.5").tensors()
    module.double()
    layer.double()
    weight, bias = module.get_merged_weight(0.5)
    assert_near(found[f"{name}.weight"], weight.detach())
    assert_near(found[f"{name}.bias"], bias.detach())


def test_differences_of_whole_tensors_have_no_alpha(tmp_path: Path) -> None:
    layer = nn.Conv2d(12, 20, 3)
    module = FullModule("x", layer, lora_dim=4, alpha=2.0)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    # LyCORIS saves the difference after apply_to, when its parameters are the changed weights
    module.apply_to()
    saved = {f"{FLAT}.{k}": t.detach() for k, t in module.state_dict().items()}
    assert saved.keys() == {f"{FLAT}.diff", f"{FLAT}.diff_b"}
    assert module.org_bias is not None
    tensors = {f"{NAME}.weight": module.org_weight, f"{NAME}.bias": module.org_bias[0]}
    base = base_of(tmp_path / "base", tensors)
    found = fuse(base, save(tmp_path / "x.safetensors", saved)).tensors()
    torch.testing.assert_close(found[f"{NAME}.weight"], module.weight.detach())
    torch.testing.assert_close(found[f"{NAME}.bias"], module.bias.detach())


# PEFT


def loha_config(**options: Any) -> LoHaConfig:
    return LoHaConfig(target_modules=["to_q"], r=4, alpha=6, **options)


def lokr_config(**options: Any) -> LoKrConfig:
    return LoKrConfig(target_modules=["to_q"], **{"r": 2, "alpha": 6, **options})


PEFT: list[tuple[str, str, LoHaConfig | LoKrConfig]] = [
    ("loha", "linear", loha_config()),
    ("loha", "linear", loha_config(alpha_pattern={"to_q": 3})),
    ("loha", "linear", loha_config(rank_pattern={"to_q": 8})),
    ("loha", "conv2d", loha_config()),
    ("loha", "conv2d", loha_config(use_effective_conv2d=True)),
    ("loha", "conv1d", loha_config(use_effective_conv2d=True)),
    ("loha", "conv1x1", loha_config(use_effective_conv2d=True)),
    ("lokr", "linear", lokr_config()),
    ("lokr", "linear", lokr_config(decompose_both=True, decompose_factor=8)),
    ("lokr", "linear", lokr_config(r=100)),
    ("lokr", "linear", lokr_config(rank_pattern={"to_q": 50}, alpha_pattern={"to_q": 20})),
    ("lokr", "conv2d", lokr_config()),
    ("lokr", "conv2d", lokr_config(use_effective_conv2d=True)),
    ("lokr", "conv2d", lokr_config(r=100)),
    ("lokr", "conv1d", lokr_config()),
    ("lokr", "conv1d", lokr_config(use_effective_conv2d=True)),
]


def weights_of(layer: Layer) -> Tensors:
    return {"to_q.weight": layer.weight.detach().clone()}


@pytest.mark.parametrize(("kind", "layer", "config"), PEFT)
def test_the_weight_that_peft_runs_with(
    kind: str, layer: str, config: LoHaConfig | LoKrConfig, tmp_path: Path
) -> None:
    made = LAYERS[layer]()
    base = base_of(tmp_path / "base", weights_of(made))
    trained = peft(tmp_path / "adapter", made, config)
    for kernel in ("auto", "reference"):
        fused = fuse(base, tmp_path / "adapter", out=tmp_path / kernel, options=["--kernel", kernel])
        assert_near(fused.tensors()["to_q.weight"], trained.changed)
        assert fused.lora["applied"][kind] == 1


def test_peft_scales_a_lokr_with_both_factors_full(tmp_path: Path) -> None:
    """LyCORIS does not; the report says whose definition was taken."""
    made = LAYERS["linear"]()
    base = base_of(tmp_path / "base", weights_of(made))
    trained = peft(tmp_path / "adapter", made, lokr_config(r=100, alpha=25))
    fused = fuse(base, tmp_path / "adapter")
    assert_near(fused.tensors()["to_q.weight"], trained.changed)
    assert fused.warning("full_factors")["as"] == "PEFT"
    (scale,) = fused.lora["scales"]
    assert (scale["scale"], scale["alpha"], scale["rank"]) == (0.25, 25.0, 100)
    assert scale["source"] == "adapter_config"


def test_pefts_product_of_a_1d_convolution_is_refused(tmp_path: Path) -> None:
    """PEFT lines w1 up with w2's last two dimensions there, which is no Kronecker product."""
    made = LAYERS["conv1d"]()
    base = base_of(tmp_path / "base", weights_of(made))
    peft(tmp_path / "adapter", made, lokr_config(r=100))
    refuse(base, tmp_path / "adapter", says=["to_q", "1-D convolution"])
