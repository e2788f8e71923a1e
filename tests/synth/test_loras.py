"""Synthetic LoRAs in every style: against the published lists, on their bases, and on disk."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from fuselora.header import read_header
from fuselora.synth import SIZES, STYLES, base_tensors, lora_tensors, tiny, write_file, write_lora
from tests import listings
from tests.synth.names import T2V, fits, q

if TYPE_CHECKING:
    from pathlib import Path

PUBLISHED_LORAS = [
    # style, base, list, rank, alpha, dtype
    ("comfy", T2V, "wan2.2-t2v-a14b.x2v-distill-1217.r64", 64, None, "BF16"),
    ("comfy", T2V, "wan2.2-a14b.kijai-lightning-fp16.r64", 64, 8, "F16"),
    ("lightning", T2V, "wan2.2-a14b.lightning-seko.r64", 64, 8, "F32"),
    ("comfy-extractor", "wan2.1-i2v-14b", "wan2.1-i2v-14b-480p.kijai-cfgstep.r128", 128, None, "BF16"),
    ("comfy-extractor", "wan2.2-ti2v-5b", "wan2.2-ti2v-5b.turbo.r64", 64, None, "F16"),
    ("extractor", "wan2.2-i2v-a14b", "wan2.2-i2v-a14b.x2v-distill-1022.high.r64", 64, None, "BF16"),
    ("extractor", "wan2.1-i2v-14b", "wan2.1-i2v-14b-480p.x2v-cfgstep.r64.with-diff_m", 64, None, "BF16"),
    ("trainer", "wan2.2-i2v-a14b", "wan2.2-i2v-a14b.diffusion-pipe.r32", 32, None, "BF16"),
    ("default", T2V, "wan2.2-t2v-a14b.diffsynth-default.r32", 32, None, "BF16"),
    ("kohya", T2V, "wan2.2-t2v-a14b.musubi-kohya.r32", 32, 16, "BF16"),
    ("diffusers", T2V, "wan2.2-t2v-a14b.diffusers-peft.r16", 16, 32, "BF16"),
    ("adapter", T2V, "wan2.2-t2v-a14b.peft-plain.r16", 16, 32, "F32"),
]


@pytest.mark.parametrize(("style", "base", "listing", "rank", "alpha", "dtype"), PUBLISHED_LORAS)
def test_styles_are_the_published_lists(
    style: str, base: str, listing: str, rank: int, alpha: float | None, dtype: str
) -> None:
    made = lora_tensors(SIZES[base], style=style, rank=rank, alpha=alpha, dtype=dtype)
    assert sorted(listings.rows(made)) == sorted(listings.rows(listings.lora(listing)))


def test_every_style_but_the_bare_one_is_held_against_a_published_list() -> None:
    assert {row[0] for row in PUBLISHED_LORAS} == STYLES.keys() - {"peft"}


@pytest.mark.parametrize("style", sorted(STYLES))
@pytest.mark.parametrize("base", [T2V, "wan2.1-i2v-14b", "wan2.1-vace-14b"])
def test_every_style_fits_its_base(style: str, base: str) -> None:
    size = tiny(base)
    tensors = lora_tensors(size, style=style, rank=3, alpha=6, diffs=True)
    assert fits(tensors, base_tensors(size, STYLES[style].layout)) > 15
    assert any(spec.name.endswith("diff_b") for spec in tensors)


@pytest.mark.parametrize("style", sorted(STYLES))
def test_every_style_writes_what_it_says(tmp_path: Path, style: str) -> None:
    said = {"rank": 3, "alpha": 6.0, "dtype": "F16"}
    path = write_lora(tmp_path / "lora", tiny(T2V), style=style, metadata={"by": "test"}, **said)  # type: ignore[arg-type]
    weights = path / "adapter_model.safetensors" if path.is_dir() else path
    header = read_header(weights)
    found = [(tensor.name, tensor.dtype, tensor.shape) for tensor in header.tensors]
    expected = lora_tensors(tiny(T2V), style=style, **said)  # type: ignore[arg-type]
    assert sorted(found) == sorted(listings.rows(expected))
    assert header.metadata["by"] == "test"
    assert load_file(weights).keys() == {name for name, _, _ in found}


def test_alpha_is_stored_where_the_style_keeps_it(tmp_path: Path) -> None:
    def written(style: str, **said: Any) -> Path:
        return write_lora(tmp_path / style, tiny(T2V), style=style, rank=4, **said)

    lightning = load_file(written("lightning", alpha=8))[f"diffusion_model.{q()}.alpha"]
    assert (lightning.dtype, lightning.shape, lightning.item()) == (torch.int64, (), 8)
    comfy = load_file(written("comfy", alpha=2.5))[f"diffusion_model.{q()}.alpha"]
    assert (comfy.dtype, comfy.item()) == (torch.bfloat16, 2.5)
    kohya = written("kohya")
    assert load_file(kohya)["lora_unet_blocks_0_self_attn_q.alpha"].item() == 4
    assert read_header(kohya).metadata["ss_network_alpha"] == "4.0"
    header = json.loads(read_header(written("diffusers", alpha=8)).metadata["lora_adapter_metadata"])
    assert (header["transformer.r"], header["transformer.lora_alpha"]) == (4, 8)
    assert "ffn.net.2" not in header["transformer.target_modules"]
    adapter = json.loads((written("adapter", alpha=8) / "adapter_config.json").read_text())
    assert (adapter["r"], adapter["lora_alpha"]) == (4, 8)
    assert {"attn1.to_q", "ffn.net.2"} < set(adapter["target_modules"])
    assert not any(name.endswith("alpha") for name in load_file(written("trainer")))


def test_the_other_expert_of_the_diffusers_style(tmp_path: Path) -> None:
    path = write_lora(tmp_path / "lora", tiny(T2V), style="diffusers", prefix="transformer_2.")
    header = read_header(path)
    assert all(tensor.name.startswith("transformer_2.blocks.") for tensor in header.tensors)
    assert "transformer_2.lora_alpha" in json.loads(header.metadata["lora_adapter_metadata"])


@pytest.mark.parametrize("alpha", [None, 0.5, 32])
def test_a_delta_is_about_a_tenth_of_the_weight(tmp_path: Path, alpha: float | None) -> None:
    size = replace(tiny(T2V), heads=16)
    weight = load_file(write_file(tmp_path / "b", size, dtype="F32", prefix=""))[f"{q()}.weight"]
    lora = load_file(write_lora(tmp_path / "l", size, style="default", rank=8, alpha=alpha, dtype="F32"))
    up, down = (lora[f"{q()}.lora_{side}.default.weight"] for side in "BA")
    delta = (1 if alpha is None else alpha / 8) * up @ down
    assert 0.08 < delta.std() / weight.std() < 0.12


def test_one_lora_has_the_same_factors_in_every_style(tmp_path: Path) -> None:
    found = []
    for style, how in STYLES.items():
        path = write_lora(tmp_path / style, tiny(T2V), style=style, rank=4, alpha=2, dtype="F32")
        tensors = load_file(path / "adapter_model.safetensors" if path.is_dir() else path)
        module = q(how.layout).replace(".", "_") if how.flat else q(how.layout)
        name = f"{how.prefix}{module}"
        found.append((tensors[f"{name}.{how.down}.weight"], tensors[f"{name}.{how.up}.weight"]))
    assert all(torch.equal(down, found[0][0]) and torch.equal(up, found[0][1]) for down, up in found)
