"""FLUX.1, FLUX.2 and Chroma with a few numbers in each tensor, in both layouts, and LoRAs of every spelling.

``native`` of a base is written from the published definition (black-forest-labs/flux and flux2,
lodestone-rock/flow), not from the families' rows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file

from fuselora.pipeline import merge
from fuselora.verify import verify

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from fuselora.families import Layout

Tensors = dict[str, torch.Tensor]
LAYOUTS: tuple[Layout, Layout] = ("native", "diffusers")
in_each_layout = pytest.mark.parametrize("layout", LAYOUTS)
classes: Any = diffusers  # without annotations
DIM, TEXT, CHANNELS, RANK = 32, 24, 4, 6
SMALL = {
    "in_channels": CHANNELS, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16,
    "num_attention_heads": 2, "joint_attention_dim": TEXT,
}  # fmt: skip

# Native names of what is no block, native -> diffusers
STEM = {"img_in": "x_embedder", "txt_in": "context_embedder", "final_layer.linear": "proj_out"}
# inside a double block and a single one
PROJECTIONS = {"img_attn.proj": "attn.to_out.0", "txt_attn.proj": "attn.to_add_out"}
FLUX1_MLPS = {
    "img_mlp.0": "ff.net.0.proj", "img_mlp.2": "ff.net.2",
    "txt_mlp.0": "ff_context.net.0.proj", "txt_mlp.2": "ff_context.net.2",
}  # fmt: skip
FLUX2_MLPS = {
    "img_mlp.0": "ff.linear_in", "img_mlp.2": "ff.linear_out",
    "txt_mlp.0": "ff_context.linear_in", "txt_mlp.2": "ff_context.linear_out",
}  # fmt: skip
NORMS = {"img": ("norm_q", "norm_k"), "txt": ("norm_added_q", "norm_added_k")}
QKV = {"img": ("to_q", "to_k", "to_v"), "txt": ("add_q_proj", "add_k_proj", "add_v_proj")}


def _layer(state: Mapping[str, torch.Tensor], theirs: str, ours: str) -> Tensors:
    return {
        f"{theirs}.{leaf}": state[f"{ours}.{leaf}"]
        for leaf in ("weight", "bias")
        if f"{ours}.{leaf}" in state
    }


def _stacked(state: Mapping[str, torch.Tensor], theirs: str, *ours: str) -> Tensors:
    leaves = [leaf for leaf in ("weight", "bias") if f"{ours[0]}.{leaf}" in state]
    return {f"{theirs}.{leaf}": torch.cat([state[f"{name}.{leaf}"] for name in ours]) for leaf in leaves}


def _embedders(state: Mapping[str, torch.Tensor], at: str, **names: str) -> Tensors:
    found: Tensors = {}
    for theirs, ours in names.items():
        found |= _layer(state, f"{theirs}.in_layer", f"{at}.{ours}.linear_1")
        found |= _layer(state, f"{theirs}.out_layer", f"{at}.{ours}.linear_2")
    return found


def _head(state: Mapping[str, torch.Tensor]) -> Tensors:
    """Black Forest Labs' last modulation is shift, then scale; diffusers' is scale, then shift."""
    found: Tensors = {}
    for name, value in _layer(state, "final_layer.adaLN_modulation.1", "norm_out.linear").items():
        scale, shift = value.chunk(2)
        found[name] = torch.cat([shift, scale])
    return found


def _double(state: Mapping[str, torch.Tensor], n: str, mlps: Mapping[str, str]) -> Tensors:
    theirs, ours = f"double_blocks.{n}", f"transformer_blocks.{n}"
    found: Tensors = {}
    for stream in ("img", "txt"):
        found |= _stacked(state, f"{theirs}.{stream}_attn.qkv", *(f"{ours}.attn.{p}" for p in QKV[stream]))
        for norm, name in zip(("query_norm", "key_norm"), NORMS[stream], strict=True):
            found[f"{theirs}.{stream}_attn.norm.{norm}.scale"] = state[f"{ours}.attn.{name}.weight"]
    for native, name in {**PROJECTIONS, **mlps}.items():
        found |= _layer(state, f"{theirs}.{native}", f"{ours}.{name}")
    found |= _layer(state, f"{theirs}.img_mod.lin", f"{ours}.norm1.linear")
    return found | _layer(state, f"{theirs}.txt_mod.lin", f"{ours}.norm1_context.linear")


def _single(state: Mapping[str, torch.Tensor], n: str) -> Tensors:
    theirs, ours = f"single_blocks.{n}", f"single_transformer_blocks.{n}"
    found: Tensors = {}
    for norm, name in (("query_norm", "norm_q"), ("key_norm", "norm_k")):
        found[f"{theirs}.norm.{norm}.scale"] = state[f"{ours}.attn.{name}.weight"]
    if f"{ours}.proj_mlp.weight" in state:
        parts = (*(f"{ours}.attn.{p}" for p in QKV["img"]), f"{ours}.proj_mlp")
        found |= _stacked(state, f"{theirs}.linear1", *parts)
        found |= _layer(state, f"{theirs}.linear2", f"{ours}.proj_out")
        return found | _layer(state, f"{theirs}.modulation.lin", f"{ours}.norm.linear")
    found |= _layer(state, f"{theirs}.linear1", f"{ours}.attn.to_qkv_mlp_proj")
    return found | _layer(state, f"{theirs}.linear2", f"{ours}.attn.to_out")


def _common(state: Mapping[str, torch.Tensor], mlps: Mapping[str, str]) -> Tensors:
    found: Tensors = {}
    for theirs, ours in STEM.items():
        found |= _layer(state, theirs, ours)
    for n in _numbers(state, "transformer_blocks"):
        found |= _double(state, n, mlps)
    for n in _numbers(state, "single_transformer_blocks"):
        found |= _single(state, n)
    return found


def _numbers(state: Mapping[str, torch.Tensor], blocks: str) -> list[str]:
    """Those of the blocks in a list of blocks."""
    return list(dict.fromkeys(found[1] for name in state if (found := re.match(rf"{blocks}\.(\d+)\.", name))))


def native_flux1(state: Mapping[str, torch.Tensor]) -> Tensors:
    """diffusers' tensors as Black Forest Labs' model has them."""
    embedders = _embedders(
        state, "time_text_embed",
        time_in="timestep_embedder", vector_in="text_embedder", guidance_in="guidance_embedder",
    )  # fmt: skip
    return _common(state, FLUX1_MLPS) | embedders | _head(state)


def native_flux2(state: Mapping[str, torch.Tensor]) -> Tensors:
    """diffusers' tensors as Black Forest Labs' model has them."""
    embedders = _embedders(
        state, "time_guidance_embed", time_in="timestep_embedder", guidance_in="guidance_embedder"
    )
    for name in ("double_stream_modulation_img", "double_stream_modulation_txt", "single_stream_modulation"):
        embedders |= _layer(state, f"{name}.lin", f"{name}.linear")
    return _common(state, FLUX2_MLPS) | embedders | _head(state)


def native_chroma(state: Mapping[str, torch.Tensor]) -> Tensors:
    """diffusers' tensors as lodestone-rock's model has them."""
    found = _common(state, FLUX1_MLPS)
    at = "distilled_guidance_layer"
    for name in ("in_proj", "out_proj"):
        found |= _layer(state, f"{at}.{name}", f"{at}.{name}")
    for n in _numbers(state, rf"{at}\.norms"):
        found |= _layer(state, f"{at}.layers.{n}.in_layer", f"{at}.layers.{n}.linear_1")
        found |= _layer(state, f"{at}.layers.{n}.out_layer", f"{at}.layers.{n}.linear_2")
        found[f"{at}.norms.{n}.scale"] = state[f"{at}.norms.{n}.weight"]
    return found


@dataclass(frozen=True)
class Base:
    """A small model, and its tensors by native names."""

    make: Callable[[], Any]
    native: Callable[[Mapping[str, torch.Tensor]], Tensors]
    inputs: Callable[[], dict[str, torch.Tensor]]

    def tensors(self, seed: int = 1) -> Tensors:
        """By diffusers' names, values between -1 and 1."""
        generator = torch.Generator().manual_seed(seed)
        shapes = {name: tensor.shape for name, tensor in self.make().state_dict().items()}
        return {name: torch.rand(shape, generator=generator) * 2 - 1 for name, shape in shapes.items()}

    def write(self, folder: Path, layout: str) -> Path:
        """One native file, or diffusers' folder."""
        if layout == "native":
            save_file(self.native(self.tensors()), folder / "base.safetensors", {"format": "pt"})
            return folder / "base.safetensors"
        model = self.make()
        model.load_state_dict(self.tensors())
        model.save_pretrained(folder / "base")
        return folder / "base"

    def read_native(self, out: Path, layout: str) -> Tensors:
        """A merged base's tensors by native names."""
        (path,) = out.rglob("*.safetensors")
        tensors = load_file(path)
        return tensors if layout == "native" else self.native(tensors)


