"""SenseNova-U1: which of its models a base or a LoRA is of, and the names that its code gives them.

There is no list of a whole model: the names are those of its definition, written out here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

import fuselora
from fuselora.describe import describe
from fuselora.description import LoraDescription
from fuselora.families.recognition import family_of
from fuselora.families.sensenova_u1 import SENSENOVA_U1
from fuselora.verify import verify
from tests import listings, small

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Shapes = dict[str, tuple[int, ...]]
LAYER = "language_model.model.layers"
HEADS = {
    "linear": {"0.weight": (4096, 4096), "0.bias": (4096,), "2.weight": (3072, 4096), "2.bias": (3072,)},
    "conv": {
        "conv1.weight": (1024, 1024, 3, 3), "conv1.bias": (1024,),
        "conv2.weight": (192, 256, 3, 3), "conv2.bias": (192,),
    },
}  # fmt: skip


def layer(
    prefix: str, tower: str, *, dim: int, kv: int, inner: int, experts: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The weights of one decoder layer's tower: 4096 for queries, ``experts`` where there are any."""
    for name, rows in (("q", 4096), ("k", kv), ("v", kv)):
        yield f"{prefix}.self_attn.{name}_proj{tower}.weight", (rows, dim)
    yield f"{prefix}.self_attn.o_proj{tower}.weight", (dim, 4096)
    for norm in ("q_norm", "q_norm_hw", "k_norm", "k_norm_hw"):
        yield f"{prefix}.self_attn.{norm}{tower}.weight", (64,)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{prefix}.{norm}{tower}.weight", (dim,)
    if experts:
        yield f"{prefix}.mlp{tower}.gate.weight", (experts, dim)
    mlp = f"{prefix}.mlp{tower}"
    for part in [f"{mlp}.experts.{n}" for n in range(experts)] or [mlp]:
        for name in ("gate_proj", "up_proj"):
            yield f"{part}.{name}.weight", (inner, dim)
        yield f"{part}.down_proj.weight", (dim, inner)


