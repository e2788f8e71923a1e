"""Synthetic checkpoints on disk, with diffusers as the one who reads them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file

from fuselora import synth
from fuselora.families.wan import WAN
from fuselora.header import read_header
from fuselora.synth import (
    SIZES,
    base_tensors,
    tiny,
    write_component,
    write_file,
    write_native,
    write_pipeline,
    write_skeleton,
)
from tests.small import tree
from tests.synth.model import model_class
from tests.synth.names import T2V

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    "name", [T2V, "wan2.2-i2v-a14b", "wan2.1-i2v-14b", "wan2.2-ti2v-5b", "wan2.1-vace-14b"]
)
def test_a_tiny_base_loads_whole_in_diffusers(tmp_path: Path, name: str) -> None:
    size = tiny(name)
    write_component(tmp_path, base_tensors(size, "diffusers"), config=synth.config(size), shard_bytes=200_000)
    model, info = model_class(name).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    stored = {
        name: tensor for path in tmp_path.glob("*.safetensors") for name, tensor in load_file(path).items()
    }
    loaded = model.state_dict()
    assert stored.keys() == loaded.keys()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in stored.items())


def test_a_tiny_base_runs(tmp_path: Path) -> None:
    size = tiny(T2V)
    write_component(tmp_path, base_tensors(size, "diffusers"), config=synth.config(size))
    model = model_class(T2V).from_pretrained(tmp_path)
    with torch.no_grad():
        result = model(torch.ones(1, 16, 1, 4, 4), torch.tensor([500]), torch.ones(1, 3, size.text_dim))[0]
    assert result.shape == (1, 16, 1, 4, 4)
    assert 0.01 < result.std() < 100


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("name", [T2V, "wan2.1-i2v-14b"])
def test_a_skeleton_is_a_pipeline_without_its_transformers_weights(
    tmp_path: Path, name: str, experts: bool
) -> None:
    size = tiny(name, blocks=1)
    whole = write_pipeline(tmp_path / "whole", size, experts=experts, shard_bytes=60_000)
    rest = tree(whole)
    weights = [path for path in rest if path.startswith("transformer") and "safetensors" in path]
    for path in weights:
        del rest[path]
    assert tree(write_skeleton(tmp_path / "skeleton", size, experts=experts)) == rest
    index = json.loads(rest["model_index.json"])
    parts = {part for part, kind in index.items() if isinstance(kind, list) and any(kind)}
    assert parts == {path.partition("/")[0] for path in rest if "/" in path}


def test_both_layouts_hold_the_same_values(tmp_path: Path) -> None:
    size = tiny("wan2.1-i2v-14b")
    native = load_file(write_file(tmp_path / "n.safetensors", size, prefix=""))
    ours = load_file(write_file(tmp_path / "d.safetensors", size, layout="diffusers", prefix=""))
    assert {WAN.translate(name, "native", "diffusers") for name in native} == ours.keys()
    assert all(torch.equal(t, ours[WAN.translate(name, "native", "diffusers")]) for name, t in native.items())


def test_shards_and_their_index_agree(tmp_path: Path) -> None:
    specs = base_tensors(tiny(T2V))
    write_component(tmp_path, specs, shard_bytes=60_000)
    index = json.loads((tmp_path / "diffusion_pytorch_model.safetensors.index.json").read_text())
    headers = {path.name: read_header(path) for path in tmp_path.glob("*.safetensors")}
    found = {tensor.name: name for name, header in headers.items() for tensor in header.tensors}
    assert found == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(spec.n_bytes for spec in specs)
    assert len(headers) > 3
    assert sorted(headers)[0] == f"diffusion_pytorch_model-00001-of-{len(headers):05d}.safetensors"
    for header in headers.values():
        assert header.metadata == {"format": "pt"}
        assert len(header.tensors) == 1 or sum(t.n_bytes for t in header.tensors) <= 60_000


def test_one_shard_needs_no_index(tmp_path: Path) -> None:
    write_component(tmp_path, base_tensors(tiny(T2V)), config={"a": 1})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "diffusion_pytorch_model.safetensors",
    ]


@pytest.mark.parametrize("shard_bytes", [60_000, 1_000_000])
def test_a_variant_has_the_names_diffusers_looks_for(tmp_path: Path, shard_bytes: int) -> None:
    size = tiny(T2V)
    specs = base_tensors(size, "diffusers", dtype="F16")
    write_component(tmp_path, specs, config=synth.config(size), shard_bytes=shard_bytes, variant="fp16")
    _, info = model_class(T2V).from_pretrained(tmp_path, variant="fp16", output_loading_info=True)
    assert not any(info.values())
    weights = [path.name for path in tmp_path.glob("*.safetensors*")]
    assert all("fp16" in name for name in weights)
    assert (len(weights) > 1) == (shard_bytes == 60_000)


@pytest.mark.parametrize(
    ("name", "experts", "pipeline", "boundary"),
    [
        (T2V, True, "WanPipeline", 0.875),
        ("wan2.2-i2v-a14b", True, "WanImageToVideoPipeline", 0.9),
        ("wan2.1-t2v-14b", False, "WanPipeline", None),
        ("wan2.1-vace-1.3b", False, "WanVACEPipeline", None),
    ],
)
def test_a_pipeline_loads_in_diffusers(
    tmp_path: Path, name: str, experts: bool, pipeline: str, boundary: float | None
) -> None:
    write_pipeline(tmp_path, tiny(name), experts=experts, shard_bytes=200_000)
    pipeline_class: Any = diffusers.DiffusionPipeline
    loaded = pipeline_class.from_pretrained(
        tmp_path, vae=None, text_encoder=None, tokenizer=None, image_encoder=None, image_processor=None
    )
    assert type(loaded).__name__ == pipeline
    assert loaded.config.boundary_ratio == boundary
    high = loaded.transformer.state_dict()
    assert (loaded.transformer_2 is not None) == experts
    if experts:
        low = loaded.transformer_2.state_dict()
        assert not any(torch.equal(tensor, low[key]) for key, tensor in high.items())


def test_a_pipeline_has_the_other_components(tmp_path: Path) -> None:
    write_pipeline(tmp_path, tiny("wan2.1-i2v-14b"))
    index = json.loads((tmp_path / "model_index.json").read_text())
    named = {key for key, value in index.items() if isinstance(value, list) and value[0]}
    assert named == {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert read_header(tmp_path / "text_encoder" / "model.safetensors").tensors
    assert read_header(tmp_path / "vae" / "diffusion_pytorch_model.safetensors").tensors


def test_native_experts_are_two_folders_with_other_values(tmp_path: Path) -> None:
    write_native(tmp_path, tiny(T2V), experts=True)
    high, low = (
        load_file(tmp_path / part / "diffusion_pytorch_model.safetensors")
        for part in ("high_noise_model", "low_noise_model")
    )
    assert list(high) == list(low)
    assert not any(torch.equal(tensor, low[name]) for name, tensor in high.items())
    config = json.loads((tmp_path / "low_noise_model" / "config.json").read_text())
    assert (config["_class_name"], config["model_type"], config["num_layers"]) == ("WanModel", "t2v", 2)


def test_one_native_model_lies_beside_its_other_files(tmp_path: Path) -> None:
    write_native(tmp_path, tiny("wan2.2-ti2v-5b"))
    names = {path.name for path in tmp_path.iterdir()}
    assert {"config.json", "diffusion_pytorch_model.safetensors", "Wan2.1_VAE.pth"} < names


def test_one_file_carries_the_prefix(tmp_path: Path) -> None:
    header = read_header(write_file(tmp_path / "model.safetensors", tiny(T2V)))
    assert all(tensor.name.startswith("model.diffusion_model.") for tensor in header.tensors)
    assert {tensor.dtype for tensor in header.tensors} == {"BF16"}
    assert not header.metadata


def test_a_hole_has_the_true_size_and_takes_no_room(tmp_path: Path) -> None:
    write_pipeline(tmp_path, SIZES[T2V], experts=True, fill="hole")
    shards = list(tmp_path.glob("transformer*/*.safetensors"))
    assert len(shards) == 24
    tensors = [tensor for path in shards for tensor in read_header(path).tensors]
    assert sum(tensor.n_bytes for tensor in tensors) == 2 * 4 * 14_288_491_584  # parameters
    assert sum(path.stat().st_blocks * 512 for path in shards) < 1_000_000