def _inputs(ids: int, **more: tuple[int, ...]) -> dict[str, torch.Tensor]:
    shapes = {"hidden_states": (1, 4, CHANNELS), "encoder_hidden_states": (1, 3, TEXT), **more}
    generator = torch.Generator().manual_seed(3)
    found = {name: torch.rand(shape, generator=generator) for name, shape in shapes.items()}
    return {
        **found,
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.ones(4, ids),
        "txt_ids": torch.zeros(3, ids),
    }


FLUX1_BASE = Base(
    lambda: classes.FluxTransformer2DModel(
        **SMALL, axes_dims_rope=(4, 6, 6), pooled_projection_dim=20, guidance_embeds=True
    ),
    native_flux1,
    lambda: _inputs(3, pooled_projections=(1, 20), guidance=(1,)),
)
FLUX2_BASE = Base(
    lambda: classes.Flux2Transformer2DModel(
        **SMALL, axes_dims_rope=(4, 4, 4, 4), timestep_guidance_channels=16
    ),
    native_flux2,
    lambda: _inputs(4, guidance=(1,)),
)
CHROMA_BASE = Base(
    lambda: classes.ChromaTransformer2DModel(
        **SMALL,
        axes_dims_rope=(4, 6, 6),
        approximator_num_channels=64,
        approximator_hidden_dim=12,
        approximator_layers=2,
    ),
    native_chroma,
    lambda: _inputs(3),
)

