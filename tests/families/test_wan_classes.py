"""Wan's model classes as data, against the classes in diffusers and the published tensor lists."""

from __future__ import annotations

import inspect
from typing import Any

import diffusers
import pytest
import torch

from fuselora.families.model_class import BadFieldError, ModelClass
from fuselora.families.wan import WAN
from fuselora.families.wan_classes import WAN_CLASSES
from fuselora.synth import SIZES, base_tensors, config, native_config, tiny
from tests import listings

CLASSES = {kind.name: kind for kind in WAN_CLASSES}
LISTED = sorted(name for name in SIZES if "vace" not in name)
T2V, I2V, VACE = "wan2.2-t2v-a14b", "wan2.1-i2v-14b", "wan2.1-vace-14b"
FIRST_AND_LAST = {"pos_embed_seq_len": 514}
Config = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]


def kind_of(found: Config) -> ModelClass:
    return CLASSES[str(found["_class_name"])]


def model_shapes(found: Config) -> Shapes:
    """Names and shapes of diffusers' own class, in diffusers' names."""
    model_class: Any = getattr(diffusers, str(found["_class_name"]))
    with torch.device("meta"):
        model = model_class.from_config({key: value for key, value in found.items() if key[0] != "_"})
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def in_diffusers_names(shapes: Shapes) -> Shapes:
    return {WAN.translate(name, "native", "diffusers"): shape for name, shape in shapes.items()}


def native(name: str, blocks: int = 2) -> Shapes:
    return {spec.name: spec.shape for spec in base_tensors(tiny(name, blocks))}


def told(found: Config, base: Shapes, base_config: Config | None = None) -> list[tuple[str | None, str]]:
    differences = kind_of(found).differences(found, base, base_config or {})
    return [(field, text) for field, text in differences]


@pytest.mark.parametrize("name", sorted(SIZES))
@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"num_layers": 1, "vace_layers": [0]},
        {"cross_attn_norm": False},
        {"out_channels": None},
        {"patch_size": [2, 4, 3], "text_dim": 40},
        {"image_dim": 20, "added_kv_proj_dim": 24},
        {"image_dim": 20, **FIRST_AND_LAST},
    ],
)
def test_names_and_shapes_are_those_of_the_class(name: str, changed: Config) -> None:
    found = config(tiny(name))
    found |= {key: value for key, value in changed.items() if key in found or key != "vace_layers"}
    shapes = kind_of(found).shapes(found)
    assert in_diffusers_names(shapes) == model_shapes(found)
    assert len(in_diffusers_names(shapes)) == len(shapes)


@pytest.mark.parametrize("kind", WAN_CLASSES, ids=lambda kind: kind.name)
def test_what_a_config_leaves_out_is_as_the_class_has_it(kind: ModelClass) -> None:
    parameters = inspect.signature(getattr(diffusers, kind.name).__init__).parameters
    theirs = {name: parameters[name].default for name in kind.defaults}
    theirs["patch_size"] = list(theirs["patch_size"])
    assert dict(kind.defaults) == theirs
    assert kind.shapes({}) == kind.shapes(theirs)


@pytest.mark.parametrize("name", LISTED)
def test_published_lists_are_what_their_configs_say(name: str) -> None:
    found = listings.config(name)
    base = {spec.name: spec.shape for spec in listings.base(name, "native")}
    assert kind_of(found).shapes(found) == base
    assert told(found, base) == []
    ours = {spec.name: spec.shape for spec in listings.base(name, "diffusers")}
    assert in_diffusers_names(base) == ours


# What a base has otherwise


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("num_layers", 3, "num_layers makes 3 blocks, but the base has 2 (blocks.*)"),
        ("num_layers", 1, "num_layers makes 1 blocks, but the base has 2 (blocks.*)"),
        ("num_attention_heads", 5, "num_attention_heads * attention_head_dim is 60"),
        ("attention_head_dim", 24, "num_attention_heads * attention_head_dim is 96"),
        ("in_channels", 36, "in_channels is 36, but the base's patch_embedding.weight has 16"),
        ("out_channels", 48, "out_channels * patch_size.0 * patch_size.1 * patch_size.2 is 192"),
        ("ffn_dim", 64, "ffn_dim is 64, but the base's blocks.0.ffn.0.weight has 108"),
        ("text_dim", 64, "text_dim is 64, but the base's text_embedding.0.weight has 32"),
        ("freq_dim", 64, "freq_dim is 64, but the base's time_embedding.0.weight has 16"),
        ("image_dim", 64, "image_dim is 64, but the base has no img_emb.proj.0.weight"),
        ("added_kv_proj_dim", 48, "added_kv_proj_dim is 48, but the base has no blocks.0.cross_attn.k_img"),
        ("cross_attn_norm", False, "cross_attn_norm is false, but the base has blocks.0.norm3.weight"),
    ],
)
def test_a_field_that_is_not_the_bases_is_said_once(field: str, value: object, text: str) -> None:
    ((said, found),) = told(config(tiny(T2V)) | {field: value}, native(T2V))
    assert said is not None and field in said
    assert found.startswith(text)


