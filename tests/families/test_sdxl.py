"""SDXL: UNet and text encoders together, single files, and published LoRAs on SGM's names.

There is no list of a single file: its tensors are those of the diffusers list, by the rows that
``test_differences`` holds against diffusers' converter.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from diffusers.loaders import lora_conversion_utils
from safetensors.torch import load_file

import fuselora
from fuselora.check.folder import check
from fuselora.describe import describe
from fuselora.description import CheckpointDescription
from fuselora.errors import Refused
from fuselora.families.sdxl import SDXL
from fuselora.marker import read_marker
from fuselora.pipeline import plan
from fuselora.synth import Spec
from fuselora.verify import verify
from tests import listings, small
from tests.families.test_loaded import SCALE, SMALL, folder_of, pairs, same

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

converters: Any = lora_conversion_utils
encoders: Any = transformers
UNET = "unet/diffusion_pytorch_model.safetensors"
ENCODERS = {"text_encoder": ("CLIPTextModel", 16), "text_encoder_2": ("CLIPTextModelWithProjection", 20)}
QUERY = "text_model.encoder.layers.0.self_attn.q_proj"
SGM = "model.diffusion_model."


def pipeline(root: Path) -> Path:
    """A small UNet and both text encoders, as diffusers and transformers save them."""
    folder_of(root, SMALL["sdxl"])
    for name, (made, size) in ENCODERS.items():
        config = encoders.CLIPTextConfig(
            vocab_size=50, hidden_size=size, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            projection_dim=20, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        getattr(encoders, made)(config).save_pretrained(root / name)
    index = {name: ["transformers", made] for name, (made, _) in ENCODERS.items()}
    index |= {"_class_name": "StableDiffusionXLPipeline", "unet": ["diffusers", "UNet2DConditionModel"]}  # type: ignore[dict-item]
    (root / "model_index.json").write_text(json.dumps(index))
    return root


def of_encoders() -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for n, (_, size) in enumerate(ENCODERS.values(), 1):
        up, down = small.noise(size, 2, seed=n), small.noise(2, size, seed=n + 5)
        found |= small.pair(f"lora_te{n}_{QUERY.replace('.', '_')}", up, down, alpha=2 * SCALE)
    return found


def shapes_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def sgm(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {found.name: found.shape for found in SDXL.spellings(shapes, "sgm")}


def single_file(path: Path) -> Path:
    """The UNet, the autoencoder and the text encoders of one file."""
    unet = sgm(shapes_of(SMALL["sdxl"].make().state_dict()))
    clip, big_clip = "conditioner.embedders.0.transformer", "conditioner.embedders.1.model"
    beside = {
        "first_stage_model.encoder.conv_in.weight": (4, 3, 3, 3),
        f"{clip}.{QUERY}.weight": (16, 16),
        f"{big_clip}.transformer.resblocks.0.attn.in_proj_weight": (60, 20),
    }
    named = {**{SGM + name: shape for name, shape in unet.items()}, **beside}
    return small.write(path, {name: small.noise(*shape) for name, shape in named.items()})


# Pipelines


@pytest.mark.parametrize("layout", ["diffusers", "sgm"])
def test_one_file_for_the_unet_and_both_text_encoders(tmp_path: Path, layout: str) -> None:
    base, out = pipeline(tmp_path / "base"), tmp_path / "out"
    before = load_file(base / UNET)
    shapes = shapes_of(before)
    unet, deltas = pairs(sgm(shapes) if layout == "sgm" else shapes, "lora_unet_", flat=True)
    if layout == "sgm":
        deltas = {SDXL.canonical_name(name, "sgm"): delta for name, delta in deltas.items()}
    path = small.write(tmp_path / "x.safetensors", {**unet, **of_encoders()})
    fuselora.merge(base, [path], out=out)
    same(load_file(out / UNET), before, deltas)
    for n, name in enumerate(ENCODERS, 1):
        weights, got = (load_file(root / name / "model.safetensors") for root in (base, out))
        lora = {key: tensor.double() for key, tensor in of_encoders().items() if f"lora_te{n}_" in key}
        down, up = (next(t for key, t in lora.items() if part in key) for part in ("lora_down", "lora_up"))
        key = next(key for key in weights if key.endswith("layers.0.self_attn.q_proj.weight"))
        same(got, weights, {key: SCALE * up @ down})
    marker = read_marker(out)
    assert marker is not None
    assert {name: found.fused for name, found in marker.components.items()} == {
        "unet": len(deltas),
        "text_encoder": 1,
        "text_encoder_2": 1,
    }
    assert verify(out, base=base, loras=[path]).ok
    assert check(out).ok


# Single files


def test_a_single_file_s_unet_is_found_beside_its_other_models(tmp_path: Path) -> None:
    base = single_file(tmp_path / "base.safetensors")
    found = describe(base)
    assert isinstance(found, CheckpointDescription)
    assert (found.family, found.layout) == ("sdxl", "sgm")
    lora, _ = pairs(shapes_of(SMALL["sdxl"].make().state_dict()), "lora_unet_", flat=True)
    path = small.write(tmp_path / "x.safetensors", lora)
    fuselora.merge(base, [path], out=tmp_path / "out")
    before, after = load_file(base), load_file(tmp_path / "out" / "base.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert len(changed) == len(lora) // 3
    assert all(name.startswith(SGM) for name in changed)


def test_the_unet_and_both_text_encoders_of_a_single_file(tmp_path: Path) -> None:
    base = single_file(tmp_path / "base.safetensors")
    unet, _ = pairs({"conv_in.weight": (16, 4, 3, 3)}, "lora_unet_", flat=True)
    path = small.write(tmp_path / "x.safetensors", {**unet, **of_encoders()})
    report = fuselora.merge(base, [path], out=tmp_path / "out")
    assert [component.n_fused for component in report.plan.components] == [3]
    assert verify(tmp_path / "out", base=base, loras=[path]).ok


def test_text_encoders_that_a_single_file_lacks_are_said_to_be_missing(tmp_path: Path) -> None:
    whole = load_file(single_file(tmp_path / "whole.safetensors"))
    rest = {name: tensor for name, tensor in whole.items() if "embedders.1" not in name}
    base = small.write(tmp_path / "base.safetensors", rest)
    unet, _ = pairs({"conv_in.weight": (16, 4, 3, 3)}, "lora_unet_", flat=True)
    path = small.write(tmp_path / "x.safetensors", {**unet, **of_encoders()})
    with pytest.raises(Refused, match="for the text encoder lora_te2, which this base does not have"):
        fuselora.merge(base, [path], out=tmp_path / "out")
    report = fuselora.merge(base, [path], out=tmp_path / "out", allow_unmatched=["lora_te2*"])
    assert [component.n_fused for component in report.plan.components] == [2]


# Published LoRAs


@pytest.mark.parametrize(
    ("name", "modules"), [("sdxl.lightning.r64", 788), ("sdxl.hyper.r64", 788), ("sdxl.dmd2.r64", 788)]
)
def test_every_module_of_a_published_lora_is_on_a_single_file(
    tmp_path: Path, name: str, modules: int
) -> None:
    shapes = {spec.name: spec.shape for spec in listings.base("sdxl-base-unet", "diffusers")}
    specs = [Spec(SGM + key, "F16", shape) for key, shape in sgm(shapes).items()]
    base = listings.sparse(tmp_path / "base.safetensors", specs)
    lora = listings.sparse(tmp_path / "x.safetensors", listings.lora(name))
    (matching,) = plan(base, [lora]).matchings
    assert len({hit.module.name for hit in matching.hits}) == modules
    assert not matching.skipped and not matching.unmatched
    assert all(hit.base_key.startswith(SGM) for hit in matching.hits)


def test_kohya_s_sgm_names_are_those_that_diffusers_reads(tmp_path: Path) -> None:
    shapes = {spec.name: spec.shape for spec in listings.base("sdxl-base-unet", "diffusers")}
    theirs = {name: shape for name, shape in sgm(shapes).items() if len(shape) > 1}
    lora: dict[str, torch.Tensor] = {}
    wanted = {}
    for name, shape in theirs.items():
        module = f"lora_unet_{name.removesuffix('.weight').replace('.', '_')}"
        lora |= small.pair(module, torch.zeros(shape[0], 1), torch.zeros(1, *shape[1:]))
        wanted[module] = SDXL.canonical_name(name.removesuffix(".weight"), "sgm")
    mapped = converters._maybe_map_sgm_blocks_to_diffusers(dict(lora), SimpleNamespace(layers_per_block=2))
    found, _ = converters._convert_non_diffusers_lora_to_diffusers(mapped)
    names = {key.removeprefix("unet.").partition(".lora")[0].partition("_lora")[0] for key in found}
    assert {name.replace(".processor", "").replace("to_out", "to_out.0") for name in names} == set(
        wanted.values()
    )
    assert len(wanted) == 794


@pytest.mark.parametrize(
    ("name", "guidance"),
    [
        ("Hyper-SDXL-8steps-lora", 0.0),
        ("Hyper-SDXL-8steps-CFG-lora", None),
        ("Hyper-SDXL-12steps-CFG-lora", None),
        ("sdxl_lightning_4step_lora", 0.0),
        ("lcm-lora-sdxl", None),
    ],
)
def test_guidance_as_published(name: str, guidance: float | None) -> None:
    row = SDXL.few_step_named(name)
    assert row is not None
    assert row.guidance_scale == guidance
    assert (row.remark is not None and "guidance scale" in row.remark) == (guidance is None)
