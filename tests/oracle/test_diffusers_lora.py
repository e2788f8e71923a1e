"""Every published kind of LoRA for Wan, merged by us and fused by diffusers (or PEFT) in float32.

What diffusers leaves unfused although the file has a delta for it is held against the float64
definition. Both numbers are stated for every file, so that no comparison passes empty.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file

from fuselora import merge
from fuselora.synth import tiny, write_pipeline
from tests import listings
from tests.oracle import definition
from tests.oracle.conftest import Base
from tests.oracle.definition import Tensors, in_diffusers_names, weights
from tests.oracle.diffusers_side import (
    fused_by_peft,
    fused_by_pipeline,
    in_float32,
    open_model,
    pipeline,
    quiet,
)

TOLERANCE = 1e-6  # of float32 sums of a few products, beside deltas of 0.002 and more
PEFT_FOLDER = "wan2.2-t2v-a14b.peft-plain.r16"
NO_PREFIX = "wan2.2-t2v-a14b.diffsynth-default.r32"
HIGH = "wan2.2-i2v-a14b.x2v-distill-1022.high.r64"
LOW = "wan2.2-i2v-a14b.kijai-distill-260412.low.r64"


@dataclass(frozen=True)
class Counts:
    """At two blocks: the file's tensors; its deltas that diffusers fuses; that it leaves; without a home."""

    tensors: int
    fused: int
    left: int
    homeless: int = 0


# LoRA -> counts on the base that it was made for
LISTED = {
    "wan2.1-i2v-14b-480p.kijai-cfgstep.r128": Counts(115, 64, 19),
    "wan2.1-i2v-14b-480p.kijai-cfgstep.r32": Counts(115, 64, 19),
    "wan2.1-i2v-14b-480p.kijai-cfgstep.r4": Counts(115, 64, 19),
    "wan2.1-i2v-14b-480p.kijai-cfgstep.r64": Counts(115, 64, 19),
    "wan2.1-i2v-14b-480p.x2v-cfgstep.r64.with-diff_m": Counts(118, 64, 23),
    "wan2.1-i2v-14b.fusionx.r32": Counts(113, 62, 20),
    "wan2.1-t2v-14b.causvid-v1.5.r32": Counts(55, 32, 7),  # has no block 0
    "wan2.1-t2v-14b.causvid-v1.r32": Counts(91, 52, 13),
    "wan2.1-t2v-14b.fastwan.r64": Counts(91, 52, 13),
    "wan2.1-t2v-14b.kijai-cfgstep-v1.r32": Counts(89, 50, 14),
    "wan2.1-t2v-14b.kijai-cfgstep-v2.r128": Counts(91, 52, 13),
    "wan2.1-t2v-14b.kijai-cfgstep-v2.r64": Counts(91, 52, 13),
    "wan2.1-t2v-14b.pusa.r512": Counts(40, 20, 0),
    "wan2.1-t2v-14b.x2v-distill.r64": Counts(91, 52, 14),
    "wan2.2-a14b.kijai-lightning-fp16.r64": Counts(60, 20, 0),
    "wan2.2-a14b.lightning-seko.r64": Counts(60, 20, 0),
    "wan2.2-i2v-a14b.diffusion-pipe.r32": Counts(40, 20, 0),
    "wan2.2-i2v-a14b.kijai-distill-1030.high.r64": Counts(91, 52, 13),
    "wan2.2-i2v-a14b.kijai-distill-260412.low.r64": Counts(91, 52, 13),
    "wan2.2-i2v-a14b.x2v-distill-1022.high.r64": Counts(94, 52, 17),
    "wan2.2-i2v-a14b.x2v-distill-1022.low.r64": Counts(115, 64, 20),
    "wan2.2-t2v-a14b.diffsynth-default.r32": Counts(40, 20, 0),
    "wan2.2-t2v-a14b.diffusers-peft.r16": Counts(32, 16, 0),
    "wan2.2-t2v-a14b.musubi-kohya.r32": Counts(60, 20, 0),
    "wan2.2-t2v-a14b.peft-plain.r16": Counts(40, 20, 0),
    "wan2.2-t2v-a14b.x2v-distill-1217.r64": Counts(40, 20, 0),
    "wan2.2-ti2v-5b.fastwan.r128": Counts(91, 52, 13),
    "wan2.2-ti2v-5b.turbo.r64": Counts(91, 52, 13),
}
CASES = {(name, listings.index()[name].base): counts for name, counts in LISTED.items()}
# published for Wan2.2 too, which lacks the image branch of Wan2.1 that the file has
CASES["wan2.2-i2v-a14b.x2v-distill-1022.low.r64", "wan2.2-i2v-a14b"] = Counts(115, 52, 14, homeless=18)
# base tensors that diffusers' Wan loader never changes, whatever the file says
NEVER_FUSED = (
    r"patch_embedding\.(weight|bias)",
    r"(blocks\.\d+\.)?scale_shift_table",
    r"blocks\.\d+\.attn[12]\.norm_(q|k|added_k)\.weight",
    r"blocks\.\d+\.norm2\.(weight|bias)",
    r"condition_embedder\.image_embedder\.norm[12]\.(weight|bias)",
)


