"""Small models of diffusers' own classes, merged with LoRAs in every layout's names, loaded and run.

What the merge writes is base + delta in float64, rows where the family says, for a LoRA in one layout on a
base in another; verify agrees.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file

import fuselora
from fuselora.families import FAMILIES
from fuselora.families.recognition import family_of
from fuselora.families.runs import Run
from fuselora.verify import verify
from tests import small

if TYPE_CHECKING:
    from pathlib import Path

    from fuselora.families import Family, Layout

Tensors = Mapping[str, torch.Tensor]
Shapes = Mapping[str, tuple[int, ...]]
FAMILY = {family.name: family for family in FAMILIES}
SCALE = 0.5  # alpha / rank


@dataclass(frozen=True)
class Small:
    """A class, a config of few and odd sizes, and what its forward takes; without that it is loaded alone."""

    family: str
    name: str
    config: Mapping[str, Any]
    inputs: Callable[[], Mapping[str, Any]] | None = None
    folder: str = "transformer"

    def make(self) -> torch.nn.Module:
        torch.manual_seed(0)
        model: torch.nn.Module = getattr(diffusers, self.name)(**self.config)
        return model.eval()

    def load(self, folder: Path) -> torch.nn.Module:
        model: torch.nn.Module = getattr(diffusers, self.name).from_pretrained(folder)
        return model.eval()

    def output(self, model: torch.nn.Module) -> torch.Tensor:
        assert self.inputs is not None
        with torch.no_grad():
            found: torch.Tensor = model(**self.inputs(), return_dict=False)[0]
        return found


def noise(*shape: int) -> torch.Tensor:
    return small.noise(*shape, seed=3)


ONE = torch.tensor([0.5])
SMALL = {
    "flux.1": Small(
        "flux.1",
        "FluxTransformer2DModel",
        {
            "in_channels": 4, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16,
            "num_attention_heads": 2, "joint_attention_dim": 24, "pooled_projection_dim": 20,
            "axes_dims_rope": (4, 4, 8), "guidance_embeds": True,
        },
        lambda: {
            "hidden_states": noise(1, 4, 4), "encoder_hidden_states": noise(1, 3, 24),
            "pooled_projections": noise(1, 20), "timestep": ONE, "guidance": ONE,
            "img_ids": torch.zeros(4, 3), "txt_ids": torch.zeros(3, 3),
        },
    ),
    "flux.2": Small(
        "flux.2",
        "Flux2Transformer2DModel",
        {
            "in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16,
            "num_attention_heads": 2, "joint_attention_dim": 24, "axes_dims_rope": (4, 4, 4, 4),
        },
        lambda: {
            "hidden_states": noise(1, 4, 4), "encoder_hidden_states": noise(1, 3, 24), "timestep": ONE,
            "guidance": ONE, "img_ids": torch.zeros(4, 4), "txt_ids": torch.zeros(3, 4),
        },
    ),
    "chroma": Small(
        "chroma",
        "ChromaTransformer2DModel",
        {
            "in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16,
            "num_attention_heads": 2, "joint_attention_dim": 24, "axes_dims_rope": (4, 4, 8),
            "approximator_num_channels": 64, "approximator_hidden_dim": 20, "approximator_layers": 2,
        },
    ),
    "qwen-image": Small(
        "qwen-image",
        "QwenImageTransformer2DModel",
        {
            "in_channels": 16, "out_channels": 4, "num_layers": 2, "attention_head_dim": 16,
            "num_attention_heads": 2, "joint_attention_dim": 24, "axes_dims_rope": (8, 4, 4),
        },
        lambda: {
            "hidden_states": noise(1, 16, 16), "encoder_hidden_states": noise(1, 7, 24),
            "encoder_hidden_states_mask": torch.ones(1, 7, dtype=torch.long), "timestep": ONE,
            "img_shapes": [(1, 4, 4)],
        },
    ),
    "z-image": Small(
        "z-image",
        "ZImageTransformer2DModel",
        {
            "in_channels": 4, "dim": 48, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2,
            "cap_feat_dim": 20, "axes_dims": (8, 8, 8), "axes_lens": (64, 64, 64),
        },
    ),
    "sd3": Small(
        "sd3",
        "SD3Transformer2DModel",
        {
            "sample_size": 8, "patch_size": 1, "in_channels": 4, "out_channels": 4, "num_layers": 3,
            "attention_head_dim": 8, "num_attention_heads": 4, "caption_projection_dim": 32,
            "joint_attention_dim": 24, "pooled_projection_dim": 20, "dual_attention_layers": (0,),
            "qk_norm": "rms_norm", "pos_embed_max_size": 8,
        },
        lambda: {
            "hidden_states": noise(1, 4, 8, 8), "encoder_hidden_states": noise(1, 3, 24),
            "pooled_projections": noise(1, 20), "timestep": ONE,
        },
    ),
    "sd": Small(
        "sd",
        "UNet2DConditionModel",
        {
            "sample_size": 16, "block_out_channels": (8, 16, 16, 16), "norm_num_groups": 4,
            "attention_head_dim": 2, "cross_attention_dim": 24,
        },
        lambda: {"sample": noise(1, 4, 16, 16), "timestep": 5, "encoder_hidden_states": noise(1, 3, 24)},
        folder="unet",
    ),
    "sdxl": Small(
        "sdxl",
        "UNet2DConditionModel",
        {
            "sample_size": 16, "block_out_channels": (16, 32, 64), "layers_per_block": 2,
            "norm_num_groups": 8,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            "transformer_layers_per_block": (1, 1, 2), "attention_head_dim": (2, 4, 8),
            "cross_attention_dim": 24, "use_linear_projection": True, "addition_embed_type": "text_time",
            "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 68,
        },
        lambda: {
            "sample": noise(1, 4, 16, 16), "timestep": 5, "encoder_hidden_states": noise(1, 3, 24),
            "added_cond_kwargs": {"text_embeds": noise(1, 20), "time_ids": noise(1, 6)},
        },
        folder="unet",
    ),
    "hunyuan-video": Small(
        "hunyuan-video",
        "HunyuanVideoTransformer3DModel",
        {
            "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 16,
            "num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1, "patch_size": 1,
            "patch_size_t": 1, "text_embed_dim": 24, "pooled_projection_dim": 20, "rope_axes_dim": (4, 6, 6),
        },
        lambda: {
            "hidden_states": noise(1, 4, 1, 4, 4), "timestep": torch.tensor([5]),
            "encoder_hidden_states": noise(1, 3, 24), "encoder_attention_mask": torch.ones(1, 3),
            "pooled_projections": noise(1, 20), "guidance": ONE,
        },
    ),
    "ltx-video": Small(
        "ltx-video",
        "LTXVideoTransformer3DModel",
        {
            "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 16,
            "cross_attention_dim": 32, "num_layers": 2, "caption_channels": 24,
        },
        lambda: {
            "hidden_states": noise(1, 8, 4), "encoder_hidden_states": noise(1, 3, 24),
            "timestep": torch.tensor([5]), "encoder_attention_mask": torch.ones(1, 3),
            "num_frames": 2, "height": 2, "width": 2,
        },
    ),
}  # fmt: skip
SPELLED = [
    (name, layout) for name, model in sorted(SMALL.items()) for layout in FAMILY[model.family].all_layouts
]


def matrices(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Weights of layers that LoRAs have pairs for."""
    return {
        name: shape for name, shape in shapes.items() if name.endswith(".weight") and len(shape) in (2, 4, 5)
    }


