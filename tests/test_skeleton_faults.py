"""Everything that keeps a base from being written as the pipeline that a skeleton is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fuselora.checkpoint import Checkpoint
from fuselora.errors import CheckpointError, Fault
from fuselora.skeleton_faults import skeleton_faults
from fuselora.synth import (
    Spec,
    base_tensors,
    native_config,
    tiny,
    write_component,
    write_file,
    write_native,
    write_pipeline,
    write_safetensors,
    write_skeleton,
)
from tests.inputs import open_base
from tests.skeletons import edit, opened, touch

T2V, VACE = tiny("wan2.2-t2v-a14b", blocks=1), tiny("wan2.1-vace-14b", blocks=1)
OLD_I2V = tiny("wan2.1-i2v-14b", blocks=1)
CONFIG, INDEX = "config.json", "model_index.json"


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair of experts."""
    return write_native(tmp_path_factory.mktemp("native") / "Wan2.2", T2V, experts=True, dtype="BF16")


@pytest.fixture
def skeleton(tmp_path: Path) -> Path:
    """The one that fits."""
    return write_skeleton(tmp_path / "skeleton", T2V, experts=True)


def faults(folder: Path, base: Path | Checkpoint, *, whole: bool = True) -> list[Fault]:
    checkpoint = open_base(base) if isinstance(base, Path) else base
    return list(skeleton_faults(opened(folder), checkpoint, whole=whole))


def only(found: list[Fault]) -> Fault:
    assert len(found) == 1, [fault.message for fault in found]
    return found[0]


# What fits


def test_a_skeleton_may_have_its_weights(tmp_path: Path, native: Path) -> None:
    whole = write_pipeline(tmp_path / "whole", T2V, experts=True, shard_bytes=60_000)
    assert faults(whole, native) == []


def test_broken_weights_of_its_transformers_do_not_matter(skeleton: Path, native: Path) -> None:
    (skeleton / "transformer" / "diffusion_pytorch_model.safetensors").write_bytes(b"version https://git-lfs")
    (skeleton / "transformer" / "diffusion_pytorch_model.safetensors.index.json").write_bytes(b"{")
    (skeleton / "transformer_2" / "model.safetensors").symlink_to("/nowhere")
    assert faults(skeleton, native) == []


@pytest.mark.parametrize(
    ("name", "experts"), [("wan2.1-i2v-14b", False), ("wan2.1-vace-14b", False), ("wan2.2-i2v-a14b", True)]
)
def test_the_skeleton_of_the_same_model_fits(tmp_path: Path, name: str, experts: bool) -> None:
    size = tiny(name)
    base = write_native(tmp_path / "base", size, experts=experts)
    assert faults(write_skeleton(tmp_path / "skeleton", size, experts=experts), base) == []


# What it lacks


@pytest.mark.parametrize("part", ["vae", "text_encoder", "tokenizer", "scheduler"])
@pytest.mark.parametrize("empty", [False, True])
def test_a_component_that_is_absent(skeleton: Path, native: Path, part: str, empty: bool) -> None:
    shutil.rmtree(skeleton / part)
    if empty:
        (skeleton / part).mkdir()
    fault = only(faults(skeleton, native))
    assert (fault.kind, fault.path) == ("skeleton", str(skeleton))
    assert fault.message == f"has no files in {part}/, which {INDEX} names"
    assert faults(skeleton, native, whole=False) == []


@pytest.mark.parametrize("part", ["vae", "text_encoder"])
def test_a_component_without_its_weights(skeleton: Path, native: Path, part: str) -> None:
    next((skeleton / part).glob("*.safetensors")).unlink()
    assert only(faults(skeleton, native)).message.startswith(f"has no weights in {part}/, whose class is ")


def test_a_tokenizer_needs_no_weights(skeleton: Path, native: Path) -> None:
    touch(skeleton / "tokenizer" / CONFIG)
    assert faults(skeleton, native) == []


