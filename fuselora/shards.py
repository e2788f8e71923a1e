"""An index and the shards that it names: of a base's component or of a LoRA. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path, PurePath, PurePosixPath

from fuselora.errors import CheckpointError
from fuselora.header import Header, read_header
from fuselora.jsonfile import read_json

INDEX_SUFFIX = ".safetensors.index.json"
SHARD_NUMBER = re.compile(r"-(\d+)-of-(\d+)(?=[.-])")


def is_index(path: PurePath) -> bool:
    """By its name."""
    return path.name.endswith(INDEX_SUFFIX)


def open_files(path: Path) -> tuple[Header, ...]:
    """The header of a safetensors file, or those of all shards of an index, in name order.

    Raises as ``read_header`` and ``indexed_shards`` do.
    """
    return indexed_shards(path)[0] if is_index(path) else (read_header(path),)


def indexed_shards(index: Path) -> tuple[tuple[Header, ...], Mapping[str, object]]:
    """The shards that an index names, each tensor where the index says it is, and the index's metadata.

    Raises ``CheckpointError`` for an index at odds with its shards, ``FormatError`` for a broken file.
    """
    document = read_json(index)
    weight_map = _weight_map(index, document)
    shards = tuple(_shard(index, name) for name in sorted(set(weight_map.values())))
    held = {(tensor.name, shard.path.name) for shard in shards for tensor in shard.tensors}
    for name, file in weight_map.items():
        if (name, file) not in held:
            raise CheckpointError.about(
                index, f"says that {file} holds the tensor {name!r}, but it does not", tensor=name
            )
    for shard in shards:
        for tensor in shard.tensors:
            if weight_map.get(tensor.name) != shard.path.name:
                raise CheckpointError.about(
                    shard.path, f"holds the tensor {tensor.name!r}, which {index.name} does not place there"
                )
    metadata = document.get("metadata")
    return shards, metadata if isinstance(metadata, dict) else {}


def shard_names(index: Path) -> tuple[str, ...]:
    """The files that an index names, sorted; none of them need be there. Raises as ``indexed_shards``."""
    return tuple(sorted(set(_weight_map(index, read_json(index)).values())))


def _weight_map(index: Path, document: Mapping[str, object]) -> dict[str, str]:
    entries = document.get("weight_map")
    if not isinstance(entries, dict) or not entries:
        raise CheckpointError.about(index, "has no weight_map")
    for name, file in entries.items():
        if not isinstance(file, str) or not file or file != PurePosixPath(file).name or file in (".", ".."):
            raise CheckpointError.about(
                index, f"places the tensor {name!r} in {file!r}, which is no file name in this folder"
            )
    return entries


def _shard(index: Path, name: str) -> Header:
    path = index.parent / name
    there = False
    with suppress(OSError):  # a name too long to be one
        there = path.is_file()
    if not there:
        raise CheckpointError.about(
            index, f"names {name}, which is not in the folder", hint="Fetch the missing shard again."
        )
    return read_header(path)
