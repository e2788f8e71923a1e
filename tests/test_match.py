"""Modules x base tensors: every spelling finds its tensor, and what cannot be told apart is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fuselora.families import Layout
from fuselora.families.wan import IMAGE_BRANCH
from fuselora.lora.adapter import open_adapter
from fuselora.match import Matching, plain_name
from fuselora.resolve import resolve_lora
from fuselora.specs import LoraSpec
from fuselora.synth import STYLES, Spec, base_tensors, lora_tensors, tiny, write_lora
from tests.inputs import PEFT, matched, one_component, open_lora, pair, tensor, two_experts

if TYPE_CHECKING:
    from collections.abc import Sequence

LAYOUTS: tuple[Layout, Layout] = ("native", "diffusers")
NATIVE_Q, DIFFUSERS_Q = "blocks.0.self_attn.q", "blocks.0.attn1.to_q"


def on(folder: Path, base: Sequence[Spec], *lora: Spec) -> Matching:
    """The LoRA matched with a base of one file."""
    checkpoint, _ = one_component(folder / "base.safetensors", base)
    return matched(open_lora(folder / "x.safetensors", lora), checkpoint)


def weights(*modules: str, out: int = 4, into: int = 4) -> list[Spec]:
    return [tensor(f"{module}.weight", out, into) for module in modules]


def hits(matching: Matching) -> dict[str, list[str]]:
    """Base tensor -> kinds of delta."""
    found: dict[str, list[str]] = {}
    for hit in matching.hits:
        found.setdefault(hit.base_key, []).append(hit.kind.name)
    return found


def faults(matching: Matching) -> list[tuple[str, str | None]]:
    return [(fault.kind, fault.key) for fault in matching.faults]


def nothing_else(matching: Matching) -> bool:
    return not (matching.skipped or matching.unmatched or matching.faults or matching.notices)


# Layouts


@pytest.mark.parametrize("style", sorted(set(STYLES) - {"adapter"}))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_every_style_finds_its_tensors_in_both_layouts(
    tmp_path: Path, style: str, layout: Layout, prefix: str
) -> None:
    size = tiny("wan2.1-i2v-14b")
    base = base_tensors(size, layout, prefix=prefix)
    lora = lora_tensors(size, style=style, alpha=2, diffs=True)
    matching = on(tmp_path, base, *lora)
    # a synthetic tensor's key is its native name, whatever its file calls it
    native = {spec.name: spec.key for spec in [*base, *lora]}
    for hit in matching.hits:
        modules = {native[tensor.name].rpartition(".")[0] for tensor in hit.tensors}
        assert modules == {re.sub(r"\.(weight|bias|modulation)$", "", native[hit.base_key])}
    used = {tensor.name for hit in matching.hits for tensor in hit.tensors}
    assert used == {spec.name for spec in lora if not spec.name.endswith(".alpha")}
    assert nothing_else(matching)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_vace_lora(tmp_path: Path, layout: Layout) -> None:
    size = tiny("wan2.1-vace-14b")
    matching = on(tmp_path, base_tensors(size, layout), *lora_tensors(size, style="extractor"))
    native = {spec.name: spec.key for spec in base_tensors(size, layout)}
    found = {native[hit.base_key] for hit in matching.hits}
    assert found >= {"vace_blocks.0.before_proj.weight", "vace_blocks.1.after_proj.bias"}
    assert "vace_blocks.0.modulation" in found
    assert nothing_else(matching)


NORMS = [
    *weights(NATIVE_Q),
    tensor("blocks.0.norm2.weight", 4),
    tensor("blocks.0.norm3.weight", 4),
]


@pytest.mark.parametrize(
    ("module", "target"),
    [(NATIVE_Q, "blocks.0.norm2.weight"), (DIFFUSERS_Q, "blocks.0.norm3.weight")],
)
def test_the_file_s_layout_decides_names_that_both_use(tmp_path: Path, module: str, target: str) -> None:
    matching = on(tmp_path, NORMS, *pair(module), tensor("blocks.0.norm2.diff", 4))
    assert hits(matching) == {"blocks.0.self_attn.q.weight": ["pair"], target: ["diff"]}
    assert nothing_else(matching)


def test_norms_change_places_on_a_diffusers_base_too(tmp_path: Path) -> None:
    base = [*weights(DIFFUSERS_Q), tensor("blocks.0.norm2.weight", 4), tensor("blocks.0.norm2.bias", 4)]
    lora = [*pair(NATIVE_Q), tensor("blocks.0.norm3.diff", 4), tensor("blocks.0.norm3.diff_b", 4)]
    assert hits(on(tmp_path, base, *lora)) == {
        "blocks.0.attn1.to_q.weight": ["pair"],
        "blocks.0.norm2.weight": ["diff"],
        "blocks.0.norm2.bias": ["diff_b"],
    }


def test_a_layout_that_cannot_be_told_is_refused_with_both_candidates(tmp_path: Path) -> None:
    matching = on(tmp_path, NORMS, tensor("blocks.0.norm2.diff", 4))
    assert faults(matching) == [("ambiguous", "blocks.0.norm2")]
    (fault,) = matching.faults
    assert fault.path == "x.safetensors"
    assert "blocks.0.norm2.weight or blocks.0.norm3.weight" in fault.message
    assert not matching.hits and not matching.unmatched


def test_as_many_names_of_each_layout_decide_nothing(tmp_path: Path) -> None:
    base = [*NORMS, *weights("blocks.0.self_attn.k")]
    lora = [*pair(NATIVE_Q), *pair("blocks.0.attn1.to_k"), tensor("blocks.0.norm2.diff", 4)]
    assert faults(on(tmp_path, base, *lora)) == [("ambiguous", "blocks.0.norm2")]


# Spellings


@pytest.mark.parametrize(
    "name",
    [
        "blocks.0.attn1.to_q",
        "transformer.blocks.0.attn1.to_q",
        "diffusion_model.blocks.0.attn1.to_q",
        "model.diffusion_model.blocks.0.attn1.to_q",
        "base_model.model.blocks.0.attn1.to_q",
        "base_model.model.transformer.blocks.0.attn1.to_q",
        "transformer_2.blocks.0.attn1.to_q",
        "unet.blocks.0.attn1.to_q",
        "lora_unet_blocks_0_attn1_to_q",
        "lora_unet_blocks_0.attn1.to_q",
        "lora_transformer_blocks_0_attn1_to_q",
        "diffusion_model.blocks.0.self_attn.q",
        "lora_unet_blocks_0_self_attn_q",
        "lora_unet_blocks_0.self_attn.q",
    ],
)
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "diffusion_model.", "transformer."])
def test_one_tensor_by_every_name(tmp_path: Path, name: str, prefix: str) -> None:
    matching = on(tmp_path, weights(prefix + DIFFUSERS_Q), *pair(name))
    assert hits(matching) == {f"{prefix}{DIFFUSERS_Q}.weight": ["pair"]}
    assert nothing_else(matching)


def test_a_prefix_that_is_part_of_the_base_s_names(tmp_path: Path) -> None:
    base = weights("transformer.layers.0.q", "layers.0.k")
    assert hits(on(tmp_path, base, *pair("transformer.layers.0.q"), *pair("transformer.layers.0.k"))) == {
        "transformer.layers.0.q.weight": ["pair"],
        "layers.0.k.weight": ["pair"],
    }


def test_two_readings_that_both_exist_are_refused(tmp_path: Path) -> None:
    matching = on(tmp_path, weights("transformer.q", "q"), *pair("transformer.q"))
    assert faults(matching) == [("ambiguous", "transformer.q")]
    assert "transformer.q.weight or q.weight" in matching.faults[0].message


def test_flattening_that_makes_two_names_alike_is_refused(tmp_path: Path) -> None:
    base = weights("a_b.c", "a.b_c", "a.b")
    matching = on(tmp_path, base, *pair("lora_unet_a_b_c"), *pair("lora_unet_a_b"))
    assert faults(matching) == [("ambiguous", "lora_unet_a_b_c")]
    assert "a_b.c.weight" in matching.faults[0].message and "a.b_c.weight" in matching.faults[0].message
    assert hits(matching) == {"a.b.weight": ["pair"]}


def test_flattened_names_are_looked_up_and_never_split_by_guessing(tmp_path: Path) -> None:
    base = weights("blocks.0.attn.add_k_proj", "time_embedding.linear_1")
    lora = [*pair("lora_unet_blocks_0_attn_add_k_proj"), *pair("lora_unet_time_embedding_linear_1")]
    assert set(hits(on(tmp_path, base, *lora))) == {spec.name for spec in base}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("diffusion_model.blocks.0.self_attn.q", "transformer.blocks.0.attn1.to_q"),
        ("lora_unet_blocks_0_self_attn_q", "blocks.0.self_attn.q"),
        ("blocks.0.self_attn.q", "base_model.model.blocks.0.self_attn.q"),
    ],
)
def test_one_module_twice_by_two_spellings(tmp_path: Path, first: str, second: str) -> None:
    matching = on(tmp_path, weights(NATIVE_Q), *pair(first), *pair(second))
    (fault,) = matching.faults
    assert fault.kind == "twice"
    assert f"{NATIVE_Q}.weight" in fault.message
    assert first in fault.message and second in fault.message


def test_a_pair_and_a_difference_on_one_tensor_are_two_deltas(tmp_path: Path) -> None:
    matching = on(tmp_path, weights(NATIVE_Q), *pair(NATIVE_Q), tensor(f"{NATIVE_Q}.diff", 4, 4))
    assert hits(matching) == {f"{NATIVE_Q}.weight": ["pair", "diff"]}
    assert nothing_else(matching)


# Kinds of delta


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("spelled", ["diffusion_model.blocks.0.diff_m", "blocks.0.modulation.diff"])
def test_modulation(tmp_path: Path, layout: Layout, spelled: str) -> None:
    name = {"native": "modulation", "diffusers": "scale_shift_table"}[layout]
    matching = on(tmp_path, [tensor(f"blocks.0.{name}", 1, 6, 4)], tensor(spelled, 1, 6, 4))
    assert list(hits(matching)) == [f"blocks.0.{name}"]
    assert nothing_else(matching)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_head_s_modulation(tmp_path: Path, layout: Layout) -> None:
    name = {"native": "head.modulation", "diffusers": "scale_shift_table"}[layout]
    q = {"native": NATIVE_Q, "diffusers": DIFFUSERS_Q}[layout]
    base = [*weights(q), tensor(name, 1, 2, 4)]
    assert hits(on(tmp_path, base, tensor("diffusion_model.head.diff_m", 1, 2, 4))) == {name: ["diff_m"]}


def test_a_difference_of_a_bare_parameter(tmp_path: Path) -> None:
    matching = on(tmp_path, [*weights(DIFFUSERS_Q), tensor("scale_shift_table", 1, 2, 4)],
                  tensor("transformer.scale_shift_table.diff", 1, 2, 4))  # fmt: skip
    assert hits(matching) == {"scale_shift_table": ["diff"]}


def test_the_weight_comes_before_a_bare_parameter_of_the_same_name(tmp_path: Path) -> None:
    base = [*weights("a"), tensor("a", 4)]
    assert hits(on(tmp_path, base, tensor("a.diff", 4, 4))) == {"a.weight": ["diff"]}


def test_differences_of_any_shape(tmp_path: Path) -> None:
    base = [tensor("conv.weight", 4, 3, 1, 2, 2), tensor("conv.bias", 4), tensor("norm.weight", 4)]
    lora = [tensor("conv.diff", 4, 3, 1, 2, 2), tensor("conv.diff_b", 4), tensor("norm.diff", 4)]
    matching = on(tmp_path, base, *lora)
    assert hits(matching) == {"conv.weight": ["diff"], "conv.bias": ["diff_b"], "norm.weight": ["diff"]}
    assert nothing_else(matching)


@pytest.mark.parametrize(
    ("part", "shape", "what"),
    [("diff_b", (4,), "no bias"), ("diff_m", (1, 6, 4), "no modulation")],
)
def test_a_difference_with_nothing_to_add_to(
    tmp_path: Path, part: str, shape: tuple[int, ...], what: str
) -> None:
    alone = on(tmp_path, weights("q"), tensor(f"q.{part}", *shape))
    assert faults(alone) == [("no_target", "q")]
    assert what in alone.faults[0].message
    with_pair = on(tmp_path, weights("q"), *pair("q"), tensor(f"q.{part}", *shape))
    assert faults(with_pair) == [("no_target", "q")]
    assert hits(with_pair) == {"q.weight": ["pair"]}
    assert alone.unmatched == with_pair.unmatched == ()


def test_a_pair_where_only_the_bias_is(tmp_path: Path) -> None:
    matching = on(tmp_path, [tensor("q.bias", 4)], *pair("q"), tensor("q.diff_b", 4))
    assert faults(matching) == [("no_target", "q")]
    assert "no weight to add the pair to" in matching.faults[0].message


# Shapes


def test_a_lora_of_another_size(tmp_path: Path) -> None:
    matching = on(tmp_path, weights("q", "k"), *pair("q", 3, 3), *pair("k"))
    (fault,) = matching.faults
    assert (fault.kind, fault.key, fault.path) == ("shape", "q", "x.safetensors")
    assert "[3, 3]" in fault.message and "q.weight is [4, 4]" in fault.message
    assert fault.hint is not None and "another size" in fault.hint


@pytest.mark.parametrize(("out", "into"), [(4, 8), (8, 4), (1, 4), (4, 1)])
def test_nothing_is_broadcast_or_cut(tmp_path: Path, out: int, into: int) -> None:
    assert faults(on(tmp_path, weights("q"), *pair("q", out, into))) == [("shape", "q")]


@pytest.mark.parametrize(
    ("part", "shape"),
    [("diff", (4, 5)), ("diff", (16,)), ("diff", (1, 4, 4)), ("diff_b", (1, 4)), ("diff_b", (1,))],
)
def test_a_difference_has_the_tensor_s_own_shape(tmp_path: Path, part: str, shape: tuple[int, ...]) -> None:
    base = [*weights("q"), tensor("q.bias", 4)]
    assert faults(on(tmp_path, base, tensor(f"q.{part}", *shape))) == [("shape", "q")]


def test_factors_that_disagree_about_the_rank(tmp_path: Path) -> None:
    lora = [tensor("q.lora_down.weight", 3, 4), tensor("q.lora_up.weight", 4, 2)]
    matching = on(tmp_path, weights("q"), *lora)
    assert faults(matching) == [("shape", "q")]
    assert "[4, 2] and down [3, 4] disagree about the rank" in matching.faults[0].message


@pytest.mark.parametrize(
    ("base", "down", "up"),
    [
        ((4, 4, 1, 1), (2, 4), (4, 2)),
        ((4, 4), (2, 4, 1, 1), (4, 2, 1, 1)),
        ((4, 3, 3, 3), (2, 3, 3, 3), (4, 2, 1, 1)),
        ((4, 3, 3, 3), (2, 3, 3, 3), (4, 2)),
        ((4, 3, 1, 2, 2), (2, 3, 1, 2, 2), (4, 2, 1, 1, 1)),
    ],
)
def test_pairs_of_convolutions(
    tmp_path: Path, base: tuple[int, ...], down: tuple[int, ...], up: tuple[int, ...]
) -> None:
    lora = [tensor("q.lora_down.weight", *down), tensor("q.lora_up.weight", *up)]
    matching = on(tmp_path, [tensor("q.weight", *base)], *lora)
    assert hits(matching) == {"q.weight": ["pair"]}
    assert matching.hits[0].rank == 2
    assert nothing_else(matching)


@pytest.mark.parametrize(
    ("base", "down", "up", "kind"),
    [
        ((4, 3, 3, 3), (2, 3, 1, 1), (4, 2, 1, 1), "shape"),
        ((4, 3, 3, 3), (2, 27), (4, 2), "shape"),
        ((4, 27), (2, 3, 3, 3), (4, 2, 1, 1), "shape"),
        ((4, 3, 3), (2, 3, 1, 3), (4, 2, 1, 1), "shape"),
        ((8, 1, 4), (2, 8, 4), (8, 2, 1), "shape"),
        ((4, 3, 3, 3), (2, 3, 1, 1), (4, 2, 3, 3), "unsupported"),
    ],
)
def test_convolutions_are_never_reshaped(
    tmp_path: Path, base: tuple[int, ...], down: tuple[int, ...], up: tuple[int, ...], kind: str
) -> None:
    lora = [tensor("q.lora_down.weight", *down), tensor("q.lora_up.weight", *up)]
    assert faults(on(tmp_path, [tensor("q.weight", *base)], *lora)) == [(kind, "q")]


def test_every_wrong_shape_is_named(tmp_path: Path) -> None:
    names = [f"l{n}" for n in range(5)]
    matching = on(tmp_path, weights(*names), *(spec for name in names for spec in pair(name, 3, 3)))
    assert {key for _, key in faults(matching)} == set(names)


# Bases


def test_a_file_of_several_models(tmp_path: Path) -> None:
    base = [
        *weights("model.diffusion_model.blocks.0.self_attn.q"),
        *weights("first_stage_model.decoder.q", "cond_stage_model.q"),
        tensor("scale_factor"),
    ]
    lora = [*pair("diffusion_model.blocks.0.self_attn.q"), *pair("first_stage_model.decoder.q")]
    matching = on(tmp_path, base, *lora)
    assert hits(matching) == {"model.diffusion_model.blocks.0.self_attn.q.weight": ["pair"]}
    assert [miss.module.name for miss in matching.unmatched] == ["first_stage_model.decoder.q"]


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "transformer."])
@pytest.mark.parametrize(
    "name", ["double.0.img.qkv", "diffusion_model.double.0.img.qkv", "lora_unet_double_0_img_qkv"]
)
def test_an_unknown_family_needs_no_data_where_names_agree(tmp_path: Path, prefix: str, name: str) -> None:
    checkpoint, component = one_component(tmp_path / "b.safetensors", weights(f"{prefix}double.0.img.qkv"))
    assert (checkpoint.family, checkpoint.layout, component.prefix) == (None, None, prefix)
    matching = matched(open_lora(tmp_path / "x.safetensors", pair(name)), checkpoint)
    assert hits(matching) == {f"{prefix}double.0.img.qkv.weight": ["pair"]}
    assert nothing_else(matching)


def test_an_unknown_family_in_a_file_of_several_models(tmp_path: Path) -> None:
    base = [*weights("model.diffusion_model.double.0.qkv"), *weights("first_stage_model.conv_in")]
    matching = on(tmp_path, base, *pair("diffusion_model.double.0.qkv"))
    assert hits(matching) == {"model.diffusion_model.double.0.qkv.weight": ["pair"]}


def test_an_unknown_family_explains_nothing(tmp_path: Path) -> None:
    base = [*weights("layers.0.q"), tensor("patch_embedding.weight", 4, 36, 1, 2, 2)]
    matching = on(tmp_path, base, *pair("layers.0.q"), *pair("blocks.0.cross_attn.k_img"))
    assert [(miss.module.name, miss.likely) for miss in matching.unmatched] == [
        ("blocks.0.cross_attn.k_img", None)
    ]


# What stays over


def image_branch(prefix: str = "diffusion_model.") -> list[Spec]:
    return [
        *pair(f"{prefix}blocks.0.cross_attn.k_img"),
        tensor(f"{prefix}blocks.0.cross_attn.k_img.diff_b", 4),
        *pair(f"{prefix}blocks.0.cross_attn.v_img"),
        tensor(f"{prefix}blocks.0.cross_attn.norm_k_img.diff", 4),
        *pair(f"{prefix}img_emb.proj.1"),
    ]


@pytest.mark.parametrize(("channels", "explained"), [(36, True), (16, False)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_image_branch_is_explained_on_an_image_base_only(
    tmp_path: Path, channels: int, explained: bool, layout: Layout
) -> None:
    q = {"native": NATIVE_Q, "diffusers": DIFFUSERS_Q}[layout]
    base = [*weights(q), tensor("patch_embedding.weight", 4, channels, 1, 2, 2)]
    matching = on(tmp_path, base, *pair(f"diffusion_model.{NATIVE_Q}"), *image_branch())
    assert hits(matching) == {f"{q}.weight": ["pair"]}
    if explained:
        assert {skip.reason for skip in matching.skipped} == {IMAGE_BRANCH.reason}
        assert len(matching.skipped) == 4
        assert matching.unmatched == ()
    else:
        assert {miss.likely for miss in matching.unmatched} == {IMAGE_BRANCH.reason}
        assert len(matching.unmatched) == 4
        assert matching.skipped == ()
    assert matching.faults == ()


@pytest.mark.parametrize(
    "name",
    [
        "lora_unet_blocks_0_cross_attn_k_img",
        "transformer.blocks.0.attn2.add_k_proj",
        "blocks.0.attn2.add_v_proj",
    ],
)
def test_the_image_branch_by_other_names(tmp_path: Path, name: str) -> None:
    base = [*weights(DIFFUSERS_Q), tensor("patch_embedding.weight", 4, 36, 1, 2, 2)]
    matching = on(tmp_path, base, *pair(DIFFUSERS_Q), *pair(name))
    assert [skip.module.name for skip in matching.skipped] == [name]


def test_a_text_lora_leaves_the_image_branch_alone(tmp_path: Path) -> None:
    base = weights("blocks.0.attn2.to_k", "blocks.0.attn2.add_k_proj")
    matching = on(tmp_path, base, *pair("blocks.0.attn2.to_k"))
    assert hits(matching) == {"blocks.0.attn2.to_k.weight": ["pair"]}
    assert nothing_else(matching)


def test_a_module_without_a_home(tmp_path: Path) -> None:
    lora = [*pair(NATIVE_Q), *pair("lora_te1_text_model_encoder_layers_0_mlp_fc1"), tensor("nowhere.diff", 4)]
    matching = on(tmp_path, weights(NATIVE_Q), *lora)
    assert {(miss.module.name, miss.likely) for miss in matching.unmatched} == {
        (
            "lora_te1_text_model_encoder_layers_0_mlp_fc1",
            "it is for the text encoder lora_te1, which this base does not have",
        ),
        ("nowhere", None),
    }
    assert matching.faults == ()


def test_an_alpha_without_a_pair_is_mentioned(tmp_path: Path) -> None:
    lora = [*pair("q"), tensor("k.alpha"), tensor("n.alpha"), tensor("n.diff", 4)]
    matching = on(tmp_path, [*weights("q", "k"), tensor("n.weight", 4)], *lora)
    (notice,) = matching.notices
    assert notice.code == "orphan_alpha"
    assert set(notice.facts["modules"]) == {"k", "n"}  # type: ignore[call-overload]
    assert set(hits(matching)) == {"q.weight", "n.weight"}
    assert not matching.faults and not matching.unmatched


def test_each_expert_gets_the_modules_that_name_it(tmp_path: Path) -> None:
    base = two_experts(tmp_path / "base", weights(DIFFUSERS_Q, "blocks.0.attn1.to_k"))
    named = (f"transformer.{DIFFUSERS_Q}", "transformer_2.blocks.0.attn1.to_k")
    adapter = open_lora(tmp_path / "x.safetensors", [s for name in named for s in pair(name, style=PEFT)])
    first, second = (matched(adapter, base, component) for component in base.components)
    assert list(hits(first)) == [f"{DIFFUSERS_Q}.weight"]
    assert list(hits(second)) == ["blocks.0.attn1.to_k.weight"]
    assert nothing_else(first) and nothing_else(second)


# Names


@pytest.mark.parametrize(
    ("module", "plain"),
    [
        ("q", "q"),
        ("diffusion_model.blocks.0.q", "blocks.0.q"),
        ("base_model.model.transformer_2.blocks.0.q", "blocks.0.q"),
        ("lora_unet_blocks_0_q", "blocks_0_q"),
    ],
)
def test_plain_name(module: str, plain: str) -> None:
    assert plain_name(module) == plain


def test_an_adapter_folder_s_names(tmp_path: Path) -> None:
    size = tiny("wan2.2-t2v-a14b", blocks=1)
    folder = write_lora(tmp_path / "adapter", size, style="adapter")
    base, _ = one_component(tmp_path / "b.safetensors", base_tensors(size))
    matching = matched(open_adapter(resolve_lora(LoraSpec(str(folder)))), base)
    assert len(matching.hits) == 10
    assert nothing_else(matching)


def test_a_norm_that_both_layouts_name_is_ambiguous_in_a_file_of_both(tmp_path: Path) -> None:
    names = ("self_attn.q", "self_attn.k", "self_attn.v", "norm2", "norm3")
    base = [tensor(f"blocks.0.{name}.weight", *((4, 4) if "attn" in name else (4,))) for name in names]
    lora = [
        *pair("transformer.blocks.0.attn1.to_q"),
        *pair("transformer.blocks.0.attn1.to_k"),
        *pair("diffusion_model.blocks.0.self_attn.v"),
        tensor("diffusion_model.blocks.0.norm3.diff", 4),
    ]
    assert faults(on(tmp_path, base, *lora)) == [("ambiguous", "diffusion_model.blocks.0.norm3")]
    assert hits(on(tmp_path, base, *lora[-3:]))["blocks.0.norm3.weight"] == ["diff"]


def test_one_tensor_twice_by_two_kinds_of_diff(tmp_path: Path) -> None:
    base = [tensor("blocks.0.modulation", 1, 6, 4)]
    diffs = [tensor("blocks.0.diff_m", 1, 6, 4), tensor("blocks.0.modulation.diff", 1, 6, 4)]
    assert [kind for kind, _ in faults(on(tmp_path, base, *diffs))] == ["twice"]
