from __future__ import annotations

import hashlib
import io
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fuselora.digest import (
    READ_BYTES,
    artifact_digest,
    canonical_json,
    content_digest,
    content_sha256,
    read_range,
    sha256_file,
    sha256_json,
    sha256_range,
    tagged,
)
from fuselora.errors import FormatError
from fuselora.header import TensorInfo, encode_header, read_header

A = bytes(range(16))
B = bytes(range(100, 106))


def write(path: Path, tensors: list[tuple[str, str, tuple[int, ...], bytes]], **metadata: str) -> Path:
    infos, at = [], 0
    for name, dtype, shape, content in tensors:
        infos.append(TensorInfo(name, dtype, shape, at, at + len(content)))
        at += len(content)
    path.write_bytes(encode_header(infos, metadata) + b"".join(content for *_, content in tensors))
    return path


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return write(tmp_path / "plain.safetensors", [("a", "F32", (2, 2), A), ("b", "BF16", (3,), B)])


def test_content_does_not_see_the_files_name(plain: Path) -> None:
    before = content_sha256(plain)
    assert content_sha256(plain.rename(plain.with_name("renamed.safetensors"))) == before


def test_content_does_not_see_the_order_of_tensors(plain: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "x.safetensors", [("b", "BF16", (3,), B), ("a", "F32", (2, 2), A)])
    assert sha256_file(other) != sha256_file(plain)
    assert content_sha256(other) == content_sha256(plain)


def test_content_does_not_see_metadata_or_padding(plain: Path, tmp_path: Path) -> None:
    tensors = [("a", "F32", (2, 2), A), ("b", "BF16", (3,), B)]
    other = write(tmp_path / "x.safetensors", tensors, format="pt", alpha="8")
    assert content_sha256(other) == content_sha256(plain)


def test_content_survives_saving_with_the_safetensors_library(plain: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.safetensors"
    a = torch.frombuffer(bytearray(A), dtype=torch.float32).view(2, 2)
    b = torch.frombuffer(bytearray(B), dtype=torch.bfloat16)
    save_file({"b": b, "a": a}, again, {"format": "pt"})
    assert content_sha256(again) == content_sha256(plain)


@pytest.mark.parametrize(
    "tensors",
    [
        [("a", "F32", (2, 2), A[:-1] + b"\xff"), ("b", "BF16", (3,), B)],  # one byte
        [("a", "F32", (2, 2), A), ("b", "F16", (3,), B)],  # a dtype
        [("a", "F32", (4,), A), ("b", "BF16", (3,), B)],  # a shape
        [("a", "F32", (4, 1), A), ("b", "BF16", (3,), B)],
        [("c", "F32", (2, 2), A), ("b", "BF16", (3,), B)],  # a name
        [("b", "F32", (2, 2), A), ("a", "BF16", (3,), B)],  # names swapped
        [("a", "F32", (2, 2), A)],  # one fewer
        [("a", "F32", (2, 2), A), ("b", "BF16", (3,), B), ("c", "U8", (0,), b"")],  # one more, of nothing
    ],
)
def test_content_sees_everything_else(
    plain: Path, tmp_path: Path, tensors: list[tuple[str, str, tuple[int, ...], bytes]]
) -> None:
    other = write(tmp_path / "x.safetensors", tensors)
    assert content_sha256(other) != content_sha256(plain)


def test_content_of_known_bytes(plain: Path) -> None:
    rows = [
        ["a", "F32", [2, 2], hashlib.sha256(A).hexdigest()],
        ["b", "BF16", [3], hashlib.sha256(B).hexdigest()],
    ]
    assert content_sha256(plain) == sha256_json(rows)
    digests = {"a": hashlib.sha256(A).hexdigest(), "b": hashlib.sha256(B).hexdigest()}
    assert content_digest(read_header(plain).tensors, digests) == sha256_json(rows)


def test_content_of_a_broken_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"<html>")
    with pytest.raises(FormatError, match=r"x\.safetensors"):
        content_sha256(path)


def test_canonical_json_has_one_spelling() -> None:
    assert canonical_json({"b": [1, 2.5], "a": "\u00e9"}) == '{"a":"\u00e9","b":[1,2.5]}'.encode()
    assert canonical_json({"a": 1, "b": 2}) == canonical_json({"b": 2, "a": 1})
    assert sha256_json([]) == hashlib.sha256(b"[]").hexdigest()
    assert tagged("ab") == "sha256:ab"


def test_files_and_ranges_longer_than_a_block(tmp_path: Path) -> None:
    content = bytes(range(256)) * (READ_BYTES // 256) + b"tail"
    path = tmp_path / "big"
    path.write_bytes(content)
    assert sha256_file(path) == hashlib.sha256(content).hexdigest()
    with path.open("rb") as stream:
        assert sha256_range(stream, 3, READ_BYTES) == hashlib.sha256(content[3 : 3 + READ_BYTES]).hexdigest()
        blocks = list(read_range(stream, 1, READ_BYTES + 2))
    assert [len(block) for block in blocks] == [READ_BYTES, 2]
    assert b"".join(blocks) == content[1 : READ_BYTES + 3]


def test_a_range_ends_where_the_file_does() -> None:
    stream = io.BytesIO(b"0123456789")
    assert list(read_range(stream, 8, 5)) == [b"89"]
    assert list(read_range(stream, 20, 5)) == []
    assert list(read_range(stream, 2, 0)) == []


def test_an_artifact_is_its_paths_and_digests_in_any_order() -> None:
    files = [("transformer/a.safetensors", "00"), ("model_index.json", "11")]
    whole = artifact_digest(files)
    assert artifact_digest(reversed(files)) == whole
    assert artifact_digest(files[:1]) != whole
    assert artifact_digest([("transformer/a.safetensors", "11"), ("model_index.json", "00")]) != whole
