"""HunyuanVideo: the three spellings of a whole model, files that ComfyUI saved, and LoRAs stored in fp8.

The rows are held against diffusers' converter in ``test_differences``; where its LoRA converter is wrong is
shown in ``tests/oracle/test_lora_converters``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file

import fuselora
from fuselora.families.hunyuan_video import HUNYUAN_VIDEO
from fuselora.verify import verify
from tests import listings, small

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from fuselora.families import Layout

classes: Any = diffusers
Shapes = dict[str, tuple[int, ...]]
Tensors = dict[str, torch.Tensor]
DIM = 32
# the published widths -> a small model's
WIDTHS = {
    3072: DIM, 9216: 3 * DIM, 12288: 4 * DIM, 18432: 6 * DIM, 21504: 7 * DIM, 15360: 5 * DIM, 6144: 2 * DIM,
    4096: 24, 768: 20, 256: 16, 128: 8, 64: 12,
}  # fmt: skip
# HunyuanVideo.process_unet_state_dict of ComfyUI's supported_models.py, as it was when files with ".scale"
# were published
COMFY = (
    (r"txt_in\.t_embedder\.mlp\.0\.", "txt_in.t_embedder.in_layer."),
    (r"txt_in\.t_embedder\.mlp\.2\.", "txt_in.t_embedder.out_layer."),
    (r"txt_in\.c_embedder\.linear_1\.", "txt_in.c_embedder.in_layer."),
    (r"txt_in\.c_embedder\.linear_2\.", "txt_in.c_embedder.out_layer."),
    (r"_mod\.linear\.", "_mod.lin."),
    (r"_attn_qkv\.", "_attn.qkv."),
    (r"mlp\.fc1\.", "mlp.0."),
    (r"mlp\.fc2\.", "mlp.2."),
    (r"_attn_q_norm\.weight", "_attn.norm.query_norm.scale"),
    (r"_attn_k_norm\.weight", "_attn.norm.key_norm.scale"),
    (r"\.q_norm\.weight", ".norm.query_norm.scale"),
    (r"\.k_norm\.weight", ".norm.key_norm.scale"),
    (r"_attn_proj\.", "_attn.proj."),
    (r"\.modulation\.linear\.", ".modulation.lin."),
    (r"_in\.mlp\.2\.", "_in.out_layer."),
    (r"_in\.mlp\.0\.", "_in.in_layer."),
)


def as_in_comfy(name: str) -> str:
    for pattern, plain in COMFY:
        name = re.sub(pattern, plain, name)
    return name


def listed(layout: Layout) -> Shapes:
    return {spec.name: spec.shape for spec in listings.base("hunyuanvideo", layout)}


def spelled(shapes: Shapes, layout: Layout) -> Shapes:
    return {found.name: found.shape for found in HUNYUAN_VIDEO.spellings(shapes, layout)}


def test_the_published_files_have_each_other_s_names() -> None:
    ours, theirs = listed("diffusers"), listed("native")
    assert spelled(ours, "native") == theirs
    assert HUNYUAN_VIDEO.canonical_shapes(theirs, "native") == ours
    comfy = {as_in_comfy(name): shape for name, shape in theirs.items()}
    assert len(comfy) == len(theirs)
    assert spelled(ours, "comfy") == comfy
    assert HUNYUAN_VIDEO.canonical_shapes(comfy, "comfy") == ours
    for layout, shapes in (("diffusers", ours), ("native", theirs), ("comfy", comfy)):
        assert HUNYUAN_VIDEO.layout_of(shapes) == layout


@pytest.mark.parametrize(
    ("config", "models"),
    [
        ({"image_condition_type": None}, ("HunyuanVideo", "HunyuanVideo-I2V")),
        ({"image_condition_type": "token_replace"}, ("HunyuanVideo", "HunyuanVideo-I2V")),
        (
            {"image_condition_type": "latent_concat", "in_channels": 33, "guidance_embeds": False},
            ("HunyuanVideo-I2V (latent concat)",),
        ),
    ],
)
def test_the_models_of_the_class(config: Mapping[str, Any], models: tuple[str, ...]) -> None:
    with torch.device("meta"):
        model = classes.HunyuanVideoTransformer3DModel(**{"guidance_embeds": True, **config})
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert HUNYUAN_VIDEO.share(shapes) == 1.0
    assert HUNYUAN_VIDEO.models_of(shapes) == models


def little(name: str, divisor: int = 16) -> list[Any]:
    """The first blocks of a published LoRA, its widths those of a small model."""
    block = re.compile(r"blocks[._]([0-9]+)[._]")
    first = [s for s in listings.lora(name) if (found := block.search(s.name)) and found[1] == "0"]
    return list(listings.scaled(first, {**WIDTHS, 32: 2}, divisor))


def little_base(folder: Path, layout: Layout) -> Path:
    """The first blocks, and all around them, of the published base."""
    block = re.compile(r"(?:transformer|double|single|refiner)_?(?:transformer_)?blocks\.([1-9][0-9]*)\.")
    kept = [spec for spec in listings.base("hunyuanvideo", layout) if not block.search(spec.name)]
    shapes = {spec.name: tuple(WIDTHS.get(n, n) for n in spec.shape) for spec in kept}
    tensors = {name: small.noise(*shape, seed=n) for n, (name, shape) in enumerate(shapes.items())}
    return small.write(folder / "base.safetensors", tensors)


def rows_of_diffusers(name: str, tensor: torch.Tensor) -> Tensors:
    """A tensor of the first double or single block, as diffusers' converter cuts it."""
    double, single = "transformer_blocks.0", "single_transformer_blocks.0"
    for stream, parts in (
        ("img", ("to_q", "to_k", "to_v")),
        ("txt", ("add_q_proj", "add_k_proj", "add_v_proj")),
    ):
        if name == f"double_blocks.0.{stream}_attn_qkv":
            cut = tensor.chunk(3)
            return {f"{double}.attn.{part}": rows for part, rows in zip(parts, cut, strict=True)}
    if name == "single_blocks.0.linear1":
        starts = {"attn.to_q": 0, "attn.to_k": DIM, "attn.to_v": 2 * DIM}
        found = {f"{single}.{part}": tensor[start : start + DIM] for part, start in starts.items()}
        return {**found, f"{single}.proj_mlp": tensor[3 * DIM :]}
    plain = {
        "double_blocks.0.img_mod.linear": f"{double}.norm1.linear",
        "double_blocks.0.txt_mod.linear": f"{double}.norm1_context.linear",
        "double_blocks.0.img_attn_proj": f"{double}.attn.to_out.0",
        "double_blocks.0.txt_attn_proj": f"{double}.attn.to_add_out",
        "double_blocks.0.img_mlp.fc1": f"{double}.ff.net.0.proj",
        "double_blocks.0.img_mlp.fc2": f"{double}.ff.net.2",
        "double_blocks.0.txt_mlp.fc1": f"{double}.ff_context.net.0.proj",
        "double_blocks.0.txt_mlp.fc2": f"{double}.ff_context.net.2",
        "single_blocks.0.linear2": f"{single}.proj_out",
        "single_blocks.0.modulation.linear": f"{single}.norm.linear",
    }
    return {plain[name]: tensor}


