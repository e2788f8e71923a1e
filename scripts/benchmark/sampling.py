"""Whether two results are the same: a few thousand elements of a few fused tensors, compared bit by bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmark.inputs import PREFIX
from fuselora.header import read_header

if TYPE_CHECKING:
    from pathlib import Path

    from benchmark.inputs import Case

UP = ".lora_B.weight"
N_TENSORS = 4
N_BYTES = 16 << 10  # of each tensor
ITEM = 2  # bytes of a bfloat16


def sample(case: Case, folder: Path) -> bytes:
    """The first elements of the first fused tensors; empty where one is missing or no bfloat16."""
    tensors = {
        tensor.name: (shard, tensor)
        for path in sorted(folder.glob("*.safetensors"))
        for shard in [read_header(path)]
        for tensor in shard.tensors
        if tensor.dtype == "BF16"
    }
    names = fused_names(case)[:N_TENSORS]
    if not names or not tensors.keys() >= set(names):
        return b""
    found = []
    for shard, tensor in map(tensors.__getitem__, names):
        with shard.path.open("rb") as stream:
            stream.seek(shard.data_start + tensor.start)
            found.append(stream.read(min(N_BYTES, tensor.n_bytes)))
    return b"".join(found)


def fused_names(case: Case) -> list[str]:
    """Base tensors that the LoRA has a pair for."""
    ups = (spec.name for spec in case.lora_specs() if spec.name.endswith(UP))
    return [name.removeprefix(PREFIX).removesuffix(UP) + ".weight" for name in ups]


def equal_share(found: bytes, other: bytes) -> float | None:
    """The share of elements with the same bits; None where there is nothing to compare."""
    if not found or len(found) != len(other):
        return None
    places = range(0, len(found), ITEM)
    same = sum(found[at : at + ITEM] == other[at : at + ITEM] for at in places)
    return same / len(places)
