"""Stable Diffusion 1 and 2: told from each other and from SDXL, whose names they have, and single files.

There is no list: the tensors are those of diffusers' class at true size, by default Stable Diffusion 1's.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import diffusers
import pytest
import torch
from diffusers.loaders import lora_conversion_utils

from fuselora.describe import describe
from fuselora.description import CheckpointDescription, LoraDescription
from fuselora.families.recognition import family_of
from fuselora.families.sd import SD
from fuselora.families.sdxl import SDXL
from fuselora.pipeline import plan
from fuselora.synth import Spec
from tests import listings, small

if TYPE_CHECKING:
    from pathlib import Path

converters: Any = lora_conversion_utils
unet: Any = diffusers.UNet2DConditionModel
Shapes = dict[str, tuple[int, ...]]


def model(**config: Any) -> Shapes:
    with torch.device("meta"):
        tensors = unet(**{"cross_attention_dim": 768, **config}).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


TWO = {"cross_attention_dim": 1024, "attention_head_dim": (5, 10, 20, 20), "use_linear_projection": True}
MODELS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "1": ({}, ("SD-1.4", "SD-1.5")),
    "1 for inpainting": ({"in_channels": 9}, ("SD-1.5-inpainting",)),
    "2": (TWO, ("SD-2.0", "SD-2.1")),
    "2 for inpainting": ({**TWO, "in_channels": 9}, ("SD-2.0-inpainting",)),
}


@pytest.mark.parametrize("layout", ["diffusers", "sgm"])
@pytest.mark.parametrize("name", MODELS)
def test_a_base_is_told_from_its_kin(tmp_path: Path, name: str, layout: str) -> None:
    config, models = MODELS[name]
    shapes = model(**config)
    assert len(shapes) == 686
    assert family_of(shapes) is SD
    assert not SDXL.models_of(shapes)
    spelled = [Spec(found.name, "F16", found.shape) for found in SD.spellings(shapes, layout)]
    found = describe(listings.sparse(tmp_path / "x.safetensors", spelled))
    assert isinstance(found, CheckpointDescription)
    assert (found.family, found.layout, found.models) == ("sd", layout, models)


def test_sdxl_is_none_of_them() -> None:
    shapes = {spec.name: spec.shape for spec in listings.base("sdxl-base-unet", "diffusers")}
    assert family_of(shapes) is SDXL
    assert not SD.models_of(shapes)


@pytest.mark.parametrize(
    ("text", "family", "models"),
    [
        (768, "sd", ("SD-1.4", "SD-1.5", "SD-1.5-inpainting")),
        (1024, "sd", ("SD-2.0", "SD-2.1", "SD-2.0-inpainting")),
        (2048, "sdxl", ("SDXL-base-1.0", "SDXL-inpainting-0.1")),
    ],
)
def test_a_lora_s_text_width_says_what_it_is_for(
    tmp_path: Path, text: int, family: str, models: tuple[str, ...]
) -> None:
    module = "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn2_to_k"
    lora = small.pair(module, torch.ones(640, 2), torch.ones(2, text))
    found = describe(small.write(tmp_path / "x.safetensors", lora))
    assert isinstance(found, LoraDescription)
    assert (found.target.family, found.target.models) == (family, models)


def test_sgm_names_on_a_diffusers_base_where_diffusers_gives_up(tmp_path: Path) -> None:
    """It takes block 10 for block 1 as well."""
    shapes = model()
    theirs = {found.name: found for found in SD.spellings(shapes, "sgm") if len(found.shape) > 1}
    lora: dict[str, torch.Tensor] = {}
    for name, found in theirs.items():
        module = f"lora_unet_{name.removesuffix('.weight').replace('.', '_')}"
        up = torch.zeros(found.shape[0], 1, *[1] * (len(found.shape) - 2))
        lora |= small.pair(module, up, torch.zeros(1, *found.shape[1:]))
    with pytest.raises(KeyError, match="input_blocks_10_0"):
        converters._maybe_map_sgm_blocks_to_diffusers(dict(lora), SimpleNamespace(layers_per_block=2))
    specs = [Spec(name, "F32", shape) for name, shape in shapes.items()]
    base = listings.sparse(tmp_path / "base.safetensors", specs)
    (matching,) = plan(base, [small.write(tmp_path / "x.safetensors", lora)]).matchings
    assert {hit.base_key for hit in matching.hits} == {
        name for name, shape in shapes.items() if len(shape) > 1
    }


@pytest.mark.parametrize(
    ("name", "guidance"),
    [
        ("Hyper-SD15-8steps-lora", 0.0),
        ("Hyper-SD15-8steps-CFG-lora", None),
        ("lcm-lora-sdv1-5", None),
    ],
)
def test_guidance_as_published(name: str, guidance: float | None) -> None:
    row = SD.few_step_named(name)
    assert row is not None
    assert row.guidance_scale == guidance
    assert (row.remark is not None and "guidance scale" in row.remark) == (guidance is None)