def pairs(shapes: Shapes, prefix: str, *, flat: bool) -> tuple[Tensors, Tensors]:
    """A LoRA of these weights, and what it adds to each, in float64."""
    tensors: dict[str, torch.Tensor] = {}
    deltas = {}
    for seed, (name, shape) in enumerate(matrices(shapes).items()):
        ones = [1] * (len(shape) - 2)
        up = small.noise(shape[0], 2, *ones, seed=seed, std=0.3)
        down = small.noise(2, *shape[1:], seed=seed + 999, std=0.3)
        module = name.removesuffix(".weight")
        tensors |= small.pair(
            prefix + (module.replace(".", "_") if flat else module), up, down, alpha=2 * SCALE
        )
        deltas[name] = SCALE * torch.einsum("or,r...->o...", up.double().flatten(1), down.double())
    return tensors, deltas


def in_canonical(family: Family, layout: Layout, tensors: Tensors) -> dict[str, torch.Tensor]:
    """Tensors of a layout, cut and ordered as canonical ones."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    found = {}
    for name, tensor in tensors.items():
        for piece in family.pieces(name, shapes, layout):
            rows = sorted(piece.runs, key=lambda run: run.other) or [Run(0, 0, tensor.shape[0])]
            found[piece.name] = torch.cat([tensor[first : first + n] for first, _, n in rows])
    return found


def same(got: Tensors, base: Tensors, deltas: Tensors) -> None:
    assert got.keys() == base.keys()
    for name, tensor in got.items():
        exact = base[name].double() + deltas.get(name, torch.zeros(()))
        torch.testing.assert_close(tensor.double(), exact, rtol=2e-6, atol=2e-6)


def folder_of(root: Path, model: Small) -> Path:
    model.make().save_pretrained(root / model.folder)  # type: ignore[operator]
    (root / "model_index.json").write_text(
        json.dumps({"_class_name": "X", model.folder: ["diffusers", model.name]})
    )
    return root


@pytest.mark.parametrize(("name", "layout"), SPELLED)
def test_on_the_class_s_own_folder(tmp_path: Path, name: str, layout: Layout) -> None:
    model = SMALL[name]
    family = FAMILY[model.family]
    base = folder_of(tmp_path / "base", model)
    weights = load_file(base / model.folder / "diffusion_pytorch_model.safetensors")
    shapes = {key: tuple(tensor.shape) for key, tensor in weights.items()}
    assert family_of(shapes) is family
    theirs = {found.name: found.shape for found in family.spellings(shapes, layout)}
    flat = layout in ("native", "sgm")
    lora, deltas = pairs(theirs, "lora_unet_" if flat else "diffusion_model.", flat=flat)
    out, path = tmp_path / "out", small.write(tmp_path / "x.safetensors", lora)
    fuselora.merge(base, [path], out=out)
    wanted = in_canonical(family, layout, deltas)
    assert wanted.keys() == matrices(shapes).keys()
    same(load_file(out / model.folder / "diffusion_pytorch_model.safetensors"), weights, wanted)
    merged = model.load(out / model.folder)
    if model.inputs:
        before, after = model.output(model.load(base / model.folder)), model.output(merged)
        assert after.isfinite().all() and before.shape == after.shape
        assert not torch.allclose(before, after)
    assert verify(out, base=base, loras=[path]).ok


@pytest.mark.parametrize(
    ("name", "layout"), [pair for pair in SPELLED if pair[1] in ("native", "sgm", "comfy")]
)
def test_a_diffusers_lora_on_a_single_file(tmp_path: Path, name: str, layout: Layout) -> None:
    model = SMALL[name]
    family = FAMILY[model.family]
    shapes = {key: tuple(tensor.shape) for key, tensor in model.make().state_dict().items()}
    theirs = {found.name: found.shape for found in family.spellings(shapes, layout)}
    base = {f"model.diffusion_model.{key}": small.noise(*shape, seed=7) for key, shape in theirs.items()}
    lora, deltas = pairs(shapes, "transformer.", flat=False)
    base_path, path = (
        small.write(tmp_path / "base.safetensors", base),
        small.write(tmp_path / "x.safetensors", lora),
    )
    fuselora.merge(base_path, [path], out=tmp_path / "out")
    got = load_file(tmp_path / "out" / "base.safetensors")
    start = len("model.diffusion_model.")
    before, after = (
        in_canonical(family, layout, {key[start:]: tensor for key, tensor in tensors.items()})
        for tensors in (base, got)
    )
    same(after, before, deltas)
    assert verify(tmp_path / "out", base=base_path, loras=[path]).ok


def test_a_control_lora_widens_the_input_and_the_result_takes_it(tmp_path: Path) -> None:
    """As FLUX.1-Depth-dev-lora: native names without a prefix, biases, and norm scales that are replaced."""
    model = SMALL["flux.1"]
    base = folder_of(tmp_path / "base", model)
    weights = load_file(base / model.folder / "diffusion_pytorch_model.safetensors")
    up, down, bias, scale = noise(32, 2), noise(2, 8), noise(32), noise(16)
    lora = {
        "img_in.lora_A.weight": down,
        "img_in.lora_B.weight": up,
        "img_in.lora_B.bias": bias,
        "double_blocks.0.img_attn.norm.query_norm.scale": scale,
    }
    path, out = small.write(tmp_path / "x.safetensors", lora), tmp_path / "out"
    report = fuselora.merge(base, [path], out=out)
    assert [notice.code for notice in report.notices] == ["widened"]
    got = load_file(out / model.folder / "diffusion_pytorch_model.safetensors")
    wide = torch.nn.functional.pad(weights["x_embedder.weight"], (0, 4)) + up @ down
    torch.testing.assert_close(got["x_embedder.weight"], wide)
    torch.testing.assert_close(got["x_embedder.bias"], weights["x_embedder.bias"] + bias)
    assert torch.equal(got["transformer_blocks.0.attn.norm_q.weight"], scale)
    merged = model.load(out / model.folder)
    assert merged.config.in_channels == 8  # type: ignore[union-attr]
    assert model.inputs is not None
    with torch.no_grad():
        found = merged(**{**model.inputs(), "hidden_states": noise(1, 4, 8)}, return_dict=False)[0]
    assert found.isfinite().all()
    assert verify(out, base=base, loras=[path]).ok
