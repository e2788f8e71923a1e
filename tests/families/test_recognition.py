"""Which family and which models the published lists are of, bases and LoRAs, told from names and shapes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from fuselora.describe import describe
from fuselora.description import CheckpointDescription, LoraDescription
from fuselora.errors import Refused
from fuselora.families.recognition import families_of
from fuselora.pipeline import plan
from tests import listings

if TYPE_CHECKING:
    from pathlib import Path

    from fuselora.families import Layout

FAMILY = {
    "wan": "wan", "qwen": "qwen-image", "flux.1": "flux.1", "flux.2": "flux.2", "z": "z-image",
    "sd3.5": "sd3", "sdxl": "sdxl", "hunyuanvideo": "hunyuan-video", "ltx-video": "ltx-video",
    "ltx-2": "ltx-2",
    "minimax": "minimax-h3", "sensenova": "sensenova-u1", "longcat": "longcat-video",
}  # fmt: skip
# a LoRA of the layers that several families have is also for those of the same width
KIN = {
    "flux.1-dev": {"FLUX.1-dev"},
    "flux.2-dev": {"FLUX.2-dev"},
    "hunyuanvideo": {"HunyuanVideo"},
    "longcat-video": {"LongCat-Video"},
    "ltx-2-19b": {"LTX-2-19B"},
    "ltx-video-13b": {"LTX-Video-13B"},
    "minimax-h3": {"MiniMax-H3"},
    "qwen-image": {"Qwen-Image"},
    "sd3.5-large": {"SD3.5-large"},
    "sdxl-base-unet": {"SDXL-base-1.0"},
    "sensenova-u1.5-mot-gen": {"SenseNova-U1.5-8B-MoT"},
    "z-image": {"Z-Image"},
}
OTHERS = listings.others()
LORAS = sorted(name for name, entry in listings.index().items() if entry.base in KIN)


def family_name(listed: str) -> str:
    return next(family for start, family in FAMILY.items() if listed.startswith(start))


def test_every_other_base_is_here() -> None:
    assert {base for base, _ in OTHERS} == KIN.keys()


@pytest.mark.parametrize(("base", "layout"), OTHERS)
def test_a_base_s_family_layout_and_models(tmp_path: Path, base: str, layout: Layout) -> None:
    path = listings.sparse(tmp_path / "x.safetensors", listings.base(base, layout))
    found = describe(path)
    assert isinstance(found, CheckpointDescription)
    assert (found.family, found.layout) == (family_name(base), layout)
    assert set(found.models) >= KIN[base]


@pytest.mark.parametrize(
    ("base", "pipeline", "models"),
    [
        ("flux.1-dev", "FluxPipeline", ("FLUX.1-dev", "FLUX.1-Krea-dev")),
        ("flux.1-dev", "FluxKontextPipeline", ("FLUX.1-Kontext-dev",)),
        ("flux.1-dev", "Unheard", ("FLUX.1-dev", "FLUX.1-Kontext-dev", "FLUX.1-Krea-dev")),
        ("qwen-image", "QwenImageEditPlusPipeline", ("Qwen-Image-Edit-2509", "Qwen-Image-Edit-2511")),
        ("hunyuanvideo", "HunyuanVideoImageToVideoPipeline", ("HunyuanVideo-I2V",)),
    ],
)
def test_a_pipeline_s_class_tells_models_of_one_shape_apart(
    tmp_path: Path, base: str, pipeline: str, models: tuple[str, ...]
) -> None:
    weights = tmp_path / "transformer" / "diffusion_pytorch_model.safetensors"
    listings.sparse(weights, listings.base(base, "diffusers"))
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": pipeline}))
    found = describe(tmp_path)
    assert isinstance(found, CheckpointDescription)
    assert found.models == models


@pytest.mark.parametrize("name", LORAS)
def test_what_a_lora_was_made_for(tmp_path: Path, name: str) -> None:
    entry = listings.index()[name]
    path = listings.sparse(tmp_path / "x.safetensors", listings.lora(name), entry.metadata)
    found = describe(path)
    assert isinstance(found, LoraDescription)
    target = found.target
    assert target.family == family_name(name), target
    wanted = {"FLUX.1-Depth-dev"} if "control" in name else KIN[entry.base]
    assert set(target.models) >= wanted


@pytest.mark.parametrize(
    ("lora", "base", "layout", "says"),
    [
        ("flux.1-dev.turbo-alpha.r64", "flux.2-dev", "diffusers", "FLUX.1-dev"),
        ("flux.1-dev.kohya.r16", "qwen-image", "diffusers", "FLUX.1-dev"),
        ("qwen-image.lightning-bf16.r64", "flux.1-dev", "native", "Qwen-Image"),
        ("sdxl.dmd2.r64", "flux.1-dev", "diffusers", "SDXL-base-1.0"),
        ("wan2.2-t2v-a14b.x2v-distill-1217.r64", "hunyuanvideo", "native", "Wan2.2-T2V-A14B"),
        ("wan2.2-ti2v-5b.turbo.r64", "wan2.1-t2v-14b", "native", "Wan2.2-TI2V-5B"),
        ("z-image.distill-patch.r32", "wan2.1-t2v-1.3b", "diffusers", "Z-Image"),
        ("ltx-2-19b.distilled-384", "ltx-video-13b", "diffusers", "LTX-2-19B"),
    ],
)
def test_a_lora_for_another_model_is_told_what_it_is_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: str, base: str, layout: Layout, says: str
) -> None:
    """The lists have no data: what has no home would pass for zeros."""
    monkeypatch.setattr("fuselora.misses.is_zero", lambda adapter, module: False)
    base_path = listings.sparse(tmp_path / "base.safetensors", listings.base(base, layout))
    lora_path = listings.sparse(tmp_path / "lora.safetensors", listings.lora(lora))
    with pytest.raises(Refused) as caught:
        plan(base_path, [lora_path])
    assert says in json.dumps(caught.value.document())


@pytest.mark.parametrize(("base", "layout"), OTHERS)
def test_a_shard_of_a_base_is_of_its_family_if_of_others_too(base: str, layout: Layout) -> None:
    specs = listings.base(base, layout)
    for part in (specs[: len(specs) // 2], specs[len(specs) // 2 :]):
        assert family_name(base) in {family.name for family in families_of(spec.name for spec in part)}


@pytest.mark.parametrize(
    "names", [[], ["x.weight", "model.layers.0.self_attn.q_proj.weight"], ["encoder.0.weight"]]
)
def test_no_family(names: list[str]) -> None:
    assert families_of(names) == ()
