"""Base tensors against the published lists, and against the model class where none is published."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from fuselora import synth
from fuselora.families.wan import WAN
from fuselora.synth import SIZES, base_tensors, tiny
from tests import listings
from tests.synth.model import model_class
from tests.synth.names import LISTED, T2V

if TYPE_CHECKING:
    from fuselora.families import Layout


@pytest.mark.parametrize("layout", ["native", "diffusers"])
@pytest.mark.parametrize("name", LISTED)
def test_published_sizes_are_the_published_lists(name: str, layout: Layout) -> None:
    assert listings.rows(base_tensors(SIZES[name], layout)) == listings.rows(listings.base(name, layout))


@pytest.mark.parametrize("name", ["wan2.1-vace-14b", "wan2.1-vace-1.3b"])
def test_vace_is_what_diffusers_builds(name: str) -> None:
    with torch.device("meta"):
        model = model_class(name).from_config(synth.config(SIZES[name]))
    built = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    assert {spec.name: spec.shape for spec in base_tensors(SIZES[name], "diffusers")} == built


def test_mixed_keeps_what_the_model_class_keeps() -> None:
    mixed = base_tensors(tiny(T2V), "diffusers", dtype="BF16", mixed=True)
    kept = {spec.name for spec in mixed if spec.dtype == "F32"}
    assert kept == {spec.name for spec in mixed if WAN.keeps_float32(spec.name, "diffusers")}
    assert {"scale_shift_table", "blocks.1.norm2.bias"} < kept
    assert "blocks.0.attn1.norm_q.weight" not in kept
    assert {spec.dtype for spec in base_tensors(tiny(T2V), dtype="BF16")} == {"BF16"}
