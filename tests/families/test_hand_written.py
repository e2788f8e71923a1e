"""Families that diffusers has no converter for, against their published definitions, written out here.

HunyuanVideo-1.5: the rules of diffusers' scripts/convert_hunyuan_video1_5_to_diffusers.py. Kandinsky 5: the
class and the published files have the same names. LongCat-Video and SenseNova-U1 have no class: a fused layer
of theirs is one layer, whatever its LoRA is made of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file

import fuselora
from fuselora.families.hunyuan_video_15 import HUNYUAN_VIDEO_15
from fuselora.families.kandinsky5 import KANDINSKY_5
from fuselora.families.pattern import split_leaf, unnumbered
from fuselora.families.recognition import family_of
from fuselora.verify import verify
from tests import small

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

classes: Any = diffusers
Tensors = dict[str, torch.Tensor]
RENAMED = {
    "time_in.mlp.0": "time_embed.timestep_embedder.linear_1",
    "time_in.mlp.2": "time_embed.timestep_embedder.linear_2",
    "time_r_in.mlp.0": "time_embed.timestep_embedder_r.linear_1",
    "time_r_in.mlp.2": "time_embed.timestep_embedder_r.linear_2",
    "txt_in.t_embedder.mlp.0": "context_embedder.time_text_embed.timestep_embedder.linear_1",
    "txt_in.t_embedder.mlp.2": "context_embedder.time_text_embed.timestep_embedder.linear_2",
    "txt_in.c_embedder.linear_1": "context_embedder.time_text_embed.text_embedder.linear_1",
    "txt_in.c_embedder.linear_2": "context_embedder.time_text_embed.text_embedder.linear_2",
    "txt_in.input_embedder": "context_embedder.proj_in",
    "byt5_in.layernorm": "context_embedder_2.norm",
    "byt5_in.fc1": "context_embedder_2.linear_1",
    "byt5_in.fc2": "context_embedder_2.linear_2",
    "byt5_in.fc3": "context_embedder_2.linear_3",
    "vision_in.proj.0": "image_embedder.norm_in",
    "vision_in.proj.1": "image_embedder.linear_1",
    "vision_in.proj.3": "image_embedder.linear_2",
    "vision_in.proj.4": "image_embedder.norm_out",
    "img_in.proj": "x_embedder.proj",
    "cond_type_embedding": "cond_type_embed",
    "final_layer.linear": "proj_out",
}
REFINER = {
    "norm1": "norm1", "norm2": "norm2", "self_attn_proj": "attn.to_out.0", "mlp.fc1": "ff.net.0.proj",
    "mlp.fc2": "ff.net.2", "adaLN_modulation.1": "norm_out.linear",
}  # fmt: skip
BLOCK = {
    "img_mod.linear": "norm1.linear", "txt_mod.linear": "norm1_context.linear",
    "img_attn_q": "attn.to_q", "img_attn_k": "attn.to_k", "img_attn_v": "attn.to_v",
    "txt_attn_q": "attn.add_q_proj", "txt_attn_k": "attn.add_k_proj", "txt_attn_v": "attn.add_v_proj",
    "img_attn_q_norm": "attn.norm_q", "img_attn_k_norm": "attn.norm_k",
    "txt_attn_q_norm": "attn.norm_added_q", "txt_attn_k_norm": "attn.norm_added_k",
    "img_attn_proj": "attn.to_out.0", "txt_attn_proj": "attn.to_add_out",
    "img_mlp.fc1": "ff.net.0.proj", "img_mlp.fc2": "ff.net.2",
    "txt_mlp.fc1": "ff_context.net.0.proj", "txt_mlp.fc2": "ff_context.net.2",
}  # fmt: skip
HUNYUAN_CONFIG = {
    "in_channels": 9, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2,
    "num_refiner_layers": 1, "text_embed_dim": 24, "text_embed_2_dim": 20, "image_embed_dim": 28,
    "rope_axes_dim": (4, 6, 6), "use_meanflow": True,
}  # fmt: skip


def converted(native: Mapping[str, torch.Tensor]) -> Tensors:
    """As the script does it, for one refiner block and two others."""
    left, found = dict(native), {}

    def move(theirs: str, ours: str) -> None:
        for leaf in ("weight", "bias"):
            if f"{theirs}.{leaf}" in left:
                found[f"{ours}.{leaf}"] = left.pop(f"{theirs}.{leaf}")

    for theirs, ours in RENAMED.items():
        move(theirs, ours)
    refiner = "context_embedder.token_refiner.refiner_blocks.0"
    for theirs, ours in REFINER.items():
        move(f"txt_in.individual_token_refiner.blocks.0.{theirs}", f"{refiner}.{ours}")
    for number in range(2):
        for theirs, ours in BLOCK.items():
            move(f"double_blocks.{number}.{theirs}", f"transformer_blocks.{number}.{ours}")
    for leaf in ("weight", "bias"):
        qkv = left.pop(f"txt_in.individual_token_refiner.blocks.0.self_attn_qkv.{leaf}").chunk(3)
        found |= {f"{refiner}.attn.to_{p}.{leaf}": rows for p, rows in zip("qkv", qkv, strict=True)}
        shift, scale = left.pop(f"final_layer.adaLN_modulation.1.{leaf}").chunk(2)
        found[f"norm_out.linear.{leaf}"] = torch.cat((scale, shift))
    assert not left
    return found


def native_of_the_class() -> tuple[Tensors, dict[str, tuple[int, ...]]]:
    """Random tensors by native names, and the class's own shapes."""
    state = classes.HunyuanVideo15Transformer3DModel(**HUNYUAN_CONFIG).state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    spelled = list(HUNYUAN_VIDEO_15.spellings(shapes, "native"))
    return {s.name: small.noise(*s.shape, seed=n) for n, s in enumerate(spelled)}, shapes


