"""LongCat-Video: split blocks of up on fused layers, as its own code multiplies them, in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

import fuselora
from fuselora.families.longcat_video import LONGCAT_VIDEO
from fuselora.families.pattern import split_leaf, unnumbered
from fuselora.header import read_header
from fuselora.pipeline import plan
from fuselora.verify import verify
from tests import listings, small

if TYPE_CHECKING:
    from pathlib import Path

HYPHEN = "___lorahyphen___"
BASE = listings.base("longcat-video", "native")
LORA = listings.lora("longcat-video.cfg-step.r128")
# each length of the true model's axes -> here; the head's 64 outputs and the 16 channels stay
WIDTHS = {4096: 8, 12288: 24, 8192: 16, 24576: 48, 11008: 12, 512: 6, 256: 5, 128: 4}


def shrunk(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(WIDTHS.get(n, n) for n in shape)


def tiny_base() -> dict[str, torch.Tensor]:
    """Two blocks and all that is outside."""
    kept = [spec for spec in BASE if not spec.name.startswith("blocks.") or spec.name[7:9] in ("0.", "1.")]
    return {spec.name: small.noise(*shrunk(spec.shape), seed=n) for n, spec in enumerate(kept)}


def tiny_lora(rank: int = 2) -> dict[str, torch.Tensor]:
    """The published list, of the same blocks and at another rank; 0.5 is 64 / 128, its alpha and rank."""
    found: dict[str, torch.Tensor] = {}
    for n, spec in enumerate(LORA):
        if spec.name.split(HYPHEN)[2] not in ("0", "1"):
            continue
        if spec.name.endswith(".alpha_scale"):
            found[spec.name] = torch.tensor(0.5)
        elif "lora_down" in spec.name:
            parts, columns = spec.shape[0] // 128, shrunk(spec.shape)[1]
            found[spec.name] = small.noise(parts * rank, columns, seed=n, std=0.3)
        else:
            found[spec.name] = small.noise(shrunk(spec.shape)[0], rank, seed=n, std=0.3)
    return found


def deltas(lora: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """alpha_scale * up(down(x)), where up cuts its input in as many parts as it has blocks."""
    found = {}
    for key, factor in lora.items():
        start, ending, _ = key.partition(".lora_down.weight")
        if not ending:
            continue
        module = start.removeprefix(f"lora{HYPHEN}").replace(HYPHEN, ".")
        ups = [up for name, up in lora.items() if name.startswith(f"{start}.lora_up.")]
        down = factor.double().chunk(len(ups))
        parts = [up.double() @ rows for up, rows in zip(ups, down, strict=True)]
        found[f"{module}.weight"] = lora[f"{start}.alpha_scale"].double() * torch.cat(parts)
    return found


def test_the_names_are_those_of_the_list() -> None:
    assert {unnumbered(split_leaf(spec.name)[0]) for spec in BASE} == {*map(unnumbered, LONGCAT_VIDEO.names)}
    shapes = {spec.name: spec.shape for spec in BASE}
    assert LONGCAT_VIDEO.models_of(shapes) == ("LongCat-Video",)
    assert LONGCAT_VIDEO.layout_of(shapes) == "native"


def test_every_module_of_the_published_lora(tmp_path: Path) -> None:
    base, lora = tiny_base(), tiny_lora()
    base_path = small.write(tmp_path / "base.safetensors", base)
    path = small.write(tmp_path / "cfg_step_lora.safetensors", lora)
    report = fuselora.merge(base_path, [path], out=tmp_path / "out")
    assert report.plan.checkpoint.family is LONGCAT_VIDEO
    got, wanted = load_file(tmp_path / "out" / "base.safetensors"), deltas(lora)
    assert len(wanted) == 2 * 9
    for name, tensor in got.items():
        exact = base[name].double() + wanted.get(name, torch.zeros(()))
        torch.testing.assert_close(tensor.double(), exact, rtol=2e-6, atol=2e-6)
        assert torch.equal(tensor, base[name]) == (name not in wanted)
    assert report.plan.serving.settings["num_inference_steps"].value == 16
    assert verify(tmp_path / "out", base=base_path, loras=[path]).ok


def test_six_blocks_of_a_modulation(tmp_path: Path) -> None:
    """As its refinement LoRA has them, which is for the second pass alone, and says so."""
    start = f"lora{HYPHEN}" + HYPHEN.join(("blocks", "1", "adaLN_modulation", "1"))
    lora = {f"{start}.lora_up.blocks.{k}.weight": small.noise(8, 2, seed=k) for k in range(6)}
    lora |= {f"{start}.lora_down.weight": small.noise(12, 6), f"{start}.alpha_scale": torch.tensor(0.5)}
    base = tiny_base()
    base_path = small.write(tmp_path / "base.safetensors", base)
    path = small.write(tmp_path / "refinement_lora.safetensors", lora)
    report = fuselora.merge(base_path, [path], out=tmp_path / "out")
    got, name = load_file(tmp_path / "out" / "base.safetensors"), "blocks.1.adaLN_modulation.1.weight"
    torch.testing.assert_close(
        got[name].double(), base[name].double() + deltas(lora)[name], rtol=2e-6, atol=2e-6
    )
    assert [notice.code for notice in report.notices] == ["phase"]


@pytest.mark.parametrize("prefix", ["", "diffusion_model.", "transformer."])
def test_a_plain_pair_on_a_fused_layer(tmp_path: Path, prefix: str) -> None:
    base, name = tiny_base(), "blocks.0.cross_attn.kv_linear"
    pair = small.pair(prefix + name, small.noise(16, 2), small.noise(2, 8, seed=1), alpha=1.0)
    path = small.write(tmp_path / "x.safetensors", pair)
    fuselora.merge(small.write(tmp_path / "base.safetensors", base), [path], out=tmp_path / "out")
    up, down, _ = (tensor.double() for tensor in pair.values())
    got = load_file(tmp_path / "out" / "base.safetensors")[f"{name}.weight"]
    torch.testing.assert_close(
        got.double(), base[f"{name}.weight"].double() + 0.5 * up @ down, rtol=2e-6, atol=2e-6
    )


def test_the_published_list_at_true_size(tmp_path: Path) -> None:
    base = listings.sparse(tmp_path / "base.safetensors", BASE)
    path = listings.sparse(tmp_path / "x.safetensors", LORA)
    (matching,) = plan(base, [path]).matchings
    used = {tensor.name for hit in matching.hits for tensor in hit.tensors}
    all_names = {tensor.name for tensor in read_header(path).tensors}
    assert used == {name for name in all_names if not name.endswith(".alpha_scale")}
    assert len({hit.base_key for hit in matching.hits}) == len(matching.hits) == 48 * 9