# how a file spells a module: layout, prefix, whether dots are underscores, endings of the factors
SPELLINGS: dict[str, tuple[str, str, bool, tuple[str, str]]] = {
    "native": ("native", "", False, ("lora_A", "lora_B")),
    "comfyui": ("native", "diffusion_model.", False, ("lora_down", "lora_up")),
    "fal": ("native", "base_model.model.", False, ("lora_A", "lora_B")),
    "kohya": ("native", "lora_unet_", True, ("lora_down", "lora_up")),
    "diffusers": ("diffusers", "transformer.", False, ("lora_A", "lora_B")),
    "infix": ("diffusers", "", False, ("lora_A.default", "lora_B.default")),
    "kohya in diffusers' names": ("diffusers", "lora_transformer_", True, ("lora_down", "lora_up")),
    "simpletuner": ("diffusers", "transformer.base_model.model.", False, ("lora_A", "lora_B")),
}


@dataclass(frozen=True)
class Lora:
    """Factors of every linear layer, alpha half the rank where the file has flattened names."""

    path: Path
    deltas: Tensors  # float64, by the layout's own tensor names
    layout: str


def write_lora(path: Path, base: Base, spelling: str, only: str = "") -> Lora:
    """``only``: a pattern of the modules that are in it."""
    layout, prefix, flat, (down, up) = SPELLINGS[spelling]
    tensors = base.tensors() if layout == "diffusers" else base.native(base.tensors())
    generator = torch.Generator().manual_seed(9)
    file: Tensors = {}
    deltas: Tensors = {}
    for name, weight in tensors.items():
        module = name.removesuffix(".weight")
        if weight.dim() != 2 or not re.search(only, module):
            continue
        a = torch.rand(RANK, weight.shape[1], generator=generator) - 0.5
        b = torch.rand(weight.shape[0], RANK, generator=generator) - 0.5
        spelled = prefix + (module.replace(".", "_") if flat else module)
        file |= {f"{spelled}.{down}.weight": a, f"{spelled}.{up}.weight": b}
        deltas[name] = b.double() @ a.double()
        if flat:
            file[f"{spelled}.alpha"] = torch.tensor(RANK / 2)
            deltas[name] /= 2
    save_file(file, path)
    return Lora(path, deltas, layout)


def summed(base: Base, lora: Lora) -> Tensors:
    """The base and the deltas in float64, by native names."""
    tensors = {name: tensor.double() for name, tensor in base.tensors().items()}
    if lora.layout == "native":
        native = base.native(tensors)
        return {name: tensor + lora.deltas.get(name, 0.0) for name, tensor in native.items()}
    return base.native({name: tensor + lora.deltas.get(name, 0.0) for name, tensor in tensors.items()})


def largest_difference(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    """Of the same tensors."""
    assert found.keys() == wanted.keys()
    return max(float((found[name].double() - tensor.double()).abs().max()) for name, tensor in wanted.items())


def merged(folder: Path, base: Base, layout: str, lora: Path) -> Tensors:
    """What a merge makes of it, by native names."""
    out = merge(base.write(folder, layout), [lora], folder / "out").out
    return base.read_native(out, layout)


def predicted(base: Base, folder: Path) -> torch.Tensor:
    """What the model in a folder makes of the inputs, all of its tensors loaded from there."""
    model, info = type(base.make()).from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"], info
    assert not info["unexpected_keys"], info
    with torch.no_grad():
        found: torch.Tensor = model.eval()(**base.inputs(), return_dict=False)[0]
    return found


def assert_all_land(folder: Path, base: Base, layout: str, lora: Lora) -> None:
    """Every delta of a LoRA is where it belongs, and nothing else has changed."""
    assert largest_difference(merged(folder, base, layout, lora.path), summed(base, lora)) < 1e-6


def assert_runs_as_another(folder: Path, base: Base, spelling: str) -> None:
    """The model of a merged folder loads, and makes something finite and different of the same inputs."""
    lora = write_lora(folder / "lora.safetensors", base, spelling)
    before = base.write(folder, "diffusers")
    out = merge(before, [lora.path], folder / "out").out
    old, new = predicted(base, before), predicted(base, out)
    assert old.shape == new.shape
    assert old.isfinite().all()
    assert new.isfinite().all()
    assert not torch.allclose(old, new)


def assert_verifies(folder: Path, base: Base, layout: str, spelling: str) -> None:
    lora = write_lora(folder / "lora.safetensors", base, spelling)
    path = base.write(folder, layout)
    report = verify(merge(path, [lora.path], folder / "out").out, base=path, loras=[lora.path])
    assert report.ok, report.findings
    assert len(report.components) == 1