def diffs(tensors: Mapping[str, torch.Tensor], prefix: str) -> tuple[Tensors, Tensors]:
    """A LoRA of a difference for each weight and bias, and those differences."""
    deltas = {name: small.noise(*t.shape, seed=500 + n) for n, (name, t) in enumerate(tensors.items())}
    endings = {".weight": ".diff", ".bias": ".diff_b"}
    lora = {}
    for name, delta in deltas.items():
        module, leaf = split_leaf(name)
        lora[f"{prefix}{module}{endings[leaf]}"] = delta
    return lora, deltas


def test_hunyuan_video_15_names_are_those_of_the_script() -> None:
    native, shapes = native_of_the_class()
    assert {name: tuple(t.shape) for name, t in converted(native).items()} == shapes
    assert family_of(shapes) is HUNYUAN_VIDEO_15


@pytest.mark.parametrize("base_is_native", [True, False])
@pytest.mark.parametrize("lora_is_native", [True, False])
def test_hunyuan_video_15_in_both_directions(
    tmp_path: Path, base_is_native: bool, lora_is_native: bool
) -> None:
    native, _ = native_of_the_class()
    ours = converted(native)
    lora, deltas = diffs(
        native if lora_is_native else ours, "diffusion_model." if lora_is_native else "transformer."
    )
    base = small.write(tmp_path / "base.safetensors", native if base_is_native else ours)
    path = small.write(tmp_path / "x.safetensors", lora)
    fuselora.merge(base, [path], out=tmp_path / "out")
    got = load_file(tmp_path / "out" / "base.safetensors")
    after = {name: tensor.double() for name, tensor in (converted(got) if base_is_native else got).items()}
    moved = converted(deltas) if lora_is_native else deltas
    for name, tensor in ours.items():
        torch.testing.assert_close(after[name], tensor.double() + moved[name].double(), rtol=1e-6, atol=1e-6)
    assert verify(tmp_path / "out", base=base, loras=[path]).ok


def test_hunyuan_video_15_merged_loads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    classes.HunyuanVideo15Transformer3DModel(**HUNYUAN_CONFIG).save_pretrained(
        tmp_path / "base" / "transformer"
    )
    weights = load_file(tmp_path / "base" / "transformer" / "diffusion_pytorch_model.safetensors")
    pair = small.pair("double_blocks.1.img_attn_q", small.noise(32, 2), small.noise(2, 32, seed=1))
    path = small.write(tmp_path / "x.safetensors", pair)
    fuselora.merge(tmp_path / "base", [path], out=tmp_path / "out")
    model = classes.HunyuanVideo15Transformer3DModel.from_pretrained(tmp_path / "out" / "transformer")
    name = "transformer_blocks.1.attn.to_q.weight"
    delta = (
        pair["double_blocks.1.img_attn_q.lora_up.weight"]
        @ pair["double_blocks.1.img_attn_q.lora_down.weight"]
    )
    torch.testing.assert_close(model.state_dict()[name], weights[name] + delta)


