"""HunyuanVideo-1.5 in ComfyUI's names, where q, k and v are one layer, and its published models and LoRA.

There is no list of a published file: names and shapes are those of diffusers' class, Tencent's names those of
its script, which ``test_hand_written`` holds the rows against. What ComfyUI makes of them is
written out here: the renames that it has for HunyuanVideo, on a model whose blocks are HunyuanVideo's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file

import fuselora
from fuselora.families.hunyuan_video_15 import HUNYUAN_VIDEO_15
from fuselora.families.recognition import family_of
from fuselora.verify import verify
from tests import small
from tests.families.test_hand_written import HUNYUAN_CONFIG, converted, diffs, native_of_the_class
from tests.families.test_hunyuan_video import as_in_comfy

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

classes: Any = diffusers
Tensors = dict[str, torch.Tensor]
STREAMS = ("img_attn", "txt_attn")


def fused(native: Mapping[str, torch.Tensor]) -> Tensors:
    """As ComfyUI has it: q, k and v of each block one below the other, the rest renamed."""
    found = {}
    for name, tensor in native.items():
        stem, _, leaf = name.rpartition(".")
        stream = next((stream for stream in STREAMS if stem.endswith(f"{stream}_q")), None)
        if stream:
            parts = [native[f"{stem.removesuffix('q')}{part}.{leaf}"] for part in "qkv"]
            found[f"{stem.removesuffix('_q')}.qkv.{leaf}"] = torch.cat(parts)
        elif not stem.endswith(tuple(f"{stream}_{part}" for stream in STREAMS for part in "kv")):
            found[as_in_comfy(name)] = tensor
    return found


def test_comfyui_s_names_and_shapes() -> None:
    native, shapes = native_of_the_class()
    theirs = {name: tuple(tensor.shape) for name, tensor in fused(native).items()}
    assert {s.name: s.shape for s in HUNYUAN_VIDEO_15.spellings(shapes, "comfy")} == theirs
    assert HUNYUAN_VIDEO_15.canonical_shapes(theirs, "comfy") == shapes
    assert HUNYUAN_VIDEO_15.layout_of(theirs) == "comfy"
    assert family_of(theirs) is HUNYUAN_VIDEO_15
    assert "double_blocks.1.img_attn.qkv.bias" in theirs
    assert "time_r_in.in_layer.weight" in theirs


@pytest.mark.parametrize("base_is", ["comfy", "native", "diffusers"])
@pytest.mark.parametrize("lora_is", ["comfy", "native", "diffusers"])
def test_every_tensor_in_every_direction(tmp_path: Path, base_is: str, lora_is: str) -> None:
    """A difference for each tensor, but for norms of ComfyUI's, whose weight is called scale."""
    native, _ = native_of_the_class()
    layouts: Any = {"comfy": fused, "native": dict, "diffusers": converted}
    base = layouts[base_is](native)
    some = {name: tensor for name, tensor in layouts[lora_is](native).items() if not name.endswith(".scale")}
    prefixes = {"comfy": "diffusion_model.", "native": "", "diffusers": "transformer."}
    lora, deltas = diffs(some, prefixes[lora_is])
    deltas |= {name: torch.zeros_like(t) for name, t in layouts[lora_is](native).items() if name not in some}
    prefix = "model.model." if base_is == "comfy" else ""
    base_path = small.write(tmp_path / "base.safetensors", {prefix + n: t for n, t in base.items()})
    path = small.write(tmp_path / "x.safetensors", lora)
    report = fuselora.merge(base_path, [path], out=tmp_path / "out")
    assert report.plan.checkpoint.layout == base_is
    found = load_file(tmp_path / "out" / "base.safetensors")
    got = {name.removeprefix(prefix): tensor.double() for name, tensor in found.items()}
    # both in diffusers' names: fused rows are cut again by hand
    after, before = (in_diffusers(tensors, base_is) for tensors in (got, base))
    moved = in_diffusers(deltas, lora_is)
    assert after.keys() == before.keys() == moved.keys()
    for name, tensor in before.items():
        exact = tensor.double() + moved[name].double()
        torch.testing.assert_close(after[name], exact, rtol=1e-6, atol=1e-6)
    assert verify(tmp_path / "out", base=base_path, loras=[path]).ok


def in_diffusers(tensors: Mapping[str, torch.Tensor], layout: str) -> Tensors:
    if layout == "diffusers":
        return dict(tensors)
    return converted(tensors if layout == "native" else unfused(tensors))


