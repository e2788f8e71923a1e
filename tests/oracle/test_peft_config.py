"""What PEFT's configurations mean, held against what PEFT itself scales and merges."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from lycoris.modules.glora import GLoRAModule
from lycoris.modules.locon import LoConModule
from lycoris.modules.loha import LohaModule
from peft import LoHaConfig, LoKrConfig, LoraConfig, PeftConfig, PeftModel, get_peft_model
from torch import nn

from fuselora import synth
from fuselora.verify import verify
from tests.cases.builders import base_of, fuse, refuse, save
from tests.fused_pair import edit_json
from tests.oracle.merges import assert_near

Tensors = Mapping[str, torch.Tensor]
PATTERNS = [
    {},
    {"proj_out": 2},
    {"layers.1.to_q": 2},
    {"layers.0.to_q": 3, "to_q": 2},
    {r".*layers\.0\..*": 2},
    {r"layers\.[01]\.to_k": 3, "to_k": 2},
    {"^layers.1.to_q": 2},
    {"q": 2, "ayers.1.to_q": 2},
]


class Layer(nn.Module):
    """Two linear layers and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.norm = nn.Linear(24, 24), nn.Linear(24, 24), nn.LayerNorm(24)


class Model(nn.Module):
    """Layers with numbers in their names, and one outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.proj_out = nn.ModuleList([Layer(), Layer()]), nn.Linear(24, 12)


@dataclass(frozen=True)
class Trained:
    """An adapter folder that PEFT saved, its base, what PEFT merges, and PEFT's scale of each module."""

    base: Path
    lora: Path
    wanted: Tensors
    scaling: Mapping[str, float]

    def check(self) -> dict[str, Any]:
        """The merge is PEFT's, and ``verify`` agrees; returns the LoRA's entry of the marker."""
        fused = fuse(self.base, self.lora)
        found = fused.tensors()
        assert found.keys() == self.wanted.keys()
        for name, wanted in self.wanted.items():
            assert_near(found[name], wanted)
        assert verify(fused.out, base=self.base, loras=[self.lora]).findings == ()
        scales = {m: group["scale"] for group in fused.lora["scales"] for m in group["modules"]}
        assert scales == pytest.approx(self.scaling, rel=1e-12)
        return fused.lora


def trained(folder: Path, config: PeftConfig, *, trained: str = "lora_|hada_|lokr_") -> Trained:
    torch.manual_seed(0)
    model = Model()
    before = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    wrapped = get_peft_model(model, config)
    for name, parameter in wrapped.named_parameters():
        if parameter.requires_grad or any(part in name for part in trained.split("|")):
            nn.init.normal_(parameter, std=0.5)
    wrapped.save_pretrained(str(folder / "adapter"))
    scaling = {
        name.removeprefix("base_model.model."): float(module.scaling["default"])
        for name, module in wrapped.named_modules()
        if "default" in getattr(module, "scaling", {})
    }
    merged = wrapped.double().merge_and_unload().state_dict()
    wanted = {name: tensor.detach() for name, tensor in merged.items()}
    return Trained(base_of(folder / "base", before), folder / "adapter", wanted, scaling)


TARGETS = ["to_q", "to_k", "proj_out"]


@pytest.mark.parametrize("pattern", PATTERNS, ids=map(str, range(len(PATTERNS))))
@pytest.mark.parametrize("use_rslora", [False, True])
def test_patterns_of_rank_and_alpha(pattern: dict[str, int], use_rslora: bool, tmp_path: Path) -> None:
    alphas = {key: 5 * rank for key, rank in pattern.items()}
    config = LoraConfig(
        r=4, lora_alpha=6, target_modules=TARGETS, rank_pattern=pattern, alpha_pattern=alphas,
        use_rslora=use_rslora,
    )  # fmt: skip
    trained(tmp_path, config).check()