@pytest.mark.parametrize("field", ["image_dim", "added_kv_proj_dim"])
def test_a_branch_that_the_config_does_not_have(field: str) -> None:
    ((said, text),) = told(config(tiny(I2V)) | {field: None}, native(I2V))
    assert said == field
    assert text.startswith(f"{field} is null, but the base has ")


def test_fewer_blocks_of_the_second_kind() -> None:
    ((said, text),) = told(config(tiny(VACE)) | {"vace_layers": [0]}, native(VACE))
    assert (said, text) == (
        "vace_layers",
        "vace_layers makes 1 blocks, but the base has 2 (vace_blocks.*)",
    )


def test_each_field_is_said() -> None:
    fields = {field for field, _ in told(config(tiny(T2V)), native(I2V))}
    assert fields == {"added_kv_proj_dim", "image_dim", "in_channels"}


def test_another_class_has_no_place_for_the_second_kind_of_blocks() -> None:
    found = told(config(tiny(T2V)), native(VACE))
    assert {field for field, _ in found} == {None}
    texts = [text for _, text in found]
    assert "WanTransformer3DModel has no place for vace_blocks.0.before_proj.weight" in texts
    assert len(texts) == len(native(VACE)) - len(native(T2V))


def test_single_tensors_too_many_and_too_few() -> None:
    base = native(T2V)
    del base["blocks.1.ffn.0.bias"], base["blocks.0.norm3.weight"]
    base["blocks.1.norm2.weight"] = (48,)
    base["head.head.bias"] = (64, 1)
    assert told(config(tiny(T2V)), base) == [
        (None, "head.head.bias is [64, 1], and should be [64]"),
        (None, "the base has no blocks.0.norm3.weight"),
        (None, "the base has no blocks.1.ffn.0.bias"),
        (None, "WanTransformer3DModel has no place for blocks.1.norm2.weight"),
    ]


def test_heads_that_no_shape_shows() -> None:
    size = tiny(T2V)
    theirs = native_config(size)
    assert told(config(size), native(T2V), theirs) == []
    halved = config(size) | {"num_attention_heads": 2, "attention_head_dim": 24}
    assert told(halved, native(T2V)) == []
    ((field, text),) = told(halved, native(T2V), theirs)
    assert field == "num_attention_heads"
    assert text == "num_attention_heads is 2, but the base's own config.json has num_heads 4"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_layers", "2"),
        ("num_layers", None),
        ("ffn_dim", 1.5),
        ("patch_size", [1, 2]),
        ("in_channels", True),
        ("num_layers", 10_001),
        ("num_layers", 1_000_000_000),
    ],
)
def test_a_field_that_the_class_cannot_use(field: str, value: object) -> None:
    with pytest.raises(BadFieldError, match=f"^{field} is .*, which WanTransformer3DModel cannot use$"):
        told(config(tiny(T2V)) | {field: value}, native(T2V))


def test_blocks_that_a_list_names_are_counted_as_well() -> None:
    found = config(tiny(VACE)) | {"vace_layers": [0] * 10_001}
    with pytest.raises(BadFieldError, match=r"^vace_layers is a list of 10001, which WanVACE"):
        kind_of(found).shapes(found)
    assert len(kind_of(found).shapes(found | {"num_layers": 10_000, "vace_layers": [0]})) > 250_000


@pytest.mark.parametrize(
    "numbers", [[0, 0], [1, 0], [0, 2], [0, 99], [-1, 0], [1], [], ["a", 1], [0, 1.0], [False, 1], "01", None]
)
def test_block_numbers_that_name_no_blocks(numbers: object) -> None:
    with pytest.raises(BadFieldError, match=r"^vace_layers is "):
        told(config(tiny(VACE)) | {"vace_layers": numbers}, native(VACE))


def test_block_numbers_are_those_of_the_bases_own_config() -> None:
    size = tiny(VACE, 4)
    ours, theirs = config(size) | {"vace_layers": [0, 1, 2, 3]}, native_config(size)
    assert theirs["vace_layers"] == [0, 1, 2, 3]
    base = native(VACE, 4)
    assert told(ours, base, theirs) == []
    assert told(ours, base, {**theirs, "vace_layers": None}) == []
    assert told(ours | {"num_layers": 4}, base, {**theirs, "vace_layers": [0, 1, 2, 4]}) == [
        (
            "vace_layers",
            "vace_layers is [0, 1, 2, 3], but the base's own config.json has vace_layers [0, 1, 2, 4]",
        )
    ]