@dataclass(frozen=True, repr=False)
class Case:
    """One LoRA on one base: what we made of it, what diffusers did, what it should be."""

    counts: Counts
    base: Base
    n_tensors: int
    deltas: Tensors
    homeless: frozenset[str]
    ours: Tensors
    ours_native: Tensors
    theirs: Tensors

    @property
    def fused(self) -> set[str]:
        """What diffusers changed."""
        return changed(self.base.state, self.theirs)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]} on {case[1]}")
def case(
    request: pytest.FixtureRequest, bases: Callable[[str], Base], tmp_path_factory: pytest.TempPathFactory
) -> Case:
    name, base_name = request.param
    base, folder = bases(base_name), tmp_path_factory.mktemp("case")
    lora = tiny_lora(folder, name)
    tensors, deltas = lora_deltas(lora, name, base)
    homeless = frozenset(deltas.keys() - base.state.keys())
    return Case(
        counts=CASES[name, base_name],
        base=base,
        n_tensors=len(tensors),
        deltas={name: delta for name, delta in deltas.items() if name not in homeless},
        homeless=homeless,
        ours=weights(merge(base.pipeline, [str(lora)], folder / "diffusers").out / "transformer"),
        ours_native=weights(merge(base.native, [str(lora)], folder / "native").out),
        theirs=fused_by_others(name, lora, base, folder),
    )


def tiny_lora(folder: Path, name: str) -> Path:
    return listings.tiny_lora(folder / (name if name == PEFT_FOLDER else f"{name}.safetensors"), name)


def lora_deltas(lora: Path, name: str, base: Base) -> tuple[Tensors, Tensors]:
    """The file's tensors, and its deltas in diffusers' names."""
    entry = listings.index()[name]
    tensors = load_file(lora / "adapter_model.safetensors" if lora.is_dir() else lora)
    deltas = definition.deltas(tensors, entry.alpha, base.native_state)
    return tensors, in_diffusers_names(deltas) if entry.layout == "native" else deltas


def fused_by_others(name: str, lora: Path, base: Base, folder: Path) -> Tensors:
    """Fused by diffusers, or by PEFT where the LoRA is PEFT's own folder."""
    model = open_model(base.pipeline / "transformer")
    if name == PEFT_FOLDER:
        upcast = in_float32(lora / "adapter_model.safetensors", folder / "f32" / "adapter_model.safetensors")
        (upcast.parent / "adapter_config.json").write_text((lora / "adapter_config.json").read_text())
        return fused_by_peft(model, upcast.parent)
    # Diffusers reads Wan's own names only behind this prefix.
    renamed = {key: f"diffusion_model.{key.replace('.default.', '.')}" for key in load_file(lora)}
    file = in_float32(lora, folder / "f32.safetensors", renamed if name == NO_PREFIX else None)
    return fused_by_pipeline(pipeline(pipeline_class(base), transformer=model), [(file, 1.0)])


def pipeline_class(base: Base) -> Any:
    image = base.size.in_channels == 36
    return diffusers.WanImageToVideoPipeline if image else diffusers.WanPipeline


def changed(before: Tensors, after: Tensors) -> set[str]:
    return {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}


def never_fused(name: str, deltas: Tensors) -> bool:
    """Whether diffusers drops this delta: it has no place for it, or takes it only beside a pair."""
    if name == "condition_embedder.time_proj.bias":
        return "condition_embedder.time_proj.weight" not in deltas
    return any(re.fullmatch(pattern, name) for pattern in NEVER_FUSED)


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, name: str) -> None:
    torch.testing.assert_close(
        ours, theirs, rtol=TOLERANCE, atol=TOLERANCE, check_dtype=False, msg=lambda text: f"{name}: {text}"
    )


def test_every_listing_is_compared() -> None:
    assert LISTED.keys() == listings.wan().keys()
    assert len(CASES) == 29


def test_counts(case: Case) -> None:
    found = Counts(case.n_tensors, len(case.fused), len(case.deltas.keys() - case.fused), len(case.homeless))
    assert found == case.counts