def model(
    head: str, *, layers: int = 42, dim: int = 4096, kv: int = 1024, inner: int = 12288, experts: int = 0
) -> Shapes:
    found: Shapes = {
        "language_model.model.embed_tokens.weight": (151936, dim),
        "language_model.lm_head.weight": (151936, dim),
        "language_model.model.norm.weight": (dim,),
        "language_model.model.norm_mot_gen.weight": (dim,),
        **{f"fm_modules.fm_head.{name}": shape for name, shape in HEADS[head].items()},
    }
    for tower in ("vision_model.embeddings", "fm_modules.vision_model_mot_gen.embeddings"):
        found |= {
            f"{tower}.patch_embedding.weight": (1024, 3, 16, 16),
            f"{tower}.patch_embedding.bias": (1024,),
        }
        found |= {
            f"{tower}.dense_embedding.weight": (dim, 1024, 2, 2),
            f"{tower}.dense_embedding.bias": (dim,),
        }
    for embedder in ("timestep_embedder", "noise_scale_embedder"):
        for n, columns in ((0, 256), (2, dim)):
            start = f"fm_modules.{embedder}.mlp.{n}"
            found |= {f"{start}.weight": (dim, columns), f"{start}.bias": (dim,)}
    for number in range(layers):
        for tower, some in (("", experts), ("_mot_gen", experts // 2)):
            found |= dict(layer(f"{LAYER}.{number}", tower, dim=dim, kv=kv, inner=inner, experts=some))
    return found


MODELS = {
    "SenseNova-U1-8B-MoT": model("linear"),
    "SenseNova-U1.5-8B-MoT": model("conv"),
    "SenseNova-U1-A3B-MoT": model("linear", layers=48, dim=2048, kv=512, inner=768, experts=4),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_told_from_its_kin(name: str) -> None:
    shapes = MODELS[name]
    assert family_of(shapes) is SENSENOVA_U1
    assert SENSENOVA_U1.models_of(shapes) == (name,)
    assert SENSENOVA_U1.share(shapes) == 1.0


def test_the_published_model_has_as_many_tensors() -> None:
    assert len(MODELS["SenseNova-U1-8B-MoT"]) == 1116


def test_the_list_of_its_generation_tower_is_part_of_it() -> None:
    listed = {spec.name: spec.shape for spec in listings.base("sensenova-u1.5-mot-gen", "native")}
    assert listed.items() <= MODELS["SenseNova-U1.5-8B-MoT"].items()


def test_a_lora_with_the_head_is_for_u1(tmp_path: Path) -> None:
    specs = listings.lora("sensenova-u1.5.8step.r128")
    path = listings.sparse(tmp_path / "x.safetensors", specs)
    both = describe(path)
    assert isinstance(both, LoraDescription)
    assert both.target.models == ("SenseNova-U1-8B-MoT", "SenseNova-U1.5-8B-MoT")
    head = {
        f"fm_modules.fm_head.{n}.lora_{part}.weight": small.noise(*shape)
        for n, out in ((0, 40), (2, 30))
        for part, shape in (("down", (2, 40)), ("up", (out, 2)))
    }
    alone = describe(small.write(tmp_path / "head.safetensors", head))
    assert isinstance(alone, LoraDescription)
    assert "SenseNova-U1.5-8B-MoT" not in alone.target.models
    assert "SenseNova-U1-8B-MoT" in alone.target.models


@pytest.mark.parametrize(
    "prefix", ["", "diffusion_model.", "base_model.model.", "lora_unet_", "model.diffusion_model."]
)
def test_the_generation_tower_in_every_spelling(tmp_path: Path, prefix: str) -> None:
    """Two towers of one layer, and a head of linear layers; the tower that reads stays."""
    names = [f"{LAYER}.0.self_attn.k_proj", f"{LAYER}.0.self_attn.k_proj_mot_gen",
             f"{LAYER}.0.mlp_mot_gen.down_proj", "fm_modules.fm_head.2"]  # fmt: skip
    base = {f"{name}.weight": small.noise(6, 8, seed=n) for n, name in enumerate(names)}
    lora: dict[str, torch.Tensor] = {}
    wanted = {f"{names[0]}.weight": base[f"{names[0]}.weight"].double()}
    for seed, name in enumerate(names[1:]):
        up, down = small.noise(6, 2, seed=seed + 20), small.noise(2, 8, seed=seed + 30)
        flat = prefix == "lora_unet_"
        lora |= small.pair(prefix + (name.replace(".", "_") if flat else name), up, down, alpha=1.0)
        wanted[f"{name}.weight"] = base[f"{name}.weight"].double() + 0.5 * up.double() @ down.double()
    base_path = small.write(tmp_path / "base.safetensors", base)
    path = small.write(tmp_path / "x.safetensors", lora)
    report = fuselora.merge(base_path, [path], out=tmp_path / "out")
    assert report.plan.checkpoint.family is SENSENOVA_U1
    got = load_file(tmp_path / "out" / "base.safetensors")
    for name, exact in wanted.items():
        torch.testing.assert_close(got[name].double(), exact, rtol=2e-6, atol=2e-6)
    assert verify(tmp_path / "out", base=base_path, loras=[path]).ok


@pytest.mark.parametrize(
    "name",
    [
        "SenseNova-U1-8B-MoT-LoRA-8step-V1.0.safetensors",
        "SenseNova-U1-8B-MoT-Infographic-LoRA-8step-V1.0.safetensors",
        "SenseNova-U1.5-8B-MoT-LoRA-8step.safetensors",
        "SenseNova-U1.5-8B-MoT-LoRA-8step-ComfyUI.safetensors",
    ],
)
def test_what_is_published_of_its_loras(name: str) -> None:
    row = SENSENOVA_U1.few_step_named(name)
    assert row is not None
    assert (row.num_inference_steps, row.guidance_scale, row.flow_shift) == (8, 1.0, 3.0)
