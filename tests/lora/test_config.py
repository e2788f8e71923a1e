"""The scale that an adapter's configuration gives, or the metadata of a file."""

from __future__ import annotations

import json
import math

import pytest
from peft.utils.other import get_pattern_key

from fuselora.lora.config import (
    METADATA_KEYS,
    AdapterConfig,
    config_of,
    config_of_metadata,
    divides_by_root,
    network_of,
    peft_configs,
)
from fuselora.lora.scale import BadNumber

# adapter_config.json


def test_an_alpha_that_is_not_said_is_pefts_default() -> None:
    for document in ({"r": 8}, {"peft_type": "LORA"}):
        config = config_of(document)
        assert config is not None
        assert (config.lora_alpha, config.by_default) == (8.0, True)


def test_what_is_no_config_of_peft_gives_no_rule() -> None:
    assert config_of({}) is None
    assert config_of({"note": "by hand"}) is None
    assert config_of({"peft_type": "OFT", "r": 8}) is None


def test_an_alpha_of_null_is_no_number() -> None:
    with pytest.raises(BadNumber, match="None is not a number"):
        config_of({"r": 8, "lora_alpha": None})


def test_a_config() -> None:
    document = {"lora_alpha": 16, "r": 8, "use_rslora": True, "alpha_pattern": {"l3": "128"}}
    assert config_of(document) == AdapterConfig(16.0, True, {"l3": 128.0}, 8)
    assert config_of({"lora_alpha": 16, "use_rslora": None, "alpha_pattern": None}) == AdapterConfig(16.0)


@pytest.mark.parametrize(
    "document",
    [
        {"lora_alpha": "sixteen"},
        {"lora_alpha": [16]},
        {"lora_alpha": math.inf},
        {"lora_alpha": 16, "alpha_pattern": {"q": "much"}},
        {"lora_alpha": 16, "alpha_pattern": {"q": None}},
        {"lora_alpha": 16, "alpha_pattern": {"q[": 8}},
    ],
)
def test_a_bad_config(document: dict[str, object]) -> None:
    with pytest.raises(BadNumber):
        config_of(document)


MODULES = ["l3", "l7", "model.l3", "model.xl3", "layers.3.q", "layers.30.q", "layers.3.q.extra", "q"]
PATTERNS = ["l3", "q", "layers.3.q", r".*layers\.3\..*", r"layers\.\d+\.q", "model.l3", "l3|l7", "x"]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_mean_what_they_mean_to_peft(module: str, pattern: str) -> None:
    peft_takes_it = get_pattern_key([pattern], module) == pattern
    assert (AdapterConfig(1.0, alpha_pattern={pattern: 2.0}).alpha_of(module) == 2.0) == peft_takes_it


def test_the_first_pattern_that_fits_counts() -> None:
    config = AdapterConfig(1.0, alpha_pattern={"l3": 2.0, "model.l3": 3.0, ".*": 4.0})
    assert [config.alpha_of(module) for module in ("model.l3", "l3", "q")] == [2.0, 2.0, 4.0]


# The file's metadata


@pytest.mark.parametrize("key", METADATA_KEYS)
@pytest.mark.parametrize(("text", "alpha"), [("8", 8.0), ("16.0", 16.0), ("0", 0.0), ("-4", -4.0)])
def test_a_plain_key(key: str, text: str, alpha: float) -> None:
    assert config_of_metadata({key: text, "format": "pt"}) == AdapterConfig(alpha)


def test_plain_keys_in_their_order() -> None:
    metadata = {key: str(number) for number, key in enumerate(METADATA_KEYS)}
    for number, key in enumerate(METADATA_KEYS):
        assert config_of_metadata(metadata) == AdapterConfig(float(number))
        del metadata[key]
    assert config_of_metadata(metadata) is None


def test_none_as_kohya_writes_it_is_no_alpha() -> None:
    assert config_of_metadata({"ss_network_alpha": "None"}) is None
    assert config_of_metadata({"alpha": "None", "ss_network_alpha": "16.0"}) == AdapterConfig(16.0)


@pytest.mark.parametrize("text", ["abc", "nan", "inf", "", "none"])
def test_a_bad_plain_key(text: str) -> None:
    with pytest.raises(BadNumber):
        config_of_metadata({"alpha": text})


