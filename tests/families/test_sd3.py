"""Stable Diffusion 3 and 3.5: told apart, kohya's names of MMDiT's blocks, and the last block's modulation.

There is no list of SD3 or of SD3.5-medium, nor of a single file: the tensors are those of diffusers' class,
and by the rows that ``test_differences`` holds against diffusers' converter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file

import fuselora
from fuselora.describe import describe
from fuselora.description import CheckpointDescription
from fuselora.families.sd3 import SD3
from fuselora.synth import Spec
from fuselora.verify import verify
from tests import listings, small
from tests.families.test_loaded import SMALL, folder_of

if TYPE_CHECKING:
    from pathlib import Path

classes: Any = diffusers
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
SGM = "model.diffusion_model."
MEDIUM = {"num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536}
LARGE = {"num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432}
MODELS: dict[str, tuple[dict[str, Any], tuple[str, ...], int]] = {
    "3 medium": (MEDIUM, ("SD3-medium",), 491),
    "3.5 medium": (
        {**MEDIUM, "qk_norm": "rms_norm", "dual_attention_layers": tuple(range(13))},
        ("SD3.5-medium",),
        665,
    ),
    "3.5 large": ({**LARGE, "qk_norm": "rms_norm"}, ("SD3.5-large", "SD3.5-large-turbo"), 923),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_single_file_with_encoders_is_told_from_its_kin(tmp_path: Path, name: str) -> None:
    config, models, n_tensors = MODELS[name]
    with torch.device("meta"):
        tensors = classes.SD3Transformer2DModel(**config).state_dict()
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    theirs = [Spec(SGM + found.name, "F16", found.shape) for found in SD3.spellings(shapes, "native")]
    assert len(theirs) == n_tensors
    beside = [
        Spec("first_stage_model.encoder.conv_in.weight", "F16", (128, 3, 3, 3)),
        Spec("text_encoders.clip_l.transformer.text_model.final_layer_norm.weight", "F16", (768,)),
    ]
    found = describe(listings.sparse(tmp_path / "x.safetensors", [*theirs, *beside]))
    assert isinstance(found, CheckpointDescription)
    assert (found.family, found.layout, found.models) == ("sd3", "native", models)


def pair(module: str, rows: int, columns: int, seed: int) -> dict[str, torch.Tensor]:
    return small.pair(module, small.noise(rows, 2, seed=seed), small.noise(2, columns, seed=seed + 1))


def product(lora: dict[str, torch.Tensor], module: str) -> torch.Tensor:
    return lora[f"{module}.lora_up.weight"].double() @ lora[f"{module}.lora_down.weight"].double()


def test_kohya_s_joint_blocks_land_where_diffusers_applies_none(tmp_path: Path) -> None:
    """The last block's context modulation is shift, then scale; diffusers' is scale, then shift."""
    context, last, joint, final = (
        "lora_unet_joint_blocks_0_context_block_adaLN_modulation_1",
        "lora_unet_joint_blocks_2_context_block_adaLN_modulation_1",
        "lora_unet_joint_blocks_1_context_block_attn_qkv",
        "lora_unet_final_layer_adaLN_modulation_1",
    )
    lora = {
        **pair(context, 192, 32, 1),
        **pair(last, 64, 32, 3),
        **pair(joint, 96, 32, 5),
        **pair(final, 64, 32, 7),
    }
    base = folder_of(tmp_path / "base", SMALL["sd3"])
    path, out = small.write(tmp_path / "x.safetensors", lora), tmp_path / "out"
    fuselora.merge(base, [path], out=out)
    before, after = load_file(base / WEIGHTS), load_file(out / WEIGHTS)
    query, key, value = product(lora, joint).chunk(3)
    attention = "transformer_blocks.1.attn.add"
    wanted = {
        "transformer_blocks.0.norm1_context.linear.weight": product(lora, context),
        "transformer_blocks.2.norm1_context.linear.weight": torch.cat(product(lora, last).chunk(2)[::-1]),
        f"{attention}_q_proj.weight": query,
        f"{attention}_k_proj.weight": key,
        f"{attention}_v_proj.weight": value,
        "norm_out.linear.weight": torch.cat(product(lora, final).chunk(2)[::-1]),
    }
    assert {name for name in before if not torch.equal(before[name], after[name])} == wanted.keys()
    for name, delta in wanted.items():
        torch.testing.assert_close(after[name].double(), before[name].double() + delta, rtol=2e-6, atol=2e-6)
    assert verify(out, base=base, loras=[path]).ok

    model: Any = SMALL["sd3"].load(base / "transformer")
    classes.StableDiffusion3Pipeline.load_lora_into_transformer(dict(lora), transformer=model)
    assert not getattr(model, "peft_config", {})


@pytest.mark.parametrize(("steps", "guidance"), [(4, 3.0), (8, 5.0), (16, 7.0)])
def test_hyper_sd3_s_guidance_is_by_its_steps(steps: int, guidance: float) -> None:
    row = SD3.few_step_named(f"Hyper-SD3-{steps}steps-CFG-lora.safetensors")
    assert row is not None
    assert (row.num_inference_steps, row.guidance_scale) == (steps, guidance)