def unfused(theirs: Mapping[str, torch.Tensor]) -> Tensors:
    """Tencent's tensors from ComfyUI's."""
    native, _ = native_of_the_class()
    found = {}
    for name in native:
        stem, _, leaf = name.rpartition(".")
        stream = next((s for s in STREAMS if stem.endswith(tuple(f"{s}_{part}" for part in "qkv"))), None)
        if stream:
            whole = theirs[f"{stem[:-2]}.qkv.{leaf}"]
            found[name] = whole.chunk(3)["qkv".index(stem[-1])]
        else:
            found[name] = theirs[as_in_comfy(name)]
    return found


def test_the_step_distilled_lora_s_modules_on_a_diffusers_folder(tmp_path: Path) -> None:
    """hunyuanvideo1.5_t2v_480p_lightx2v_4step_lora_rank_32: pairs for a fused layer; the model runs."""
    torch.manual_seed(0)
    config = {**HUNYUAN_CONFIG, "use_meanflow": False}
    folder = tmp_path / "base" / "transformer"
    classes.HunyuanVideo15Transformer3DModel(**config).save_pretrained(folder)
    weights = load_file(folder / "diffusion_pytorch_model.safetensors")
    up, down = small.noise(96, 2), small.noise(2, 32, seed=1)
    refiner = "txt_in.individual_token_refiner.blocks.0.self_attn.qkv"
    lora = {
        **small.pair("diffusion_model.double_blocks.1.txt_attn.qkv", up, down, alpha=1.0),
        **small.pair(f"diffusion_model.{refiner}", up, down),
    }
    path = small.write(tmp_path / "x.safetensors", lora)
    fuselora.merge(tmp_path / "base", [path], out=tmp_path / "out")
    model = classes.HunyuanVideo15Transformer3DModel.from_pretrained(tmp_path / "out" / "transformer")
    got = model.state_dict()
    places = {
        0.5: [f"transformer_blocks.1.attn.add_{part}_proj" for part in "qkv"],
        1.0: [f"context_embedder.token_refiner.refiner_blocks.0.attn.to_{part}" for part in "qkv"],
    }
    for scale, names in places.items():
        for name, rows in zip(names, (up.double() @ down.double()).chunk(3), strict=True):
            exact = weights[f"{name}.weight"].double() + scale * rows
            torch.testing.assert_close(got[f"{name}.weight"].double(), exact, rtol=1e-6, atol=1e-6)
    before = classes.HunyuanVideo15Transformer3DModel.from_pretrained(folder)
    outputs = [run(one) for one in (before, model)]
    assert outputs[1].isfinite().all() and not torch.allclose(outputs[0], outputs[1])


def run(model: Any) -> torch.Tensor:
    given = {
        "hidden_states": small.noise(1, 9, 1, 4, 4), "timestep": torch.tensor([5.0]),
        "encoder_hidden_states": small.noise(1, 3, 24), "encoder_attention_mask": torch.ones(1, 3),
        "encoder_hidden_states_2": small.noise(1, 2, 20), "encoder_attention_mask_2": torch.ones(1, 2),
        "image_embeds": small.noise(1, 2, 28),
    }  # fmt: skip
    with torch.no_grad():
        found: torch.Tensor = model.eval()(**given, return_dict=False)[0]
    return found


@pytest.mark.parametrize(
    ("config", "models"),
    [
        ({}, ("HunyuanVideo-1.5-T2V", "HunyuanVideo-1.5-I2V")),
        ({"use_meanflow": True}, ("HunyuanVideo-1.5-I2V step-distilled",)),
        ({"in_channels": 98}, ("HunyuanVideo-1.5-SR",)),
        ({"in_channels": 98, "use_meanflow": True}, ("HunyuanVideo-1.5-SR",)),
        ({"num_layers": 53}, ()),
    ],
)
def test_its_models_are_told_apart(config: Mapping[str, Any], models: tuple[str, ...]) -> None:
    with torch.device("meta"):
        model = classes.HunyuanVideo15Transformer3DModel(**config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert HUNYUAN_VIDEO_15.share(shapes) == 1.0
    assert HUNYUAN_VIDEO_15.models_of(shapes) == models


def test_what_is_published_of_its_lora() -> None:
    row = HUNYUAN_VIDEO_15.few_step_named(
        "hunyuanvideo1.5_t2v_480p_lightx2v_4step_lora_rank_32_bf16.safetensors"
    )
    assert row is not None
    assert (row.num_inference_steps, row.guidance_scale, row.flow_shift) == (4, 1.0, 5.0)
