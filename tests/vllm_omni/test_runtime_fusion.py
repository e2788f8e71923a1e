"""Published LoRAs for Wan, fused by the engine as it starts and by us before: the same but for rounding.

What the engine leaves out although the file has a delta for it is listed, and counted for every file.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fuselora import merge
from fuselora.synth import base_tensors, tiny
from tests import listings
from tests.oracle import definition
from tests.oracle.definition import Tensors, in_diffusers_names
from tests.vllm_omni import engine
from tests.vllm_omni.bases import write_wan
from tests.vllm_omni.comparison import Comparison, compare, compared


@dataclass(frozen=True)
class Counts:
    """At two blocks: the file's deltas that the engine fuses, and those that it leaves."""

    fused: int
    left: int


# LoRA -> counts on the base that it was made for
LISTED = {
    "wan2.1-i2v-14b-480p.kijai-cfgstep.r128": Counts(64, 19),
    "wan2.1-i2v-14b-480p.kijai-cfgstep.r32": Counts(64, 19),
    "wan2.1-i2v-14b-480p.kijai-cfgstep.r4": Counts(64, 19),
    "wan2.1-i2v-14b-480p.kijai-cfgstep.r64": Counts(64, 19),
    "wan2.1-i2v-14b-480p.x2v-cfgstep.r64.with-diff_m": Counts(64, 23),
    "wan2.1-i2v-14b.fusionx.r32": Counts(62, 20),
    "wan2.1-t2v-14b.causvid-v1.5.r32": Counts(32, 7),
    "wan2.1-t2v-14b.causvid-v1.r32": Counts(52, 13),
    "wan2.1-t2v-14b.fastwan.r64": Counts(52, 13),
    "wan2.1-t2v-14b.kijai-cfgstep-v1.r32": Counts(50, 14),
    "wan2.1-t2v-14b.kijai-cfgstep-v2.r128": Counts(52, 13),
    "wan2.1-t2v-14b.kijai-cfgstep-v2.r64": Counts(52, 13),
    "wan2.1-t2v-14b.pusa.r512": Counts(20, 0),
    "wan2.1-t2v-14b.x2v-distill.r64": Counts(52, 14),
    "wan2.2-a14b.kijai-lightning-fp16.r64": Counts(20, 0),
    "wan2.2-a14b.lightning-seko.r64": Counts(20, 0),
    "wan2.2-i2v-a14b.diffusion-pipe.r32": Counts(20, 0),
    "wan2.2-i2v-a14b.kijai-distill-1030.high.r64": Counts(52, 13),
    "wan2.2-i2v-a14b.kijai-distill-260412.low.r64": Counts(52, 13),
    "wan2.2-i2v-a14b.x2v-distill-1022.high.r64": Counts(52, 17),
    "wan2.2-i2v-a14b.x2v-distill-1022.low.r64": Counts(64, 20),
    "wan2.2-t2v-a14b.diffsynth-default.r32": Counts(0, 20),
    "wan2.2-t2v-a14b.diffusers-peft.r16": Counts(16, 0),
    "wan2.2-t2v-a14b.musubi-kohya.r32": Counts(0, 20),
    "wan2.2-t2v-a14b.peft-plain.r16": Counts(0, 20),
    "wan2.2-t2v-a14b.x2v-distill-1217.r64": Counts(20, 0),
    "wan2.2-ti2v-5b.fastwan.r128": Counts(52, 13),
    "wan2.2-ti2v-5b.turbo.r64": Counts(52, 13),
}
# names that the engine does not know: Wan's own without a prefix, kohya's, diffusers' without a prefix
UNREAD = {
    "wan2.2-t2v-a14b.diffsynth-default.r32",
    "wan2.2-t2v-a14b.musubi-kohya.r32",
    "wan2.2-t2v-a14b.peft-plain.r16",
}
# its alpha is in the file's metadata, which the engine does not read
ALPHA_UNREAD = "wan2.2-t2v-a14b.diffusers-peft.r16"
# tensors of which the engine never fuses a delta, whatever the file says
LEFT = (
    r"patch_embedding\.(weight|bias)",
    r"(blocks\.\d+\.)?scale_shift_table",
    r"blocks\.\d+\.attn[12]\.norm_(q|k|added_k)\.weight",
    r"blocks\.\d+\.norm2\.(weight|bias)",
    r"condition_embedder\.image_embedder\.norm[12]\.(weight|bias)",
)

EXPERTS = ("transformer", "transformer_2")
# the image pipelines want an image encoder, or a second expert; the transformer is the same
TRANSFORMER_ONLY: dict[str, Any] = {"model_class_name": "WanPipeline"}


@dataclass(frozen=True)
class Case:
    name: str
    found: Comparison

    @property
    def left(self) -> set[str]:
        """Deltas that the engine left out."""
        return self.found.deltas.keys() - self.found.fused


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda name: write_wan(tmp_path_factory.mktemp(name) / "base", tiny(name)))


