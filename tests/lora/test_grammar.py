"""Every row of the key grammar, and the order in which a module's name is read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuselora.kinds import Part
from fuselora.kinds.replacement import FULL_PARTS
from fuselora.lora.grammar import (
    COMPONENT_PREFIXES,
    DOT_PREFIXES,
    FLAT_PREFIXES,
    PREFIXES,
    SUFFIXES,
    UNFUSED,
    ParsedKey,
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
    ("lora_A", "down", "lora_A/B", ""),
    ("lora_B", "up", "lora_A/B", ""),
    ("lora.down.weight", "down", "lora.down/up", ""),
    ("lora.up.weight", "up", "lora.down/up", ""),
    ("lora_linear_layer.down.weight", "down", "lora.down/up", ""),
    ("lora_linear_layer.up.weight", "up", "lora.down/up", ""),
    ("alpha", "alpha", "alpha", ""),
    ("alpha_scale", "alpha_scale", "alpha", ""),
    ("diff", "diff", "diff", ""),
    ("diff_b", "diff_b", "diff", ""),
    ("diff_m", "diff_m", "diff", ""),
    ("w_norm", "w_norm", "diff", ""),
    ("b_norm", "b_norm", "diff", ""),
    ("lora_mid.weight", "mid", "lora_down/up", ""),
    ("lora_mid", "mid", "lora_down/up", ""),
    ("lora_B.bias", "pair_bias", "lora_A/B", ""),
    ("lora_B.default.bias", "pair_bias", "lora_A/B", "default"),
    *((f"lora_up.blocks.{n}.weight", f"up_{n}", "lora_up.blocks", "") for n in range(8)),
    ("lora_embedding_A", "embedding_down", "lora_embedding_A/B", ""),
    ("lora_embedding_B", "embedding_up", "lora_embedding_A/B", ""),
    ("lora_embedding_B.default", "embedding_up", "lora_embedding_A/B", "default"),
    ("dora_scale", "dora_scale", "DoRA", ""),
    ("lora_magnitude_vector", "magnitude", "DoRA", ""),
    ("lora_magnitude_vector.weight", "magnitude", "DoRA", ""),
    ("lora_magnitude_vector.default.weight", "magnitude", "DoRA", "default"),
    ("reshape_weight", "reshape_weight", "reshape_weight", ""),
    *((f"hada_{part}", f"hada_{part}", "LoHa", "") for part in ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2")),
    ("hada_w1_a.default", "hada_w1_a", "LoHa", "default"),
    *(
        (f"lokr_{part}", f"lokr_{part}", "LoKr", "")
        for part in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t2")
    ),
    ("lokr_w2.default", "lokr_w2", "LoKr", "default"),
    *((f"{part}.weight", part, "GLoRA", "") for part in ("a1", "a2", "b1", "b2")),
    ("oft_blocks", "oft_blocks", "OFT", ""),
    ("rescale", "rescale", "OFT", ""),
    ("oft_R.weight", "oft_r", "OFT", ""),
    ("oft_R.default.weight", "oft_r", "OFT", "default"),
    ("oft_embedding_R.weight", "oft_embedding_r", "OFT", ""),
    ("boft_R", "boft_r", "BOFT", ""),
    ("boft_s.default", "boft_s", "BOFT", "default"),
    ("on_input", "on_input", "IA3", ""),
    ("ia3_l", "ia3_l", "IA3", ""),
    ("ia3_l.default", "ia3_l", "IA3", "default"),
    ("set_weight", "set_weight", "full weights", ""),
    *((part, part, "full weights", "") for part in sorted(FULL_PARTS)),
    *((f"base_layer.{part}", part, "full weights", "") for part in sorted(FULL_PARTS)),
    *((f"modules_to_save.x.{part}", part, "full weights", "x") for part in sorted(FULL_PARTS)),
]
PROCESSOR = {("processor", "down"), ("processor", "up")}
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


@pytest.mark.parametrize(
    "layer", ["a.processor.to_q_lora", "a.to_out_lora", "a.processor.qkv_lora1", "b.processor.proj_lora2"]
)
@pytest.mark.parametrize("part", ["down", "up"])
def test_the_layers_of_a_processor(layer: str, part: Part) -> None:
    assert parse_key(f"{layer}.{part}.weight") == ParsedKey(layer, part, "processor", "")


def test_every_row_is_tested() -> None:
    rows = {(suffix.dialect, suffix.part) for suffix in SUFFIXES}
    assert {(dialect, part) for _, part, dialect, _ in KEYS} | PROCESSOR == rows


# without 1 and 2: a weight of a module a1 is GLoRA's
@given(st.text("abqz09_-.", min_size=1))
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
        "x.lora",
        "x.lora_a",
        "x.lora_A.default",
        "x.lora_linear_layer.weight",
        "x.to_q_lora3.down.weight",
        "x.to_qlora.down.weight",
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
    found = parse_key(key)
    # whatever ends like a tensor of a model can only be meant as one
    assert found is None or found.part in FULL_PARTS
    assert unfused_kind(key) is None


def test_what_ends_like_nothing_known_has_no_kind() -> None:
    assert [unfused_kind(key) for key in ("", "x.lora_C", "blocks.0.modulation", ".weight")] == [None] * 4


UNFUSED_KEYS = [
    ("oft_diag", "OFT as it was saved before 2024 (oft_diag, oft_r)"),
    ("oft_r.default", "OFT as it was saved before 2024 (oft_diag, oft_r)"),
    ("lora_up.blocks.8.weight", "a pair with more than 8 blocks of outputs (lora_up.blocks)"),
    ("lokr_t1", "LoKr with a core of its first factor (lokr_t1)"),
    ("bm.weight", "GLoRA with a Tucker core (bm)"),
    ("scalar", "a trained scale of its module (use_scalar)"),
]


@pytest.mark.parametrize(("suffix", "kind"), [row for row in UNFUSED_KEYS if row[1] in dict(UNFUSED)])
def test_a_kind_that_is_not_fused_has_a_name(suffix: str, kind: str) -> None:
    parsed = parse_key(f"blocks.0.to_q.{suffix}")
    assert parsed is None or parsed.part in FULL_PARTS
    assert unfused_kind(f"blocks.0.to_q.{suffix}") == kind


def test_every_unfused_row_is_tested() -> None:
    assert {kind for _, kind in UNFUSED_KEYS} >= {kind for kind, _ in UNFUSED}


# How a module's name is read


def names(module: str) -> list[str]:
    return [spelling.name for spelling in spellings(module)]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_prefix_may_be_part_of_the_name_or_not(prefix: str) -> None:
    assert spellings(f"{prefix}blocks.0.q") == (
        Spelling(f"{prefix}blocks.0.q", False, None),
        Spelling("blocks.0.q", False, None),
    )


@pytest.mark.parametrize(("prefix", "component"), FLAT_PREFIXES.items())
def test_a_flat_prefix_says_that_the_rest_is_flattened(prefix: str, component: str | None) -> None:
    assert spellings(f"{prefix}blocks_0_q") == (
        Spelling(f"{prefix}blocks_0_q", False, None),
        Spelling("blocks_0_q", True, component),
    )
    assert spellings(f"{prefix}blocks_0.q")[1] == Spelling("blocks_0.q", True, component)


@pytest.mark.parametrize(("prefix", "dot"), DOT_PREFIXES.items())
def test_a_prefix_may_say_what_stands_for_a_dot(prefix: str, dot: str) -> None:
    module = prefix + dot.join(["blocks", "0", "cross_attn", "q"])
    assert spellings(module) == (
        Spelling(module, False, None),
        Spelling("blocks.0.cross_attn.q", False, None),
    )


@pytest.mark.parametrize(
    ("layer", "in_the_model"),
    [
        ("a.processor.to_q_lora", ["a.to_q", "a.q_proj"]),
        ("a.processor.to_k_lora", ["a.to_k", "a.k_proj"]),
        ("a.to_v_lora", ["a.to_v", "a.v_proj"]),
        ("a.processor.to_out_lora", ["a.to_out.0", "a.out_proj"]),
        ("a.processor.add_k_proj_lora", ["a.add_k_proj"]),
        ("a.processor.qkv_lora1", []),
        ("to_q_lora", []),
        ("a.to_q", []),
    ],
)
def test_a_layer_of_a_processor_is_called_otherwise_in_the_model(layer: str, in_the_model: list[str]) -> None:
    assert names(layer) == [*in_the_model, layer]
    assert names(f"unet.{layer}")[-1] == layer
    assert set(in_the_model) <= set(names(f"unet.{layer}"))


@pytest.mark.parametrize("encoder", ["clip_l", "clip_g", "t5xxl", "umt5xxl", "qwen25_7b"])
def test_comfyui_names_say_which_encoder(encoder: str) -> None:
    last = spellings(f"text_encoders.{encoder}.transformer.a.b")[-1]
    assert last == Spelling("a.b", False, encoder)


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
    [
        "q",
        "models.q",
        "blocks.0.transformer.q",
        "transformer_blocks.0.q",
        "transformer_3.q",
        "my_lora_unet_q",
    ],
)
def test_what_only_looks_like_a_prefix_stays(module: str) -> None:
    assert names(module) == [module]


def test_which_keys_show_a_lora() -> None:
    told = ("x.lora_down.weight", "x.lora_A.default.weight", "x.diff", "x.hada_w1_a", "x.dora_scale")
    others = ("x.weight", "x.bias", "x.scale", "x.alpha", "blocks.0.modulation", "norm")
    assert list(filter(is_lora_key, (*told, *others))) == list(told)
