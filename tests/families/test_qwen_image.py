"""Qwen-Image: LoRAs in every spelling add what diffusers' own LoRA converter makes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import diffusers
import pytest
import torch
from diffusers.loaders import lora_conversion_utils
from safetensors.torch import load_file

import fuselora
from fuselora.families.qwen_image import QWEN_IMAGE
from fuselora.verify import verify
from tests import listings, small
from tests.families.test_loaded import SMALL, folder_of, matrices

if TYPE_CHECKING:
    from pathlib import Path

classes: Any = diffusers
converters: Any = lora_conversion_utils
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
# prefix, whether dots are underscores, ends of the factors' names, alpha
SPELLINGS: dict[str, tuple[str, bool, tuple[str, str], float | None]] = {
    "lightning": ("", False, ("lora_down", "lora_up"), 1.0),
    "musubi": ("lora_unet_", True, ("lora_down", "lora_up"), 3.0),
    "ComfyUI": ("diffusion_model.", False, ("lora_A", "lora_B"), 1.0),
    "DiffSynth": ("", False, ("lora_A.default", "lora_B.default"), None),
}


def test_every_name_of_the_class_is_known() -> None:
    shapes = {spec.name: spec.shape for spec in listings.base("qwen-image", "diffusers")}
    assert QWEN_IMAGE.share(shapes) == 1
    assert len(shapes) == 1933
    with torch.device("meta"):
        tensors = classes.QwenImageTransformer2DModel().state_dict()
    assert shapes == {name: tuple(tensor.shape) for name, tensor in tensors.items()}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_it_adds_what_diffusers_makes_of_it(tmp_path: Path, spelling: str) -> None:
    prefix, flat, (down, up), alpha = SPELLINGS[spelling]
    base, out = folder_of(tmp_path / "base", SMALL["qwen-image"]), tmp_path / "out"
    before = load_file(base / WEIGHTS)
    layers = matrices({name: tuple(tensor.shape) for name, tensor in before.items()})
    lora: dict[str, torch.Tensor] = {}
    for seed, (name, shape) in enumerate(layers.items()):
        module = name.removesuffix(".weight")
        module = prefix + (module.replace(".", "_") if flat else module)
        lora[f"{module}.{down}.weight"] = small.noise(2, shape[1], seed=seed)
        lora[f"{module}.{up}.weight"] = small.noise(shape[0], 2, seed=seed + 99)
        if alpha is not None:
            lora[f"{module}.alpha"] = torch.tensor(alpha)
    theirs = converters._convert_non_diffusers_qwen_lora_to_diffusers(
        {key: tensor.double() for key, tensor in lora.items()}
    )
    path = small.write(tmp_path / "x.safetensors", lora)
    fuselora.merge(base, [path], out=out)
    after = load_file(out / WEIGHTS)
    for name, tensor in before.items():
        key = f"transformer.{name.removesuffix('.weight')}"
        factors = theirs.get(f"{key}.lora_B.weight"), theirs.get(f"{key}.lora_A.weight")
        added = factors[0] @ factors[1] if factors[0] is not None else torch.zeros(())
        torch.testing.assert_close(after[name].double(), tensor.double() + added, rtol=2e-6, atol=2e-6)
    assert len(theirs) == 2 * len(layers)
    assert verify(out, base=base, loras=[path]).ok