@pytest.fixture(scope="module", params=LISTED)
def case(
    request: pytest.FixtureRequest, base: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Case:
    name, folder = request.param, tmp_path_factory.mktemp("case")
    lora = tiny_lora(folder, name)
    base_folder = base(listings.index()[name].base)
    return Case(name, compare(base_folder, lora, folder / "out", lora_deltas(lora, name), **TRANSFORMER_ONLY))


def tiny_lora(folder: Path, name: str) -> Path:
    is_folder = listings.index()[name].peft_config is not None
    return listings.tiny_lora(folder / (name if is_folder else f"{name}.safetensors"), name)


def lora_deltas(lora: Path, name: str) -> Tensors:
    """The file's deltas in float64 by diffusers' names."""
    entry = listings.index()[name]
    file = lora / "adapter_model.safetensors" if lora.is_dir() else lora
    native = [spec.name for spec in base_tensors(tiny(entry.base))]
    deltas = definition.deltas(load_file(file), entry.alpha, native)
    return in_diffusers_names(deltas) if entry.layout == "native" else deltas


def never_fused(name: str, deltas: Tensors) -> bool:
    """Whether the engine leaves this delta: it has no place for it, or takes it only beside a pair."""
    if name == "condition_embedder.time_proj.bias":
        return "condition_embedder.time_proj.weight" not in deltas
    return any(re.fullmatch(pattern, name) for pattern in LEFT)


def test_every_listing_is_fused() -> None:
    assert LISTED.keys() == listings.wan().keys()


def test_counts(case: Case) -> None:
    assert case.found.fused <= case.found.deltas.keys()
    assert Counts(len(case.found.fused), len(case.left)) == LISTED[case.name]


def test_ours_are_exact_and_rounded_once(case: Case) -> None:
    case.found.assert_ours()


def test_what_the_engine_fuses_agrees(case: Case) -> None:
    """Within its two roundings; at the strength that the file means, if the engine reads it."""
    entry = listings.index()[case.name]
    strength = 1.0
    if case.name == ALPHA_UNREAD:
        assert entry.alpha is not None
        strength = max(1, entry.rank // 16) / entry.alpha
        assert strength < 0.2
    case.found.assert_theirs(case.found.fused, strength)


def test_what_the_engine_leaves_is_known(case: Case) -> None:
    deltas = case.found.deltas
    left = deltas.keys() if case.name in UNREAD else {name for name in deltas if never_fused(name, deltas)}
    assert case.left == left


def test_the_engine_takes_every_file_for_fused(case: Case) -> None:
    assert case.found.says_fused


def test_one_rounding_is_nearer_than_two(case: Case) -> None:
    ours, theirs = (
        torch.cat([case.found.error(made, name).flatten() for name in case.found.deltas])
        for made in (case.found.ours, case.found.theirs)
    )
    assert ours.square().mean() < theirs.square().mean()


def test_an_image_branch_has_no_place_in_wan22(base: Callable[[str], Path], tmp_path: Path) -> None:
    """The Wan2.1 file that is published for Wan2.2-I2V too: neither fuses what the base does not have."""
    name = "wan2.2-i2v-a14b.x2v-distill-1022.low.r64"
    folder = base("wan2.2-i2v-a14b")
    lora = tiny_lora(tmp_path, name)
    deltas = lora_deltas(lora, name)
    homeless = {n for n in deltas if "image_embedder" in n or ".add_" in n or ".norm_added_k." in n}
    kept = {name: delta for name, delta in deltas.items() if name not in homeless}
    found = compare(folder, lora, tmp_path / "out", kept, **TRANSFORMER_ONLY)
    assert (len(found.fused), len(kept.keys() - found.fused), len(homeless)) == (52, 14, 18)
    found.assert_ours()
    found.assert_theirs(found.fused)


def test_each_expert_gets_its_own(tmp_path: Path) -> None:
    """The engine takes a list by position, transformer first."""
    names = ("wan2.2-i2v-a14b.x2v-distill-1022.high.r64", "wan2.2-i2v-a14b.kijai-distill-260412.low.r64")
    base = write_wan(tmp_path / "base", tiny("wan2.2-i2v-a14b"), experts=True)
    loras = {c: tiny_lora(tmp_path, name) for c, name in zip(EXPERTS, names, strict=True)}
    pipeline = engine.load(base, loras=tuple(loras.values()))
    out = merge(base, [",".join(map(str, loras.values()))], tmp_path / "out").out
    for (component, file), name in zip(loras.items(), names, strict=True):
        found = compared(component, base, out, pipeline, lora_deltas(file, name), file)
        found.assert_ours()
        assert len(found.fused) == 52
        found.assert_theirs(found.fused)


def test_the_engine_does_not_read_a_folder(base: Callable[[str], Path], tmp_path: Path) -> None:
    lora = tiny_lora(tmp_path, "wan2.2-t2v-a14b.peft-plain.r16")
    with pytest.raises(ValueError, match="weights_name is required"):
        engine.load(base("wan2.2-t2v-a14b"), loras=(lora,))
