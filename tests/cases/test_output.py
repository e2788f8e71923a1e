"""Public reports about what was written: lost metadata, names, side files, sizes, and garbled memory."""
# ruff: noqa: N802 - cases keep their names

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors import safe_open

from tests.cases.builders import (
    INDEX,
    MODULE,
    WEIGHTS,
    Fused,
    K,
    Q,
    Tensors,
    assert_filled,
    base_of,
    full,
    fuse,
    metadata_of,
    same_bytes,
    save,
    save_json,
    sharded_base,
    std_pair,
    std_tensors,
)

# B42


METADATA = [{"format": "pt", "x": "y"}, None, {}, {"x": "y"}, {"format": "np", "x": "y"}, {"x": 'ü " \\ \n'}]


@pytest.mark.parametrize("metadata", METADATA)
@pytest.mark.parametrize("container", ["shards", "component", "file"])
def test_B42_metadata_is_kept_and_says_pt(
    metadata: dict[str, str] | None, container: str, tmp_path: Path
) -> None:
    tensors = std_tensors()
    lora = save(tmp_path / "x.safetensors", std_pair(4))
    if container == "shards":
        base = sharded_base(tmp_path / "base", {Q: tensors[Q]}, {K: tensors[K]}, metadata=metadata)
    elif container == "component":
        base = base_of(tmp_path / "base", tensors, metadata=metadata)
    else:
        base = save(tmp_path / "base.safetensors", tensors, metadata)
    out = fuse(base, lora).out
    written = sorted(out.rglob("*.safetensors"))
    assert len(written) == (2 if container == "shards" else 1)
    for path in written:
        found = metadata_of(path)
        assert found["format"] == "pt"
        assert {**found, "format": None} == {**found, **(metadata or {}), "format": None}


def test_B42_an_empty_metadata_entry_is_no_obstacle(tmp_path: Path) -> None:
    """``"__metadata__": {}`` as some writers leave it; the safetensors library writes none instead."""
    base = tmp_path / "base.safetensors"
    entries = {"__metadata__": {}, Q: {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}}
    text = json.dumps(entries).encode()
    base.write_bytes(len(text).to_bytes(8, "little") + text + struct.pack("<16f", *[1.0] * 16))
    fused = fuse(base, save(tmp_path / "x.safetensors", std_pair(4)))
    assert metadata_of(fused.out / base.name)["format"] == "pt"
    assert_filled(fused.tensors("")[Q], 2.0)


def test_B42_only_shards_with_a_fused_tensor_change(tmp_path: Path) -> None:
    tensors = std_tensors()
    base = sharded_base(tmp_path / "base", {Q: tensors[Q]}, {K: tensors[K]}, metadata={"format": "pt"})
    fused = fuse(base, save(tmp_path / "x.safetensors", std_pair(4)))
    first, second = sorted((fused.out / "transformer").glob("*.safetensors"))
    assert metadata_of(first)["fuselora.fingerprint"] == fused.document["fingerprint"]
    assert second.read_bytes() == (base / "transformer" / second.name).read_bytes()


# B43