def test_a_shard_that_an_index_names(skeleton: Path, native: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (skeleton / "text_encoder" / "model.safetensors.index.json").write_text(json.dumps(index))
    fault = only(faults(skeleton, native))
    assert fault.message == "has no text_encoder/model-00002-of-00002.safetensors, which an index names"


def test_a_pointer_to_a_file_that_was_not_fetched(skeleton: Path, native: Path) -> None:
    path = skeleton / "vae" / "diffusion_pytorch_model.safetensors"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    fault = only(faults(skeleton, native))
    assert fault.path == str(path)
    assert "a Git LFS pointer" in fault.message
    assert fault.hint == "Fetch the real file with 'git lfs pull'."


@pytest.mark.parametrize(
    "name", ["tokenizer/spiece.model", "text_encoder/pytorch_model.bin", "vae/config.json", "notes.txt"]
)
def test_a_pointer_of_any_kind(skeleton: Path, native: Path, name: str) -> None:
    (skeleton / name).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    fault = only(faults(skeleton, native))
    assert (fault.kind, fault.path) == ("skeleton", str(skeleton / name))
    assert fault.message == "is a Git LFS pointer, not the file itself"
    assert fault.hint == "Fetch the real file with 'git lfs pull'."


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_broken_index(skeleton: Path, native: Path, text: str) -> None:
    path = skeleton / "vae" / "diffusion_pytorch_model.safetensors.index.json"
    path.write_text(text)
    fault = only(faults(skeleton, native))
    assert (fault.kind, fault.path) == ("skeleton", str(path))
    assert "JSON" in fault.message


def test_a_link_that_leaves_it(skeleton: Path, native: Path, tmp_path: Path) -> None:
    touch(tmp_path / "elsewhere.txt")
    (skeleton / "vae" / "link.txt").symlink_to(tmp_path / "elsewhere.txt")
    with pytest.raises(CheckpointError, match=r"vae/link.txt is a link out of the folder"):
        faults(skeleton, native)


def left_over(skeleton: Path, *indexes: str) -> None:
    """Indexes of files that are not there."""
    for index in indexes:
        path = skeleton / "text_encoder" / index
        path.write_text(json.dumps({"weight_map": {"a": f"{index.partition('.')[0]}-00001-of-00002.bin"}}))


PICKLES, VARIANT = "pytorch_model.bin.index.json", "model.safetensors.index.fp16.json"


@pytest.mark.parametrize("index", [PICKLES, VARIANT])
def test_an_index_that_no_loader_goes_by_is_not_followed(skeleton: Path, native: Path, index: str) -> None:
    left_over(skeleton, index)
    assert faults(skeleton, native) == []


@pytest.mark.parametrize("index", [PICKLES, VARIANT])
def test_an_index_without_other_weights_is_followed(skeleton: Path, native: Path, index: str) -> None:
    left_over(skeleton, index)
    folder = skeleton / "text_encoder"
    other = "pytorch_model-00002-of-00002.bin" if index == PICKLES else "model.fp16.safetensors"
    (folder / "model.safetensors").rename(folder / other)
    message = only(faults(skeleton, native)).message
    assert message.startswith("has no text_encoder/") and message.endswith(", which an index names")


@pytest.mark.parametrize("part", ["vae", "text_encoder"])
def test_a_component_without_weights_and_config(skeleton: Path, native: Path, part: str) -> None:
    for path in (skeleton / part).iterdir():
        path.unlink()
    touch(skeleton / part / "README.md", skeleton / part / "generation_config.json")
    assert only(faults(skeleton, native)).message.startswith(f"has no weights in {part}/, whose class is ")


@pytest.mark.parametrize(
    ("part", "kind"), [("tokenizer", "TokenizersBackend"), ("scheduler", "UniPCMultistep")]
)
def test_a_class_of_any_name_whose_config_says_that_it_has_no_weights(
    skeleton: Path, native: Path, part: str, kind: str
) -> None:
    edit(skeleton / INDEX, lambda document: document.update({part: ["transformers", kind]}))
    assert faults(skeleton, native) == []


# The base beside it


def test_a_base_that_has_diffusers_names(skeleton: Path, tmp_path: Path) -> None:
    base = write_pipeline(tmp_path / "base", T2V, experts=True)
    fault = only(faults(skeleton, base))
    assert (fault.kind, fault.path) == ("layout", str(base))
    assert fault.message == "has diffusers names already: there is nothing to convert"


def test_a_base_of_no_known_family(skeleton: Path, tmp_path: Path) -> None:
    specs = [Spec("decoder.0.weight", "F32", (4, 4))]
    base = write_safetensors(tmp_path / "odd.safetensors", specs)
    assert only(faults(skeleton, base)).message == (
        "is of no family whose diffusers names are known; it has names like decoder.0.weight"
    )


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("flux.1", ("double_blocks.0.img_attn.qkv.weight", "vector_in.in_layer.weight")),
        ("z-image", ("layers.0.attention.qkv.weight", "cap_embedder.0.weight")),
    ],
)
def test_a_family_that_is_not_converted(
    skeleton: Path, tmp_path: Path, family: str, names: tuple[str, ...]
) -> None:
    base = write_safetensors(tmp_path / "x.safetensors", [Spec(name, "F32", (12, 4)) for name in names])
    fault = only(faults(skeleton, base))
    assert fault.message == f"is a {family} base, and only those of wan can be written as a pipeline"
    assert fault.hint is not None and "Leave out --layout" in fault.hint