@pytest.mark.parametrize("kind", ["lora", "loha"])
def test_an_alpha_that_the_configuration_leaves_out_is_pefts_own(kind: str, tmp_path: Path) -> None:
    settings: Any = {"r": 4, "target_modules": TARGETS}
    config: PeftConfig = LoraConfig(**settings) if kind == "lora" else LoHaConfig(**settings)
    made = trained(tmp_path, config)
    path = made.lora / "adapter_config.json"
    document = json.loads(path.read_text())
    del document["lora_alpha" if kind == "lora" else "alpha"]
    path.write_text(json.dumps(document))
    made.check()
    warning = fuse(made.base, made.lora, out=tmp_path / "again").warning("default_alpha")
    assert warning["alpha"] == 8


def test_patterns_that_pefts_own_folder_has_in_another_order(tmp_path: Path) -> None:
    """PEFT writes them sorted and takes the first that fits, so it cannot load this folder again either."""
    patterns = {"to_q": 2, "layers.0.to_q": 3}
    config = LoraConfig(r=4, lora_alpha=6, target_modules=TARGETS, rank_pattern=patterns)
    made = trained(tmp_path, config)
    refuse(made.base, made.lora, says=("says rank 3 for base_model.model.layers.0.to_q", "have 2"))
    with pytest.raises(RuntimeError, match="size mismatch"):
        PeftModel.from_pretrained(Model(), str(made.lora))


@pytest.mark.parametrize("pattern", [PATTERNS[2], PATTERNS[4]], ids=["tail", "expression"])
@pytest.mark.parametrize("kind", ["loha", "lokr"])
def test_patterns_of_the_other_kinds(kind: str, pattern: dict[str, int], tmp_path: Path) -> None:
    alphas = dict.fromkeys(pattern, 5.0)
    settings: Any = {"r": 4, "alpha": 6, "target_modules": TARGETS, "rank_pattern": pattern}
    if kind == "loha":
        config: PeftConfig = LoHaConfig(**settings, alpha_pattern=alphas)
    else:
        config = LoKrConfig(**settings, alpha_pattern=alphas, decompose_both=True, decompose_factor=2)
    trained(tmp_path, config).check()


@pytest.mark.parametrize(
    "config", [LoHaConfig(r=4, alpha=6), LoKrConfig(r=4, alpha=6), LoKrConfig(r=32, alpha=6)]
)
def test_a_root_that_only_lora_is_divided_by(config: Any, tmp_path: Path) -> None:
    """PEFT has no rank-stabilised LoHa or LoKr, so it does not read ``use_rslora`` of one."""
    config.target_modules = TARGETS
    made = trained(tmp_path, config)
    path = made.lora / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_rslora": True}))
    scales = {(group["alpha"], group["rank"]) for group in made.check()["scales"]}
    assert scales == {(6, config.r)}


