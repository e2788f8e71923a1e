"""Bases of every layout, read from headers; what does not fit together is refused by name."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import pytest

from fuselora.checkpoint import Checkpoint, open_checkpoint
from fuselora.describe import describe
from fuselora.description import CheckpointDescription
from fuselora.errors import CheckpointError, FormatError, FuseloraError, InputError, ReadError
from fuselora.families import Layout
from fuselora.header import read_header
from fuselora.marker import FINGERPRINT_KEY, encode
from fuselora.pipeline import merge, plan
from fuselora.synth import (
    base_tensors,
    config,
    tiny,
    write_component,
    write_file,
    write_native,
    write_pipeline,
    write_safetensors,
)
from fuselora.verify import verify
from tests.inputs import open_base, pair, tensor

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE = tiny("wan2.2-t2v-a14b", blocks=1)
SPECS = base_tensors(SIZE, "diffusers")
SHARD_BYTES = 60_000
INDEX = "diffusion_pytorch_model.safetensors.index.json"
PLAIN = "diffusion_pytorch_model.safetensors"
Q, K = tensor("blocks.0.attn1.to_q.weight", 4, 4), tensor("blocks.0.attn1.to_k.weight", 4, 4)


def names(checkpoint: Checkpoint) -> list[str]:
    return [component.name for component in checkpoint.components]


def sharded(folder: Path) -> Path:
    """A component of two shards with an index, q in the first and k in the second."""
    write_component(folder, [Q, K], config={"_class_name": "X"}, shard_bytes=64)
    return folder


def edit_index(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = folder / INDEX
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))


def refused(
    root: Path, kind: type[FuseloraError] = CheckpointError, variant: str | None = None
) -> FuseloraError:
    with pytest.raises(kind) as caught:
        open_base(root, variant=variant)
    assert str(root) in caught.value.message
    return caught.value


# Containers


@pytest.mark.parametrize("experts", [True, False])
def test_a_pipeline(tmp_path: Path, experts: bool) -> None:
    root = write_pipeline(tmp_path / "base", SIZE, experts=experts, shard_bytes=SHARD_BYTES)
    found = open_base(root)
    assert (found.container, found.layout, found.pipeline_class) == ("pipeline", "diffusers", "WanPipeline")
    assert found.family is not None and found.family.name == "wan"
    assert (found.root, found.source, found.revision, found.marker) == (root, "base", None, None)
    roles = [(component.name, component.role) for component in found.components]
    assert roles == (
        [("transformer", "high_noise"), ("transformer_2", "low_noise")]
        if experts
        else [("transformer", "single")]
    )
    for component in found.components:
        assert component.folder == PurePosixPath(component.name)
        assert component.index == PurePosixPath(component.name, INDEX)
        assert component.config["_class_name"] == "WanTransformer3DModel"
        assert len(component.shards) > 1
        assert {spec.name for spec in SPECS} == set(component.tensors())
        assert component.model_shapes() == {spec.name: spec.shape for spec in SPECS}
        assert (component.prefix, component.strays, component.is_fused) == ("", (), False)
    assert not found.is_fused


@pytest.mark.parametrize("experts", [True, False])
def test_a_native_folder(tmp_path: Path, experts: bool) -> None:
    found = open_base(write_native(tmp_path / "base", SIZE, experts=experts, shard_bytes=SHARD_BYTES))
    assert (found.layout, found.pipeline_class) == ("native", None)
    if experts:
        assert found.container == "experts"
        assert [(c.name, c.role, str(c.folder)) for c in found.components] == [
            ("transformer", "high_noise", "high_noise_model"),
            ("transformer_2", "low_noise", "low_noise_model"),
        ]
    else:
        assert found.container == "component"
        assert [(c.name, c.role, str(c.folder)) for c in found.components] == [("transformer", "single", ".")]
        assert found.components[0].index == PurePosixPath(INDEX)


def test_one_component_s_folder(tmp_path: Path) -> None:
    root = write_pipeline(tmp_path / "base", SIZE, experts=True) / "transformer_2"
    found = open_base(root)
    assert (found.container, names(found)) == ("component", ["transformer"])
    assert found.components[0].weight_path(found.components[0].shards[0]) == PurePosixPath(PLAIN)
    assert found.components[0].index is None
    assert found.components[0].index_metadata == {}


@pytest.mark.parametrize("layout", ["native", "diffusers"])
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "diffusion_model.", "transformer."])
def test_a_file(tmp_path: Path, layout: Layout, prefix: str) -> None:
    path = write_file(tmp_path / "wan.safetensors", SIZE, layout=layout, prefix=prefix)
    found = open_base(path)
    (component,) = found.components
    assert (found.container, found.layout, found.root) == ("file", layout, path)
    assert (component.name, component.role, component.prefix) == ("transformer", "single", prefix)
    assert component.model_shapes() == {s.name: s.shape for s in base_tensors(SIZE, layout)}
    assert all(name.startswith(prefix) for name in component.tensors())
    assert (component.config, component.index) == ({}, None)


def test_a_unet(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "base" / "unet" / PLAIN, [tensor("down.q.weight", 4, 4)])
    found = open_base(tmp_path / "base")
    assert (names(found), found.family, found.layout) == (["unet"], None, None)
    assert found.components[0].role == "single"


def test_two_components_of_an_unknown_family_have_no_roles(tmp_path: Path) -> None:
    for name in ("transformer", "transformer_2"):
        write_safetensors(tmp_path / "base" / name / PLAIN, [tensor("layers.q.weight", 4, 4)])
    assert [c.role for c in open_base(tmp_path / "base").components] == ["single", "single"]


def test_source_and_revision_are_kept(tmp_path: Path) -> None:
    root = write_pipeline(tmp_path / "base", SIZE)
    found = open_checkpoint(root, source="owner/name", revision="abc", variant=None)
    assert (found.source, found.revision) == ("owner/name", "abc")


def test_shards_come_in_the_order_they_are_written(tmp_path: Path) -> None:
    found = open_base(write_pipeline(tmp_path / "base", SIZE, experts=True, shard_bytes=SHARD_BYTES))
    rows = [(component.name, shard.path.name) for component in found.components for shard in component.shards]
    assert rows == sorted(rows)
    assert {name for name, _ in rows} == {"transformer", "transformer_2"}


# Shards and indexes


def test_the_index_is_authoritative(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "transformer")
    stray = f"{PLAIN.removesuffix('.safetensors')}-00001-of-00003.safetensors"
    write_safetensors(folder / stray, [tensor(Q.name, 9, 9)])
    (folder / "model.bin").write_bytes(b"x")
    (folder / "README.md").write_text("x")
    (component,) = open_base(tmp_path).components
    assert [shard.path.name for shard in component.shards] == [
        f"diffusion_pytorch_model-0000{n}-of-00002.safetensors" for n in (1, 2)
    ]
    assert component.tensors()[Q.name].shape == (4, 4)
    assert component.strays == (stray, "model.bin")
    assert component.index_metadata == {"total_size": 128}


def test_numbered_shards_without_an_index(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "transformer")
    (folder / INDEX).unlink()
    (component,) = open_base(tmp_path).components
    assert (len(component.shards), component.index) == (2, None)
    assert set(component.tensors()) == {Q.name, K.name}


def test_an_incomplete_set_without_an_index(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "transformer")
    (folder / INDEX).unlink()
    write_safetensors(folder / "diffusion_pytorch_model-00001-of-00003.safetensors", [Q])
    error = refused(folder)
    assert "3 weight files that are not one whole set" in error.message
    assert "diffusion_pytorch_model-00001-of-00003.safetensors" in error.message
    assert error.hint is not None


def test_one_shard_of_several_without_an_index(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "transformer")
    (folder / INDEX).unlink()
    next(folder.glob("*-00002-of-*")).unlink()
    assert "not one whole set" in refused(folder).message


def test_several_files_without_an_index(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "transformer" / "a.safetensors", [Q])
    write_safetensors(tmp_path / "transformer" / "b.safetensors", [K])
    assert "a.safetensors, b.safetensors" in refused(tmp_path / "transformer").message


def test_a_tensor_in_two_files_without_an_index(tmp_path: Path) -> None:
    for number in (1, 2):
        write_safetensors(tmp_path / f"model-0000{number}-of-00002.safetensors", [Q])
    assert f"holds the tensor {Q.name!r} in two files" in refused(tmp_path).message


def test_a_missing_shard(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "transformer")
    gone = next(folder.glob("*-00002-of-*"))
    gone.unlink()
    error = refused(folder)
    assert gone.name in error.message and INDEX in error.message
    assert error.hint is not None and "again" in error.hint


def test_an_index_that_places_a_tensor_where_it_is_not(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "transformer")
    first = next(folder.glob("*-00001-*")).name
    edit_index(folder, lambda d: d["weight_map"].update({"ghost.weight": first}))
    error = refused(folder)
    assert "'ghost.weight'" in error.message and INDEX in error.message
    assert error.facts["tensor"] == "ghost.weight"


def test_an_index_that_swaps_two_tensors(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "transformer")
    first, second = sorted(path.name for path in folder.glob("*-of-*"))
    edit_index(folder, lambda d: d.update(weight_map={Q.name: second, K.name: first}))
    assert "holds the tensor" in refused(folder).message


def test_a_shard_with_a_tensor_that_the_index_lacks(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "transformer")
    first = next(folder.glob("*-00001-*"))
    write_safetensors(first, [Q, tensor("extra.weight", 2)])
    error = refused(folder)
    assert "'extra.weight'" in error.message and first.name in error.message


def test_one_tensor_in_two_indexed_shards(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "transformer")
    write_safetensors(next(folder.glob("*-00002-*")), [K, Q])
    assert repr(Q.name) in refused(folder).message


@pytest.mark.parametrize(
    "place",
    [
        "../model.safetensors",
        "/etc/passwd",
        "sub/model.safetensors",
        "..",
        ".",
        "",
        "a/../b.safetensors",
        3,
        None,
    ],
)
def test_an_index_never_leaves_its_folder(tmp_path: Path, place: object) -> None:
    write_safetensors(tmp_path / "model.safetensors", [Q])
    folder = sharded(tmp_path / "transformer")
    edit_index(folder, lambda d: d.update(weight_map={Q.name: place}))
    error = refused(folder)
    assert repr(Q.name) in error.message
    assert "no file name in this folder" in error.message


@pytest.mark.parametrize("document", [{}, {"weight_map": {}}, {"weight_map": []}, {"weight_map": None}])
def test_an_index_without_a_map(tmp_path: Path, document: dict[str, object]) -> None:
    folder = sharded(tmp_path / "transformer")
    (folder / INDEX).write_text(json.dumps(document))
    assert "has no weight_map" in refused(folder).message


def test_an_index_that_is_not_json(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "transformer")
    (folder / INDEX).write_text("{")
    assert INDEX in refused(folder, FormatError).message


def test_two_indexes(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "transformer")
    (folder / "model.safetensors.index.json").write_bytes((folder / INDEX).read_bytes())
    message = refused(folder).message
    assert INDEX in message and "model.safetensors.index.json" in message


@pytest.mark.parametrize("metadata", [None, [], "x"])
def test_an_index_without_usable_metadata(tmp_path: Path, metadata: object) -> None:
    folder = sharded(tmp_path / "transformer")
    edit_index(folder, lambda d: d.update(metadata=metadata))
    assert open_base(tmp_path).components[0].index_metadata == {}


def test_a_broken_shard(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "transformer")
    shard = next(folder.glob("*-00002-*"))
    os.truncate(shard, shard.stat().st_size - 1)
    error = refused(folder, FormatError)
    assert shard.name in error.message and "cut short" in error.message


# Variants


def test_a_variant(tmp_path: Path) -> None:
    root = write_pipeline(tmp_path / "base", SIZE, dtype="F16", variant="fp16", shard_bytes=SHARD_BYTES)
    write_component(root / "transformer", SPECS, config=config(SIZE))
    plain, half = open_base(root), open_base(root, variant="fp16")
    assert {t.dtype for t in plain.components[0].tensors().values()} == {"F32"}
    assert {t.dtype for t in half.components[0].tensors().values()} == {"F16"}
    assert half.components[0].index == PurePosixPath("transformer", INDEX.replace("index.", "index.fp16."))
    assert plain.components[0].index is None
    assert len(plain.components[0].strays) == len(half.components[0].shards)
    assert half.components[0].strays == (PLAIN,)


@pytest.mark.parametrize("variant", ["fp16", "my-cut"])
def test_a_variant_in_one_file(tmp_path: Path, variant: str) -> None:
    root = write_pipeline(tmp_path / "base", SIZE, variant=variant)
    (component,) = open_base(root, variant=variant).components
    assert [shard.path.name for shard in component.shards] == [
        f"diffusion_pytorch_model.{variant}.safetensors"
    ]


@pytest.mark.parametrize(
    "name",
    [
        "diffusion_pytorch_model.fp16-0000{}-of-00002.safetensors",
        "diffusion_pytorch_model-0000{}-of-00002.fp16.safetensors",
    ],
)
def test_shards_of_a_variant_without_an_index(tmp_path: Path, name: str) -> None:
    for number, spec in enumerate((Q, K), start=1):
        write_safetensors(tmp_path / "transformer" / name.format(number), [spec])
    write_safetensors(tmp_path / "transformer" / PLAIN, [Q])
    half, plain = open_base(tmp_path, variant="fp16"), open_base(tmp_path)
    assert len(half.components[0].shards) == 2
    assert [shard.path.name for shard in plain.components[0].shards] == [PLAIN]


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("wan.fp16.safetensors", "fp16"), ("wan-00001-of-00001.bf16.safetensors", "bf16"),
        ("wan.ema-00001-of-00001.safetensors", "ema"),
        ("diffusion_pytorch_model.my-cut.safetensors", "my-cut"),
        ("wan2.2.safetensors", None), ("wan.my-cut.safetensors", None),
    ],
)  # fmt: skip
def test_all_commands_know_the_variant_of_a_folder(tmp_path: Path, name: str, variant: str | None) -> None:
    write_safetensors(tmp_path / "transformer" / name, [Q])
    lora = write_safetensors(tmp_path / "x.safetensors", pair(Q.name.removesuffix(".weight"), *Q.shape))
    if variant:
        with pytest.raises(CheckpointError) as caught:
            plan(tmp_path / "transformer", [lora])
        assert caught.value.hint == f"Say which variant with --variant: {variant}."
    out = tmp_path / "out"
    merge(tmp_path / "transformer", [lora], out, variant=variant)
    assert verify(out, base=tmp_path / "transformer", loras=[lora]).ok
    found = describe(tmp_path / "transformer")
    assert isinstance(found, CheckpointDescription)
    assert found.variant == variant


def test_a_variant_that_is_not_there(tmp_path: Path) -> None:
    root = write_pipeline(tmp_path / "base", SIZE)
    with pytest.raises(CheckpointError, match="holds no bf16 weights") as caught:
        open_base(root, variant="bf16")
    assert caught.value.hint == f"It holds {PLAIN}."


def test_only_a_variant_and_none_asked_for(tmp_path: Path) -> None:
    root = write_pipeline(tmp_path / "base", SIZE, variant="fp16")
    with pytest.raises(CheckpointError, match="holds no safetensors weights") as caught:
        open_base(root)
    assert caught.value.hint == "Say which variant with --variant: fp16."


# Folders that hold no model


def test_a_path_that_does_not_exist(tmp_path: Path) -> None:
    assert "no such file or folder" in refused(tmp_path / "absent", InputError).message


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ((), None),
        (("model.bin",), "model.bin"),
        (("model.gguf", "x.ckpt"), "model.gguf, x.ckpt"),
        (("fuselora.journal",), "fuselora.journal"),
        (("README.md",), None),
    ],
)
def test_a_folder_without_safetensors(tmp_path: Path, files: tuple[str, ...], said: str | None) -> None:
    folder = tmp_path / "base"
    folder.mkdir()
    for name in files:
        (folder / name).write_bytes(b"x")
    error = refused(folder)
    assert "holds no safetensors weights" in error.message
    assert error.hint == (f"It holds {said}." if said else None)


@pytest.mark.parametrize(
    ("content", "what"), [(b"", "is empty"), (b"\x80\x04 a pickle", "pickle"), (b"GGUF", "GGUF")]
)
def test_a_file_that_is_no_model(tmp_path: Path, content: bytes, what: str) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    assert what in refused(tmp_path / "x.safetensors", FormatError).message


def test_a_config_that_is_not_json(tmp_path: Path) -> None:
    root = write_pipeline(tmp_path / "base", SIZE)
    (root / "transformer" / "config.json").write_text("no")
    assert "config.json" in refused(root, FormatError).message


# model_index.json


def test_a_component_that_the_pipeline_names_and_lacks(tmp_path: Path) -> None:
    root = write_pipeline(tmp_path / "base", SIZE, experts=True)
    for path in (root / "transformer_2").iterdir():
        path.unlink()
    (root / "transformer_2").rmdir()
    error = refused(root)
    assert "'transformer_2'" in error.message and "model_index.json" in error.message
    assert error.hint is not None and "component folder by itself" in error.hint


def test_a_component_that_the_pipeline_sets_to_null_may_be_absent(tmp_path: Path) -> None:
    root = write_pipeline(tmp_path / "base", SIZE)
    assert json.loads((root / "model_index.json").read_text())["transformer_2"] == [None, None]
    assert names(open_base(root)) == ["transformer"]


@pytest.mark.parametrize("name", [None, 3])
def test_a_pipeline_without_a_class(tmp_path: Path, name: object) -> None:
    root = write_pipeline(tmp_path / "base", SIZE)
    (root / "model_index.json").write_text(json.dumps({"_class_name": name}))
    assert open_base(root).pipeline_class is None
    (root / "model_index.json").unlink()
    assert open_base(root).pipeline_class is None


def test_a_broken_model_index(tmp_path: Path) -> None:
    root = write_pipeline(tmp_path / "base", SIZE)
    (root / "model_index.json").write_text("[]")
    assert "model_index.json" in refused(root, FormatError).message


# The Hub's cache


def test_a_snapshot_of_links_to_blobs(tmp_path: Path) -> None:
    repo = tmp_path / "models--owner--name"
    real = write_pipeline(tmp_path / "real", SIZE, experts=True, shard_bytes=SHARD_BYTES)
    snapshot = repo / "snapshots" / ("a" * 40)
    (repo / "blobs").mkdir(parents=True)
    for number, path in enumerate(sorted(p for p in real.rglob("*") if p.is_file())):
        blob = repo / "blobs" / f"{number:064x}"
        path.rename(blob)
        link = snapshot / path.relative_to(real)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    found = open_base(snapshot)
    assert (found.container, names(found)) == ("pipeline", ["transformer", "transformer_2"])
    for component in found.components:
        assert {spec.name for spec in SPECS} == set(component.tensors())
        assert all(shard.path.name.startswith("diffusion_pytorch_model-") for shard in component.shards)
        assert component.strays == ()


# Prefixes


@pytest.mark.parametrize(
    ("keys", "prefix"),
    [
        (
            ["model.diffusion_model.blocks.0.self_attn.q.weight", "first_stage_model.x"],
            "model.diffusion_model.",
        ),
        (["diffusion_model.blocks.0.self_attn.q.weight", "x"], "diffusion_model."),
        (["transformer.blocks.0.attn1.to_q.weight"], "transformer."),
        (["blocks.0.self_attn.q.weight", "transformer.x"], ""),
        (["model.diffusion_model.x.weight", "first_stage_model.x"], "model.diffusion_model."),
        (["transformer.x.weight", "transformer.y"], "transformer."),
        (["transformer.x.weight", "y"], ""),
        (["diffusion_model.x", "diffusion_model.y"], "diffusion_model."),
        (["x", "y"], ""),
    ],
)
def test_the_prefix_of_the_model(tmp_path: Path, keys: list[str], prefix: str) -> None:
    path = write_safetensors(tmp_path / "x.safetensors", [tensor(key, 2) for key in keys])
    (component,) = open_base(path).components
    assert component.prefix == prefix
    assert set(component.model_shapes()) == {
        key.removeprefix(prefix) for key in keys if key.startswith(prefix)
    }
    assert set(component.tensors()) == set(keys)


def test_a_file_without_tensors(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "x.safetensors", [])
    assert open_base(path).components[0].tensors() == {}


# Fused bases


def test_a_shard_that_carries_a_fingerprint_is_fused(tmp_path: Path) -> None:
    metadata = {FINGERPRINT_KEY: "sha256:" + "1" * 64}
    path = write_safetensors(tmp_path / "x.safetensors", [Q], metadata=metadata)
    found = open_base(path)
    assert found.marker is None
    assert found.components[0].is_fused and found.is_fused
    assert read_header(path).metadata == metadata


def marker(*paths: str) -> bytes:
    files = [{"path": path, "bytes": 1, "fused": 1} for path in paths]
    component = {"dtype": "float32", "index": None, "tensors": 1, "fused": len(files), "files": files}
    lora = {"name": "x", "content_sha256": "0" * 64, "component": "transformer", "strength": 1.0}
    return encode(
        {
            "schema": "fuselora.fused/1.0",
            "lora_is_fused": True,
            "fingerprint": f"sha256:{'1' * 64}",
            "components": {"transformer": component},
            "side_files": [],
            "loras": [lora],
        }
    )


def test_a_folder_with_a_marker_is_fused(tmp_path: Path) -> None:
    root = write_pipeline(tmp_path / "base", SIZE)
    (root / "fused.json").write_bytes(marker(f"transformer/{PLAIN}"))
    found = open_base(root)
    assert found.is_fused and not found.components[0].is_fused
    assert found.marker is not None and found.marker.loras[0].name == "x"


def test_a_file_s_marker_is_the_one_beside_it_that_lists_it(tmp_path: Path) -> None:
    mine, other = (write_safetensors(tmp_path / name, [Q]) for name in ("a.safetensors", "b.safetensors"))
    (tmp_path / "fused.json").write_bytes(marker("a.safetensors"))
    assert open_base(mine).is_fused
    assert not open_base(other).is_fused


def test_a_broken_marker_is_refused(tmp_path: Path) -> None:
    root = write_pipeline(tmp_path / "base", SIZE)
    (root / "fused.json").write_text("{}")
    with pytest.raises(FuseloraError, match=r"fused\.json"):
        open_base(root)


def test_a_folder_that_cannot_be_listed_is_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_component(tmp_path / "base" / "transformer", base_tensors(tiny("wan2.2-t2v-a14b", blocks=1)))

    def refused(path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "iterdir", refused)
    with pytest.raises(ReadError, match="base: cannot be read: Permission denied"):
        open_checkpoint(tmp_path / "base", source="base", revision=None, variant=None)
