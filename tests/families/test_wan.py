"""Wan's data against the published tensor lists and diffusers' model classes."""

from __future__ import annotations

import diffusers
import pytest

from fuselora.families import Layout
from fuselora.families.recognition import families_of
from fuselora.families.wan import WAN
from fuselora.synth import SIZES, base_tensors, tiny
from tests import listings

LISTED = sorted(name for name in SIZES if "vace" not in name)
VACE = sorted(set(SIZES) - set(LISTED))
LAYOUTS: tuple[Layout, Layout] = ("native", "diffusers")
MODELS = {
    "wan2.1-t2v-1.3b": (("Wan2.1-T2V-1.3B",), ()),
    "wan2.1-t2v-14b": (("Wan2.1-T2V-14B", "Wan2.2-T2V-A14B (one expert)"), ("Wan2.2-T2V-A14B",)),
    "wan2.1-i2v-14b": (("Wan2.1-I2V-14B",), ()),
    "wan2.2-t2v-a14b": (("Wan2.1-T2V-14B", "Wan2.2-T2V-A14B (one expert)"), ("Wan2.2-T2V-A14B",)),
    "wan2.2-i2v-a14b": (("Wan2.2-I2V-A14B (one expert)",), ("Wan2.2-I2V-A14B",)),
    "wan2.2-ti2v-5b": (("Wan2.2-TI2V-5B",), ()),
    "wan2.1-vace-1.3b": (("Wan2.1-VACE-1.3B",), ()),
    "wan2.1-vace-14b": (("Wan2.1-VACE-14B",), ()),
}


def names(base: str, layout: Layout) -> list[str]:
    if base in VACE:
        return [spec.name for spec in base_tensors(SIZES[base], layout)]
    return [spec.name for spec in listings.base(base, layout)]


def shapes(base: str, layout: Layout) -> dict[str, tuple[int, ...]]:
    found = base_tensors(SIZES[base], layout) if base in VACE else listings.base(base, layout)
    return {spec.name: spec.shape for spec in found}


@pytest.mark.parametrize("base", LISTED)
@pytest.mark.parametrize(("here", "there"), [LAYOUTS, LAYOUTS[::-1]])
def test_renames_carry_one_published_list_into_the_other(base: str, here: Layout, there: Layout) -> None:
    translated = [WAN.translate(name, here, there) for name in names(base, here)]
    assert len(set(translated)) == len(translated)
    assert set(translated) == set(names(base, there))
    assert [WAN.translate(name, there, here) for name in translated] == names(base, here)


@pytest.mark.parametrize("base", sorted(SIZES))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_translated_tensors_keep_their_shapes(base: str, layout: Layout) -> None:
    assert WAN.canonical_shapes(shapes(base, layout)) == shapes(base, "native")


@pytest.mark.parametrize("base", VACE)
def test_vace_comes_back_whole(base: str) -> None:
    ours = names(base, "diffusers")
    assert [WAN.translate(name, "diffusers", "native") for name in ours] == names(base, "native")
    assert "vace_blocks.0.proj_in.weight" in ours
    assert "vace_blocks.0.attn1.to_q.weight" in ours
    assert "vace_blocks.1.proj_in.weight" not in ours


@pytest.mark.parametrize("base", sorted(SIZES))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_base_is_recognised_with_its_layout(base: str, layout: Layout) -> None:
    assert families_of(names(base, layout)) == (WAN,)
    assert WAN.layout_of(names(base, layout)) == layout


@pytest.mark.parametrize("base", sorted(SIZES))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_base_is_named(base: str, layout: Layout) -> None:
    alone, as_expert = MODELS[base]
    assert WAN.models_of(shapes(base, layout)) == alone
    assert WAN.models_of(shapes(base, layout), n_experts=2) == as_expert


def test_a_small_base_is_wan_and_no_published_model() -> None:
    small = {spec.name: spec.shape for spec in base_tensors(tiny("wan2.2-t2v-a14b"))}
    assert families_of(small) == (WAN,)
    assert WAN.models_of(small) == WAN.models_of(small, n_experts=2) == ()


@pytest.mark.parametrize(
    "name",
    ["transformer_blocks.0.attn.to_q.weight", "double_blocks.0.img_attn.qkv.weight", "blocks.0.norm1.weight"],
)
def test_other_models_are_not_wan(name: str) -> None:
    assert WAN not in families_of([name])


@pytest.mark.parametrize("base", sorted(SIZES))
def test_the_models_with_room_are_those_that_have_every_tensor(base: str) -> None:
    deltas = shapes(base, "native")
    others = [other for other in SIZES if deltas.items() <= shapes(other, "native").items()]
    fitting = {name for other in others for name in MODELS[other][0]}
    assert {name for kin in WAN.kin_of_deltas(deltas) for name in kin.named(1)} == fitting


def test_a_wan21_image_lora_has_room_in_wan22_but_for_the_image_branch() -> None:
    deltas = shapes("wan2.1-i2v-14b", "native")
    found = WAN.kin_but_for(WAN.skips[0], deltas)
    assert [name for kin in found for name in kin.expert_of] == ["Wan2.2-I2V-A14B"]


# Float32


@pytest.mark.parametrize("base", sorted(SIZES))
def test_what_is_kept_in_float32_is_what_the_model_class_keeps(base: str) -> None:
    model = diffusers.WanVACETransformer3DModel if base in VACE else diffusers.WanTransformer3DModel
    listed = set(model._keep_in_fp32_modules)
    assert listed >= WAN.keep_float32
    for name in names(base, "diffusers"):
        assert WAN.keeps_float32(name, "diffusers") == (not listed.isdisjoint(name.split("."))), name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("base", ["wan2.1-i2v-14b", "wan2.1-vace-14b"])
