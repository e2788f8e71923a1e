"""LTX-Video: both spellings of both sizes, and the distilled LoRA.

The rows are held against diffusers' converter in ``test_differences``. Of the native layout there is no list:
its names are made of the published diffusers list by the rows, and taken back by diffusers' converter here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import diffusers
import pytest
import torch
from diffusers.loaders import lora_conversion_utils, single_file_utils

from fuselora.families.ltx_video import LTX_VIDEO
from fuselora.families.recognition import family_of
from fuselora.pipeline import plan
from fuselora.synth import Spec
from tests import listings

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

classes: Any = diffusers
converters: Any = single_file_utils
lora_converters: Any = lora_conversion_utils
Shapes = dict[str, tuple[int, ...]]
# those of a block that the distilled LoRA has, as its trainer's default
LAYERS = [
    f"{attention}.{layer}"
    for attention in ("attn1", "attn2")
    for layer in ("to_q", "to_k", "to_v", "to_out.0")
] + ["ff.net.0.proj", "ff.net.2"]


def listed() -> Shapes:
    return {spec.name: spec.shape for spec in listings.base("ltx-video-13b", "diffusers")}


def native(shapes: Shapes) -> Shapes:
    return {found.name: found.shape for found in LTX_VIDEO.spellings(shapes, "native")}


def test_diffusers_takes_the_native_names_back() -> None:
    ours = listed()
    theirs = native(ours)
    assert "patchify_proj.weight" in theirs
    assert "transformer_blocks.47.attn2.k_norm.weight" in theirs
    with torch.device("meta"):
        tensors = {f"model.diffusion_model.{name}": torch.empty(shape) for name, shape in theirs.items()}
    converted = converters.convert_ltx_transformer_checkpoint_to_diffusers(tensors)
    assert {name: tuple(tensor.shape) for name, tensor in converted.items()} == ours
    assert LTX_VIDEO.canonical_shapes(theirs, "native") == ours
    assert LTX_VIDEO.layout_of(theirs) == "native"


@pytest.mark.parametrize(
    ("config", "models"),
    [
        ({}, ("LTX-Video-2B",)),
        (
            {"num_layers": 48, "attention_head_dim": 128, "cross_attention_dim": 4096},
            ("LTX-Video-13B",),
        ),
        ({"num_layers": 27}, ()),
    ],
)
def test_the_models_of_the_class(config: Mapping[str, Any], models: tuple[str, ...]) -> None:
    with torch.device("meta"):
        model = classes.LTXVideoTransformer3DModel(**config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for spelled in (shapes, native(shapes)):
        assert family_of(spelled) is LTX_VIDEO
        assert LTX_VIDEO.share(spelled) == 1.0
        assert LTX_VIDEO.models_of(spelled) == models


def a_distilled_lora(shapes: Shapes) -> list[Spec]:
    """ltxv-13b-0.9.7-distilled-lora128: the linear layers of each block, and some outside, natively named."""
    layers = [f"transformer_blocks.{n}.{layer}" for n in range(48) for layer in LAYERS]
    specs = []
    for module in (
        *layers,
        "patchify_proj",
        "adaln_single.linear",
        "caption_projection.linear_1",
        "proj_out",
    ):
        out, into = shapes[f"{module}.weight"]
        for part, shape in (("A", (128, into)), ("B", (out, 128))):
            specs.append(Spec(f"diffusion_model.{module}.lora_{part}.weight", "BF16", shape))
    return specs


@pytest.mark.parametrize("layout", ["diffusers", "native"])
def test_the_distilled_lora_fits_either_spelling(tmp_path: Path, layout: str) -> None:
    ours = listed()
    specs = a_distilled_lora(native(ours))
    shapes = ours if layout == "diffusers" else native(ours)
    prefix = "" if layout == "diffusers" else "model.diffusion_model."
    base = [Spec(prefix + name, "BF16", shape) for name, shape in shapes.items()]
    base_path = listings.sparse(tmp_path / "base.safetensors", base)
    path = listings.sparse(tmp_path / "ltxv-13b-0.9.7-distilled-lora128.safetensors", specs)
    (matching,) = plan(base_path, [path]).matchings
    assert sum(len(hit.tensors) for hit in matching.hits) == len(specs)
    keys = {hit.base_key.removeprefix(prefix) for hit in matching.hits}
    assert ("proj_in.weight" if layout == "diffusers" else "patchify_proj.weight") in keys


def test_diffusers_lora_converter_leaves_the_native_names() -> None:
    """It changes the prefix alone: what is natively called otherwise has no home in its model."""
    with torch.device("meta"):
        tensors = {spec.name: torch.empty(spec.shape) for spec in a_distilled_lora(native(listed()))}
    converted = lora_converters._convert_non_diffusers_ltxv_lora_to_diffusers(tensors)
    modules = {key.removeprefix("transformer.").partition(".lora_")[0] for key in converted}
    homeless = {module for module in modules if f"{module}.weight" not in listed()}
    assert homeless == {"patchify_proj", "adaln_single.linear"}


def test_what_is_published_of_its_lora() -> None:
    row = LTX_VIDEO.few_step_named("ltxv-13b-0.9.7-distilled-lora128.safetensors")
    assert row is not None
    assert (row.num_inference_steps, row.guidance_scale) == (8, 1.0)
