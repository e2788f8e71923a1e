"""What the output is called: as the base, or as diffusers calls it."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import pytest

from fuselora.families.wan import WAN
from fuselora.naming import as_base, as_diffusers
from fuselora.synth import base_tensors, tiny, write_file, write_native, write_pipeline
from tests.inputs import open_base

if TYPE_CHECKING:
    from pathlib import Path

SIZE = tiny("wan2.2-t2v-a14b", blocks=1)
INDEX = "diffusion_pytorch_model.safetensors.index.json"


def paths(*names: str) -> tuple[PurePosixPath, ...]:
    return tuple(map(PurePosixPath, names))


def test_as_the_base_everything_keeps_its_name(tmp_path: Path) -> None:
    base = open_base(write_native(tmp_path / "base", SIZE, experts=True, shard_bytes=60_000))
    for component in base.components:
        naming = as_base(component)
        assert naming.folder == component.folder
        assert naming.shards == tuple(component.folder / shard.path.name for shard in component.shards)
        assert naming.index == component.index is not None
        assert naming.tensors == {name: name for name in component.tensors()}


def test_as_the_base_one_file_has_no_index_and_several_get_one(tmp_path: Path) -> None:
    (single,) = open_base(write_file(tmp_path / "wan.safetensors", SIZE)).components
    assert (as_base(single).shards, as_base(single).index) == (paths("wan.safetensors"), None)
    folder = write_pipeline(tmp_path / "base", SIZE, shard_bytes=60_000)
    (folder / "transformer" / INDEX).unlink()
    (component,) = open_base(folder).components
    assert as_base(component).index == PurePosixPath("transformer", INDEX)


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "diffusion_model."])
def test_as_diffusers_the_prefix_goes_and_one_file_has_an_index(tmp_path: Path, prefix: str) -> None:
    (component,) = open_base(write_file(tmp_path / "wan.safetensors", SIZE, prefix=prefix)).components
    naming = as_diffusers(component, WAN)
    assert naming.shards == paths("transformer/diffusion_pytorch_model-00001-of-00001.safetensors")
    assert naming.index == PurePosixPath("transformer", INDEX)
    assert naming.folder == PurePosixPath("transformer")
    assert naming.tensors[f"{prefix}head.modulation"] == "scale_shift_table"
    assert naming.tensors[f"{prefix}blocks.0.norm3.weight"] == "blocks.0.norm2.weight"
    assert naming.tensors[f"{prefix}patch_embedding.weight"] == "patch_embedding.weight"
    assert sorted(naming.tensors.values()) == sorted(s.name for s in base_tensors(SIZE, "diffusers"))


def test_as_diffusers_experts_have_folders_of_their_own(tmp_path: Path) -> None:
    base = open_base(write_native(tmp_path / "base", SIZE, experts=True, shard_bytes=60_000))
    high, low = (as_diffusers(component, WAN) for component in base.components)
    n_shards = len(base.components[0].shards)
    assert n_shards > 1
    numbers = range(1, n_shards + 1)
    names = [f"diffusion_pytorch_model-{n:05d}-of-{n_shards:05d}.safetensors" for n in numbers]
    assert high.shards == paths(*(f"transformer/{name}" for name in names))
    assert low.shards == paths(*(f"transformer_2/{name}" for name in names))
    assert low.index == PurePosixPath("transformer_2", INDEX)
    assert high.tensors == low.tensors


def test_renamed_tensors_keep_dtype_shape_and_place(tmp_path: Path) -> None:
    (component,) = open_base(write_file(tmp_path / "wan.safetensors", SIZE)).components
    naming, tensors = as_diffusers(component, WAN), component.shards[0].tensors
    for before, after in zip(tensors, naming.renamed(tensors), strict=True):
        assert after.name == naming.tensors[before.name]
        assert (after.dtype, after.shape) == (before.dtype, before.shape)
        assert (after.start, after.end) == (before.start, before.end)
