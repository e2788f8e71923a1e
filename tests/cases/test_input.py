"""Public reports about what was read: packed, broken, renamed, missing, empty or oddly named files."""
# ruff: noqa: N802 - cases keep their names

from __future__ import annotations

import io
import json
import os
import pickle
import re
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from safetensors.torch import load_file

from tests.cases.builders import (
    INDEX,
    MODULE,
    PEFT,
    PLAIN,
    WEIGHTS,
    K,
    Q,
    assert_filled,
    base_of,
    command,
    full,
    fuse,
    refuse,
    same_bytes,
    save,
    save_json,
    sharded_base,
    std_base,
    std_pair,
    std_tensors,
)

SHARD_1 = "diffusion_pytorch_model-00001-of-00002.safetensors"
SHARD_2 = "diffusion_pytorch_model-00002-of-00002.safetensors"


def std_lora(folder: Path) -> Path:
    return save(folder / "x.safetensors", std_pair(4))


# B38


PACKED = {
    "nf4": {Q: torch.zeros(2, 4, dtype=torch.uint8), f"{Q}.absmax": full(2), f"{Q}.quant_map": full(16)},
    "bare u8": {Q: torch.zeros(2, 4, dtype=torch.uint8)},
    "bare u8 of the right shape": {Q: torch.zeros(4, 4, dtype=torch.uint8)},
    "i8": {Q: torch.zeros(4, 4, dtype=torch.int8)},
    "i8 with scales": {Q: torch.zeros(4, 4, dtype=torch.int8), f"{MODULE}.weight_scale": full(4, 1)},
    "i32": {Q: torch.zeros(4, 1, dtype=torch.int32)},
    "fp8": {Q: full(4, 4).to(torch.float8_e4m3fn)},
    "fp8 with its scale": {Q: full(4, 4).to(torch.float8_e4m3fn), f"{MODULE}.scale_weight": full(1)},
    "scaled bf16": {Q: full(4, 4, dtype=torch.bfloat16), f"{MODULE}.weight_scale": full(1)},
    "bool": {Q: torch.zeros(4, 4, dtype=torch.bool)},
}
CODES = {
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.bfloat16: "BF16",
    torch.bool: "BOOL",
}


@pytest.mark.parametrize("kind", PACKED)
def test_B38_a_packed_base_is_no_plain_one(kind: str, tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", {**PACKED[kind], K: full(4, 4)})
    dtype = CODES[PACKED[kind][Q].dtype]
    kind_said = "boolean" if dtype == "BOOL" else "fp8" if dtype.startswith("F8") else "quantised"
    refuse(base, std_lora(tmp_path), says=("transformer", f"{Q} is {dtype}", kind_said))


@pytest.mark.parametrize(
    "names",
    [("qweight", "qzeros", "scales", "g_idx"), ("qweight", "wscales"), ("weight_packed", "weight_scale")],
)
def test_B38_packed_weights_of_another_name(names: tuple[str, ...], tmp_path: Path) -> None:
    packed = {f"{MODULE}.{name}": torch.zeros(1, 4, dtype=torch.int32) for name in names}
    base = base_of(tmp_path / "base", {**packed, K: full(4, 4)})
    says = ("transformer", f"{MODULE}.{names[0]}", "I32", "quantised")
    refuse(base, std_lora(tmp_path), says=says)


def test_B38_a_packed_tensor_that_no_lora_touches_is_copied(tmp_path: Path) -> None:
    packed = {K: torch.arange(8, dtype=torch.uint8).reshape(2, 4), f"{K}.absmax": full(2)}
    fused = fuse(base_of(tmp_path / "base", {Q: full(4, 4), **packed}), std_lora(tmp_path))
    assert_filled(fused.tensors()[Q], 2.0)
    assert all(same_bytes(fused.tensors()[name], tensor) for name, tensor in packed.items())


@pytest.mark.parametrize("where", ["file", "folder", "component"])
def test_B38_a_gguf_base(where: str, tmp_path: Path) -> None:
    name = "model.gguf"
    path = tmp_path / "base" / ("transformer" if where == "component" else "") / name
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF\x03\0\0\0" + bytes(64))
    base = path if where == "file" else tmp_path / "base"
    says = (name, "GGUF", "quantised") if where == "file" else (name, "safetensors")
    refuse(base, std_lora(tmp_path), says=says, beside=tmp_path)


def test_B38_a_gguf_file_called_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"GGUF\x03\0\0\0" + bytes(64))
    refuse(path, std_lora(tmp_path), says=("model.safetensors", "GGUF", "quantised"))


