"""convert(W + B A) - convert(W), through diffusers' own converters, is what a match in the other layout adds.

In both directions, for every tensor of every family that diffusers has a converter for: widths are true, for
some converters know them by heart; of the columns a few are kept.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import pytest
import torch

from fuselora.checkpoint import Component
from fuselora.header import Header, TensorInfo
from fuselora.name_table import Home, name_table
from fuselora.reading import State
from tests.families.models import MODELS, SHOWN, Model

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fuselora.families import Layout

Shape = tuple[int, ...]
Shapes = dict[str, Shape]
each = pytest.mark.parametrize("name", sorted(MODELS))


def homes(model: Model, base: Shapes, layout: Layout, wanted: Layout) -> dict[str, Home]:
    """What every name of one layout means in a base of another, as a merge looks it up."""
    tensors = tuple(TensorInfo(name, "F64", shape, 0, 0) for name, shape in base.items())
    header = Header(Path("base"), 0, 0, tensors, {}, "", State(0, 0, 0, 0, 1, 0))
    component = Component("transformer", "single", PurePosixPath(), (header,), None, {}, {}, "")
    return dict(name_table(component, model.family, layout).dotted[wanted])


def spelled(model: Model) -> Shapes:
    """The same model's tensors in the other layout."""
    return {found.name: found.shape for found in model.family.spellings(model.shapes(), model.layout)}


def shown(shape: Shape) -> Shape:
    return tuple(min(n, SHOWN) if at else n for at, n in enumerate(shape))


def product(shape: Shape, seed: int) -> torch.Tensor:
    """B A of rank 2, of a vector a difference."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = (shape[0] if shape else 1), torch.Size(shape[1:]).numel()
    up = torch.randn(rows, 2, generator=generator, dtype=torch.float64)
    down = torch.randn(2, columns, generator=generator, dtype=torch.float64)
    return (up @ down).reshape(shape)


def landed(
    base: Shapes, found: Mapping[str, Home], deltas: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Deltas by names of one layout, added where those names are in the base."""
    total = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in base.items()}
    for name, delta in deltas.items():
        for place in found[name].places:
            for first, other, n in place.rows or ((0, 0, len(delta)),):
                total[place.base_key][first : first + n] += delta[other : other + n]
    return total


@each
def test_a_lora_of_the_other_layout_on_a_diffusers_base(name: str) -> None:
    model = MODELS[name]
    ours, theirs = model.shapes(), spelled(model)
    deltas = {key: product(shown(shape), seed) for seed, (key, shape) in enumerate(theirs.items())}
    weights = {key: product(shown(shape), -seed) for seed, (key, shape) in enumerate(theirs.items())}
    before = model.converted({key: tensor.clone() for key, tensor in weights.items()})
    after = model.converted({key: tensor + deltas[key] for key, tensor in weights.items()})
    added = landed(
        {k: shown(s) for k, s in ours.items()}, homes(model, ours, "diffusers", model.layout), deltas
    )
    assert added.keys() == before.keys() == ours.keys()
    largest = max(float((after[key] - before[key] - delta).abs().max()) for key, delta in added.items())
    assert largest < 1e-11
    assert all(delta.any() for delta in added.values())


@each
def test_a_diffusers_lora_on_a_base_of_the_other_layout(name: str) -> None:
    model = MODELS[name]
    ours, theirs = model.shapes(), spelled(model)
    deltas = {key: product(shown(shape), seed) for seed, (key, shape) in enumerate(ours.items())}
    weights = {key: product(shown(shape), -seed) for seed, (key, shape) in enumerate(theirs.items())}
    found = homes(model, theirs, model.layout, "diffusers")
    assert found.keys() == ours.keys()
    added = landed({key: shown(shape) for key, shape in theirs.items()}, found, deltas)
    before = model.converted({key: tensor.clone() for key, tensor in weights.items()})
    after = model.converted({key: tensor + added[key] for key, tensor in weights.items()})
    largest = max(float((after[key] - before[key] - delta).abs().max()) for key, delta in deltas.items())
    assert largest < 1e-11
    assert all(delta.any() for delta in added.values())
