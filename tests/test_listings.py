"""The lists that tests are built on, and the small files made from them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from safetensors.torch import load_file

from fuselora.header import read_header
from fuselora.synth import Spec, base_tensors, tiny
from tests import listings
from tests.synth.names import LISTED, T2V, fits, q

if TYPE_CHECKING:
    from pathlib import Path


def test_every_list_is_in_the_index() -> None:
    bases = {f"{name}.{layout}" for name in LISTED for layout in ("native", "diffusers")}
    bases |= {f"{name}.{layout}" for name, layout in listings.others()}
    files = {path.name.removesuffix(".tsv.gz") for path in listings.LISTINGS.glob("*.tsv.gz")}
    assert files == bases | listings.index().keys()
    assert len(listings.index()) == 55


def test_a_sparse_list_reads_back(tmp_path: Path) -> None:
    specs = listings.lora("wan2.1-t2v-14b.pusa.r512")
    path = listings.sparse(tmp_path / "pusa.safetensors", specs, {"a": "b"})
    header = read_header(path)
    assert sorted((t.name, t.dtype, t.shape) for t in header.tensors) == sorted(listings.rows(specs))
    assert header.metadata == {"a": "b"}
    assert path.stat().st_size > 4_900_000_000
    assert path.stat().st_blocks * 512 < 1_000_000


@pytest.mark.parametrize("name", sorted(listings.wan()))
def test_a_tiny_lora_fits_its_tiny_base(tmp_path: Path, name: str) -> None:
    entry = listings.index()[name]
    path = listings.tiny_lora(tmp_path / "lora", name)
    weights = path / "adapter_model.safetensors" if entry.peft_config else path
    header = read_header(weights)
    specs = [Spec(tensor.name, tensor.dtype, tensor.shape) for tensor in header.tensors]
    pairs = fits(specs, base_tensors(tiny(entry.base), entry.layout))
    assert pairs >= (10 if "causvid-v1.5" in name else 16)
    assert {spec.dtype for spec in specs} == {spec.dtype for spec in listings.lora(name)}
    assert all(tensor.isfinite().all() and tensor.any() for tensor in load_file(weights).values())
    assert weights.stat().st_size < 400_000


def test_a_tiny_lora_keeps_missing_blocks_missing(tmp_path: Path) -> None:
    path = listings.tiny_lora(tmp_path / "lora", "wan2.1-t2v-14b.causvid-v1.5.r32", blocks=3)
    names = [tensor.name for tensor in read_header(path).tensors]
    assert {name.split(".")[2] for name in names if ".blocks." in name} == {"1", "2"}
    assert any("head.head" in name for name in names)


def test_a_tiny_lora_keeps_alpha_and_says_its_own_rank(tmp_path: Path) -> None:
    seko = load_file(listings.tiny_lora(tmp_path / "seko", "wan2.2-a14b.lightning-seko.r64"))
    assert seko[f"diffusion_model.{q()}.alpha"].item() == 8
    assert seko[f"diffusion_model.{q()}.lora_down.weight"].shape == (4, tiny(T2V).dim)
    kohya = listings.tiny_lora(tmp_path / "kohya", "wan2.2-t2v-a14b.musubi-kohya.r32")
    assert read_header(kohya).metadata["ss_network_dim"] == "2"
    theirs = listings.tiny_lora(tmp_path / "theirs", "wan2.2-t2v-a14b.diffusers-peft.r16", divisor=8)
    said = json.loads(read_header(theirs).metadata["lora_adapter_metadata"])
    assert (said["transformer.r"], said["transformer.lora_alpha"]) == (2, 32)
    peft = listings.tiny_lora(tmp_path / "peft", "wan2.2-t2v-a14b.peft-plain.r16")
    config = json.loads((peft / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (1, 32)
