"""Which files of a repository are needed: names only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fuselora.errors import FormatError, InputError
from fuselora.selection import (
    absent_files,
    adapter_weights,
    model_files,
    needed_files,
    skeleton_files,
    variants,
)

WAN_DIFFUSERS = (
    ".gitattributes",
    "README.md",
    "model_index.json",
    "scheduler/scheduler_config.json",
    "text_encoder/config.json",
    "text_encoder/model-00001-of-00002.safetensors",
    "text_encoder/model-00002-of-00002.safetensors",
    "text_encoder/model.safetensors.index.json",
    "tokenizer/spiece.model",
    "tokenizer/tokenizer.json",
    "transformer/config.json",
    "transformer/diffusion_pytorch_model-00001-of-00002.safetensors",
    "transformer/diffusion_pytorch_model-00002-of-00002.safetensors",
    "transformer/diffusion_pytorch_model.safetensors.index.json",
    "vae/config.json",
    "vae/diffusion_pytorch_model.safetensors",
)
WAN_NATIVE = (
    "Wan2.1_VAE.pth",
    "configuration.json",
    "google/umt5-xxl/spiece.model",
    "high_noise_model/config.json",
    "high_noise_model/diffusion_pytorch_model-00001-of-00006.safetensors",
    "high_noise_model/diffusion_pytorch_model.safetensors.index.json",
    "low_noise_model/diffusion_pytorch_model-00001-of-00006.safetensors",
    "models_t5_umt5-xxl-enc-bf16.pth",
)


@pytest.mark.parametrize("names", [WAN_DIFFUSERS, WAN_NATIVE])
def test_a_repository_of_one_kind_is_needed_whole(names: tuple[str, ...]) -> None:
    assert needed_files(reversed(names), None) == tuple(sorted(names))


@pytest.mark.parametrize(
    "extra",
    [
        "transformer/diffusion_pytorch_model.fp16.safetensors",
        "transformer/diffusion_pytorch_model-00001-of-00002.fp16.safetensors",
        "transformer/diffusion_pytorch_model.fp16-00001-of-00002.safetensors",
        "transformer/diffusion_pytorch_model.safetensors.index.fp16.json",
        "transformer/diffusion_pytorch_model.bin",
        "transformer/diffusion_pytorch_model.bin.index.json",
        "transformer/diffusion_pytorch_model.fp16.bin",
        "text_encoder/pytorch_model.bin",
        "text_encoder/flax_model.msgpack",
        "text_encoder/tf_model.h5",
        "vae/model.onnx",
        "vae/model.onnx_data",
        "transformer/q4.gguf",
        "whole.safetensors",
        "whole.ckpt",
        "optimizer.pt",
    ],
)
def test_what_a_pipeline_does_not_need_is_left_out(extra: str) -> None:
    assert needed_files([*WAN_DIFFUSERS, extra], None) == tuple(sorted(WAN_DIFFUSERS))


@pytest.mark.parametrize(
    "extra", ["safety_checker/pytorch_model.bin", "vae.pth", "custom.py", "vae/notes.fp16.txt"]
)
def test_what_has_no_better_form_stays(extra: str) -> None:
    assert extra in needed_files([*WAN_DIFFUSERS, extra], None)


def test_a_name_with_dots_is_no_variant() -> None:
    names = ("Wan2.2_fp8.safetensors", "config.json")
    assert needed_files(names, None) == names
    assert variants(names) == ()


def test_a_variant_replaces_plain_weights_where_it_exists() -> None:
    fp16 = (
        "transformer/diffusion_pytorch_model.fp16-00001-of-00001.safetensors",
        "transformer/diffusion_pytorch_model.safetensors.index.fp16.json",
    )
    other = (
        "transformer/diffusion_pytorch_model.bf16.safetensors",
        "vae/diffusion_pytorch_model.bf16.safetensors",
    )
    needed = needed_files([*WAN_DIFFUSERS, *fp16, *other], "fp16")
    plain = {name for name in WAN_DIFFUSERS if name.startswith("transformer/diffusion")}
    assert set(needed) == (set(WAN_DIFFUSERS) - plain) | set(fp16)
    assert variants([*WAN_DIFFUSERS, *fp16, *other]) == ("bf16", "fp16")


def test_a_skeleton_is_a_pipeline_less_its_transformers_weights() -> None:
    more = (
        "transformer/custom.safetensors",
        "transformer/old/config.json",
        "transformer_2/config.json",
        "transformer_2/diffusion_pytorch_model.safetensors",
        "transformer_2/diffusion_pytorch_model.safetensors.index.json",
        "transformer_2/diffusion_pytorch_model.fp16.safetensors",
        "transformer_3d/notes.txt",
        "whole.safetensors",
    )
    weights = {name for name in WAN_DIFFUSERS if name.startswith("transformer/diffusion")}
    assert set(skeleton_files([*WAN_DIFFUSERS, *more])) == set(WAN_DIFFUSERS) - weights | {
        "transformer/old/config.json",
        "transformer_2/config.json",
        "transformer_3d/notes.txt",
    }


def test_the_models_of_a_native_repository_alone() -> None:
    assert model_files(needed_files(WAN_NATIVE, None)) == tuple(
        sorted(name for name in WAN_NATIVE if "noise_model" in name)
    )
    assert "low_noise_model/config.json" in model_files(["low_noise_model/config.json", "a.pth", "README.md"])


def test_an_adapter_folder_has_its_own_names() -> None:
    names = ["adapter_config.json", "adapter_model.safetensors", "other.safetensors"]
    assert adapter_weights(names, "x") == "adapter_model.safetensors"
    assert adapter_weights(["pytorch_lora_weights.safetensors", "b.safetensors"], "x").startswith("pytorch")
    assert adapter_weights(["README.md", "lora.safetensors", "adapter_model.bin"], "x") == "lora.safetensors"


@pytest.mark.parametrize("stem", ["adapter_model", "pytorch_lora_weights"])
def test_an_index_stands_for_its_files(stem: str) -> None:
    index, shards = f"{stem}.safetensors.index.json", [f"{stem}-0000{n}-of-00002.safetensors" for n in "12"]
    assert adapter_weights([*shards, index, "adapter_config.json"], "x") == index
    with pytest.raises(
        InputError, match=rf"x: holds both {stem}\.safetensors and {stem}\.safetensors\.index"
    ):
        adapter_weights([index, f"{stem}.safetensors"], "x")


def test_several_files_are_not_chosen_from() -> None:
    with pytest.raises(InputError, match=r"x: holds 2 safetensors files, a.safetensors, b.safetensors"):
        adapter_weights(["b.safetensors", "a.safetensors"], "x")


def test_a_pickled_adapter_says_how_to_convert_it() -> None:
    with pytest.raises(FormatError, match=r"x: holds adapter_model.bin") as caught:
        adapter_weights(["adapter_config.json", "adapter_model.bin"], "x")
    assert "Convert it to safetensors" in str(caught.value.hint)


def test_a_folder_without_weights_is_no_lora() -> None:
    with pytest.raises(InputError, match="x: holds no LoRA"):
        adapter_weights(["adapter_config.json"], "x")


def test_what_indexes_list_and_a_folder_lacks(tmp_path: Path) -> None:
    (tmp_path / "transformer").mkdir()
    index = "transformer/diffusion_pytorch_model.safetensors.index.json"
    (tmp_path / index).write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
    (tmp_path / "transformer" / "1.safetensors").touch()
    parts = {"_class_name": "P", "transformer": ["d", "T"], "vae": ["d", "V"], "image_encoder": [None, None]}
    (tmp_path / "model_index.json").write_text(json.dumps(parts))
    assert absent_files(tmp_path, ["model_index.json", index]) == ("vae", "transformer/2.safetensors")
    assert absent_files(tmp_path, ["transformer/config.json"]) == ()


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}', '{"vae": [1, 2]}']
)
def test_a_broken_index_lists_nothing(text: str, tmp_path: Path) -> None:
    names = ["model_index.json", "model.safetensors.index.json"]
    for name in names:
        (tmp_path / name).write_text(text)
    assert absent_files(tmp_path, names) == ()
