"""A merge of one base tensor by tensor, and how near it must be to what others compute in float64."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

import fuselora
from tests.cases.builders import WEIGHTS, base_of

Tensors = dict[str, torch.Tensor]
SLACK = 2.0**-20


def fused(
    folder: Path,
    base: Mapping[str, torch.Tensor],
    lora: Path,
    *,
    kernel: str = "auto",
    dtype: torch.dtype = torch.float32,
    strength: float = 1.0,
    jobs: int = 1,
) -> Tensors:
    """The tensors of a base that is stored as ``dtype``, merged with a file or a folder of an adapter."""
    stored = base_of(folder / "base", {name: tensor.to(dtype) for name, tensor in base.items()})
    out = folder / f"out-{kernel}-{jobs}"
    fuselora.merge(base=stored, loras=[f"{lora}:{strength}"], out=out, kernel=kernel, jobs=jobs)
    return load_file(out / "transformer" / WEIGHTS)


def assert_near(found: torch.Tensor, wanted: torch.Tensor, name: str = "it") -> None:
    """Within one unit in the last place, and a float32 sum's slack of the largest value."""
    unit = torch.finfo(found.dtype).eps * wanted.abs()
    error = (found.double() - wanted.double()).abs()
    assert bool((error <= unit + SLACK * wanted.abs().max()).all()), f"{name} is off by {float(error.max())}"
