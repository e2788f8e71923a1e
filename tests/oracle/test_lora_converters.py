"""What diffusers' LoRA converters make of published grammars beside our matches, and where they are wrong.

Its converters of checkpoints are the oracle (``tests/families/test_differences``): where the two disagree,
ours follows the checkpoint's. Compared are products of the factors, for one block, at a small rank.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from diffusers.loaders import lora_conversion_utils
from safetensors.torch import load_file

from fuselora.pipeline import plan
from fuselora.synth import Spec
from tests import listings, small
from tests.families.models import MODELS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

converters: Any = lora_conversion_utils
RANK, COLUMNS = 6, 4
BLOCK = re.compile(r"(?:blocks|layers|refiner)[._]([0-9]+)[._]")
UP, DOWN = re.compile(r"\.(?:lora_up|lora_B|up)\b"), re.compile(r"\.(?:lora_down|lora_A|down)\b")
Products = dict[str, torch.Tensor]


def published(name: str) -> dict[str, torch.Tensor]:
    """The tensors of a published LoRA for its first blocks, at rank 2, with values."""
    found = {}
    for seed, spec in enumerate(listings.lora(name)):
        number = BLOCK.search(spec.name)
        if number and int(number[1]) > 0:
            continue
        if not spec.shape:
            found[spec.name] = torch.tensor(1.0)
        elif UP.search(spec.name):
            found[spec.name] = small.noise(spec.shape[0], RANK, *spec.shape[2:], seed=seed)
        elif DOWN.search(spec.name):
            found[spec.name] = small.noise(RANK, *spec.shape[1:], seed=seed)
    return found


def pair(
    module: str, out: int, into: int, seed: int, style: tuple[str, str] = ("lora_A", "lora_B")
) -> Products:
    down, up = style
    return {
        f"{module}.{down}.weight": small.noise(RANK, into, seed=seed),
        f"{module}.{up}.weight": small.noise(out, RANK, seed=seed + 1),
    }


def ours(folder: Path, model: str, lora: Mapping[str, torch.Tensor]) -> Products:
    """What a plan adds to each tensor of a diffusers base, of the first columns."""
    base = listings.sparse(
        folder / "base.safetensors",
        [Spec(name, "F32", shape) for name, shape in MODELS[model].shapes().items()],
    )
    path = small.write(folder / "lora.safetensors", dict(lora))
    tensors = load_file(path)
    (matching,) = plan(base, [path]).matchings
    found: Products = {}
    for hit in matching.hits:
        up, down = (tensors[hit.parts[part].name].double().flatten(1) for part in ("up", "down"))
        product = hit.scale(1.0) * up @ down[:, :COLUMNS]
        rows = hit.rows or ((0, 0, len(product)),)
        there = torch.cat([product[other : other + n] for _, other, n in sorted(rows)])
        found[hit.base_key] = found.get(hit.base_key, torch.zeros(())) + there
    return found


def theirs(converted: Mapping[str, torch.Tensor]) -> Products:
    """The products of what a converter gives."""
    found = {}
    for key, down in converted.items():
        if DOWN.search(key):
            up = converted[key.replace("lora_A", "lora_B")].double().flatten(1)
            name = key.removeprefix("transformer.").partition(".lora_A")[0]
            found[f"{name}.weight"] = up @ down.double().flatten(1)[:, :COLUMNS]
    return found


def differing(mine: Products, other: Products) -> set[str]:
    """Tensors of both that are not the same."""
    return {
        name
        for name in mine.keys() & other.keys()
        if mine[name].shape != other[name].shape
        or not torch.allclose(mine[name], other[name], rtol=1e-4, atol=1e-5)
    }


AGREE = {
    "flux.1-dev.kohya.r16": ("flux.1", "_convert_kohya_flux_lora_to_diffusers"),
    "flux.1-dev.xlabs.r16": ("flux.1", "_convert_xlabs_flux_lora_to_diffusers"),
    "ltx-2-19b.distilled-384": ("ltx-2", "_convert_non_diffusers_ltx2_lora_to_diffusers"),
    "z-image.distill-patch-comfy.r32": ("z-image", "_convert_non_diffusers_z_image_lora_to_diffusers"),
}


@pytest.mark.parametrize("name", sorted(AGREE))
def test_where_diffusers_applies_a_published_lora_we_add_the_same(tmp_path: Path, name: str) -> None:
    model, converter = AGREE[name]
    lora = published(name)
    mine = ours(tmp_path, model, lora)
    other = theirs(getattr(converters, converter)({key: tensor.clone() for key, tensor in lora.items()}))
    other = {key: product for key, product in other.items() if "text_proj_in" not in key}
    assert len(other) >= 8
    assert other.keys() <= mine.keys()
    assert differing(mine, other) == set()


def test_flux_2_norm_out_is_not_swapped_by_diffusers(tmp_path: Path) -> None:
    module = "diffusion_model.final_layer.adaLN_modulation.1"
    lora = {**pair(module, 12288, 6144, 1), **pair("diffusion_model.img_in", 6144, 128, 3)}
    mine = ours(tmp_path, "flux.2", lora)
    other = theirs(converters._convert_non_diffusers_flux2_lora_to_diffusers(dict(lora)))
    assert mine.keys() == other.keys() == {"norm_out.linear.weight", "x_embedder.weight"}
    assert differing(mine, other) == {"norm_out.linear.weight"}
    shift, scale = other["norm_out.linear.weight"].chunk(2)
    assert torch.allclose(mine["norm_out.linear.weight"], torch.cat((scale, shift)))


def test_hunyuan_video_norm_out_and_token_refiner_come_out_wrong_in_diffusers(tmp_path: Path) -> None:
    refiner = "diffusion_model.txt_in.individual_token_refiner.blocks.0.self_attn_qkv"
    norm = "diffusion_model.final_layer.adaLN_modulation.1"
    image = "diffusion_model.double_blocks.0.img_attn_qkv"
    lora = {**pair(refiner, 9216, 3072, 1), **pair(norm, 6144, 3072, 3), **pair(image, 9216, 3072, 5)}
    mine = ours(tmp_path, "hunyuan-video", lora)
    converted = converters._convert_hunyuan_video_lora_to_diffusers({k: t.clone() for k, t in lora.items()})
    attention = {f"transformer_blocks.0.attn.to_{part}.weight" for part in "qkv"}
    blocks = "context_embedder.token_refiner.refiner_blocks.0.attn"
    assert mine.keys() == {*attention, "norm_out.linear.weight", *(f"{blocks}.to_{p}.weight" for p in "qkv")}
    shapes = {key.removeprefix("transformer."): tuple(tensor.shape) for key, tensor in converted.items()}
    # its down factor is cut in three along the rank
    assert shapes[f"{blocks}.to_q.lora_A.weight"][0] != RANK
    whole = {key: tensor for key, tensor in converted.items() if "refiner" not in key}
    assert differing(mine, theirs(whole)) == {"norm_out.linear.weight"}


def test_flux_1_kohya_embedders_lose_the_prefix_that_diffusers_loads_by(tmp_path: Path) -> None:
    style = ("lora_down", "lora_up")
    lora = {
        **pair("lora_unet_img_in", 3072, 64, 1, style),
        **pair("lora_unet_double_blocks_0_img_attn_proj", 3072, 3072, 3, style),
        **pair("lora_unet_final_layer_adaLN_modulation_1", 6144, 3072, 5, style),
    }
    mine = ours(tmp_path, "flux.1", lora)
    converted = converters._convert_kohya_flux_lora_to_diffusers({k: t.clone() for k, t in lora.items()})
    loaded = {key: tensor for key, tensor in converted.items() if key.startswith("transformer.")}
    assert theirs(loaded).keys() == {"transformer_blocks.0.attn.to_out.0.weight"}
    assert mine.keys() == {*theirs(loaded), "x_embedder.weight", "norm_out.linear.weight"}
    assert differing(mine, theirs(converted)) == set()


def test_z_image_fused_attention_passes_diffusers_unsplit(tmp_path: Path) -> None:
    lora = pair("diffusion_model.layers.0.attention.qkv", 11520, 3840, 1)
    converted = converters._convert_non_diffusers_z_image_lora_to_diffusers(dict(lora))
    assert all(".attention.qkv." in key for key in converted)
    mine = ours(tmp_path, "z-image", lora)
    assert mine.keys() == {f"layers.0.attention.to_{part}.weight" for part in "qkv"}
