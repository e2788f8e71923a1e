"""Digests of files and of tensor content. Standard library only."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from fuselora.header import TensorInfo
from fuselora.shards import open_files

READ_BYTES = 1 << 22


def canonical_json(value: object) -> bytes:
    """UTF-8 JSON with sorted keys and no spaces: the only form that digests are taken of."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "surrogatepass")


def whole_numbers(value: object) -> object:
    """``value`` with 4 for every 4.0 in it: JSON has one kind of number, and tools write either."""
    if isinstance(value, Mapping):
        return {name: whole_numbers(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [whole_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def tagged(digest: str) -> str:
    """``"sha256:<64 hex digits>"``, the spelling used in the marker for identities."""
    return f"sha256:{digest}"


def sha256_json(value: object) -> str:
    """Hex sha256 of ``canonical_json(value)``."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def sha256_file(path: Path) -> str:
    """Hex sha256 of a whole file, read in blocks of 4 MiB."""
    hasher = hashlib.sha256()
    with path.open("rb") as stream:
        for block in iter(lambda: stream.read(READ_BYTES), b""):
            hasher.update(block)
    return hasher.hexdigest()


def read_range(stream: BinaryIO, start: int, n_bytes: int) -> Iterator[bytes]:
    """The ``n_bytes`` from ``start`` in blocks of at most 4 MiB; fewer only if the file is cut short."""
    stream.seek(start)
    while n_bytes > 0 and (block := stream.read(min(READ_BYTES, n_bytes))):
        n_bytes -= len(block)
        yield block


def sha256_range(stream: BinaryIO, start: int, n_bytes: int) -> str:
    """Hex sha256 of a byte range of an open file."""
    hasher = hashlib.sha256()
    for block in read_range(stream, start, n_bytes):
        hasher.update(block)
    return hasher.hexdigest()


def content_digest(tensors: Iterable[TensorInfo], tensor_digests: Mapping[str, str]) -> str:
    """Hex sha256 over sorted (name, dtype, shape, sha256 of the bytes).

    A re-saved file has the same, and so have the same tensors in several files.
    """
    rows = [[t.name, t.dtype, list(t.shape), tensor_digests[t.name]] for t in tensors]
    return sha256_json(sorted(rows))


def content_sha256(path: Path) -> str:
    """``content_digest`` of a safetensors file, or of all shards of an index; their data is read once.

    Raises ``FormatError``, and ``CheckpointError`` for an index at odds with its shards.
    """
    digests, files = {}, open_files(path)
    for header in files:
        with header.path.open("rb") as stream:
            for tensor in header.tensors:
                start = header.data_start + tensor.start
                digests[tensor.name] = sha256_range(stream, start, tensor.n_bytes)
    return content_digest((tensor for header in files for tensor in header.tensors), digests)


def artifact_digest(files: Iterable[tuple[str, str]]) -> str:
    """Hex sha256 over sorted (relative path, sha256) of all files of a fused folder."""
    return sha256_json(sorted([path, sha256] for path, sha256 in files))
