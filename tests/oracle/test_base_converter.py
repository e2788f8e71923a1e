"""Every Wan name against diffusers' converter for checkpoints: convert(W + delta) - convert(W).

A LoRA in one layout on a base in the other must put each delta where the converter puts the changed
weight. All values are small whole numbers, so that float32 and float64 sums are the same numbers and
"equal" means equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fuselora import merge
from fuselora.families import Layout
from fuselora.families.pattern import unnumbered
from fuselora.synth import SIZES, base_tensors, tiny
from tests import listings
from tests.oracle.definition import Tensors, in_diffusers_names

RANK, ALPHA = 2, 4.0
# base -> names of one transformer
N_NAMES = {
    "wan2.1-i2v-14b": 1303,
    "wan2.1-t2v-1.3b": 825,
    "wan2.1-t2v-14b": 1095,
    "wan2.2-i2v-a14b": 1095,
    "wan2.2-t2v-a14b": 1095,
    "wan2.2-ti2v-5b": 825,
    "wan2.1-vace-1.3b": 1264,
    "wan2.1-vace-14b": 1331,
}
BLOCKS = 6  # of VACE every fifth has a second branch
VACE = [name for name in N_NAMES if "vace" in name]


@dataclass(frozen=True, repr=False)
class Whole:
    """A base of whole numbers, some blocks of it, in Wan's own names; ``renamed``: diffusers' for each."""

    state: Tensors
    renamed: Mapping[str, str]


@pytest.fixture(scope="module", params=N_NAMES)
def whole(request: pytest.FixtureRequest) -> Whole:
    specs = base_tensors(tiny(request.param, BLOCKS))
    return of_integers({spec.name: spec.shape for spec in specs})


@pytest.mark.parametrize("name", N_NAMES)
def test_further_blocks_have_the_same_names(name: str) -> None:
    specs = base_tensors(tiny(name, SIZES[name].blocks))
    if name not in VACE:
        assert [spec.name for spec in specs] == [spec.name for spec in listings.base(name, "native")]
    assert len(specs) == N_NAMES[name]
    few = {unnumbered(spec.name) for spec in base_tensors(tiny(name, BLOCKS))}
    assert {unnumbered(spec.name) for spec in specs} == few


def of_integers(shapes: Mapping[str, tuple[int, ...]]) -> Whole:
    generator = torch.Generator().manual_seed(0)
    state = {name: integers(shape, 99, generator) for name, shape in shapes.items()}
    names = list(state)
    numbered = in_diffusers_names({name: torch.tensor(at) for at, name in enumerate(names)})
    return Whole(state, {names[int(at)]: renamed for renamed, at in numbered.items()})


def integers(shape: tuple[int, ...], largest: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(-largest, largest + 1, shape, generator=generator).float()


@dataclass(frozen=True)
class Dialect:
    """How a file spells its modules, and what it holds for a 2-D weight."""

    prefix: str
    pairs: tuple[str, str] | None
    flat: bool = False


DIALECTS: Mapping[Layout, tuple[Dialect, ...]] = {
    "native": (
        Dialect("diffusion_model.", ("lora_down", "lora_up")),
        Dialect("", None),
        Dialect("lora_unet_", ("lora_down", "lora_up"), flat=True),
    ),
    "diffusers": (
        Dialect("transformer.", ("lora_A", "lora_B")),
        Dialect("", None),
        Dialect("lora_transformer_", ("lora_down", "lora_up"), flat=True),
    ),
}
PARTS = {"weight": "diff", "bias": "diff_b", "modulation": "diff_m"}


def lora(whole: Whole, layout: Layout, dialect: Dialect, seed: int) -> tuple[Tensors, Tensors]:
    """A LoRA for every tensor of the base in the names of ``layout``, and its deltas by native name."""
    generator = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    deltas: Tensors = {}
    for name, weight in whole.state.items():
        module, _, leaf = (name if layout == "native" else whole.renamed[name]).rpartition(".")
        if leaf not in PARTS:  # scale_shift_table, a parameter with no leaf of its own
            if dialect.flat:  # nobody has a spelling for it
                continue
            module, leaf = f"{module}.{leaf}".lstrip("."), "weight"
        spelled = dialect.prefix + (module.replace(".", "_") if dialect.flat else module)
        if dialect.pairs and weight.dim() == 2:
            down, up = dialect.pairs
            tensors[f"{spelled}.{down}.weight"] = integers((RANK, weight.shape[1]), 3, generator)
            tensors[f"{spelled}.{up}.weight"] = integers((weight.shape[0], RANK), 3, generator)
            tensors[f"{spelled}.alpha"] = torch.tensor(ALPHA)
            product = tensors[f"{spelled}.{up}.weight"] @ tensors[f"{spelled}.{down}.weight"]
            deltas[name] = product * (ALPHA / RANK)
        else:
            tensors[f"{spelled}.{PARTS[leaf]}"] = deltas[name] = integers(tuple(weight.shape), 9, generator)
    return tensors, deltas


def merged(base: Tensors, files: Sequence[Tensors], folder: Path) -> Tensors:
    paths = [folder / f"lora_{number}.safetensors" for number in range(len(files))]
    for path, tensors in zip(paths, files, strict=True):
        save_file(tensors, path)
    save_file(base, folder / "base.safetensors")
    merge(folder / "base.safetensors", [str(path) for path in paths], folder / "out")
    return load_file(folder / "out" / "base.safetensors")


def added(whole: Whole, deltas: Sequence[Tensors]) -> Tensors:
    """W + every delta, in native names and float64."""
    total = {name: weight.double() for name, weight in whole.state.items()}
    for each in deltas:
        for name, delta in each.items():
            total[name] = total[name] + delta.double()
    return total


def converted_difference(before: Tensors, after: Tensors) -> Tensors:
    """convert(after) - convert(before), both in native names."""
    first, second = in_diffusers_names(before), in_diffusers_names(after)
    return {name: second[name].double() - first[name].double() for name in first}


def assert_all_equal(ours: Tensors, theirs: Tensors) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("layout", ["native", "diffusers"])
def test_a_lora_in_one_layout_on_a_base_in_the_other(whole: Whole, layout: Layout, tmp_path: Path) -> None:
    files = [lora(whole, layout, dialect, seed) for seed, dialect in enumerate(DIALECTS[layout], 1)]
    theirs = converted_difference(whole.state, added(whole, [deltas for _, deltas in files]))
    assert sum(bool(difference.any()) for difference in theirs.values()) == len(whole.state)
    base = in_diffusers_names(whole.state) if layout == "native" else whole.state
    fused = merged(base, [tensors for tensors, _ in files], tmp_path)
    if layout == "native":
        ours = {name: fused[name].double() - before.double() for name, before in base.items()}
    else:
        ours = converted_difference(whole.state, fused)
    assert_all_equal(ours, theirs)


@pytest.mark.parametrize("layout", ["native", "diffusers"])
def test_norm2_and_norm3_change_places(layout: Layout, tmp_path: Path) -> None:
    """With both of them in one block, as in no published checkpoint, each is the other one's name."""
    shapes = {spec.name: spec.shape for spec in base_tensors(tiny("wan2.1-t2v-1.3b", 1))}
    shapes["blocks.0.norm2.weight"] = shapes["blocks.0.norm3.weight"]
    shapes["blocks.0.norm2.bias"] = shapes["blocks.0.norm3.bias"]
    whole = of_integers(shapes)
    assert whole.renamed["blocks.0.norm2.weight"] == "blocks.0.norm3.weight"
    assert whole.renamed["blocks.0.norm3.weight"] == "blocks.0.norm2.weight"
    tensors, deltas = lora(whole, layout, DIALECTS[layout][0], seed=1)
    after = added(whole, [deltas])
    before = whole.state
    if layout == "native":
        before, after = in_diffusers_names(before), in_diffusers_names(after)
    fused = merged(before, [tensors], tmp_path)
    assert_all_equal({name: tensor.double() for name, tensor in fused.items()}, after)