# B44


def two_shards(root: Path) -> Path:
    tensors = std_tensors()
    return sharded_base(root, {Q: tensors[Q]}, {K: tensors[K]})


def edit_index(base: Path, edit: Callable[[dict[str, str]], object]) -> None:
    path = base / "transformer" / INDEX
    index = json.loads(path.read_text())
    edit(index["weight_map"])
    save_json(path, index)


def placing(key: str, file: str) -> Callable[[dict[str, str]], object]:
    return lambda weights: weights.update({key: file})


STRAYS = [
    "diffusion_pytorch_model-00001-of-00003.safetensors",
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.fp16.safetensors",
    "pytorch_lora_weights.safetensors",
    "diffusion_pytorch_model.bin",
    "old.ckpt",
]


@pytest.mark.parametrize("stray", STRAYS)
def test_B44_a_stray_file_is_left_behind(stray: str, tmp_path: Path) -> None:
    base = two_shards(tmp_path / "base")
    save(base / "transformer" / stray, {Q: full(3, 3, value=9.0)})
    fused = fuse(base, std_lora(tmp_path))
    assert_filled(fused.tensors()[Q], 2.0)
    assert {path.name for path in (fused.out / "transformer").iterdir()} == {
        SHARD_1,
        SHARD_2,
        INDEX,
        "config.json",
    }
    assert fused.warning("stray_weights")["files"] == [stray]


def test_B44_a_missing_shard(tmp_path: Path) -> None:
    for missing in (SHARD_1, SHARD_2):
        base = two_shards(tmp_path / missing / "base")
        (base / "transformer" / missing).unlink()
        refuse(base, std_lora(tmp_path), says=(INDEX, missing, "not in the folder"))


def test_B44_a_shard_that_is_a_dangling_link(tmp_path: Path) -> None:
    base = two_shards(tmp_path / "base")
    shard = base / "transformer" / SHARD_2
    shard.unlink()
    shard.symlink_to(tmp_path / "gone")
    refuse(base, std_lora(tmp_path), says=(INDEX, SHARD_2), beside=tmp_path / "else")


def test_B44_a_tensor_that_its_shard_lacks(tmp_path: Path) -> None:
    base = two_shards(tmp_path / "base")
    edit_index(base, lambda weights: weights.update({"blocks.0.attn1.to_v.weight": SHARD_2}))
    refuse(base, std_lora(tmp_path), says=(INDEX, SHARD_2, "blocks.0.attn1.to_v.weight"))


def test_B44_a_tensor_in_the_other_shard(tmp_path: Path) -> None:
    base = two_shards(tmp_path / "base")
    edit_index(base, lambda weights: weights.update({Q: SHARD_2, K: SHARD_1}))
    refuse(base, std_lora(tmp_path), says=(INDEX, Q))


@pytest.mark.parametrize("key", [Q, K])
def test_B44_a_tensor_that_the_index_lacks(key: str, tmp_path: Path) -> None:
    extra = "blocks.0.attn1.to_v.weight"
    base = sharded_base(tmp_path / "base", {Q: full(4, 4), extra: full(4, 4)}, {K: full(4, 4)})
    edit_index(base, lambda weights: weights.pop(extra))
    refuse(base, std_lora(tmp_path), says=(SHARD_1, extra, INDEX))


