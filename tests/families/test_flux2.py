"""FLUX.2: its published lists, its models, and merges of LoRAs in every spelling, in both layouts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from fuselora.describe_lora import target_of
from fuselora.families.flux2 import FLUX2
from fuselora.lora.adapter import open_adapter
from fuselora.pipeline import plan
from fuselora.resolve import LoraLocation
from fuselora.specs import LoraSpec
from tests import listings, small
from tests.families.flux_bases import (
    DIM,
    FLUX2_BASE,
    LAYOUTS,
    SPELLINGS,
    assert_all_land,
    assert_runs_as_another,
    assert_verifies,
    classes,
    in_each_layout,
    largest_difference,
    merged,
    write_lora,
)
from tests.inputs import open_lora, pair

if TYPE_CHECKING:
    from pathlib import Path

    from fuselora.families import Layout

KLEIN = {
    "9B": {"num_attention_heads": 32, "num_layers": 8, "num_single_layers": 24, "joint_attention_dim": 12288},
    "4B": {"num_attention_heads": 24, "num_layers": 5, "num_single_layers": 20, "joint_attention_dim": 7680},
}


def shapes(layout: Layout) -> dict[str, tuple[int, ...]]:
    return {spec.name: spec.shape for spec in listings.base("flux.2-dev", layout)}


def klein(size: str) -> dict[str, tuple[int, ...]]:
    """From diffusers' class."""
    with torch.device("meta"):
        model = classes.Flux2Transformer2DModel(**KLEIN[size], guidance_embeds=False)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


# Names and shapes


def test_the_published_lists_are_one_model() -> None:
    assert FLUX2.canonical_shapes(shapes("native"), "native") == shapes("diffusers")
    spelled = {found.name: found.shape for found in FLUX2.spellings(shapes("diffusers"), "native")}
    assert spelled == shapes("native")


@pytest.mark.parametrize("layout", [*LAYOUTS, "sformer"])
def test_every_name_is_known(layout: Layout) -> None:
    names = [found.name for found in FLUX2.spellings(shapes("diffusers"), layout)]
    assert FLUX2.share(names) == 1


def test_models() -> None:
    assert FLUX2.models_of(shapes("native")) == FLUX2.models_of(shapes("diffusers")) == ("FLUX.2-dev",)
    for size in KLEIN:
        assert FLUX2.models_of(klein(size)) == (f"FLUX.2-klein-{size}", f"FLUX.2-klein-base-{size}")


@pytest.mark.parametrize("size", sorted(KLEIN))
def test_a_lora_of_all_layers_names_its_models(size: str) -> None:
    found = FLUX2.kin_of_deltas(klein(size))
    assert [kin.models[0] for kin in found] == [f"FLUX.2-klein-{size}"]


def test_guidance_is_dev_s() -> None:
    deltas = {"time_guidance_embed.guidance_embedder.linear_2.weight": (6144, 6144)}
    assert [kin.models for kin in FLUX2.kin_of_deltas(deltas)] == [("FLUX.2-dev",)]


def test_a_feed_forward_tells_klein_from_flux_1(tmp_path: Path) -> None:
    """Both are 3072 wide and have layers of one native name."""
    specs = [
        *pair("diffusion_model.double_blocks.0.img_mlp.0", 18432, 3072),
        *pair("diffusion_model.double_blocks.0.img_attn.proj", 3072, 3072),
    ]
    found = target_of(open_lora(tmp_path / "klein.safetensors", specs))
    assert found.family == "flux.2"
    assert found.models == ("FLUX.2-klein-4B", "FLUX.2-klein-base-4B")
    specs[:2] = pair("diffusion_model.double_blocks.0.img_mlp.0", 12288, 3072)
    found = target_of(open_lora(tmp_path / "flux1.safetensors", specs))
    assert found.family == "flux.1"
    assert "FLUX.1-dev" in found.models


