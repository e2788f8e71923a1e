"""What is sharded, on which meshes, and where each rank leaves what it found. Imports nothing heavy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

FUSED, RANKS = "fused", "ranks"  # folders
EXPERTS = ("transformer", "transformer_2")
# how each folder is merged from a float32 base
FOLDERS: Mapping[str, Mapping[str, Any]] = {
    "mixed": {"dtype": "bfloat16"},  # what the model class keeps in float32 stays so
    "uniform": {"dtype": "bfloat16", "uniform": True},
}


@dataclass(frozen=True)
class Mesh:
    """Ranks in a line of shards, or in replicas of such lines: (replicas, shards)."""

    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        return "x".join(map(str, self.shape))

    @property
    def axes(self) -> tuple[str, ...]:
        return ("replicate", "shard")[-len(self.shape) :]

    @property
    def shards(self) -> int:
        return self.shape[-1]

    @property
    def size(self) -> int:
        replicas = self.shape[0] if len(self.shape) > 1 else 1
        return replicas * self.shards

    @property
    def placements(self) -> list[str]:
        return ["Replicate()"] * (len(self.shape) - 1) + ["Shard(dim=0)"]

    def notes(self, folder: Path, rank: int) -> Notes:
        return Notes(folder / RANKS / f"{self.name}-dtypes" / str(rank))

    def rows(self, rank: int, n_rows: int) -> slice:
        """A tensor's rows on a rank: n_rows / shards, rounded up; the last shards have fewer or none."""
        each, shard = -(-n_rows // self.shards), rank % self.shards
        return slice(min(each * shard, n_rows), min(each * (shard + 1), n_rows))


MESHES = (Mesh((1,)), Mesh((2,)), Mesh((4,)), Mesh((2, 2)))
SIZES = sorted({mesh.size for mesh in MESHES})


@dataclass(frozen=True)
class Case:
    """One expert of one folder on one mesh."""

    mesh: Mesh
    kind: str
    expert: str

    def __str__(self) -> str:
        return f"{self.mesh.name}-{self.kind}-{self.expert}"

    def component(self, folder: Path) -> Path:
        return folder / FUSED / self.kind / self.expert

    def notes(self, folder: Path, rank: int) -> Notes:
        return Notes(folder / RANKS / str(self) / str(rank))


CASES = [Case(mesh, kind, expert) for mesh in MESHES for kind in FOLDERS for expert in EXPERTS]


@dataclass(frozen=True)
class Notes:
    """What one rank found: ``facts`` and files of tensors, by name."""

    path: Path

    def write(self, facts: Mapping[str, object], **tensors: Mapping[str, torch.Tensor]) -> None:
        from safetensors.torch import save_file

        self.path.mkdir(parents=True)
        (self.path / "facts.json").write_text(json.dumps(facts))
        for name, named in tensors.items():
            save_file(dict(named), self.path / f"{name}.safetensors")

    @property
    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads((self.path / "facts.json").read_text())
        return facts

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        from safetensors.torch import load_file

        return dict(load_file(self.path / f"{name}.safetensors"))