def test_kandinsky_5_has_the_names_of_its_class(tmp_path: Path) -> None:
    config = {
        "in_text_dim": 24, "in_text_dim2": 20, "time_dim": 16, "model_dim": 48, "ff_dim": 56,
        "num_text_blocks": 1, "num_visual_blocks": 2, "axes_dims": (8, 8, 8),
    }  # fmt: skip
    torch.manual_seed(0)
    classes.Kandinsky5Transformer3DModel(**config).save_pretrained(tmp_path / "base" / "transformer")
    weights = load_file(tmp_path / "base" / "transformer" / "diffusion_pytorch_model.safetensors")
    assert family_of({name: tuple(tensor.shape) for name, tensor in weights.items()}) is KANDINSKY_5
    assert {unnumbered(split_leaf(name)[0]) for name in weights} == {*map(unnumbered, KANDINSKY_5.names)}
    layer = "visual_transformer_blocks.1.cross_attention.to_key"
    pair = small.pair(
        f"lora_unet_{layer.replace('.', '_')}", small.noise(48, 2), small.noise(2, 48), alpha=1.0
    )
    path = small.write(tmp_path / "x.safetensors", pair)
    fuselora.merge(tmp_path / "base", [path], out=tmp_path / "out")
    up, down, _ = pair.values()
    model = classes.Kandinsky5Transformer3DModel.from_pretrained(tmp_path / "out" / "transformer")
    torch.testing.assert_close(
        model.state_dict()[f"{layer}.weight"], weights[f"{layer}.weight"] + 0.5 * up @ down
    )


def test_longcat_video_s_split_blocks_on_its_fused_layer(tmp_path: Path) -> None:
    """up.blocks.K @ its own rows of down are q, k and v of one stacked layer, times alpha_scale alone."""
    start = "lora___lorahyphen___blocks___lorahyphen___0___lorahyphen___attn___lorahyphen___qkv"
    ups = [small.noise(8, 2, seed=k) for k in range(3)]
    down = small.noise(6, 8, seed=9)
    lora = {f"{start}.lora_up.blocks.{k}.weight": up for k, up in enumerate(ups)}
    lora |= {f"{start}.lora_down.weight": down, f"{start}.alpha_scale": torch.tensor(0.5)}
    base = {
        "blocks.0.attn.qkv.weight": small.noise(24, 8, seed=20),
        "blocks.0.attn.proj.weight": small.noise(8, 8),
    }
    base_path, path = (
        small.write(tmp_path / "b.safetensors", base),
        small.write(tmp_path / "x.safetensors", lora),
    )
    report = fuselora.merge(base_path, [path], out=tmp_path / "out")
    assert report.plan.checkpoint.family is not None and report.plan.checkpoint.family.name == "longcat-video"
    parts = [up.double() @ rows.double() for up, rows in zip(ups, down.chunk(3), strict=True)]
    exact = base["blocks.0.attn.qkv.weight"].double() + 0.5 * torch.cat(parts)
    got = load_file(tmp_path / "out" / "b.safetensors")["blocks.0.attn.qkv.weight"]
    torch.testing.assert_close(got.double(), exact, rtol=1e-6, atol=1e-6)


def test_sensenova_u1_s_generation_tower_alone_changes(tmp_path: Path) -> None:
    layer = "language_model.model.layers.0"
    towers = [
        f"{layer}.self_attn.q_proj",
        f"{layer}.self_attn.q_proj_mot_gen",
        f"{layer}.mlp_mot_gen.up_proj",
    ]
    base = {f"{name}.weight": small.noise(8, 8, seed=n) for n, name in enumerate(towers)}
    lora = {
        **small.pair(towers[1], small.noise(8, 2), small.noise(2, 8, seed=5), alpha=1.0),
        **small.pair(towers[2], small.noise(8, 2, seed=6), small.noise(2, 8, seed=7), alpha=4.0),
    }
    base_path, path = (
        small.write(tmp_path / "b.safetensors", base),
        small.write(tmp_path / "x.safetensors", lora),
    )
    report = fuselora.merge(base_path, [path], out=tmp_path / "out")
    assert report.plan.checkpoint.family is not None and report.plan.checkpoint.family.name == "sensenova-u1"
    got = load_file(tmp_path / "out" / "b.safetensors")
    assert torch.equal(got[f"{towers[0]}.weight"], base[f"{towers[0]}.weight"])
    for name, scale in ((towers[1], 0.5), (towers[2], 2.0)):
        up, down = lora[f"{name}.lora_up.weight"].double(), lora[f"{name}.lora_down.weight"].double()
        exact = base[f"{name}.weight"].double() + scale * up @ down
        torch.testing.assert_close(got[f"{name}.weight"].double(), exact, rtol=1e-6, atol=1e-6)