def test_a_family_with_diffusers_names_alone(skeleton: Path, tmp_path: Path) -> None:
    names = ("img_in.weight", "txt_in.weight", "txt_norm.weight")
    base = write_safetensors(tmp_path / "qwen.safetensors", [Spec(name, "F32", (4,)) for name in names])
    assert "has diffusers names already" in only(faults(skeleton, base)).message


def test_a_base_whose_names_say_nothing(skeleton: Path, tmp_path: Path) -> None:
    specs = [Spec("blocks.0.modulation", "F32", (1,)), Spec("blocks.0.scale_shift_table", "F32", (1,))]
    base = write_safetensors(tmp_path / "odd.safetensors", specs)
    assert "too few tensors" in only(faults(skeleton, base)).message


def test_two_experts_and_a_skeleton_of_one_transformer(tmp_path: Path, native: Path) -> None:
    single = write_skeleton(tmp_path / "single", T2V)
    fault = only(faults(single, native))
    assert (fault.kind, fault.path, fault.key) == ("components", str(single / INDEX), "transformer_2")
    assert fault.message == "names no transformer_2, and the base has it (low_noise_model/)"
    assert fault.hint == "Take the skeleton of a model with two experts."


def test_one_transformer_and_a_skeleton_of_two_experts(skeleton: Path, tmp_path: Path) -> None:
    file = write_file(tmp_path / "high.safetensors", T2V)
    for base in (write_native(tmp_path / "single", T2V), file):
        fault = only(faults(skeleton, base))
        assert (fault.kind, fault.key) == ("components", "transformer_2")
        assert fault.message == "names transformer_2, and the base has only transformer"
        assert "high_noise_model/ and low_noise_model/" in str(fault.hint)


def test_one_folder_of_two_experts(skeleton: Path, tmp_path: Path) -> None:
    base = write_native(tmp_path / "base", T2V, experts=True)
    shutil.rmtree(base / "high_noise_model")
    fault = only(faults(skeleton, base))
    assert fault.message == "names transformer, and the base has only transformer_2"


def test_a_config_of_another_model(tmp_path: Path, native: Path) -> None:
    other = write_skeleton(tmp_path / "other", OLD_I2V, experts=True)
    found = faults(other, native)
    assert {fault.path for fault in found} == {
        str(other / part / CONFIG) for part in ("transformer", "transformer_2")
    }
    assert {fault.kind for fault in found} == {"config"}
    assert {fault.key for fault in found} == {"added_kv_proj_dim", "image_dim", "in_channels"}


def test_one_expert_s_config_alone(skeleton: Path, native: Path) -> None:
    edit(skeleton / "transformer_2" / CONFIG, lambda document: document.update(num_layers=40))
    fault = only(faults(skeleton, native))
    assert fault.path == str(skeleton / "transformer_2" / CONFIG)
    assert fault.message == "num_layers makes 40 blocks, but the base has 1 (blocks.*)"


def test_the_model_that_the_base_is(tmp_path: Path) -> None:
    from fuselora.synth import SIZES

    size = SIZES["wan2.2-i2v-a14b"]
    for part in ("high_noise_model", "low_noise_model"):
        write_component(tmp_path / "base" / part, base_tensors(size, dtype="BF16"), fill="hole")
    other = write_skeleton(tmp_path / "other", SIZES["wan2.2-t2v-a14b"], experts=True)
    found = faults(other, tmp_path / "base")
    assert {fault.message for fault in found} == {
        "in_channels is 16, but the base's patch_embedding.weight has 36"
    }
    assert {fault.hint for fault in found} == {"The base is Wan2.2-I2V-A14B: take that model's skeleton."}


def test_the_class_of_another_family(skeleton: Path, native: Path) -> None:
    edit(skeleton / "transformer" / CONFIG, lambda document: document.update(_class_name="FluxModel"))
    fault = only(faults(skeleton, native))
    assert fault.message == (
        "is for the class FluxModel; a wan base needs WanTransformer3DModel or WanVACETransformer3DModel"
    )