def test_B43_equal_tensors_are_no_shared_memory(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", {Q: full(4, 4), K: full(4, 4)})
    found = fuse(base, save(tmp_path / "x.safetensors", std_pair(4))).tensors()
    assert found.keys() == {Q, K}
    assert_filled(found[Q], 2.0)
    assert same_bytes(found[K], full(4, 4))


# B45


def index_of(fused: Fused, name: str = INDEX) -> dict[str, Any]:
    index: dict[str, Any] = json.loads((fused.out / "transformer" / name).read_text())
    return index


def assert_index_holds(fused: Fused, index: Mapping[str, Any], tensors: Tensors) -> None:
    """It names exactly the tensors there are, each in the file that holds it."""
    assert index["weight_map"].keys() == tensors.keys()
    for name, file in index["weight_map"].items():
        with safe_open(fused.out / "transformer" / file, "pt") as opened:
            assert name in opened.keys()  # noqa: SIM118 - safe_open is no mapping


def test_B45_total_size_counts_tensor_bytes(tmp_path: Path) -> None:
    shards = {Q: full(4, 4)}, {K: full(4, 8)}
    base = sharded_base(tmp_path / "base", *shards)
    fused = fuse(base, save(tmp_path / "x.safetensors", std_pair(4)))
    index = index_of(fused)
    assert index["metadata"]["total_size"] == 64 + 128
    assert_index_holds(fused, index, {**shards[0], **shards[1]})


@pytest.mark.parametrize("said", [1, 10**12, None])
def test_B45_a_wrong_total_size_of_the_base_is_put_right(said: int | None, tmp_path: Path) -> None:
    base = sharded_base(tmp_path / "base", {Q: full(4, 4)}, {K: full(4, 8)})
    path = base / "transformer" / INDEX
    index = json.loads(path.read_text())
    index["metadata"] = {"note": "kept", **({"total_size": said} if said else {})}
    save_json(path, index)
    fused = fuse(base, save(tmp_path / "x.safetensors", std_pair(4)))
    assert index_of(fused)["metadata"] == {"note": "kept", "total_size": 192}


def test_B45_total_size_follows_the_dtype(tmp_path: Path) -> None:
    shards = {Q: full(4, 4)}, {K: full(4, 8), "ids": torch.arange(4)}
    base = sharded_base(tmp_path / "base", *shards)
    lora = save(tmp_path / "x.safetensors", std_pair(4))
    fused = fuse(base, lora, options=["--dtype", "bfloat16"])
    assert index_of(fused)["metadata"]["total_size"] == 32 + 64 + 32
    assert_index_holds(fused, index_of(fused), {**shards[0], **shards[1]})


def test_B45_shards_without_an_index_get_one(tmp_path: Path) -> None:
    shards = {Q: full(4, 4)}, {K: full(4, 8)}
    base = sharded_base(tmp_path / "base", *shards)
    (base / "transformer" / INDEX).unlink()
    fused = fuse(base, save(tmp_path / "x.safetensors", std_pair(4)))
    assert index_of(fused)["metadata"]["total_size"] == 192
    assert_index_holds(fused, index_of(fused), {**shards[0], **shards[1]})


# B46


@pytest.mark.parametrize("lora_prefix", ["", "diffusion_model.", "transformer.", "lora_unet_"])
def test_B46_a_file_of_several_models_keeps_every_key(lora_prefix: str, tmp_path: Path) -> None:
    tensors = {
        f"model.diffusion_model.{Q}": full(4, 4),
        f"model.diffusion_model.{K}": full(4, 4, value=2.0),
        "first_stage_model.decoder.conv_in.weight": torch.randn(4, 4, 3, 3),
        "first_stage_model.decoder.mid.attn_1.q.weight": torch.randn(4, 4),
        f"cond_stage_model.{Q}": torch.randn(4, 4),
        "cond_stage_model.logit_scale": torch.tensor(4.6, dtype=torch.float16),
        "model_ema.decay": torch.tensor(0.99),
    }
    base = save(tmp_path / "base.safetensors", tensors)
    module = MODULE.replace(".", "_") if lora_prefix.startswith("lora_") else MODULE
    fused = fuse(base, save(tmp_path / "x.safetensors", std_pair(4, lora_prefix + module)))
    found = fused.tensors("")
    assert found.keys() == tensors.keys()
    assert_filled(found[f"model.diffusion_model.{Q}"], 2.0)
    changed = [name for name, tensor in tensors.items() if not same_bytes(found[name], tensor)]
    assert changed == [f"model.diffusion_model.{Q}"]
    assert sorted(path.name for path in fused.out.iterdir()) == ["base.safetensors", "fused.json"]
    assert fused.document["components"]["transformer"]["tensors"] == 7


def test_B46_a_cast_is_for_the_model_alone(tmp_path: Path) -> None:
    others = {"first_stage_model.x.weight": torch.randn(4, 4), f"cond_stage_model.{Q}": torch.randn(4, 4)}
    tensors = {f"model.diffusion_model.{Q}": full(4, 4), **others}
    base = save(tmp_path / "base.safetensors", tensors)
    lora = save(tmp_path / "x.safetensors", std_pair(4))
    found = fuse(base, lora, options=["--dtype", "bfloat16"]).tensors("")
    assert found[f"model.diffusion_model.{Q}"].dtype == torch.bfloat16
    assert all(same_bytes(found[name], tensor) for name, tensor in others.items())


# B47


SIDE_FILES = {
    "model_index.json": b'{"_class_name": "WanPipeline", "transformer": ["diffusers", "X"]}',
    "README.md": b"# Base\r\n",
    "LICENSE.txt": b"all of it",
    "custom_pipeline.py": b"print('hello')\n",
    ".gitattributes": b"*.safetensors filter=lfs\n",
    "scheduler/scheduler_config.json": b'{"shift": 5.0}',
    "tokenizer/tokenizer.json": '{"ü": 1}'.encode(),
    "tokenizer/spiece.model": bytes(range(256)),
    "text_encoder/config.json": b"{ }",
    "text_encoder/pytorch_model.bin": b"\x80\x02 not ours to read",
    "vae/config.json": b'{"torch_dtype": "float32"}',
    "vae/diffusion_pytorch_model.safetensors": b"copied as it is, whatever it holds",
    "transformer/modeling_custom.py": b"x = 1\n",
    "transformer/notes/deep/er.txt": b"",
    "assets/a b/\xc3\xbc.png".encode("latin-1").decode("utf-8"): b"\x89PNG",
}


def pipeline(root: Path) -> Path:
    for name, content in SIDE_FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (root / "feature_extractor").mkdir()
    return base_of(root, std_tensors())


@pytest.mark.parametrize("assets", ["copy", "hardlink", "symlink"])
def test_B47_the_rest_of_a_pipeline_comes_along(assets: str, tmp_path: Path) -> None:
    base = pipeline(tmp_path / "base")
    lora = save(tmp_path / "x.safetensors", std_pair(4))
    fused = fuse(base, lora, options=["--assets", assets])
    expected = {*SIDE_FILES, "transformer/config.json", f"transformer/{WEIGHTS}", "fused.json"}
    files = {path.relative_to(fused.out).as_posix() for path in fused.out.rglob("*") if path.is_file()}
    assert files == expected
    for name, content in SIDE_FILES.items():
        assert (fused.out / name).read_bytes() == content
    config = "transformer/config.json"
    assert (fused.out / config).read_bytes() == (base / config).read_bytes()
    listed = {record["path"] for record in fused.document["side_files"]}
    assert listed == expected - {f"transformer/{WEIGHTS}", "fused.json"}


def test_B47_a_copy_does_not_depend_on_the_base(tmp_path: Path) -> None:
    base = pipeline(tmp_path / "base")
    fused = fuse(base, save(tmp_path / "x.safetensors", std_pair(4)))
    for path in (p for p in fused.out.rglob("*") if p.is_file()):
        assert not path.is_symlink()
        assert path.stat().st_nlink == 1


@pytest.mark.parametrize("dtype", ["keep", "bfloat16"])
def test_B47_a_stale_quantisation_note_is_said(dtype: str, tmp_path: Path) -> None:
    config = {"_class_name": "X", "quantization_config": {"quant_method": "bitsandbytes"}}
    base = base_of(tmp_path / "base", std_tensors(), config=config)
    lora = save(tmp_path / "x.safetensors", std_pair(4))
    fused = fuse(base, lora, options=["--dtype", dtype])
    warning = fused.warning("quantization_config")
    assert "transformer" in warning["message"] and "quantization_config" in warning["message"]
    config_out = fused.out / "transformer" / "config.json"
    assert config_out.read_bytes() == (base / "transformer" / "config.json").read_bytes()


# B48


DTYPES: Mapping[str, str] = {"F32": "<f4", "F16": "<f2", "I64": "<i8", "F64": "<f8"}


def read_alone(path: Path) -> dict[str, npt.NDArray[Any]]:
    """A file read by its format's own words: header length, JSON, and rows of little-endian numbers."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            first, last = (8 + length + offset for offset in entry["data_offsets"])
            flat = np.frombuffer(content[first:last], dtype=DTYPES[entry["dtype"]])
            assert flat.size == math.prod(entry["shape"])
            found[name] = flat.reshape(entry["shape"])
    return found


def test_B48_rows_and_columns_stay_what_they_are(tmp_path: Path) -> None:
    down, up = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0], [3.0]])
    square, wide = f"{MODULE}.weight", "blocks.0.attn1.to_v.weight"
    tensors = {
        square: torch.zeros(2, 2),
        wide: torch.tensor([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]),
        "blocks.0.ffn.net.2.weight": torch.tensor([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]),
    }
    lora = {
        f"{MODULE}.lora_A.weight": down,
        f"{MODULE}.lora_B.weight": up,
        f"{MODULE}.alpha": torch.tensor(1.0),
        "blocks.0.attn1.to_v.lora_A.weight": torch.tensor([[1.0, 0.0, 10.0]]),
        "blocks.0.attn1.to_v.lora_B.weight": torch.tensor([[1.0], [100.0]]),
    }
    fused = fuse(base_of(tmp_path / "base", tensors), save(tmp_path / "x.safetensors", lora))
    alone = read_alone(fused.out / "transformer" / WEIGHTS)
    expected = {
        square: [[1, 2], [3, 6]],
        wide: [[1, 1, 12], [103, 4, 1005]],
        "blocks.0.ffn.net.2.weight": [[0, 1, 2], [3, 4, 5]],
    }
    for name, rows in expected.items():
        assert alone[name].tolist() == rows
        assert fused.tensors()[name].tolist() == rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("options", [[], ["--dtype", "float32"], ["--kernel", "reference"]])
def test_B48_two_readers_agree(dtype: torch.dtype, options: list[str], tmp_path: Path) -> None:
    """Odd sizes, so that a row, a column or an offset out of place cannot pass."""
    tensors = {
        Q: (torch.arange(7 * 5) / 8).reshape(7, 5).to(dtype),
        "ids": torch.arange(3),
        K: (torch.arange(5 * 3) / 8).reshape(5, 3).to(dtype),
        "one": torch.tensor([1.5], dtype=torch.float64),
    }
    lora = save(tmp_path / "x.safetensors", std_pair(2, out=7, into=5))
    fused = fuse(base_of(tmp_path / "base", tensors), lora, options=options)
    alone, library = read_alone(fused.out / "transformer" / WEIGHTS), fused.tensors()
    assert alone.keys() == library.keys() == tensors.keys()
    for name, array in alone.items():
        assert array.tolist() == library[name].tolist()
        assert array.tolist() == (tensors[name] + (1 if name == Q else 0)).tolist()


def test_B48_inputs_by_another_writer(tmp_path: Path) -> None:
    """Tensors in an order of their own, at odd offsets, under a header that nothing pads."""
    base = tmp_path / "base.safetensors"
    rows = [("flag", "U8", [3], bytes([1, 2, 3])), (K, "F32", [1, 2], struct.pack("<2f", 5, 6))]
    rows.append((Q, "F32", [2, 3], struct.pack("<6f", *range(6))))
    header: dict[str, object] = {}
    at = 0
    for name, code, shape, content in rows:
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [at, at + len(content)]}
        at += len(content)
    text = json.dumps(header, indent=1).encode()
    base.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(row[3] for row in rows))
    lora = save(tmp_path / "x.safetensors", std_pair(2, out=2, into=3))
    found = fuse(base, lora).tensors("")
    assert found[Q].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert found[K].tolist() == [[5, 6]]
    assert found["flag"].tolist() == [1, 2, 3]