def test_B44_a_tensor_in_two_shards(tmp_path: Path) -> None:
    extra = "blocks.0.attn1.to_v.weight"
    shards = {Q: full(4, 4), extra: full(4, 4)}, {K: full(4, 4), Q: full(4, 4, value=9.0)}
    base = sharded_base(tmp_path / "base", *shards)
    for named, other in ((SHARD_2, SHARD_1), (SHARD_1, SHARD_2)):
        edit_index(base, placing(Q, named))
        refuse(base, std_lora(tmp_path), says=(Q, other))


def test_B44_a_tensor_in_two_shards_without_an_index(tmp_path: Path) -> None:
    base = sharded_base(tmp_path / "base", {Q: full(4, 4)}, {K: full(4, 4), Q: full(4, 4, value=9.0)})
    (base / "transformer" / INDEX).unlink()
    refuse(base, std_lora(tmp_path), says=("transformer", Q, "two files"))


def test_B44_a_tensor_twice_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "base.safetensors"
    entry = '"%s":{"dtype":"F32","shape":[1],"data_offsets":[%d,%d]}'
    text = ("{" + ",".join(entry % (Q, 4 * n, 4 * n + 4) for n in range(2)) + "}").encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    refuse(path, std_lora(tmp_path), says=("base.safetensors", Q, "twice"))


def test_B44_an_incomplete_set_without_an_index(tmp_path: Path) -> None:
    base = two_shards(tmp_path / "base")
    (base / "transformer" / INDEX).unlink()
    (base / "transformer" / SHARD_2).unlink()
    save(base / "transformer" / "diffusion_pytorch_model-00002-of-00003.safetensors", {K: full(4, 4)})
    refuse(base, std_lora(tmp_path), says=("transformer", "index", "00002-of-00003"))


def test_B44_one_shard_of_several_without_an_index(tmp_path: Path) -> None:
    base = two_shards(tmp_path / "base")
    (base / "transformer" / INDEX).unlink()
    (base / "transformer" / SHARD_2).unlink()
    refuse(base, std_lora(tmp_path), says=("transformer", SHARD_1))


@pytest.mark.parametrize(
    "place", ["../elsewhere.safetensors", "/etc/passwd", "sub/x.safetensors", "", ".", ".."]
)
def test_B44_an_index_that_leads_elsewhere(place: str, tmp_path: Path) -> None:
    base = two_shards(tmp_path / "base")
    save(base / "elsewhere.safetensors", {K: full(4, 4)})
    edit_index(base, lambda weights: weights.update({K: place}))
    refuse(base, std_lora(tmp_path), says=(INDEX, K))


@pytest.mark.parametrize("name", ["a\0b", "x" * 300, "gone.safetensors", "\ud800.safetensors"], ids=ascii)
def test_B44_an_index_that_names_no_possible_file(name: str, tmp_path: Path) -> None:
    base = two_shards(tmp_path / "base")
    edit_index(base, lambda weights: weights.update({K: name}))
    refuse(base, std_lora(tmp_path), says=(INDEX, "not in the folder"))


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"{}", b'{"weight_map": {}}', b'{"weight_map": []}', b"\xff\xfe", b"null"]
)
def test_B44_an_index_that_is_none(text: bytes, tmp_path: Path) -> None:
    base = two_shards(tmp_path / "base")
    (base / "transformer" / INDEX).write_bytes(text)
    refuse(base, std_lora(tmp_path), says=(INDEX,))


# B49