def test_every_delta_shows(case: Case) -> None:
    for name, delta in case.deltas.items():
        assert delta.abs().max() > 1000 * TOLERANCE, name


def test_what_diffusers_fuses_we_fuse_alike(case: Case) -> None:
    assert case.ours.keys() == case.theirs.keys() == case.base.state.keys()
    for name in case.fused:
        assert_close(case.ours[name], case.theirs[name], name)


def test_what_diffusers_leaves_is_known(case: Case) -> None:
    assert case.fused <= case.deltas.keys()
    assert case.deltas.keys() - case.fused == {n for n in case.deltas if never_fused(n, case.deltas)}


def test_every_tensor_is_as_defined(case: Case) -> None:
    for name, before in case.base.state.items():
        if name in case.deltas:
            assert_close(case.ours[name], before.double() + case.deltas[name], name)
        else:
            assert torch.equal(case.ours[name], before), name


def test_a_native_base_becomes_the_same_numbers(case: Case) -> None:
    converted = in_diffusers_names(case.ours_native)
    assert converted.keys() == case.ours.keys()
    for name, tensor in case.ours.items():
        assert torch.equal(converted[name], tensor), name


def test_only_the_image_branch_is_homeless(case: Case) -> None:
    image_branch = r"condition_embedder\.image_embedder\..*|.*\.attn2\.(add_[kv]_proj|norm_added_k)\..*"
    assert all(re.fullmatch(image_branch, name) for name in case.homeless)


# In other forms


@pytest.mark.parametrize("name", [NO_PREFIX, PEFT_FOLDER])
def test_as_a_bare_file_diffusers_fuses_nothing(
    name: str, bases: Callable[[str], Base], tmp_path: Path
) -> None:
    base = bases(listings.index()[name].base)
    lora = tiny_lora(tmp_path, name)
    file = lora / "adapter_model.safetensors" if lora.is_dir() else lora
    pipe = pipeline(diffusers.WanPipeline, transformer=open_model(base.pipeline / "transformer"))
    with quiet():
        pipe.load_lora_weights(str(file))
    assert pipe.get_list_adapters() == {}
    state = pipe.transformer.state_dict()
    assert state.keys() == base.state.keys()
    assert all(torch.equal(state[key], tensor) for key, tensor in base.state.items())


def test_two_loras_at_their_strengths(bases: Callable[[str], Base], tmp_path: Path) -> None:
    """Pairs and biases alike; the second has an alpha of its own, and one strength is negative."""
    base = bases("wan2.1-t2v-14b")
    names = ("wan2.1-t2v-14b.x2v-distill.r64", "wan2.2-a14b.lightning-seko.r64")
    strengths = (0.75, -1.25)
    loras = [tiny_lora(tmp_path, name) for name in names]
    files = [in_float32(lora, tmp_path / f"f32-{lora.name}") for lora in loras]
    pipe = pipeline(diffusers.WanPipeline, transformer=open_model(base.pipeline / "transformer"))
    theirs = fused_by_pipeline(pipe, list(zip(files, strengths, strict=True)))
    specs = [f"{lora}:{strength}" for lora, strength in zip(loras, strengths, strict=True)]
    ours = weights(merge(base.pipeline, specs, tmp_path / "out").out / "transformer")
    (_, first), (_, second) = (lora_deltas(lora, n, base) for lora, n in zip(loras, names, strict=True))
    touched = changed(base.state, theirs)
    assert (len(touched), len(touched & second.keys())) == (52, 20)
    for name in touched:
        assert_close(ours[name], theirs[name], name)
    for name, before in base.state.items():
        delta = 0.75 * first.get(name, torch.zeros(())) - 1.25 * second.get(name, torch.zeros(()))
        assert_close(ours[name], before.double() + delta, name)


def test_each_expert_takes_its_own(tmp_path: Path) -> None:
    size = tiny("wan2.2-i2v-a14b")
    base = write_pipeline(tmp_path / "base", size, experts=True)
    loras = {"transformer": tiny_lora(tmp_path, HIGH), "transformer_2": tiny_lora(tmp_path, LOW)}
    out = merge(base, [",".join(map(str, loras.values()))], tmp_path / "out").out
    models = {component: open_model(base / component) for component in loras}
    pipe = pipeline(diffusers.WanImageToVideoPipeline, **models)
    for component, lora in loras.items():
        before, ours = weights(base / component), weights(out / component)
        file = in_float32(lora, tmp_path / component / "f32.safetensors")
        theirs = fused_by_pipeline(pipe, [(file, 1.0)], component=component)
        touched = changed(before, theirs)
        assert len(touched) == 52
        for name in touched:
            assert_close(ours[name], theirs[name], name)