@pytest.mark.parametrize("prefix", ["", "transformer.", "transformer_2.", "unet."])
def test_diffusers_flattens_the_config_under_a_component(prefix: str) -> None:
    document = {
        prefix + "lora_alpha": 32,
        prefix + "r": 16,
        prefix + "use_rslora": True,
        prefix + "alpha_pattern": {"q": 64},
    }
    metadata = {"lora_adapter_metadata": json.dumps(document), "alpha": "8"}
    assert config_of_metadata(metadata) == AdapterConfig(32.0, True, {"q": 64.0}, 16)


def test_each_expert_may_have_a_config_of_its_own() -> None:
    document = {"transformer.lora_alpha": 8, "transformer_2.lora_alpha": 16, "transformer_2.use_rslora": True}
    metadata = {"lora_adapter_metadata": json.dumps(document)}
    assert set(peft_configs(metadata)) == {"transformer", "transformer_2"}
    assert config_of_metadata(metadata, "transformer") == AdapterConfig(8.0)
    assert config_of_metadata(metadata, "transformer_2") == AdapterConfig(16.0, use_rslora=True)
    assert config_of_metadata(metadata, "unet") == AdapterConfig(8.0)


def test_a_config_for_another_component_without_alpha_leaves_the_plain_keys() -> None:
    metadata = {"lora_adapter_metadata": json.dumps({"text_encoder.lora_alpha": 4}), "alpha": "8"}
    assert config_of_metadata(metadata) == AdapterConfig(8.0)


@pytest.mark.parametrize("text", ["{", "", "[]", "3", "null", "[" * 100_000])
def test_a_config_in_the_header_that_is_no_object(text: str) -> None:
    with pytest.raises(BadNumber, match="lora_adapter_metadata is not a JSON object"):
        config_of_metadata({"lora_adapter_metadata": text})


def test_no_metadata_gives_no_rule() -> None:
    assert config_of_metadata({}) is None
    assert config_of_metadata({"format": "pt"}) is None


def test_pefts_loha_and_lokr_call_it_alpha() -> None:
    for kind in ("LOHA", "LOKR"):
        config = config_of({"peft_type": kind, "r": 8, "alpha": 4, "alpha_pattern": {"q": 2}})
        assert config is not None
        assert (config.alpha_of("a.k"), config.alpha_of("a.q")) == (4, 2)
    for kind, other in (("LOHA", "lora_alpha"), ("LORA", "alpha")):
        config = config_of({"peft_type": kind, "r": 8, other: 4})
        assert config is not None
        assert (config.lora_alpha, config.by_default) == (8, True)


@pytest.mark.parametrize("kind", ["LORA", "LOHA", "LOKR"])
def test_the_rank_is_stated(kind: str) -> None:
    document = {"r": 8, "alpha": 4, "lora_alpha": 4, "rank_pattern": {"q": 2}}
    config = config_of({"peft_type": kind, **document})
    assert config is not None
    assert (config.rank_of("a.k"), config.rank_of("a.q")) == (8, 2)


@pytest.mark.parametrize("kind", ["LORA", "LOHA"])
def test_factors_that_show_their_rank_need_none_stated(kind: str) -> None:
    config = config_of({"peft_type": kind, "alpha": 4, "lora_alpha": 4})
    assert config is not None
    assert config.rank_of("q") is None


@pytest.mark.parametrize("rank", [0, -1, 1.5, "x", None])
def test_a_stated_rank_is_a_whole_number(rank: object) -> None:
    with pytest.raises(BadNumber):
        config_of({"peft_type": "LOKR", "r": rank, "alpha": 4})


# What kohya's trainers write


def kohya(module: str = "networks.lora", alpha: str = "8", **args: object) -> dict[str, str]:
    return {"ss_network_module": module, "ss_network_alpha": alpha, "ss_network_args": json.dumps(args)}


LYCORIS = "lycoris.kohya"


