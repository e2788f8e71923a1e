"""Every row of the key grammar, and the order in which a module's name is read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuselora.lora.grammar import (
    COMPONENT_PREFIXES,
    FLAT_PREFIXES,
    LEAVES,
    PREFIXES,
    SUFFIXES,
    UNFUSED,
    ParsedKey,
    Part,
    Spelling,
    is_lora_key,
    parse_key,
    spellings,
    unfused_kind,
)

KEYS: list[tuple[str, Part, str, str]] = [
    # suffix, part, dialect, adapter name
    ("lora_down.weight", "down", "lora_down/up", ""),
    ("lora_up.weight", "up", "lora_down/up", ""),
    ("lora_A.weight", "down", "lora_A/B", ""),
    ("lora_B.weight", "up", "lora_A/B", ""),
    ("lora_A.default.weight", "down", "lora_A/B", "default"),
    ("lora_B.default.weight", "up", "lora_A/B", "default"),
    ("lora_A.default_0.default.weight", "down", "lora_A/B", "default_0.default"),
    ("lora_B.default.default.weight", "up", "lora_A/B", "default.default"),
    ("lora_A.my style-1.weight", "down", "lora_A/B", "my style-1"),
    ("alpha", "alpha", "alpha", ""),
    ("diff", "diff", "diff", ""),
    ("diff_b", "diff_b", "diff", ""),
    ("diff_m", "diff_m", "diff", ""),
]
MODULES = [
    "x",
    "blocks.0.self_attn.q",
    "diffusion_model.blocks.0.self_attn.q",
    "base_model.model.transformer.blocks.0.attn1.to_out.0",
    "lora_unet_blocks_0_self_attn_q",
    "lora_unet_blocks_12.self_attn.k",
    "blocks.0.attn.lora_a.alpha_net",
    "head.diff.head",
]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(("suffix", "part", "dialect", "name"), KEYS)
def test_every_row(module: str, suffix: str, part: Part, dialect: str, name: str) -> None:
    assert parse_key(f"{module}.{suffix}") == ParsedKey(module, part, dialect, name)


def test_every_row_is_tested_and_every_part_has_a_leaf() -> None:
    assert {(dialect, part) for _, part, dialect, _ in KEYS} == {(d, p) for d, p, _ in SUFFIXES}
    assert {part for _, part, _ in SUFFIXES} == set(LEAVES)


@given(st.text("abqz019_-.", min_size=1))
def test_any_module_comes_back_whole(module: str) -> None:
    for suffix, part, dialect, name in KEYS:
        assert parse_key(f"{module}.{suffix}") == ParsedKey(module, part, dialect, name)


@pytest.mark.parametrize(
    "key",
    [
        "",
        "alpha",
        ".alpha",
        "lora_down.weight",
        ".lora_down.weight",
        "x.lora_down",
        "x.lora_A",
        "x.lora_A.bias",
        "x.lora_down.weight.1",
        "x.lora_down.weights",
        "xlora_down.weight",
        "x.lora_Adefault.weight",
        "x.diff_bias",
        "x.alphas",
        "x.lora_A..weight ",
        "x.lora_C.weight.y",
        "blocks.0.modulation",
    ],
)
def test_what_is_no_key_is_nothing(key: str) -> None:
    assert parse_key(key) is None
    # whatever ends like a tensor of a model can only be meant as one
    assert unfused_kind(key) in (None, "a full weight (modules_to_save)")


def test_what_ends_like_nothing_known_has_no_kind() -> None:
    assert [unfused_kind(key) for key in ("", "x.lora_A", "blocks.0.modulation", ".weight")] == [None] * 4


UNFUSED_KEYS = [
    ("dora_scale", "DoRA"),
    ("lora_magnitude_vector", "DoRA"),
    ("lora_magnitude_vector.default.weight", "DoRA"),
    ("lora_B.bias", "a bias of the pair (lora_bias)"),
    ("lora_B.default.bias", "a bias of the pair (lora_bias)"),
    ("lora_mid.weight", "a Tucker core (lora_mid)"),
    ("hada_w1_a", "LoHa"),
    ("hada_w2_b", "LoHa"),
    ("hada_t1", "LoHa"),
    ("lokr_w1", "LoKr"),
    ("lokr_w2_a", "LoKr"),
    ("lokr_t2", "LoKr"),
    ("a1.weight", "GLoRA"),
    ("b2.weight", "GLoRA"),
    ("oft_blocks", "OFT or BOFT"),
    ("oft_diag", "OFT or BOFT"),
    ("oft_r.default", "OFT or BOFT"),
    ("ia3_l", "IA3"),
    ("ia3_l.default", "IA3"),
    ("lora_embedding_A", "an embedding pair"),
    ("lora_embedding_B.default", "an embedding pair"),
    ("set_weight", "a full replacement (set_weight)"),
    ("reshape_weight", "a full replacement (set_weight)"),
    ("w_norm", "a norm delta (w_norm, b_norm)"),
    ("b_norm", "a norm delta (w_norm, b_norm)"),
    ("alpha_scale", "a finished factor (alpha_scale)"),
    ("lora_up.blocks.2.weight", "a split pair (lora_up.blocks)"),
    ("lora.down.weight", "a diffusers processor pair"),
    ("lora.up.weight", "a diffusers processor pair"),
    ("processor.qkv_lora1.down.weight", "a diffusers processor pair"),
    ("processor.to_q_lora.up.weight", "a diffusers processor pair"),
    ("weight", "a full weight (modules_to_save)"),
    ("bias", "a full weight (modules_to_save)"),
    ("scale", "a full weight (modules_to_save)"),
]


@pytest.mark.parametrize(("suffix", "kind"), UNFUSED_KEYS)
def test_a_kind_that_is_not_fused_has_a_name(suffix: str, kind: str) -> None:
    assert parse_key(f"blocks.0.to_q.{suffix}") is None
    assert unfused_kind(f"blocks.0.to_q.{suffix}") == kind


def test_every_unfused_row_is_tested() -> None:
    assert {kind for _, kind in UNFUSED_KEYS} == {kind for kind, _ in UNFUSED}


# How a module's name is read


def names(module: str) -> list[str]:
    return [spelling.name for spelling in spellings(module)]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_prefix_may_be_part_of_the_name_or_not(prefix: str) -> None:
    assert spellings(f"{prefix}blocks.0.q") == (
        Spelling(f"{prefix}blocks.0.q", False, None),
        Spelling("blocks.0.q", False, None),
    )


@pytest.mark.parametrize("prefix", FLAT_PREFIXES)
def test_a_flat_prefix_says_that_the_rest_is_flattened(prefix: str) -> None:
    assert spellings(f"{prefix}blocks_0_q") == (
        Spelling(f"{prefix}blocks_0_q", False, None),
        Spelling("blocks_0_q", True, None),
    )
    assert spellings(f"{prefix}blocks_0.q")[1] == Spelling("blocks_0.q", True, None)


@pytest.mark.parametrize(("prefix", "component"), COMPONENT_PREFIXES.items())
def test_a_component_prefix_says_for_whom_the_rest_is(prefix: str, component: str) -> None:
    assert spellings(f"{prefix}blocks.0.q") == (
        Spelling(f"{prefix}blocks.0.q", False, None),
        Spelling("blocks.0.q", False, component),
    )
    assert spellings(f"base_model.model.{prefix}x")[-1] == Spelling("x", False, component)


def test_prefixes_come_off_one_after_another() -> None:
    assert names("base_model.model.transformer.blocks.0.q") == [
        "base_model.model.transformer.blocks.0.q",
        "transformer.blocks.0.q",
        "blocks.0.q",
    ]
    assert names("transformer.transformer.q") == ["transformer.transformer.q", "transformer.q", "q"]
    assert names("diffusion_model.unet.diffusion_model.q")[-1] == "q"


def test_the_longer_prefix_comes_off_whole() -> None:
    assert names("model.diffusion_model.q") == ["model.diffusion_model.q", "q"]


@pytest.mark.parametrize(
    "module",
    ["q", "model.q", "blocks.0.transformer.q", "transformer_blocks.0.q", "transformer_3.q", "my_lora_unet_q"],
)
def test_what_only_looks_like_a_prefix_stays(module: str) -> None:
    assert names(module) == [module]


def test_which_keys_show_a_lora() -> None:
    told = ("x.lora_down.weight", "x.lora_A.default.weight", "x.diff", "x.hada_w1_a", "x.dora_scale")
    others = ("x.weight", "x.bias", "x.scale", "x.alpha", "blocks.0.modulation", "norm")
    assert list(filter(is_lora_key, (*told, *others))) == list(told)
