"""Tensors at hand in place of files: what a kind's arithmetic reads, and its rows in any chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from fuselora.delta.adders import TERMS
from fuselora.delta.sums import Sums
from fuselora.kinds import Kind
from fuselora.kinds.settings import Settings
from fuselora.steps import Delta, Factor

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Given:
    """Parts by name, and the base tensor that they are for."""

    parts: Tensors
    base_tensor: torch.Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = as_matrix(self.base_tensor).shape
        return rows, columns

    def whole(self, part: str) -> torch.Tensor:
        return self.parts[part].to(self.dtype)

    def matrix(self, part: str) -> torch.Tensor:
        found = self.whole(part)
        return found.reshape(found.shape[0], -1)

    def rows(self, part: str, first: int, last: int) -> torch.Tensor:
        return self.whole(part).reshape(len(self.base_tensor), -1)[first:last]

    def base(self, first: int, last: int) -> torch.Tensor:
        return as_matrix(self.base_tensor)[first:last].to(self.dtype)


def as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(len(tensor), -1)


def delta_of(kind: Kind, parts: Tensors, settings: Settings | None = None) -> Delta:
    """Of parts that are in no file."""
    factors = {
        name: Factor(Path("x"), name, "F32", tuple(tensor.shape), 0, 4 * tensor.numel())
        for name, tensor in parts.items()
    }
    return Delta(kind, factors, 1.0, 1.0, settings or Settings())


def rows_of(
    kind: Kind,
    parts: Tensors,
    base: torch.Tensor,
    sums: Sums,
    cuts: Sequence[int] = (),
    settings: Settings | None = None,
) -> torch.Tensor:
    """The kind's rows, computed in chunks that end at ``cuts``, as one matrix."""
    term = TERMS[kind.name](delta_of(kind, parts, settings), Given(parts, base, sums.dtype), sums)
    edges = [0, *cuts, len(base)]
    matrix = as_matrix(base)
    chunks = [term(matrix[a:b], a, b) for a, b in pairwise(edges)]
    return torch.cat(chunks)


def random(seed: int, **shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """float32 parts, all different."""
    source = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=source) for name, shape in shapes.items()}
