"""Z-Image: parts of its fused attention, each on its own rows, in every spelling that trainers have."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

import fuselora
from fuselora.errors import Refused
from fuselora.families.z_image import Z_IMAGE
from fuselora.verify import verify
from tests import small

if TYPE_CHECKING:
    from pathlib import Path

ATTENTION = "layers.0.attention"
DIM = 6
NATIVE = {
    f"{block}.attention.{name}.weight": (rows, DIM)
    for block in ("layers.0", "noise_refiner.0", "context_refiner.0")
    for name, rows in (("qkv", 3 * DIM), ("out", DIM))
}
# how a file spells one of q, k and v, and the ends of its factors' names
PARTS = {
    "diffusers": ("{block}.attention.to_{part}", "lora_down", "lora_up"),
    "ComfyUI": ("diffusion_model.{block}.attention.to_{part}", "lora_A.default", "lora_B.default"),
    "kohya": ("lora_unet_{flat}_attention_to_{part}", "lora_down", "lora_up"),
    "Anime-Z": ("{block}.attention.to.{part}", "lora.down", "lora.up"),
}


def base_of(folder: Path, layout: str) -> Path:
    """As a single file has its attention, or as diffusers has it."""
    tensors = {name: small.noise(*shape, seed=n) for n, (name, shape) in enumerate(NATIVE.items())}
    if layout == "native":
        return small.write(folder / "base.safetensors", tensors)
    return small.write(folder / "base.safetensors", split(tensors))


def split(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same by diffusers' names."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if "qkv" in name:
            parts = zip("qkv", tensor.chunk(3), strict=True)
            found |= {name.replace("qkv", f"to_{part}"): rows.contiguous() for part, rows in parts}
        else:
            found[name.replace(".out.", ".to_out.0.")] = tensor
    return found


def pair(module: str, down: str, up: str, seed: int, rows: int = DIM) -> dict[str, torch.Tensor]:
    factors = small.noise(2, DIM, seed=seed), small.noise(rows, 2, seed=seed + 1)
    return dict(zip((f"{module}.{down}.weight", f"{module}.{up}.weight"), factors, strict=True))


def merged(folder: Path, layout: str, lora: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a merge added, by diffusers' names."""
    base, path = base_of(folder, layout), small.write(folder / "x.safetensors", lora)
    fuselora.merge(base, [path], out=folder / "out")
    assert verify(folder / "out", base=base, loras=[path]).ok
    before, after = load_file(base), load_file(folder / "out" / "base.safetensors")
    found = {name: after[name].double() - before[name].double() for name in before}
    return split(found) if layout == "native" else found


@pytest.mark.parametrize("layout", ["native", "diffusers"])
@pytest.mark.parametrize("spelling", PARTS)
@pytest.mark.parametrize("parts", ["k", "qv", "qkv"])
def test_parts_of_the_attention_land_on_their_rows(
    tmp_path: Path, layout: str, spelling: str, parts: str
) -> None:
    module, down, up = PARTS[spelling]
    lora: dict[str, torch.Tensor] = {}
    wanted = {}
    for seed, (block, part) in enumerate((b, p) for b in ("layers.0", "noise_refiner.0") for p in parts):
        name = module.format(block=block, flat=block.replace(".", "_"), part=part)
        factors = pair(name, down, up, 10 * seed)
        lora |= factors
        b, a = factors[f"{name}.{up}.weight"].double(), factors[f"{name}.{down}.weight"].double()
        wanted[f"{block}.attention.to_{part}.weight"] = b @ a
    for name, delta in merged(tmp_path, layout, lora).items():
        torch.testing.assert_close(delta, wanted.get(name, torch.zeros_like(delta)), rtol=0, atol=2e-6)


@pytest.mark.parametrize("layout", ["native", "diffusers"])
@pytest.mark.parametrize(
    "module", [f"{ATTENTION}.out", f"{ATTENTION}.to_out.0", "lora_unet_layers_0_attention_out"]
)
def test_the_output_layer_has_two_names(tmp_path: Path, layout: str, module: str) -> None:
    lora = pair(module, "lora_down", "lora_up", 3)
    down, up = (tensor.double() for tensor in lora.values())
    found = merged(tmp_path, layout, lora)
    torch.testing.assert_close(found.pop(f"{ATTENTION}.to_out.0.weight"), up @ down, rtol=0, atol=2e-6)
    assert not any(delta.any() for delta in found.values())


@pytest.mark.parametrize("layout", ["native", "diffusers"])
def test_parts_and_the_whole_of_one_attention_in_one_file_are_refused(tmp_path: Path, layout: str) -> None:
    """Some trainers save both; diffusers leaves the whole out, and both together would count twice."""
    lora: dict[str, torch.Tensor] = {}
    for seed, part in enumerate("qkv"):
        lora |= pair(f"{ATTENTION}.to.{part}", "lora.down", "lora.up", seed)
    lora |= pair(f"{ATTENTION}.qkv", "lora.down", "lora.up", 7, rows=3 * DIM)
    base, path = base_of(tmp_path, layout), small.write(tmp_path / "x.safetensors", lora)
    with pytest.raises(Refused, match="is meant twice"):
        fuselora.merge(base, [path], out=tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("z_image_turbo_distill_patch_lora_bf16.safetensors", 8),
        ("DiffSynth-Studio/Z-Image-Turbo-DistillPatch", 8),
        ("Z-Image-Fun-Lora-Distill-4-Steps-2603-ComfyUI.safetensors", None),
        ("my-z-image-style.safetensors", 0),
    ],
)
def test_what_is_published_of_its_loras(name: str, steps: int | None) -> None:
    row = Z_IMAGE.few_step_named(name)
    assert (row.num_inference_steps if row else 0) == steps


@pytest.mark.parametrize("layout", ["native", "diffusers"])
def test_a_file_that_repeats_its_attention_is_told_what_to_leave_out(tmp_path: Path, layout: str) -> None:
    """Anime-Z's has ``qkv`` and ``out`` beside their own parts, and diffusers skips those."""
    _, down, up = PARTS["Anime-Z"]
    lora = pair(f"{ATTENTION}.qkv", down, up, 1, 3 * DIM) | pair(f"{ATTENTION}.out", down, up, 2)
    for seed, part in enumerate(("to.q", "to.k", "to.v", "to_out.0"), 3):
        lora |= pair(f"{ATTENTION}.{part}", down, up, seed)
    path = small.write(tmp_path / "x.safetensors", lora)
    with pytest.raises(Refused) as caught:
        fuselora.plan(base_of(tmp_path, layout), [path])
    assert {fault.kind for fault in caught.value.faults} == {"twice"}
    assert caught.value.hint is not None
    for ending in ("*.attention.qkv", "*.attention.out"):
        assert f"Leave the keys of {ending} out of the file, as diffusers does" in caught.value.hint
    kept = {name: tensor for name, tensor in lora.items() if ".qkv." not in name and ".out." not in name}
    small.write(path, kept)
    (matching,) = fuselora.plan(base_of(tmp_path, layout), [path]).matchings
    assert len({hit.module.name for hit in matching.hits}) == 4


def test_any_other_layer_said_twice_has_a_hint_too(tmp_path: Path) -> None:
    lora = {
        **pair(f"{ATTENTION}.to_q", "lora_A", "lora_B", 1),
        **pair(f"{ATTENTION}.to.q", "lora_A", "lora_B", 2),
    }
    with pytest.raises(Refused) as caught:
        fuselora.plan(base_of(tmp_path, "diffusers"), [small.write(tmp_path / "x.safetensors", lora)])
    assert caught.value.hint == "Leave the keys of one of the two out of the file."
