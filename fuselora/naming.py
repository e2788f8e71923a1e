"""What the output calls a component's tensors and files: as the base does, or as diffusers does."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fuselora.checkpoint import Component
    from fuselora.families import Family
    from fuselora.header import TensorInfo

FILE_STEM = "diffusion_pytorch_model"
DIFFUSERS_INDEX = f"{FILE_STEM}.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Naming:
    """The output's names of one component: ``tensors`` by the base's, ``shards`` in the base's order.

    ``folder`` is the component's folder and ``index`` where its index goes, None for a file without one.
    """

    folder: PurePosixPath
    tensors: Mapping[str, str]
    shards: tuple[PurePosixPath, ...]
    index: PurePosixPath | None

    def renamed(self, tensors: Sequence[TensorInfo]) -> Iterator[TensorInfo]:
        """The same tensors by their output names."""
        for tensor in tensors:
            yield replace(tensor, name=self.tensors[tensor.name])


def as_base(component: Component) -> Naming:
    """Everything as it is; several shards without an index get one."""
    shards = tuple(component.weight_path(shard) for shard in component.shards)
    stem = re.sub(r"-\d+-of-\d+", "", shards[0].name) if shards else FILE_STEM
    new = component.folder / f"{stem}.index.json" if len(shards) > 1 else None
    tensors = {name: name for name in component.tensors()}
    return Naming(component.folder, tensors, shards, component.index or new)


def as_diffusers(component: Component, family: Family) -> Naming:
    """diffusers' names for a native component, its prefix off.

    The folder is called as the component is. It has an index for one shard too: where there is none,
    vLLM-Omni takes every weight file that it finds.
    """
    folder, n_shards = PurePosixPath(component.name), len(component.shards)
    names = (f"{FILE_STEM}-{n:05d}-of-{n_shards:05d}.safetensors" for n in range(1, n_shards + 1))
    start = len(component.prefix)
    tensors = {n: family.translate(n[start:], "native", "diffusers") for n in component.tensors()}
    return Naming(folder, tensors, tuple(folder / name for name in names), folder / DIFFUSERS_INDEX)