def same_sums(base: Path, out: Path, deltas: Tensors, layout: Layout) -> None:
    before, after = load_file(base), load_file(out)
    wanted = deltas
    if layout == "diffusers":
        wanted = {}
        for name, delta in deltas.items():
            wanted |= rows_of_diffusers(name, delta)
    assert {f"{name}.weight" for name in wanted} <= before.keys()
    for name, tensor in before.items():
        exact = tensor.double() + wanted.get(name.removesuffix(".weight"), torch.zeros(())).double()
        torch.testing.assert_close(after[name].double(), exact, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("layout", ["native", "diffusers"])
def test_a_lora_stored_in_fp8_is_added_in_full(tmp_path: Path, layout: Layout) -> None:
    """hyvideo_FastVideo_LoRA-fp8: every number of its float8_e4m3fn is one of float32."""
    specs = little("hunyuanvideo.fastvideo-fp8.r32")
    assert {spec.dtype for spec in specs} == {"F8_E4M3"}
    lora = {
        spec.name: small.noise(*spec.shape, seed=n, std=0.2).to(torch.float8_e4m3fn)
        for n, spec in enumerate(specs)
    }
    base, path = little_base(tmp_path, layout), tmp_path / "x.safetensors"
    save_file(lora, path)
    fuselora.merge(base, [path], out=tmp_path / "out")
    deltas = {
        key.removeprefix("diffusion_model.").removesuffix(".lora_A.weight"): (
            lora[key.replace("lora_A", "lora_B")].double() @ down.double()
        )
        for key, down in lora.items()
        if ".lora_A." in key
    }
    assert 2 * len(deltas) == len(lora)
    same_sums(base, tmp_path / "out" / "base.safetensors", deltas, layout)
    assert verify(tmp_path / "out", base=base, loras=[path]).ok


@pytest.mark.parametrize("layout", ["native", "diffusers"])
def test_musubi_s_flattened_names_and_alpha(tmp_path: Path, layout: Layout) -> None:
    specs = little("hunyuanvideo.musubi-kohya.r32")
    lora = {
        spec.name: small.noise(*spec.shape, seed=n) if spec.shape else torch.tensor(1.0)
        for n, spec in enumerate(specs)
    }
    base, path = little_base(tmp_path, layout), small.write(tmp_path / "x.safetensors", lora)
    fuselora.merge(base, [path], out=tmp_path / "out")
    deltas = {}
    for name in listed("native"):
        key = "lora_unet_" + name.removesuffix(".weight").replace(".", "_")
        if f"{key}.alpha" in lora:
            down, up = (lora[f"{key}.lora_{part}.weight"].double() for part in ("down", "up"))
            deltas[name.removesuffix(".weight")] = up @ down / len(down)
    assert 3 * len(deltas) == len(lora)
    same_sums(base, tmp_path / "out" / "base.safetensors", deltas, layout)


@pytest.mark.parametrize("prefix", ["model.model.", "model.diffusion_model.", ""])
def test_a_file_that_comfyui_saved(tmp_path: Path, prefix: str) -> None:
    """Its names under its prefix, with a LoRA of diffusers' names and one of its own."""
    native = load_file(little_base(tmp_path / "native", "native"))
    base = {prefix + as_in_comfy(name): tensor for name, tensor in native.items()}
    base_path = small.write(tmp_path / "base.safetensors", base)
    up, down, mod = small.noise(DIM, 2), small.noise(2, DIM), small.noise(2 * DIM, 2)
    ours = {
        **small.pair("transformer.transformer_blocks.0.attn.to_k", up, down),
        **small.pair("transformer.norm_out.linear", mod, down),
    }
    theirs = small.pair("diffusion_model.guidance_in.in_layer", up, small.noise(2, 16))
    paths = [small.write(tmp_path / f"{n}.safetensors", tensors) for n, tensors in enumerate((ours, theirs))]
    report = fuselora.merge(base_path, paths, out=tmp_path / "out")
    assert report.plan.checkpoint.family is HUNYUAN_VIDEO
    assert report.plan.checkpoint.layout == "comfy"
    got = load_file(tmp_path / "out" / "base.safetensors")
    assert got.keys() == base.keys()
    scale, shift = (mod.double() @ down.double()).chunk(2)
    zero = torch.zeros(DIM, DIM, dtype=torch.float64)
    deltas = {
        "double_blocks.0.img_attn.qkv.weight": torch.cat((zero, up.double() @ down.double(), zero)),
        "final_layer.adaLN_modulation.1.weight": torch.cat((shift, scale)),
        "guidance_in.in_layer.weight": up.double() @ small.noise(2, 16).double(),
    }
    for name, tensor in base.items():
        exact = tensor.double() + deltas.get(name.removeprefix(prefix), torch.zeros(()))
        torch.testing.assert_close(got[name].double(), exact, rtol=2e-6, atol=2e-6)
    assert verify(tmp_path / "out", base=base_path, loras=paths).ok


def test_what_is_published_of_the_fast_one() -> None:
    row = HUNYUAN_VIDEO.few_step_named("hyvideo_FastVideo_LoRA-fp8.safetensors")
    assert row is not None
    assert (row.num_inference_steps, row.flow_shift, row.guidance_scale) == (6, 17.0, None)
    assert HUNYUAN_VIDEO.few_step_named("hyvideo_FastVideo_LoRA-fp8_mycat.safetensors") is None
