"""Kandinsky 5: names and models of the class, every prefix, and what stays in float32.

There is no list: names and shapes are those of diffusers' class at the published sizes, which are those of
the published configs (kandinskylab/Kandinsky-5). Its own code has the same names.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file

import fuselora
from fuselora.describe import describe
from fuselora.description import CheckpointDescription
from fuselora.families.kandinsky5 import KANDINSKY_5
from fuselora.families.recognition import family_of
from fuselora.synth import Spec
from fuselora.verify import verify
from tests import listings, small

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

classes: Any = diffusers
VIDEO = {"in_visual_dim": 16, "out_visual_dim": 16, "visual_cond": True}
LITE = {**VIDEO, "model_dim": 1792, "ff_dim": 7168, "num_visual_blocks": 32, "axes_dims": (16, 24, 24)}
PRO = {
    **VIDEO, "model_dim": 4096, "ff_dim": 16384, "time_dim": 1024, "num_text_blocks": 4,
    "num_visual_blocks": 60, "axes_dims": (32, 48, 48),
}  # fmt: skip
IMAGE = {**VIDEO, "model_dim": 2560, "ff_dim": 10240, "num_visual_blocks": 50, "axes_dims": (32, 48, 48)}
LITTLE = {
    "in_text_dim": 24, "in_text_dim2": 20, "time_dim": 16, "model_dim": 48, "ff_dim": 56,
    "num_text_blocks": 1, "num_visual_blocks": 2, "axes_dims": (8, 8, 8),
}  # fmt: skip


def shapes_of(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = classes.Kandinsky5Transformer3DModel(**config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    ("config", "models"),
    [
        (LITE, ("Kandinsky-5.0-T2V-Lite", "Kandinsky-5.0-I2V-Lite")),
        (PRO, ("Kandinsky-5.0-T2V-Pro", "Kandinsky-5.0-I2V-Pro")),
        ({**IMAGE, "visual_cond": False}, ("Kandinsky-5.0-T2I-Lite",)),
        (IMAGE, ("Kandinsky-5.0-I2I-Lite",)),
        ({**LITE, "num_visual_blocks": 31}, ()),
    ],
)
def test_the_models_of_the_class(config: Mapping[str, Any], models: tuple[str, ...]) -> None:
    shapes = shapes_of(config)
    assert family_of(shapes) is KANDINSKY_5
    assert KANDINSKY_5.share(shapes) == 1.0
    assert KANDINSKY_5.models_of(shapes) == models


@pytest.mark.parametrize(
    ("pipeline", "model"),
    [
        ("Kandinsky5T2VPipeline", "Kandinsky-5.0-T2V-Lite"),
        ("Kandinsky5I2VPipeline", "Kandinsky-5.0-I2V-Lite"),
    ],
)
def test_the_pipeline_s_class_tells_what_shapes_do_not(tmp_path: Path, pipeline: str, model: str) -> None:
    specs = [Spec(name, "BF16", shape) for name, shape in shapes_of(LITE).items()]
    listings.sparse(tmp_path / "transformer" / "diffusion_pytorch_model.safetensors", specs)
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": pipeline}))
    found = describe(tmp_path)
    assert isinstance(found, CheckpointDescription)
    assert found.models == (model,)


def a_base(folder: Path) -> Path:
    torch.manual_seed(0)
    classes.Kandinsky5Transformer3DModel(**LITTLE).save_pretrained(folder / "transformer")
    return folder


def weights_of(root: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(root / "transformer" / "diffusion_pytorch_model.safetensors")
    return found


@pytest.mark.parametrize(
    ("prefix", "style"),
    [
        ("", ("lora_A", "lora_B")),
        ("transformer.", ("lora_A", "lora_B")),
        ("base_model.model.", ("lora_A", "lora_B")),
        ("diffusion_model.", ("lora_down", "lora_up")),
        ("lora_unet_", ("lora_down", "lora_up")),
    ],
)
def test_every_matrix_under_every_prefix(tmp_path: Path, prefix: str, style: tuple[str, str]) -> None:
    base = a_base(tmp_path / "base")
    before = weights_of(base)
    lora: dict[str, torch.Tensor] = {}
    deltas = {name: torch.zeros(()).double() for name in before}
    for seed, (name, tensor) in enumerate(before.items()):
        if tensor.dim() != 2:
            continue
        module = name.removesuffix(".weight")
        spelled = prefix + (module.replace(".", "_") if prefix == "lora_unet_" else module)
        up, down = small.noise(len(tensor), 2, seed=seed), small.noise(2, tensor.shape[1], seed=seed + 500)
        lora |= {f"{spelled}.{style[0]}.weight": down, f"{spelled}.{style[1]}.weight": up}
        deltas[name] = up.double() @ down.double()
    path = small.write(tmp_path / "x.safetensors", lora)
    fuselora.merge(base, [path], out=tmp_path / "out")
    for name, tensor in weights_of(tmp_path / "out").items():
        exact = before[name].double() + deltas[name]
        torch.testing.assert_close(tensor.double(), exact, rtol=2e-6, atol=2e-6)
    assert verify(tmp_path / "out", base=base, loras=[path]).ok


def test_what_the_class_keeps_in_float32_stays_so(tmp_path: Path) -> None:
    kept = classes.Kandinsky5Transformer3DModel._keep_in_fp32_modules
    assert KANDINSKY_5.keep_float32 == frozenset(kept)
    base = a_base(tmp_path / "base")
    layer = "visual_transformer_blocks.0.visual_modulation.out_layer"
    path = small.write(tmp_path / "x.safetensors", small.pair(layer, small.noise(432, 2), small.noise(2, 16)))
    fuselora.merge(base, [path], out=tmp_path / "out", dtype="bfloat16")
    loaded = classes.Kandinsky5Transformer3DModel.from_pretrained(
        base / "transformer", torch_dtype=torch.bfloat16
    )
    wanted = {name: tensor.dtype for name, tensor in loaded.state_dict().items()}
    assert {name: tensor.dtype for name, tensor in weights_of(tmp_path / "out").items()} == wanted
    assert wanted[f"{layer}.weight"] == torch.float32
    assert verify(tmp_path / "out", base=base, loras=[path]).ok


def test_the_merged_model_runs(tmp_path: Path) -> None:
    base = a_base(tmp_path / "base")
    layer = "lora_unet_visual_transformer_blocks_1_cross_attention_to_key"
    path = small.write(tmp_path / "x.safetensors", small.pair(layer, small.noise(48, 2), small.noise(2, 48)))
    fuselora.merge(base, [path], out=tmp_path / "out")
    outputs = []
    for root in (base, tmp_path / "out"):
        model = classes.Kandinsky5Transformer3DModel.from_pretrained(root / "transformer").eval()
        # a new model's gates are all zero
        torch.nn.init.ones_(model.visual_transformer_blocks[1].visual_modulation.out_layer.bias)
        torch.nn.init.ones_(model.out_layer.modulation.out_layer.bias)
        with torch.no_grad():
            outputs.append(
                model(
                    hidden_states=small.noise(1, 2, 4, 4, 4), encoder_hidden_states=small.noise(1, 3, 24),
                    timestep=torch.tensor([5.0]), pooled_projections=small.noise(1, 20),
                    visual_rope_pos=(torch.arange(2), torch.arange(2), torch.arange(2)),
                    text_rope_pos=torch.arange(3), return_dict=False,
                )[0]
            )  # fmt: skip
    assert outputs[1].isfinite().all() and not torch.allclose(outputs[0], outputs[1])
