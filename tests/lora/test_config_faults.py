"""A configuration and its tensors: what one says and the other has not is a fault."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from peft import LoraConfig
from peft.utils.peft_types import PeftType

from fuselora.errors import Fault
from fuselora.lora.config_faults import KINDS_OF, STORAGE_CONFIG, UNFUSED_CONFIG
from tests.inputs import PEFT, open_lora, pair, tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fuselora.synth import Spec

LORA: dict[str, object] = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
Q = pair("base_model.model.q", style=PEFT)
K = pair("base_model.model.k", style=PEFT)
MAGNITUDE = tensor("base_model.model.q.lora_magnitude_vector", 4)
PAIR_BIAS = tensor("base_model.model.q.lora_B.bias", 4)
WEIGHT = tensor("base_model.model.head.proj.weight", 4, 4)
BIAS = tensor("base_model.model.q.base_layer.bias", 4)
LOHA = [
    tensor("base_model.model.q.hada_w1_a", 4, 2), tensor("base_model.model.q.hada_w1_b", 2, 4),
    tensor("base_model.model.q.hada_w2_a", 4, 2), tensor("base_model.model.q.hada_w2_b", 2, 4),
]  # fmt: skip


def faults(folder: Path, specs: Sequence[Spec] = Q, /, **settings: object) -> tuple[Fault, ...]:
    config = folder / "adapter_config.json"
    config.write_text(json.dumps({**LORA, **settings}))
    return open_lora(folder / "adapter_model.safetensors", specs, config=config).faults


def said(folder: Path, specs: Sequence[Spec] = Q, /, **settings: object) -> list[tuple[str, str | None]]:
    found = faults(folder, specs, **settings)
    assert all(fault.message.startswith("adapter_config.json: ") for fault in found)
    return [(fault.kind, fault.key) for fault in found]


# Kinds of adapters


@pytest.mark.parametrize("kind", sorted(kind.value for kind in PeftType))
def test_every_type_of_peft_is_fused_or_refused_by_its_name(tmp_path: Path, kind: str) -> None:
    found = faults(tmp_path, [], peft_type=kind)
    refused = [fault for fault in found if fault.key == "peft_type"]
    assert len(refused) == (kind not in KINDS_OF)
    assert all(fault.kind == "unsupported" and f" {kind}," in fault.message for fault in refused)


@pytest.mark.parametrize("kind", ["", 3, ["LORA"], "FUTURE"])
def test_a_type_that_is_unknown(tmp_path: Path, kind: object) -> None:
    (fault,) = faults(tmp_path, peft_type=kind)
    assert (fault.kind, fault.key) == ("unsupported", "peft_type")


def test_of_a_type_that_is_not_fused_nothing_but_that_is_said(tmp_path: Path) -> None:
    specs = [tensor("base_model.model.q.vera_lambda_b", 4), tensor("base_model.vera_A", 2, 4), WEIGHT]
    found = faults(tmp_path, [*specs, *Q], peft_type="VERA", r=3, lora_alpha="many", modules_to_save=["x"])
    assert [fault.message for fault in found] == [
        "is an adapter of type VERA, which fuselora does not fuse (by its adapter_config.json)"
    ]
    assert (found[0].path, found[0].hint) == (
        "adapter_model.safetensors",
        "It fuses LORA, LOHA, LOKR, IA3, OFT and BOFT.",
    )


@pytest.mark.parametrize("kind", ["LORA", "lora", None])
def test_a_lora_is_a_lora(tmp_path: Path, kind: str | None) -> None:
    assert said(tmp_path, peft_type=kind) == []


def test_tensors_of_another_type(tmp_path: Path) -> None:
    (fault,) = faults(tmp_path, peft_type="LOHA", alpha=2)
    assert (fault.kind, fault.key) == ("config", "peft_type")
    assert "says LOHA, and 1 module of LORA, such as base_model.model.q" in fault.message
    assert said(tmp_path, LOHA, peft_type="LOHA", alpha=2) == []
    assert said(tmp_path, LOHA) == [("config", "peft_type")]


# Settings that are not fused


@pytest.mark.parametrize("setting", UNFUSED_CONFIG)
def test_a_setting_that_would_be_ignored(tmp_path: Path, setting: str) -> None:
    assert said(tmp_path, **{setting: True}) == [("unsupported", setting)]
    assert said(tmp_path, **{setting: None}) == []


@pytest.mark.parametrize("setting", STORAGE_CONFIG)
def test_how_weights_are_stored_is_read_for_loras_alone(tmp_path: Path, setting: str) -> None:
    specs: Any = [tensor("base_model.model.q.ia3_l", 4, 1)]
    assert said(tmp_path, specs, peft_type="IA3", **{setting: True}) == [("unsupported", setting)]


def test_no_variant_of_peft_is_ignored() -> None:
    variants = {f.name for f in dataclasses.fields(LoraConfig) if f.metadata.get("is_lora_variant")}
    # VeLoRA changes how a gradient is computed and nothing of the result; DoRA shows in the keys.
    assert variants - {"velora_config", "use_dora"} <= set(UNFUSED_CONFIG)


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora", "OLoRA", "loftq", "corda", "lora_ga"])
def test_an_adapter_of_a_changed_base(tmp_path: Path, init: str) -> None:
    (fault,) = faults(tmp_path, init_lora_weights=init)
    assert (fault.kind, fault.key) == ("changed_base", "init_lora_weights")
    assert init in fault.message
    assert fault.hint is not None and "path_initial_model_for_weight_conversion" in fault.hint


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_a_start_that_leaves_the_base_alone(tmp_path: Path, init: object) -> None:
    assert said(tmp_path, init_lora_weights=init) == []


# Ranks


def test_a_rank_that_is_not_the_stated_one(tmp_path: Path) -> None:
    (fault,) = faults(tmp_path, r=4)
    assert (fault.kind, fault.key) == ("config", "base_model.model.q")
    assert "says rank 4 for base_model.model.q, and its factors have 2" in fault.message


@pytest.mark.parametrize("pattern", ["k", r".*k", "k|v"])
def test_the_rank_of_a_pattern(tmp_path: Path, pattern: str) -> None:
    other = pair("base_model.model.k", rank=3, style=PEFT)
    assert said(tmp_path, [*Q, *other], rank_pattern={pattern: 3}) == []
    assert said(tmp_path, [*Q, *K], rank_pattern={pattern: 3}) == [("config", "base_model.model.k")]
    assert said(tmp_path, [*Q, *other], rank_pattern={"v": 3}) == [("config", "base_model.model.k")]


@pytest.mark.parametrize("settings", [{"r": 0}, {"r": "two"}, {"rank_pattern": {"q[": 2}}])
def test_ranks_that_are_none(tmp_path: Path, settings: dict[str, object]) -> None:
    assert [fault.kind for fault in faults(tmp_path, **settings)] == ["alpha"]


def test_a_loha_has_the_stated_rank(tmp_path: Path) -> None:
    settings = {"peft_type": "LOHA", "alpha": 2}
    assert said(tmp_path, LOHA, **settings, r=3) == [("config", "base_model.model.q")]


def test_no_rank_is_stated(tmp_path: Path) -> None:
    assert said(tmp_path, r=None) == []


# Parts that a setting asks for


@pytest.mark.parametrize(
    ("setting", "part"), [("use_dora", MAGNITUDE), ("lora_bias", PAIR_BIAS)], ids=["dora", "bias"]
)
def test_parts_of_every_pair(tmp_path: Path, setting: str, part: Spec) -> None:
    q, k = "base_model.model.q", "base_model.model.k"
    assert said(tmp_path, [*Q, part], **{setting: True}) == []
    assert said(tmp_path, [*Q, part]) == []
    assert said(tmp_path, Q, **{setting: False}) == []
    assert said(tmp_path, Q, **{setting: True}) == [("config", q)]
    assert said(tmp_path, [*Q, *K, part], **{setting: True}) == [("config", k)]
    assert said(tmp_path, [*Q, part], **{setting: False}) == [("config", q)]


@pytest.mark.parametrize("name", ["head", "proj", "head.proj"])
def test_saved_modules_are_there(tmp_path: Path, name: str) -> None:
    assert said(tmp_path, [*Q, WEIGHT], modules_to_save=[name]) == []
    assert said(tmp_path, [*Q, WEIGHT], modules_to_save=name) == []
    assert said(tmp_path, Q, modules_to_save=[name]) == [("config", name)]


@pytest.mark.parametrize("listed", [None, [], ["other"], ["ead"]])
def test_whole_weights_that_are_not_named(tmp_path: Path, listed: list[str] | None) -> None:
    found = said(tmp_path, [*Q, WEIGHT], modules_to_save=listed)
    assert ("config", WEIGHT.name) in found
    assert len(found) == 1 + len(listed or [])


def test_without_a_list_whole_weights_are_meant(tmp_path: Path) -> None:
    assert said(tmp_path, [*Q, WEIGHT]) == []


@pytest.mark.parametrize(("bias", "n_faults"), [("all", 0), ("lora_only", 0), ("none", 1), (None, 1)])
def test_trained_biases(tmp_path: Path, bias: str | None, n_faults: int) -> None:
    found = said(tmp_path, [*Q, BIAS], modules_to_save=None, bias=bias)
    assert found == [("config", BIAS.name)] * n_faults
    assert said(tmp_path, [*Q, WEIGHT], modules_to_save=None, bias=bias) == [("config", WEIGHT.name)]


def test_every_targeted_parameter_has_a_pair(tmp_path: Path) -> None:
    experts = pair("base_model.model.mlp.experts", style=PEFT)
    assert said(tmp_path, experts, target_parameters=["mlp.experts.gate"]) == []
    assert said(tmp_path, experts, target_parameters=["experts.gate"]) == []
    assert said(tmp_path, experts, target_parameters=["gate"]) == []
    found = said(tmp_path, experts, target_parameters=["experts.gate", "other.gate"])
    assert found == [("config", "other.gate")]


# What diffusers keeps in a header


def in_header(folder: Path, specs: Sequence[Spec], **settings: object) -> list[tuple[str, str | None]]:
    said = {f"transformer.{key}": value for key, value in {"lora_alpha": 4, **settings}.items()}
    metadata = {"lora_adapter_metadata": json.dumps(said)}
    return [(f.kind, f.key) for f in open_lora(folder / "x.safetensors", specs, metadata=metadata).faults]


def test_a_header_is_held_to_its_word_too(tmp_path: Path) -> None:
    q, k = pair("transformer.q", style=PEFT), pair("transformer_2.k", style=PEFT)
    assert in_header(tmp_path, q, r=2, use_dora=False, lora_bias=False) == []
    assert in_header(tmp_path, q, r=4) == [("config", "transformer.q")]
    assert in_header(tmp_path, [*q, *k], use_dora=True) == [
        ("config", "transformer.q"),
        ("config", "transformer_2.k"),
    ]
    assert in_header(tmp_path, q, modules_to_save=["head"]) == [("config", "head")]
    assert in_header(tmp_path, q, peft_type="HRA", r=4) == [("unsupported", "peft_type")]


def test_diffusers_saves_whole_weights_that_no_configuration_names(tmp_path: Path) -> None:
    q = pair("transformer.q", style=PEFT)
    assert in_header(tmp_path, [*q, tensor("transformer.norm.weight", 4)], modules_to_save=None) == []


# What kohya's trainers say


def kohya(
    folder: Path, specs: Sequence[Spec], module: str = "lycoris.kohya", **args: str
) -> list[tuple[str, str | None]]:
    metadata = {"ss_network_module": module, "ss_network_args": json.dumps(args)}
    return [(f.kind, f.key) for f in open_lora(folder / "x.safetensors", specs, metadata=metadata).faults]


def test_a_dora_that_lost_its_magnitudes(tmp_path: Path) -> None:
    whole = [*pair("q"), tensor("q.dora_scale", 4, 1)]
    assert kohya(tmp_path, pair("q"), dora_wd="True") == [("config", "dora_wd")]
    assert kohya(tmp_path, whole, dora_wd="True") == []
    assert kohya(tmp_path, [*whole, *pair("k")], dora_wd="True") == []
    assert kohya(tmp_path, pair("q"), dora_wd="False") == []
    assert kohya(tmp_path, [tensor("q.diff", 4, 4)], dora_wd="True") == []
    # sd-scripts' own networks know no such argument
    assert kohya(tmp_path, pair("q"), "networks.lora", dora_wd="True") == []


def test_a_full_lokr_under_rs_lora_has_two_scales(tmp_path: Path) -> None:
    full = [tensor("q.lokr_w1", 2, 2), tensor("q.lokr_w2", 2, 2)]
    assert kohya(tmp_path, full, rs_lora="True") == [("unsupported", "q")]
    assert kohya(tmp_path, full) == []
    assert kohya(tmp_path, pair("q"), rs_lora="True") == []


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("use_rslora", 1),
        ("fan_in_fan_out", "true"),
        ("use_dora", 1),
        ("lora_bias", 1),
        ("alpha_pattern", ["q"]),
        ("rank_pattern", [4]),
        ("modules_to_save", 7),
        ("lora_alpha", True),
    ],
)
def test_a_setting_of_another_type_never_counts_as_off(tmp_path: Path, setting: str, value: object) -> None:
    assert ("config", setting) in said(tmp_path, pair("blocks.0.q"), **{setting: value})
