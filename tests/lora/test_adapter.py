"""A LoRA file's modules: every tensor is in one, or a fault names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fuselora.errors import FormatError, InputError
from fuselora.header import read_header
from fuselora.lora.adapter import Adapter, component_of, open_adapter
from fuselora.lora.config import AdapterConfig
from fuselora.lora.scale import StoredAlpha
from fuselora.resolve import LoraLocation
from fuselora.specs import LoraSpec
from tests import listings
from tests.inputs import PEFT, open_lora, pair, shard_name, sharded, tensor

if TYPE_CHECKING:
    from fuselora.synth import Spec


def opened(folder: Path, *specs: Spec, metadata: dict[str, str] | None = None) -> Adapter:
    return open_lora(folder / "x.safetensors", specs, metadata=metadata)


def with_config(folder: Path, **settings: object) -> Adapter:
    config = folder / "adapter_config.json"
    config.write_text(json.dumps({"r": 2, "lora_alpha": 4, **settings}))
    return open_lora(folder / "adapter_model.safetensors", pair("q", style=PEFT), config=config)


def said(adapter: Adapter) -> list[tuple[str, str | None]]:
    assert {fault.path for fault in adapter.faults} <= {adapter.name}
    return [(fault.kind, fault.key) for fault in adapter.faults]


def test_a_module_has_its_parts(tmp_path: Path) -> None:
    adapter = opened(tmp_path, *pair("a.q", 6, 4, rank=3, alpha=8), tensor("a.q.diff_b", 6))
    (module,) = adapter.modules
    assert (adapter.name, adapter.faults, adapter.config) == ("x.safetensors", (), None)
    assert (module.name, module.dialect, module.alpha, module.rank) == ("a.q", "lora_down/up", 8.0, 3)
    assert {part: found.shape for part, found in module.parts.items()} == {
        "down": (3, 4), "up": (6, 3), "alpha": (), "diff_b": (6,),
    }  # fmt: skip
    assert [kind.name for kind in module.kinds] == ["pair", "diff_b"]


def test_modules_without_a_pair(tmp_path: Path) -> None:
    adapter = opened(tmp_path, tensor("norm.diff", 4), tensor("q.alpha", value=2))
    assert {(m.name, m.dialect, m.rank, m.alpha) for m in adapter.modules} == {
        ("norm", "diff", None, None),
        ("q", "alpha", None, 2.0),
    }
    assert adapter.faults == ()


def test_one_file_may_mix_dialects(tmp_path: Path) -> None:
    specs = [
        *pair("q"),
        *pair("k", style=PEFT),
        *pair("v", style=("lora_A.default", "lora_B.default")),
        *pair("lora_unet_o", alpha=1),
        tensor("n.diff", 4),
    ]
    adapter = opened(tmp_path, *specs)
    assert {m.name: m.dialect for m in adapter.modules} == {
        "q": "lora_down/up", "k": "lora_A/B", "v": "lora_A/B", "lora_unet_o": "lora_down/up", "n": "diff",
    }  # fmt: skip
    assert adapter.faults == ()


@pytest.mark.parametrize("name", sorted(listings.wan()))
def test_every_published_tensor_is_in_one_module(tmp_path: Path, name: str) -> None:
    metadata = listings.index()[name].metadata
    path = listings.sparse(tmp_path / "x.safetensors", listings.lora(name), metadata)
    adapter = open_adapter(LoraLocation(LoraSpec("x"), path, "x", None))
    parts = [found.name for module in adapter.modules for found in module.parts.values()]
    assert sorted(parts) == sorted(found.name for found in adapter.tensors)
    assert adapter.faults == ()


# Faults of the keys


def test_half_a_pair(tmp_path: Path) -> None:
    down, up = pair("q")
    assert said(opened(tmp_path, down)) == [("half_pair", "q")]
    half = opened(tmp_path, up, tensor("q.alpha"), tensor("q.diff_b", 4))
    assert [fault.message for fault in half.faults] == ["q has no down factor"]


def test_two_adapters_for_one_module_are_never_chosen_between(tmp_path: Path) -> None:
    specs = [
        *pair("q", style=("lora_A.style", "lora_B.style")),
        *pair("q", style=("lora_A.char", "lora_B.char")),
        *pair("k", style=("lora_A.style", "lora_B.style")),
    ]
    (fault,) = opened(tmp_path, *specs).faults
    assert (fault.kind, fault.key) == ("ambiguous", "q")
    assert "char, style" in fault.message
    assert fault.hint is not None and "one adapter per file" in fault.hint


def test_factors_of_different_adapters_are_no_pair(tmp_path: Path) -> None:
    specs = pair("q", style=("lora_A.style", "lora_B.char"))
    assert said(opened(tmp_path, *specs)) == [("ambiguous", "q")]
    named_and_not = pair("q", style=("lora_A", "lora_B.char"))
    assert said(opened(tmp_path, *named_and_not)) == [("ambiguous", "q")]


def test_one_factor_in_two_dialects(tmp_path: Path) -> None:
    adapter = opened(tmp_path, *pair("q"), *pair("q", style=PEFT))
    assert said(adapter) == [("twice", "q"), ("twice", "q")]
    assert {"q.lora_A.weight", "q.lora_down.weight"} <= set(
        adapter.faults[0].message.replace(",", " ").split()
    )


@pytest.mark.parametrize(
    ("down", "up", "empty"),
    [((0,), (4, 2), "down"), ((0, 4), (4, 0), "both"), ((2, 4), (0,), "up")],
)
def test_empty_factors(tmp_path: Path, down: tuple[int, ...], up: tuple[int, ...], empty: str) -> None:
    adapter = opened(tmp_path, tensor("q.lora_down.weight", *down), tensor("q.lora_up.weight", *up))
    keys = {"down": {"q.lora_down.weight"}, "up": {"q.lora_up.weight"}}
    found = {fault.key for fault in adapter.faults if fault.kind == "empty"}
    assert found == keys.get(empty, keys["down"] | keys["up"])
    assert all("shape is [0" in f.message or "0]" in f.message for f in adapter.faults if f.kind == "empty")


def test_an_empty_difference(tmp_path: Path) -> None:
    assert said(opened(tmp_path, tensor("q.diff", 0))) == [("empty", "q.diff")]


@pytest.mark.parametrize("shape", [(), (4,)])
def test_a_factor_is_a_matrix_at_least(tmp_path: Path, shape: tuple[int, ...]) -> None:
    adapter = opened(tmp_path, tensor("q.lora_down.weight", *shape), tensor("q.lora_up.weight", *shape))
    assert sorted(said(adapter)) == [("shape", "q.lora_down.weight"), ("shape", "q.lora_up.weight")]


def test_a_file_without_tensors(tmp_path: Path) -> None:
    adapter = opened(tmp_path, metadata={"format": "pt"})
    assert said(adapter) == [("empty", None)]
    assert adapter.modules == ()


def test_keys_that_mean_nothing_and_kinds_that_are_not_fused(tmp_path: Path) -> None:
    adapter = opened(
        tmp_path,
        *pair("q"),
        tensor("q.bm.weight", 1),
        tensor("q.lora_magnitude", 4),
    )
    assert sorted(said(adapter)) == [
        ("unknown_key", "q.lora_magnitude"),
        ("unsupported", "q.bm.weight"),
    ]
    by_key = {fault.key: fault.message for fault in adapter.faults}
    assert "GLoRA with a Tucker core" in by_key["q.bm.weight"]
    assert [module.name for module in adapter.modules] == ["q"]


def test_full_weights_alone_are_no_lora(tmp_path: Path) -> None:
    adapter = opened(tmp_path, tensor("q.weight", 4, 4), tensor("q.bias", 4))
    assert said(adapter) == [("unsupported", adapter.tensors[0].name)]
    assert "it is a checkpoint, not a LoRA" in adapter.faults[0].message


def test_full_weights_beside_a_key_that_nobody_knows_may_be_part_of_a_lora(tmp_path: Path) -> None:
    adapter = opened(tmp_path, tensor("q.weight", 4, 4), tensor("q.hra_u", 4, 2))
    assert said(adapter) == [("unknown_key", "q.hra_u")]


def test_full_weights_beside_a_pair_are_parts_of_it(tmp_path: Path) -> None:
    adapter = opened(tmp_path, *pair("q"), tensor("proj_out.weight", 4, 4))
    assert adapter.faults == ()
    assert {m.name: [kind.name for kind in m.kinds] for m in adapter.modules} == {
        "q": ["pair"], "proj_out": ["replace"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "value", "why"),
    [
        ((2,), 8.0, "not one number"),
        ((0,), 8.0, "not one number"),
        ((), float("nan"), "not a finite number"),
        ((), float("inf"), "not a finite number"),
    ],
)
def test_an_alpha_that_is_not_one_finite_number(
    tmp_path: Path, shape: tuple[int, ...], value: float, why: str
) -> None:
    (fault,) = opened(tmp_path, *pair("q"), tensor("q.alpha", *shape, value=value)).faults
    assert (fault.kind, fault.key) == ("alpha", "q.alpha")
    assert why in fault.message


def test_all_faults_are_found_at_once(tmp_path: Path) -> None:
    adapter = opened(
        tmp_path,
        pair("half")[0],
        *pair("two", style=("lora_A.a", "lora_B.b")),
        tensor("x.bm.weight", 1),
        tensor("x.nonsense", 2),
        *pair("odd", alpha=float("nan")),
        metadata={"lora_adapter_metadata": "{"},
    )
    assert {kind for kind, _ in said(adapter)} == {
        "half_pair", "ambiguous", "unsupported", "unknown_key", "alpha",
    }  # fmt: skip
    assert ("alpha", "lora_adapter_metadata") in said(adapter)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    location = LoraLocation(LoraSpec("x"), tmp_path / "absent.safetensors", "absent.safetensors", None)
    with pytest.raises(InputError, match=r"absent\.safetensors"):
        open_adapter(location)
    location.path.write_bytes(b"\x80\x04 a pickle")
    with pytest.raises(FormatError, match="pickle"):
        open_adapter(location)


# adapter_config.json and its copy in the header


def test_a_config_sets_the_scale(tmp_path: Path) -> None:
    adapter = with_config(tmp_path, use_rslora=True, alpha_pattern={"q": 16})
    assert adapter.config == AdapterConfig(4.0, True, {"q": 16.0}, 2)
    assert adapter.faults == ()


@pytest.mark.parametrize("prefix", ["", "transformer.", "transformer_2.", "unet."])
def test_the_header_may_hold_the_config(tmp_path: Path, prefix: str) -> None:
    settings = {"lora_alpha": 4, "use_qalora": True, "init_lora_weights": "pissa"}
    text = json.dumps({prefix + key: value for key, value in settings.items()})
    adapter = opened(tmp_path, *pair("q"), metadata={"lora_adapter_metadata": text})
    assert said(adapter) == [("unsupported", "use_qalora"), ("changed_base", "init_lora_weights")]
    assert "lora_adapter_metadata" in adapter.faults[0].message


def test_the_header_may_hold_a_config_for_each_expert(tmp_path: Path) -> None:
    text = json.dumps(
        {"transformer.lora_alpha": 4, "transformer_2.lora_alpha": 4, "transformer_2.use_qalora": True}
    )
    adapter = opened(tmp_path, *pair("q"), metadata={"lora_adapter_metadata": text})
    assert said(adapter) == [("unsupported", "use_qalora")]


@pytest.mark.parametrize("alpha", ["many", [1], float("nan"), {}])
def test_a_config_without_a_usable_alpha(tmp_path: Path, alpha: object) -> None:
    adapter = with_config(tmp_path, lora_alpha=alpha)
    assert said(adapter) == [("alpha", "lora_alpha")]


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("r", "abc", "r 'abc' is not a number"),
        ("r", 1.5, "r 1.5 is no whole number above 0"),
        ("rank_pattern", {"q": 0}, "rank_pattern 0 is no whole number above 0"),
        ("alpha_pattern", {"q": "much"}, "alpha_pattern 'much' is not a number"),
    ],
)
def test_a_number_that_is_none_is_named_with_its_file(
    tmp_path: Path, name: str, value: object, what: str
) -> None:
    adapter = with_config(tmp_path, **{name: value})
    assert said(adapter) == [("alpha", name)]
    assert adapter.faults[0].message == f"adapter_config.json: {what}"


def test_a_config_that_is_not_json(tmp_path: Path) -> None:
    config = tmp_path / "adapter_config.json"
    config.write_text("r: 2")
    with pytest.raises(FormatError, match=r"adapter_config\.json"):
        open_lora(tmp_path / "adapter_model.safetensors", pair("q"), config=config)


def test_the_file_s_own_header_is_kept(tmp_path: Path) -> None:
    adapter = opened(tmp_path, *pair("q"), metadata={"x": "y"})
    assert adapter.files == (read_header(adapter.location.path),)
    assert adapter.metadata == {"x": "y"}


# Finished factors


def test_a_finished_factor(tmp_path: Path) -> None:
    adapter = opened(tmp_path, *pair("q", rank=4), tensor("q.alpha_scale", value=0.5))
    (module,) = adapter.modules
    assert (module.alpha, module.alpha_scale, adapter.faults) == (None, 0.5, ())
    assert adapter.stored_alpha(module, 4, conv=False) == StoredAlpha(0.5, finished=True)


def test_an_alpha_and_a_finished_factor(tmp_path: Path) -> None:
    adapter = opened(tmp_path, *pair("q", alpha=8), tensor("q.alpha_scale", value=0.5))
    (fault,) = adapter.faults
    assert (fault.kind, fault.key) == ("alpha", "q")
    assert "q.alpha and q.alpha_scale" in fault.message


# Several files


def test_a_lora_in_several_files(tmp_path: Path) -> None:
    q, k = pair("q", alpha=8), pair("k", rank=3)
    index = sharded(tmp_path, [q[0], k[1]], [*q[1:], k[0]])
    adapter = open_adapter(LoraLocation(LoraSpec(str(index)), index, index.name, None))
    whole = open_lora(tmp_path / "whole.safetensors", [*q, *k])
    assert adapter.faults == ()
    assert [header.path.name for header in adapter.files] == [shard_name(1, 2), shard_name(2, 2)]
    assert {m.name: (m.rank, m.alpha) for m in adapter.modules} == {"q": (2, 8.0), "k": (3, None)}
    assert {t.name for t in adapter.tensors} == {t.name for t in whole.tensors}
    assert {name: header.path.name for name, header in adapter.homes.items()} == {
        "q.lora_down.weight": shard_name(1, 2), "k.lora_up.weight": shard_name(1, 2),
        "q.lora_up.weight": shard_name(2, 2), "q.alpha": shard_name(2, 2),
        "k.lora_down.weight": shard_name(2, 2),
    }  # fmt: skip
    assert adapter.n_bytes == sum(header.n_bytes for header in adapter.files)
    assert set(adapter.paths) == {index, *(header.path for header in adapter.files)}


@pytest.mark.parametrize(("key", "alike"), [("ss_network_alpha", False), ("sshs_model_hash", True)])
def test_files_may_not_say_different_things_about_the_scale(tmp_path: Path, key: str, alike: bool) -> None:
    q, k = pair("q"), pair("k")
    index = sharded(tmp_path, q, k, metadata=[{key: "1", "format": "pt"}, {key: "2"}])
    adapter = open_adapter(LoraLocation(LoraSpec(str(index)), index, index.name, None))
    assert adapter.metadata == {key: "1", "format": "pt"}
    assert said(adapter) == ([] if alike else [("alpha", key)])


def test_one_of_several_files_is_no_lora(tmp_path: Path) -> None:
    first, other = tmp_path / shard_name(1, 2), tmp_path / shard_name(1, 1)
    assert [fault.kind for fault in open_lora(first, pair("q")).faults] == ["shard"]
    assert open_lora(other, pair("q")).faults == ()


# Which component a configuration in the header speaks of


@pytest.mark.parametrize(
    ("module", "component"),
    [
        ("blocks.0.q", "transformer"),
        ("transformer.blocks.0.q", "transformer"),
        ("transformer_2.blocks.0.q", "transformer_2"),
        ("text_encoder_2.x", "text_encoder_2"),
        ("lora_te1_x", "text_encoder"),
        ("text_encoders.clip_l.x", "text_encoder"),
    ],
)
def test_the_component_of_a_module(module: str, component: str) -> None:
    assert component_of(module) == component


def test_a_configuration_in_the_header_tells_what_its_own_modules_mean(tmp_path: Path) -> None:
    said = {"transformer.lora_alpha": 4, "transformer.fan_in_fan_out": True, "text_encoder.lora_alpha": 2}
    specs = [*pair("transformer.q", style=PEFT), *pair("text_encoder.q", style=PEFT)]
    adapter = opened(tmp_path, *specs, metadata={"lora_adapter_metadata": json.dumps(said)})
    assert {m.name: [k.name for k in m.kinds] for m in adapter.modules} == {
        "transformer.q": ["transposed"],
        "text_encoder.q": ["pair"],
    }