def test_the_turbo_lora_s_sampling() -> None:
    row = FLUX2.few_step_named("flux.2-turbo-lora.safetensors")
    assert row is not None
    assert row == FLUX2.few_step_named("fal/FLUX.2-dev-Turbo")
    assert (row.num_inference_steps, row.guidance_scale) == (8, 2.5)
    assert "0.6509" in (row.remark or "")


# Merges


@in_each_layout
@pytest.mark.parametrize("spelling", sorted(SPELLINGS))
def test_every_linear_layer_in_every_spelling(tmp_path: Path, layout: Layout, spelling: str) -> None:
    lora = write_lora(tmp_path / "lora.safetensors", FLUX2_BASE, spelling)
    assert len(lora.deltas) == (31 if lora.layout == "native" else 39)
    assert_all_land(tmp_path, FLUX2_BASE, layout, lora)


@in_each_layout
def test_shortened_names_beside_native_ones(tmp_path: Path, layout: Layout) -> None:
    """``transformer_blocks`` without its beginning, anchored: ``single_transformer_blocks`` is another."""
    native, diffused = "single_blocks.0.linear1", "single_transformer_blocks.1.attn.to_out"
    modules = {
        "diffusion_model.sformer_blocks.0.attn.to_k": ("transformer_blocks.0.attn.to_k", DIM, DIM),
        "diffusion_model.sformer_blocks.1.ff.linear_out": (
            "transformer_blocks.1.ff.linear_out",
            DIM,
            3 * DIM,
        ),
        f"diffusion_model.{native}": ("single_transformer_blocks.0.attn.to_qkv_mlp_proj", 9 * DIM, DIM),
        f"diffusion_model.{diffused}": (diffused, DIM, 4 * DIM),
        "diffusion_model.guidance_in.in_layer": ("time_guidance_embed.guidance_embedder.linear_1", DIM, 16),
    }
    lora: dict[str, torch.Tensor] = {}
    wanted = {name: tensor.double() for name, tensor in FLUX2_BASE.tensors().items()}
    for seed, (module, (key, out, into)) in enumerate(modules.items()):
        down, up = small.noise(2, into, seed=seed), small.noise(out, 2, seed=seed + 10)
        lora |= {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up}
        wanted[f"{key}.weight"] += up.double() @ down.double()
    save_file(lora, tmp_path / "lora.safetensors")
    found = merged(tmp_path, FLUX2_BASE, layout, tmp_path / "lora.safetensors")
    assert largest_difference(found, FLUX2_BASE.native(wanted)) < 2e-6


@in_each_layout
def test_the_published_turbo_lora_lands_alike_in_both_spellings(tmp_path: Path, layout: Layout) -> None:
    base = listings.sparse(tmp_path / "base.safetensors", listings.base("flux.2-dev", layout))
    found = []
    for name in ("flux.2-dev.fal-turbo.r128", "flux.2-dev.fal-turbo-sformer.r128"):
        lora = listings.sparse(tmp_path / f"{name}.safetensors", listings.lora(name))
        (matching,) = plan(base, [lora]).matchings
        assert not matching.skipped
        found.append({hit.base_key for hit in matching.hits})
    assert found[0] == found[1]


# What loads


def test_the_merged_model_runs_and_is_another(tmp_path: Path) -> None:
    assert_runs_as_another(tmp_path, FLUX2_BASE, "comfyui")


@in_each_layout
def test_the_merged_base_verifies(tmp_path: Path, layout: Layout) -> None:
    assert_verifies(tmp_path, FLUX2_BASE, layout, "kohya in diffusers' names")


def test_a_lora_that_mixes_the_names_of_two_layouts_is_described_whole(tmp_path: Path) -> None:
    """fal's copy for ComfyUI: double blocks in a spelling of their own, single ones in native names."""
    for name in ("flux.2-dev.fal-turbo.r128", "flux.2-dev.fal-turbo-sformer.r128"):
        path = listings.sparse(tmp_path / f"{name}.safetensors", listings.lora(name))
        found = target_of(open_adapter(LoraLocation(LoraSpec(str(path)), path, path.name, None)))
        assert (found.family, found.models) == ("flux.2", ("FLUX.2-dev",))
        assert found.blocks == tuple(range(8))