@pytest.mark.parametrize(
    ("metadata", "linear", "conv"),
    [
        (kohya(), 8.0, 8.0),
        (kohya(conv_dim="4", conv_alpha="2"), 8.0, 2.0),
        (kohya(conv_dim=4, conv_alpha=2.5), 8.0, 2.5),
        (kohya(conv_dim="4"), 8.0, 1.0),
        (kohya(conv_dim="None", conv_alpha="None"), 8.0, 8.0),
        (kohya(conv_dim=None, conv_alpha=None), 8.0, 8.0),
        (kohya(LYCORIS, conv_dim="4"), 8.0, 8.0),
        (kohya(LYCORIS, conv_dim="4", conv_alpha="2"), 8.0, 2.0),
        (kohya(LYCORIS, conv_dim="4", conv_alpha="0"), 8.0, 8.0),
        ({"ss_network_alpha": "8", "ss_network_args": "None"}, 8.0, 8.0),
        ({"ss_network_alpha": "8", "ss_network_args": "null"}, 8.0, 8.0),
        ({"alpha": "8", "ss_network_args": '{"conv_alpha": "2"}'}, 8.0, 8.0),
    ],
)
def test_convolutions_have_their_own_alpha(metadata: dict[str, str], linear: float, conv: float) -> None:
    config = config_of_metadata(metadata)
    assert config is not None
    assert (config.alpha_of("q"), config.alpha_of("q", conv=True)) == (linear, conv)


@pytest.mark.parametrize("text", ["{", "[]", "3", '"x"'])
def test_arguments_that_are_no_object(text: str) -> None:
    with pytest.raises(BadNumber, match="ss_network_args is not a JSON object"):
        config_of_metadata({"ss_network_alpha": "8", "ss_network_args": text})


@pytest.mark.parametrize("alpha", ["two", "nan", ""])
def test_an_alpha_of_convolutions_that_is_no_number(alpha: str) -> None:
    with pytest.raises(BadNumber):
        config_of_metadata(kohya(conv_dim="4", conv_alpha=alpha))


@pytest.mark.parametrize(
    ("metadata", "divisor"),
    [
        (kohya(LYCORIS, rs_lora="True"), 4.0),
        (kohya(LYCORIS, rs_lora=True), 4.0),
        (kohya(LYCORIS, rs_lora="1"), 4.0),
        (kohya(LYCORIS, rs_lora="False"), 16),
        (kohya(LYCORIS), 16),
        (kohya("networks.lora", rs_lora="True"), 16),
    ],
)
def test_lycoris_rs_lora_divides_by_the_root(metadata: dict[str, str], divisor: float) -> None:
    config = config_of_metadata(metadata)
    assert config is not None
    assert config.divisor(16) == divisor


@pytest.mark.parametrize(
    ("stored", "conv", "by_root"),
    [
        (8.0, False, True),  # as it was given
        (32.0, False, False),  # times sqrt(16) already
        (2.0, True, True),
        (8.0, True, False),
        (5.0, False, False),
    ],
)
def test_a_stored_alpha_may_be_short_of_its_root(stored: float, conv: bool, by_root: bool) -> None:
    metadata = kohya(LYCORIS, rs_lora="True", conv_alpha="2")
    assert divides_by_root(metadata, stored, 16, conv=conv) == by_root
    assert not divides_by_root(kohya(LYCORIS, conv_alpha="2"), stored, 16, conv=conv)
    assert not divides_by_root(kohya(rs_lora="True"), stored, 16, conv=conv)
    assert not divides_by_root({}, stored, 16, conv=conv)


def test_an_alpha_of_0_is_the_rank_to_lycoris() -> None:
    metadata = kohya(LYCORIS, alpha="0", rs_lora="True")
    assert divides_by_root(metadata, 16.0, 16, conv=False)
    assert not divides_by_root(metadata, 64.0, 16, conv=False)


@pytest.mark.parametrize("broken", [{"ss_network_args": "{"}, {"ss_network_alpha": "many"}])
def test_what_cannot_be_read_changes_no_stored_alpha(broken: dict[str, str]) -> None:
    assert not divides_by_root({**kohya(LYCORIS, rs_lora="True"), **broken}, 8.0, 16, conv=False)


def test_a_network() -> None:
    network = network_of(kohya(LYCORIS, dora_wd="True", algo="lokr", preset=None))
    assert (network.is_lycoris, network.has("dora_wd"), network.has("use_tucker")) == (True, True, False)
    assert network.args == {"dora_wd": "True", "algo": "lokr"}