def test_kept_tensors(base: str, layout: Layout) -> None:
    kept = {name for name in names(base, layout) if WAN.keeps_float32(name, layout)}
    kept = {WAN.translate(name, "native", "diffusers") for name in kept} if layout == "native" else kept
    assert {name for name in kept if not name.startswith(("blocks.", "vace_blocks."))} == {
        "scale_shift_table",
        *(
            f"condition_embedder.time_embedder.linear_{n}.{leaf}"
            for n in (1, 2)
            for leaf in ("weight", "bias")
        ),
        *(
            f"condition_embedder.image_embedder.norm{n}.{leaf}"
            for n in (1, 2)
            for leaf in ("weight", "bias")
            if "i2v" in base
        ),
    }
    assert {name.partition(".")[2].partition(".")[2] for name in kept if name.startswith("blocks.")} == {
        "scale_shift_table", "norm2.weight", "norm2.bias",
    }  # fmt: skip


# Norms that change places


@pytest.mark.parametrize("block", ["blocks.3", "vace_blocks.3"])
def test_norm2_and_norm3_change_places(block: str) -> None:
    assert WAN.translate(f"{block}.norm3.weight", "native", "diffusers") == f"{block}.norm2.weight"
    assert WAN.translate(f"{block}.norm2.weight", "native", "diffusers") == f"{block}.norm3.weight"
    assert WAN.translate(f"{block}.norm3.bias", "diffusers", "native") == f"{block}.norm2.bias"
    assert WAN.layout_of([f"{block}.norm2.weight", f"{block}.norm3.bias"]) is None


def test_modulations() -> None:
    assert WAN.translate("head.modulation", "native", "diffusers") == "scale_shift_table"
    assert WAN.translate("blocks.0.modulation", "native", "diffusers") == "blocks.0.scale_shift_table"
    assert WAN.translate("scale_shift_table", "diffusers", "native") == "head.modulation"


# The image branch


def test_the_image_branch_is_what_wan21_i2v_has_more_than_wan22_i2v() -> None:
    more = set(names("wan2.1-i2v-14b", "native")) - set(names("wan2.2-i2v-a14b", "native"))
    modules = {name.rpartition(".")[0] for name in more}
    assert len(modules) == 40 * 3 + 4
    (rule,) = WAN.skips
    assert all(rule.covers(module) for module in modules)
    assert all(rule.covers_flat(module.replace(".", "_")) for module in modules)
    kept = {name.rpartition(".")[0] for name in names("wan2.2-i2v-a14b", "native")}
    assert not any(rule.covers(module) for module in kept)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_image_branch_may_be_absent_from_an_image_model_only(layout: Layout) -> None:
    harmless = {base for base in SIZES if WAN.skips[0].harmless(WAN.canonical_shapes(shapes(base, layout)))}
    assert harmless == {"wan2.1-i2v-14b", "wan2.2-i2v-a14b"}


@pytest.mark.parametrize("base", sorted(SIZES))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_flattened_names_come_back(base: str, layout: Layout) -> None:
    stems = {name.removesuffix(".weight").removesuffix(".bias") for name in names(base, layout)}
    assert len(stems) > 300
    assert {WAN.dotted(stem.replace(".", "_")) for stem in stems} == stems


@pytest.mark.parametrize("base", sorted(SIZES))
def test_a_base_s_own_tensors_as_deltas_name_the_models_that_it_is_named(base: str) -> None:
    native = shapes(base, "native")
    models = [model for kin in WAN.kin_of_deltas(native) for model in kin.named(1)]
    also = ["Wan2.1-VACE-14B"] if "t2v" in base and "14b" in base else []
    also = ["Wan2.1-VACE-1.3B"] if base == "wan2.1-t2v-1.3b" else also
    # an image model's tensors without the image branch fit the one that has it
    also = ["Wan2.1-I2V-14B"] if base == "wan2.2-i2v-a14b" else also
    assert sorted(models) == sorted([*WAN.models_of(native), *also])


@pytest.mark.parametrize(
    ("name", "shape", "width"),
    [
        ("blocks.1.self_attn.o.weight", (48, 9), 48),
        ("blocks.1.cross_attn.v.weight", (48, 9), 48),
        ("blocks.1.ffn.0.weight", (9, 48), 48),
        ("blocks.1.ffn.2.weight", (48, 9), 48),
        ("blocks.1.modulation", (1, 6, 48), 48),
        ("vace_blocks.1.ffn.0.weight", (9, 48), 48),
        ("patch_embedding.weight", (48, 16, 1, 2, 2), 48),
        ("time_embedding.0.weight", (48, 9), 48),
    ],
)
def test_what_shows_the_width(name: str, shape: tuple[int, ...], width: int) -> None:
    measure = next(measure for measure in WAN.measures if measure.name == "dim")
    assert measure.of({name: shape}) == {width}


@pytest.mark.parametrize(
    "name",
    [
        "high_anime_style_for_lightx2v_4steps",
        "NoLightx2v_4steps",
        "style-lora-trained-on-lightx2v_cfg_step_distill",
        "anti-fastwan2.1-t2v",
    ],
)
def test_a_lora_made_for_a_published_one_is_another(name: str) -> None:
    assert WAN.few_step_named(name) is None