def test_index_and_config_name_two_classes(skeleton: Path, native: Path) -> None:
    edit(
        skeleton / INDEX,
        lambda document: document.update(transformer=["diffusers", "WanVACETransformer3DModel"]),
    )
    fault = only(faults(skeleton, native))
    assert fault.path == str(skeleton / INDEX)
    assert fault.message == (
        "names the class WanVACETransformer3DModel for transformer, and its config.json WanTransformer3DModel"
    )


def test_a_quantised_config(skeleton: Path, native: Path) -> None:
    edit(
        skeleton / "transformer" / CONFIG,
        lambda document: document.update(quantization_config={"quant_method": "fp8"}),
    )
    fault = only(faults(skeleton, native))
    assert (fault.kind, fault.path) == ("config", str(skeleton / "transformer" / CONFIG))
    assert fault.message.startswith("has a quantization_config")


def test_a_field_of_another_type(skeleton: Path, native: Path) -> None:
    edit(skeleton / "transformer" / CONFIG, lambda document: document.update(ffn_dim="108"))
    assert only(faults(skeleton, native)).message == (
        'ffn_dim is "108", which WanTransformer3DModel cannot use'
    )


def test_more_blocks_than_any_model_has(skeleton: Path, native: Path) -> None:
    edit(skeleton / "transformer" / CONFIG, lambda document: document.update(num_layers=1_000_000_000))
    fault = only(faults(skeleton, native))
    assert (fault.kind, fault.path) == ("config", str(skeleton / "transformer" / CONFIG))
    assert fault.message == "num_layers is 1000000000, which WanTransformer3DModel cannot use"


def test_heads_that_only_the_two_configs_show(skeleton: Path, native: Path) -> None:
    halved = {"num_attention_heads": 2, "attention_head_dim": 24}
    edit(skeleton / "transformer" / CONFIG, lambda document: document.update(halved))
    assert native_config(T2V)["num_heads"] == 4
    assert only(faults(skeleton, native)).key == "num_attention_heads"


def base_with(path: Path, *, add: tuple[str, ...] = (), drop: tuple[str, ...] = (), prefix: str = "") -> Path:
    specs = [spec for spec in base_tensors(T2V, dtype="BF16", prefix=prefix) if spec.name not in drop]
    return write_safetensors(path, [*specs, *(Spec(name, "BF16", (48,)) for name in add)])


def test_tensors_that_have_no_name_in_diffusers(tmp_path: Path) -> None:
    single = write_skeleton(tmp_path / "single", T2V)
    base = base_with(tmp_path / "b.safetensors", add=("face_adapter.x.weight", "blocks.0.norm2.weight"))
    found = faults(single, base)
    assert {(fault.kind, fault.path) for fault in found} == {("names", str(base))}
    assert [fault.message for fault in found] == [
        "WanTransformer3DModel has no place for blocks.0.norm2.weight",
        "WanTransformer3DModel has no place for face_adapter.x.weight",
    ]


def test_a_tensor_that_the_base_lacks(tmp_path: Path) -> None:
    single = write_skeleton(tmp_path / "single", T2V)
    base = base_with(tmp_path / "b.safetensors", drop=("blocks.0.ffn.2.bias",))
    assert only(faults(single, base)).message == "the base has no blocks.0.ffn.2.bias"


def test_two_tensors_that_would_become_one(tmp_path: Path) -> None:
    single = write_skeleton(tmp_path / "single", T2V)
    base = base_with(tmp_path / "b.safetensors", add=("blocks.0.attn1.norm_q.weight",))
    found = [fault.message for fault in faults(single, base)]
    assert found == [
        "blocks.0.attn1.norm_q.weight and blocks.0.self_attn.norm_q.weight would both be called "
        "blocks.0.attn1.norm_q.weight",
        "WanTransformer3DModel has no place for blocks.0.attn1.norm_q.weight",
    ]


def test_a_file_that_holds_more_than_the_model(tmp_path: Path) -> None:
    single = write_skeleton(tmp_path / "single", T2V)
    prefix = "model.diffusion_model."
    base = base_with(tmp_path / "b.safetensors", add=("first_stage_model.x.weight",), prefix=prefix)
    assert only(faults(single, base)).message == (
        "first_stage_model.x.weight is no part of the model, whose names begin with model.diffusion_model."
    )


def test_a_base_with_vace_blocks_and_a_skeleton_without(tmp_path: Path) -> None:
    base = write_native(tmp_path / "base", VACE)
    found = faults(write_skeleton(tmp_path / "plain", T2V), base)
    assert {fault.kind for fault in found} == {"names"}
    assert any("no place for vace_blocks.0.before_proj.weight" in fault.message for fault in found)