def header_bytes(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


CUTS: dict[str, Callable[[Path], int]] = {
    "nothing": lambda path: 1,
    "4 bytes": lambda path: 4,
    "the length alone": lambda path: 8,
    "mid-header": lambda path: header_bytes(path) // 2,
    "the header alone": header_bytes,
    "mid-data": lambda path: (header_bytes(path) + path.stat().st_size) // 2,
    "first tensor": lambda path: header_bytes(path) + 16,
    "one byte short": lambda path: path.stat().st_size - 1,
}
DAMAGED = ["base", "one-file base", "first shard", "last shard", "second expert", "lora", "adapter"]


def damaged(what: str, tmp_path: Path) -> tuple[Path, Path | str, Path]:
    """A base and a LoRA that fit, and the one of their files that is to be damaged."""
    lora: Path | str = save(tmp_path / "x.safetensors", std_pair(64))
    base = tmp_path / "base"
    if what == "one-file base":
        base = save(tmp_path / "base.safetensors", std_tensors())
        return base, lora, base
    if "shard" in what:
        name = SHARD_1 if what == "first shard" else SHARD_2
        return two_shards(base), lora, base / "transformer" / name
    std_base(base)
    if what == "second expert":
        base_of(base, std_tensors(), component="transformer_2")
        return base, f"high={lora}", base / "transformer_2" / WEIGHTS
    if what == "adapter":
        folder = tmp_path / "adapter"
        save_json(folder / "adapter_config.json", {"lora_alpha": 4})
        return base, folder, save(folder / "adapter_model.safetensors", std_pair(64, style=PEFT))
    return base, lora, Path(lora) if what == "lora" else base / "transformer" / WEIGHTS


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("what", DAMAGED)
def test_B49_a_file_that_is_cut_short(what: str, cut: str, tmp_path: Path) -> None:
    base, lora, path = damaged(what, tmp_path)
    whole, header = path.stat().st_size, header_bytes(path)
    kept = CUTS[cut](path)
    path.write_bytes(path.read_bytes()[:kept])
    declared = () if kept < 8 else (str(header if kept < header else whole),)
    refuse(base, lora, says=(str(path), str(kept), *declared), beside=tmp_path)


@pytest.mark.parametrize("more", [1, 5, 4096])
@pytest.mark.parametrize("what", DAMAGED)
def test_B49_a_file_that_is_too_long(what: str, more: int, tmp_path: Path) -> None:
    base, lora, path = damaged(what, tmp_path)
    whole = path.stat().st_size
    path.write_bytes(path.read_bytes() + bytes(more))
    refuse(base, lora, says=(str(path), str(whole), str(whole + more)), beside=tmp_path)


@pytest.mark.parametrize("what", ["base", "lora"])
def test_B49_the_plan_sees_it_too(what: str, tmp_path: Path) -> None:
    base, lora, path = damaged(what, tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    run = command("plan", "--base", base, "--lora", lora)
    assert run.exit_code == 1
    assert str(path) in run.stderr and "cut short" in run.stderr


# B50


class Bomb:
    """Whoever unpickles this makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.marker,)


def zipped(content: bytes) -> bytes:
    """A zip as torch writes it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/version", "3\n")
    return buffer.getvalue()


LFS = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)
HTML = b"<!DOCTYPE html>\n<html><head><title>404</title></head></html>"
LOOKS: list[tuple[str, Callable[[bytes], bytes], str]] = [
    ("x.safetensors", lambda bomb: LFS, "Git LFS pointer"),
    ("x.safetensors", lambda bomb: HTML, "HTML"),
    ("x.safetensors", lambda bomb: b"\n\n  <html lang='en'>" + bytes(600), "HTML"),
    ("x.safetensors", lambda bomb: b"\xef\xbb\xbf" + HTML, "HTML"),
    ("x.safetensors", zipped, "zip"),
    ("x.safetensors", lambda bomb: bomb, "pickle"),
    ("x.pt", lambda bomb: bomb, "pickle"),
    ("x.pt", zipped, "zip"),
    ("x.bin", zipped, "zip"),
    ("x.ckpt", zipped, "zip"),
    ("x.ckpt", lambda bomb: b"something else entirely", ".ckpt"),
    ("x.bin", lambda bomb: bytes(100), ".bin"),
    ("x.pth", lambda bomb: b"\x01" * 100, ".pth"),
    ("x.pkl", lambda bomb: b"(dp0\n.", ".pkl"),
    ("x.pkl", lambda bomb: bomb, "pickle"),
    ("x.safetensors", lambda bomb: b"", "empty"),
    ("x.pt", lambda bomb: b"", "empty"),
    ("x.safetensors", lambda bomb: b'{"error":"Repository not found"}', "JSON"),
    ("x.safetensors", lambda bomb: b'{\n  "message": "Access denied", "a": 1}', "JSON"),
    ("x.safetensors", lambda bomb: b"Entry not found", "x.safetensors"),
    ("x.safetensors", lambda bomb: b"\x1f\x8b\x08" + bytes(100), "gzip"),
    ("x.safetensors", lambda bomb: bytes(512), "JSON object"),
    ("x.safetensors", lambda bomb: b"GGUF\3\0\0\0" + bytes(100), "GGUF"),
]


def look_id(row: object) -> str | None:
    return row if isinstance(row, str) else None


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("role", ["lora", "base", "in base"])
def test_B50_a_pickle_is_never_loaded(role: str, protocol: int, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    for number, wrapped in enumerate((lambda bomb: bomb, zipped)):
        content = wrapped(pickle.dumps(Bomb(marker), protocol=protocol))
        check_look(role, "x.safetensors", content, ("pickle", "zip")[number], tmp_path / str(number))
    assert not marker.exists()
    pickle.loads(content if wrapped is not zipped else pickle.dumps(Bomb(marker), protocol=protocol))
    assert marker.exists()  # the bomb was a live one


@pytest.mark.parametrize("role", ["lora", "base"])
@pytest.mark.parametrize(("name", "content", "says"), LOOKS, ids=look_id)
def test_B50_what_is_no_safetensors_file(
    name: str, content: Callable[[bytes], bytes], says: str, role: str, tmp_path: Path
) -> None:
    marker = tmp_path / "marker"
    check_look(role, name, content(pickle.dumps(Bomb(marker), protocol=2)), says, tmp_path / "here")
    assert not marker.exists()


def check_look(role: str, name: str, content: bytes, says: str, folder: Path) -> None:
    """The content as a LoRA, as a one-file base, or as a pipeline's only weight file."""
    path = folder / name
    path.parent.mkdir(parents=True)
    base: Path = path
    if role == "lora":
        base = std_base(folder / "base")
    elif role == "in base":
        base, path = folder / "base", folder / "base" / "transformer" / WEIGHTS
        path.parent.mkdir(parents=True)
    path.write_bytes(content)
    lora = path if role == "lora" else save(folder / "lora.safetensors", std_pair(4))
    refuse(base, lora, says=(str(path), says), beside=folder)


@pytest.mark.parametrize("name", ["diffusion_pytorch_model.bin", "model.ckpt", "model.pt"])
def test_B50_a_folder_of_pickles(name: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    path = tmp_path / "base" / "transformer" / name
    path.parent.mkdir(parents=True)
    path.write_bytes(pickle.dumps(Bomb(marker)))
    refuse(tmp_path / "base", std_lora(tmp_path), says=("transformer", name, "safetensors"))
    assert not marker.exists()


@pytest.mark.parametrize("suffix", ["bin", "pt", "pth", "ckpt", "pkl"])
def test_B50_an_adapter_folder_of_pickles(suffix: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    folder = tmp_path / "adapter"
    save_json(folder / "adapter_config.json", {"lora_alpha": 4})
    (folder / f"adapter_model.{suffix}").write_bytes(pickle.dumps(Bomb(marker)))
    says = (f"holds adapter_model.{suffix} and no safetensors", "python -c", "never unpickles")
    refuse(std_base(tmp_path / "base"), folder, says=says)
    assert not marker.exists()


@pytest.mark.parametrize(("suffix", "in_folder"), [("bin", True), ("pt", False)])
def test_B50_a_pickled_lora_is_refused_with_a_command_that_converts_it(
    suffix: str, in_folder: bool, tmp_path: Path
) -> None:
    """The hint is run as it stands, its placeholders filled in."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    pickled = folder / f"adapter_model.{suffix}"
    tensors = std_pair(4, into=8)
    torch.save({name: tensor.T for name, tensor in tensors.items()}, pickled)
    base = std_base(tmp_path / "base")
    said = refuse(base, folder if in_folder else pickled, says=("adapter", "safetensors", "python -c"))
    (script,) = re.findall(r'python -c "(.*?)"', " ".join(said.split()))
    script = script.replace("IN.bin", str(pickled)).replace("OUT.safetensors", str(folder / "x.safetensors"))
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    found = load_file(folder / "x.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor.T) for name, tensor in tensors.items())


def test_B50_a_lora_that_is_only_called_a_pickle_is_merged(tmp_path: Path) -> None:
    lora = save(tmp_path / "x.safetensors", std_pair(4)).rename(tmp_path / "x.bin")
    assert_filled(fuse(std_base(tmp_path / "base"), lora).tensors()[Q], 2.0)


def test_B50_pickles_beside_the_model_are_copied_unread(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    base = std_base(tmp_path / "base")
    content = pickle.dumps(Bomb(marker))
    (base / "vae").mkdir()
    (base / "vae" / "model.bin").write_bytes(content)
    fused = fuse(base, std_lora(tmp_path))
    assert (fused.out / "vae" / "model.bin").read_bytes() == content
    assert not marker.exists()


# B51


@pytest.mark.parametrize(
    "header", ['{"__metadata__":{"format":"pt"}}', '{"__metadata__":{}}', "{}", "{}      "]
)
def test_B51_a_lora_without_tensors(header: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    for options in ([], ["--allow-unmatched", "*"]):
        refuse(std_base(tmp_path / "base"), path, says=("x.safetensors", "holds no tensors"), options=options)


EMPTY = [
    ((0,), (4, 4)),
    ((0, 4), (4, 0)),
    ((4, 4), (0,)),
    ((0, 4), (4, 4)),
    ((4, 0), (4, 4)),
    ((0, 0), (0, 0)),
]


@pytest.mark.parametrize(("down", "up"), EMPTY)
@pytest.mark.parametrize("style", [PLAIN, PEFT])
def test_B51_factors_of_size_zero(
    down: tuple[int, ...], up: tuple[int, ...], style: tuple[str, str], tmp_path: Path
) -> None:
    first, second = (f"{MODULE}.{part}" for part in style)
    lora = {first: full(*down), second: full(*up)}
    empty = first if 0 in down else second
    shape = list(down if 0 in down else up)
    path = save(tmp_path / "x.safetensors", lora)
    refuse(std_base(tmp_path / "base"), path, says=("x.safetensors", empty, str(shape)))


def test_B51_one_empty_module_among_good_ones(tmp_path: Path) -> None:
    to_k = K.removesuffix(".weight")
    lora = {**std_pair(4), f"{to_k}.{PEFT[0]}": full(0), f"{to_k}.{PEFT[1]}": full(4, 4)}
    path = save(tmp_path / "x.safetensors", lora)
    refuse(std_base(tmp_path / "base"), path, says=("x.safetensors", to_k, "empty"))


@pytest.mark.parametrize("part", ["diff", "diff_b"])
def test_B51_an_empty_difference(part: str, tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", {**std_tensors(), f"{MODULE}.bias": full(4)})
    path = save(tmp_path / "x.safetensors", {f"{MODULE}.{part}": full(0)})
    refuse(base, path, says=("x.safetensors", f"{MODULE}.{part}", "empty"))


@pytest.mark.parametrize("alpha", [None, 8.0])
@pytest.mark.parametrize("style", [PLAIN, PEFT])
def test_B51_a_zero_delta_is_said(style: tuple[str, str], alpha: float | None, tmp_path: Path) -> None:
    tensors = {Q: torch.randn(4, 4), K: full(4, 4, value=2.0)}
    tensors[Q][0, 0] = -0.0
    lora = save(tmp_path / "x.safetensors", std_pair(4, value=0.0, style=style, alpha=alpha))
    fused = fuse(base_of(tmp_path / "base", tensors), lora)
    assert all(same_bytes(fused.tensors()[name], tensor) for name, tensor in tensors.items())
    assert "the delta is zero in 1 of 1 modules" in fused.warning("zero_delta")["message"]
    assert fused.document["components"]["transformer"]["fused"] == 1


def test_B51_an_alpha_of_zero_is_a_zero_delta(tmp_path: Path) -> None:
    fused = fuse(std_base(tmp_path / "base"), save(tmp_path / "x.safetensors", std_pair(4, alpha=0.0)))
    assert_filled(fused.tensors()[Q], 1.0)
    assert "the delta is zero in 1 of 1 modules" in fused.warning("zero_delta")["message"]


def test_B51_zero_modules_among_others_are_counted(tmp_path: Path) -> None:
    to_k = K.removesuffix(".weight")
    lora = save(tmp_path / "x.safetensors", {**std_pair(4), **std_pair(4, to_k, value=0.0)})
    fused = fuse(std_base(tmp_path / "base"), lora)
    assert "the delta is zero in 1 of 2 modules" in fused.warning("zero_delta")["message"]


# B52


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whoever opens a socket or asks for an address is told off, and found out at the end."""
    tried: list[object] = []

    def refuse_socket(*arguments: object, **_: object) -> NoReturn:
        tried.append(arguments)
        raise OSError("no network here")

    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(socket, "socket", refuse_socket)
    monkeypatch.setattr(socket, "getaddrinfo", refuse_socket)
    yield
    assert tried == []


@pytest.mark.parametrize("base", ["org/name", "./org/name", "org/../org/name/", "absolute", "Wan2.2"])
@pytest.mark.usefixtures("no_network")
def test_B52_a_local_base_opens_no_socket(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    std_base(tmp_path / ("Wan2.2" if base == "Wan2.2" else "org/name"))
    std_lora(tmp_path)
    given = tmp_path / "org/name" if base == "absolute" else base
    run = command("merge", "--base", given, "--lora", "x.safetensors", "--out", "out/deep/er")
    assert run.exit_code == 0, run.said
    document = json.loads((tmp_path / "out/deep/er/fused.json").read_text())
    assert document["base"]["source"] == ("Wan2.2" if base == "Wan2.2" else "name")
    assert document["base"]["revision"] is None


@pytest.mark.parametrize(
    "base", ["org/name", "org/name/", "./org/name", "/org/name", "org/sub/name", "no-such"]
)
@pytest.mark.usefixtures("no_network")
def test_B52_a_missing_folder_fails_at_once(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    std_lora(tmp_path)
    refuse(base, "x.safetensors", says=(f"{base}: no such file or folder",), out=tmp_path / "out")


@pytest.mark.usefixtures("no_network")
def test_B52_a_missing_lora_fails_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    std_base(tmp_path / "base")
    for name in ("org/name", "org/name/x.safetensors", "x.safetensors"):
        refuse("base", name, says=(f"{name}: no such file or folder",), out=tmp_path / "out")


def test_B52_a_name_like_a_hub_id_without_a_network(tmp_path: Path) -> None:
    """Nothing of that name is here, so the Hub is asked; its address leads nowhere."""
    std_lora(tmp_path)
    environment = {
        **{k: v for k, v in os.environ.items() if k not in ("HF_TOKEN", "HF_HUB_OFFLINE")},
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HOME": str(tmp_path / "hub"),
    }
    arguments = ["merge", "--base", "org/name", "--lora", "x.safetensors", "--out", "out"]
    run = subprocess.run(
        [sys.executable, "-m", "fuselora", *arguments],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 1
    assert "org/name: there is no such file or folder here" in run.stderr
    assert "Traceback" not in run.stderr
    assert not (tmp_path / "out").exists()


# B53


NAMES = [
    "a b.safetensors",
    " lead and trail .safetensors",
    "modèle_ü.safetensors",
    "u\u0308.safetensors",
    "模型-高噪声.safetensors",
    "a..b.safetensors",
    "a.b.c.safetensors",
    "-x.safetensors",
    "--base.safetensors",
    "#1.safetensors",
    "a%20b&c;d'e\"f.safetensors",
    "[x].safetensors",
    "$HOME.safetensors",
    "~x.safetensors",
    "a\nb.safetensors",
    "a\tb\x1b[31m.safetensors",
    "x" * 200 + ".safetensors",
    "a:0.5.safetensors",
    "a=b.safetensors",
    "transformer=x.safetensors",
    "a,b.safetensors",
    ",.safetensors",
    "noending",
    os.fsdecode(b"caf\xe9.safetensors"),
]
FOLDERS = [name.removesuffix(".safetensors") for name in NAMES]


def assert_valid(out: Path) -> None:
    """``fused.json`` is UTF-8 and JSON, and the folder passes its own check."""
    json.loads((out / "fused.json").read_bytes().decode("utf-8"))
    run = command("check", "--digest", "--", out)
    assert run.exit_code == 0, run.said


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_B53_a_lora_of_any_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its bare name in the current folder, where a leading dash or comma is seen as such."""
    monkeypatch.chdir(tmp_path)
    base = std_base(tmp_path / "base")
    temporary = std_lora(tmp_path)
    temporary.rename(tmp_path / name)
    for number, (spec, value) in enumerate([(name, 2.0), (f"{name}:0.5", 1.5), (f"transformer={name}", 2.0)]):
        out = tmp_path / f"out{number}"
        fused = fuse(base, spec, out=out)
        assert_filled(fused.tensors()[Q], value)
        assert fused.lora["name"] == name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        assert_valid(out)


@pytest.mark.parametrize("name", FOLDERS, ids=ascii)
def test_B53_folders_of_any_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    std_base(tmp_path / "in" / name)
    std_lora(tmp_path)
    monkeypatch.chdir(tmp_path / "in")
    run = command("merge", "--base", name, "--lora", "../x.safetensors", "--out", f"../{name}")
    assert run.exit_code == 0, run.said
    run.stdout.encode("utf-8")
    assert_valid(tmp_path / name)
    source = json.loads((tmp_path / name / "fused.json").read_bytes())["base"]["source"]
    assert source == name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_B53_a_one_file_base_of_any_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "plain", std_tensors()).rename(tmp_path / name)
    lora = std_lora(tmp_path / "lora")
    base, out = Path(name), tmp_path / "out"
    if "\n" in name or "\t" in name or name.startswith("a:"):  # "a:" reads as a drive elsewhere
        refuse(base, lora, says=("has a name that fused.json cannot record",), out=out)
        return
    fused = fuse(base, lora, out=out)
    assert_valid(out)
    # the library opens no path that is not UTF-8
    found = load_file((out / name).rename(tmp_path / "plain"))
    assert_filled(found[Q], 2.0)
    assert {path.name for path in fused.out.iterdir()} == {"fused.json"}


def test_B53_files_of_any_name_beside_the_weights(tmp_path: Path) -> None:
    base = std_base(tmp_path / "base")
    names = [name for name in NAMES if name.isprintable()]
    for name in names:
        (base / "tokenizer").mkdir(exist_ok=True)
        (base / "tokenizer" / name).write_bytes(b"x")
    fused = fuse(base, std_lora(tmp_path))
    assert sorted(path.name for path in (fused.out / "tokenizer").iterdir()) == sorted(names)
    assert_valid(fused.out)


def test_B53_a_missing_name_with_a_comma_is_explained(tmp_path: Path) -> None:
    for name in ("a,b.safetensors", "a.safetensors,b.safetensors"):
        refuse(std_base(tmp_path / "base"), tmp_path / name, says=("comma", "repeat --lora"))


def test_B53_two_files_with_commas_in_one_list(tmp_path: Path) -> None:
    base = base_of(std_base(tmp_path / "base"), std_tensors(), component="transformer_2")
    high, low = tmp_path / "a,b.safetensors", tmp_path / "c,d.safetensors"
    save(high, std_pair(4))
    save(low, std_pair(4, value=2.0))
    fused = fuse(base, f"{high},{low}")
    assert_filled(fused.tensors("transformer")[Q], 2.0)
    assert_filled(fused.tensors("transformer_2")[Q], 3.0)


def test_B53_an_output_name_that_leaves_no_room(tmp_path: Path) -> None:
    out = tmp_path / ("x" * 250)
    refuse(std_base(tmp_path / "base"), std_lora(tmp_path), says=("xxxx", "too long"), out=out)