@pytest.mark.parametrize("use_dora", [False, True])
def test_linear_layers_of_a_known_model_are_never_transposed(use_dora: bool, tmp_path: Path) -> None:
    """PEFT resets ``fan_in_fan_out`` for them, of a folder that was edited or made elsewhere too."""
    base = synth.write_pipeline(tmp_path / "base", synth.tiny("wan2.2-t2v-a14b", blocks=1)) / "transformer"
    model_of: Any = WanTransformer3DModel.from_pretrained
    config = LoraConfig(r=2, lora_alpha=3, target_modules=["to_q", "net.2"], use_dora=use_dora)
    wrapped = get_peft_model(model_of(base), config)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.5)
    lora = tmp_path / "lora"
    wrapped.save_pretrained(str(lora))
    edit_json(lora / "adapter_config.json", lambda document: document.update(fan_in_fan_out=True))
    with pytest.warns(UserWarning, match="Setting fan_in_fan_out to False"):
        loaded = PeftModel.from_pretrained(model_of(base), str(lora))
    merged = loaded.double().merge_and_unload().state_dict()
    fused = fuse(base, lora)
    for name, tensor in fused.tensors().items():
        assert_near(tensor, merged[name])
    assert fused.warning("fan_in_fan_out")["modules"] == 3
    assert verify(fused.out, base=base, loras=[lora]).ok


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("lora_bias", [False, True])
def test_saved_modules_and_trained_biases(use_dora: bool, lora_bias: bool, tmp_path: Path) -> None:
    config = LoraConfig(
        r=4, lora_alpha=6, target_modules=["to_q", "to_k"], modules_to_save=["norm", "proj_out"],
        use_dora=use_dora and not lora_bias, lora_bias=lora_bias,
    )  # fmt: skip
    entry = trained(tmp_path, config).check()
    assert entry["applied"]["replace"] == 6


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_biases_that_were_trained_along(bias: Any, tmp_path: Path) -> None:
    entry = trained(tmp_path, LoraConfig(r=4, lora_alpha=6, target_modules=["to_q"], bias=bias)).check()
    assert entry["applied"]["replace"] == {"all": 7, "lora_only": 2}[bias]


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_a_changed_base_that_was_converted_back(init: Any, tmp_path: Path) -> None:
    """PEFT can turn such an adapter into a plain one, of twice the rank: that one fits the base."""
    torch.manual_seed(0)
    model = Model()
    before = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    config = LoraConfig(r=4, lora_alpha=6, target_modules=TARGETS, init_lora_weights=init)
    wrapped = get_peft_model(model, config)
    config.init_lora_weights = True
    wrapped.save_pretrained(str(tmp_path / "start"))
    config.init_lora_weights = init
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.5)
    wrapped.save_pretrained(str(tmp_path / "raw"))
    start = str(tmp_path / "start")
    wrapped.save_pretrained(str(tmp_path / "plain"), path_initial_model_for_weight_conversion=start)
    wanted = wrapped.merge_and_unload().state_dict()
    base = base_of(tmp_path / "base", before)
    refuse(base, tmp_path / "raw", says=("trained against a base changed by", repr(init)))
    found = fuse(base, tmp_path / "plain").tensors()
    for name, tensor in wanted.items():
        # PEFT takes the first values out of a float32 base and adds them again
        assert torch.allclose(found[name], tensor.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("setting", "key"),
    [("use_dora", "lora_magnitude_vector"), ("lora_bias", "lora_B.bias"), ("modules_to_save", "proj_out")],
)
def test_a_folder_that_lost_a_part(setting: str, key: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    value: Any = ["proj_out"] if setting == "modules_to_save" else True
    made = trained(tmp_path, LoraConfig(r=4, lora_alpha=6, target_modules=["to_q"], **{setting: value}))
    weights = made.lora / "adapter_model.safetensors"
    save(weights, {name: tensor for name, tensor in load_file(weights).items() if key not in name})
    refuse(made.base, made.lora, says=("adapter_config.json", setting, "not saved together"))


# LyCORIS' own rank-stabilised scale


@pytest.mark.parametrize("module", [LoConModule, LohaModule, GLoRAModule])
@pytest.mark.parametrize("alpha", [0, 2, 6])
def test_rs_lora_of_lycoris(module: type, alpha: int, tmp_path: Path) -> None:
    """It stores alpha times the root, except for GLoRA, which stores alpha; the scale is the same."""
    torch.manual_seed(0)
    layer = nn.Linear(24, 160, bias=False)
    made = module("x", layer, lora_dim=4, alpha=alpha, rs_lora=True)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.5)
    tensors = {f"lora_unet_to_q.{name}": tensor.detach() for name, tensor in made.state_dict().items()}
    metadata = {
        "ss_network_module": "lycoris.kohya",
        "ss_network_alpha": str(alpha),
        "ss_network_args": json.dumps({"rs_lora": "True"}),
    }
    lora = save(tmp_path / "x.safetensors", tensors, metadata)
    base = base_of(tmp_path / "base", {"to_q.weight": layer.weight.detach()})
    made.eval().double()
    weight = layer.double().weight.detach()
    # LyCORIS' LoHa has its scale in the weight, and get_diff_weight multiplies by it again
    delta = made.get_weight(weight.shape) if module is LohaModule else made.get_diff_weight()[0]
    fused = fuse(base, lora)
    assert_near(fused.tensors()["to_q.weight"], (weight + delta).detach())
    (scale,) = fused.lora["scales"]
    assert scale["scale"] == pytest.approx((alpha or 4) / 2)
    assert verify(fused.out, base=base, loras=[lora]).findings == ()
