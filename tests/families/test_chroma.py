"""Chroma: its names, what it lacks of FLUX.1, and merges of LoRAs in every spelling, in both layouts.

There is no published list: that of diffusers' names is its class's, that of native names the one by hand in
``flux_bases``, which diffusers' converter takes back to the class's (``test_differences``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from fuselora.errors import Refused
from fuselora.families.chroma import CHROMA
from fuselora.families.flux1 import FLUX1
from fuselora.families.recognition import family_of
from fuselora.pipeline import merge, plan
from fuselora.synth import Spec
from tests import listings
from tests.families.flux_bases import (
    CHROMA_BASE,
    FLUX1_BASE,
    SPELLINGS,
    assert_all_land,
    assert_runs_as_another,
    assert_verifies,
    classes,
    in_each_layout,
    largest_difference,
    summed,
    write_lora,
)

if TYPE_CHECKING:
    from pathlib import Path

    from fuselora.families import Layout

MODELS = ("Chroma1-Base", "Chroma1-HD", "Chroma1-Flash")


def shapes(layout: Layout) -> dict[str, tuple[int, ...]]:
    """At true size."""
    with torch.device("meta"):
        tensors = classes.ChromaTransformer2DModel().state_dict()
    if layout == "native":
        tensors = CHROMA_BASE.native(tensors)
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


# Names and shapes


def test_the_layouts_are_one_model() -> None:
    native, ours = shapes("native"), shapes("diffusers")
    assert (len(native), len(ours)) == (643, 1023)
    assert CHROMA.canonical_shapes(native, "native") == ours
    assert {found.name: found.shape for found in CHROMA.spellings(ours, "native")} == native


@in_each_layout
def test_it_is_no_flux(layout: Layout) -> None:
    base = shapes(layout)
    assert CHROMA.share(base) == 1
    assert CHROMA.layout_of(base) == layout
    assert family_of(base) is CHROMA
    assert CHROMA.models_of(base) == MODELS
    assert FLUX1.models_of(base) == ()
    flux = {spec.name: spec.shape for spec in listings.base("flux.1-dev", layout)}
    assert family_of(flux) is FLUX1
    assert CHROMA.models_of(flux) == ()


def test_a_lora_of_what_both_have_is_for_both_and_one_with_modulation_is_flux_s() -> None:
    deltas = {"transformer_blocks.0.attn.to_q.weight": (3072, 3072)}
    assert [kin.models for kin in CHROMA.kin_of_deltas(deltas)] == [MODELS]
    assert FLUX1.kin_of_deltas(deltas)
    for name in ("transformer_blocks.0.norm1.linear.weight", "norm_out.linear.weight"):
        assert not CHROMA.kin_of_deltas({**deltas, name: (1, 3072)})
        assert FLUX1.kin_of_deltas({**deltas, name: (1, 3072)})


# Merges


@in_each_layout
@pytest.mark.parametrize("spelling", sorted(SPELLINGS))
def test_every_linear_layer_in_every_spelling(tmp_path: Path, layout: Layout, spelling: str) -> None:
    lora = write_lora(tmp_path / "lora.safetensors", CHROMA_BASE, spelling)
    assert len(lora.deltas) == (29 if lora.layout == "native" else 43)
    assert_all_land(tmp_path, CHROMA_BASE, layout, lora)


@in_each_layout
@pytest.mark.parametrize("spelling", ["native", "kohya", "diffusers", "kohya in diffusers' names"])
def test_modulation_of_flux_has_no_home_and_is_said_to_be_lost(
    tmp_path: Path, layout: Layout, spelling: str
) -> None:
    lora = write_lora(tmp_path / "lora.safetensors", FLUX1_BASE, spelling)
    base = CHROMA_BASE.write(tmp_path, layout)
    with pytest.raises(Refused, match="Chroma computes in its distilled_guidance_layer") as caught:
        merge(base, [lora.path], tmp_path / "out")
    # 6 of blocks, the last layer's and 6 embedders
    assert len(caught.value.faults) == 13
    out = merge(base, [lora.path], tmp_path / "out", allow_unmatched=["*"]).out
    deltas = lora.deltas.items()
    known = CHROMA_BASE.tensors() if lora.layout == "diffusers" else CHROMA_BASE.native(CHROMA_BASE.tensors())
    rest = {name: delta for name, delta in deltas if name in known}
    assert len(deltas) - len(rest) == 13
    wanted = summed(CHROMA_BASE, type(lora)(lora.path, rest, lora.layout))
    assert largest_difference(CHROMA_BASE.read_native(out, layout), wanted) < 1e-6


@in_each_layout
def test_a_published_flux_lora_lacks_its_modulation_here(tmp_path: Path, layout: Layout) -> None:
    specs = [Spec(name, "BF16", shape) for name, shape in shapes(layout).items()]
    base = listings.sparse(tmp_path / "base.safetensors", specs)
    lora = listings.sparse(tmp_path / "lora.safetensors", listings.lora("flux.1-dev.kohya.r16"))
    (matching,) = plan(base, [lora], allow_unmatched=["*_mod_lin", "*_modulation_lin"]).matchings
    assert len(matching.skipped) == 19 * 2 + 38
    assert len({hit.module.name for hit in matching.hits}) == 19 * 8 + 38 * 2


# What loads


def test_the_merged_model_runs_and_is_another(tmp_path: Path) -> None:
    assert_runs_as_another(tmp_path, CHROMA_BASE, "comfyui")


@in_each_layout
def test_the_merged_base_verifies(tmp_path: Path, layout: Layout) -> None:
    assert_verifies(tmp_path, CHROMA_BASE, layout, "diffusers")
