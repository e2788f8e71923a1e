"""``--blocks``: which modules a glob means, what becomes of their strength, and where it is recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fuselora.errors import Refused, UsageError
from fuselora.pipeline import merge, plan
from fuselora.specs import BlockSpec, parse_block
from fuselora.verify import verify

NAMES = ("blocks.0.attn.q", "blocks.1.attn.q", "blocks.1.ffn", "blocks.10.attn.q")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.safetensors"
    tensors = {f"{name}.weight": torch.ones(4, 4) for name in NAMES}
    save_file({**tensors, "blocks.1.ffn.bias": torch.ones(4)}, path)
    return path


@pytest.fixture
def lora(tmp_path: Path) -> Path:
    """Adds 1 to every weight, and 1 to the bias."""
    path = tmp_path / "lora.safetensors"
    pairs = {f"{name}.lora_{way}.weight" for name in NAMES for way in ("down", "up")}
    tensors = {key: torch.full((1, 4) if "down" in key else (4, 1), 1.0) for key in pairs}
    save_file({**tensors, "blocks.1.ffn.diff_b": torch.ones(4)}, path)
    return path


def fused(
    base: Path, lora: Path, *blocks: str, strength: str = ""
) -> tuple[dict[str, float], dict[str, Any]]:
    """Each tensor's value, and the LoRA's entry in the marker; verified."""
    out = base.with_name("out")
    merge(base, [f"{lora}{strength}"], out, blocks=blocks, restart=True)
    found = {key: sorted(set(t.flatten().tolist())) for key, t in load_file(out / base.name).items()}
    assert all(len(values) == 1 for values in found.values())
    report = verify(out, base=str(base), loras=[str(lora)])
    assert report.ok, list(report.lines())
    marker = json.loads((out / "fused.json").read_text())
    return {key: values[0] for key, values in found.items()}, marker["loras"][0]


def test_without_blocks_nothing_is_said_of_them(base: Path, lora: Path) -> None:
    values, entry = fused(base, lora)
    assert set(values.values()) == {2.0}
    assert "blocks" not in entry and all("block" not in group for group in entry["scales"])


def test_a_block_is_not_the_ones_that_begin_alike(base: Path, lora: Path) -> None:
    values, entry = fused(base, lora, "blocks.1=0.5")
    assert values == {
        "blocks.0.attn.q.weight": 2.0,
        "blocks.1.attn.q.weight": 1.5,
        "blocks.1.ffn.weight": 1.5,
        "blocks.1.ffn.bias": 1.5,
        "blocks.10.attn.q.weight": 2.0,
    }
    assert entry["blocks"] == [{"glob": "blocks.1", "strength": 0.5}]
    assert [(group["scale"], group.get("block")) for group in entry["scales"]] == [(0.5, 0.5), (1.0, None)]


def test_zero_leaves_modules_out_and_says_so(base: Path, lora: Path) -> None:
    values, entry = fused(base, lora, "*.q=0")
    assert [key for key, value in values.items() if value == 1.0] == sorted(
        f"{name}.weight" for name in NAMES if name.endswith("q")
    )
    reason = "left out by --blocks *.q=0"
    assert {(row["module"], row["reason"]) for row in entry["skipped"]} == {
        (name, reason) for name in NAMES if name.endswith("q")
    }
    assert entry["applied"]["pairs"] == 1


def test_the_last_glob_counts_and_times_the_strength(base: Path, lora: Path) -> None:
    values, _ = fused(base, lora, "*=0", "blocks.10=-2", strength=":0.5")
    assert values["blocks.10.attn.q.weight"] == 0.0
    assert {values[f"{name}.weight"] for name in NAMES[:3]} == {1.0}


def test_by_the_bases_name(base: Path, lora: Path) -> None:
    values, _ = fused(base, lora, "*.bias=0")
    assert values["blocks.1.ffn.bias"] == 1.0
    assert values["blocks.1.ffn.weight"] == 2.0


def test_a_glob_that_means_nothing_is_refused(base: Path, lora: Path) -> None:
    with pytest.raises(Refused, match=r"--blocks block\.1 means no module") as caught:
        plan(base, [lora], blocks=["block.1=0"])
    assert "There are modules like blocks.0.attn.q, in the base blocks.0.attn.q.weight." in (
        caught.value.hint or ""
    )


@pytest.mark.parametrize(
    "glob",
    [
        "lora_unet_blocks_1",
        "blocks_1",
        "lora_unet_blocks_1_*",
        "blocks_1_attn_q",
        "blocks.1",
        "blocks.1.attn.*",
    ],
)
def test_flattened_names_by_prefix_and_by_level(base: Path, tmp_path: Path, glob: str) -> None:
    names = [f"lora_unet_{name.replace('.', '_')}" for name in NAMES if name.endswith("q")]
    pairs = {f"{name}.lora_{way}.weight" for name in names for way in ("down", "up")}
    path = tmp_path / "flat.safetensors"
    save_file({key: torch.ones((1, 4) if "down" in key else (4, 1)) for key in pairs}, path)
    values, _ = fused(base, path, f"{glob}=0.5")
    assert (values["blocks.1.attn.q.weight"], values["blocks.10.attn.q.weight"]) == (1.5, 2.0)


def test_native_names_mean_flattened_ones_on_a_diffusers_base(tmp_path: Path) -> None:
    """As kohya's trainers flatten them; the base has neither."""
    base = tmp_path / "base.safetensors"
    names = [f"transformer_blocks.{n}.attn.to_out.0" for n in (1, 10)]
    others = {f"transformer_blocks.{n}.norm1.linear.weight": torch.ones(24, 4) for n in range(11)}
    save_file({**{f"{name}.weight": torch.ones(4, 4) for name in names}, **others}, base)
    lora = tmp_path / "x.safetensors"
    keys = [f"lora_unet_double_blocks_{n}_img_attn_proj" for n in (1, 10)]
    save_file({f"{key}.lora_{way}.weight": torch.ones((1, 4) if way == "down" else (4, 1))
               for key in keys for way in ("down", "up")}, lora)  # fmt: skip
    merge(base, [lora], tmp_path / "out", blocks=["double_blocks.1=0"])
    fused = load_file(tmp_path / "out" / base.name)
    assert [fused[f"{name}.weight"][0, 0].item() for name in names] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("glob", "meant"),
    [
        ("ffn", "*ffn would mean blocks.1.ffn."),
        ("s.1", "*s.1 would mean blocks.1."),
        ("q", "*q would mean blocks.0.attn.q and blocks.1.attn.q and blocks.10.attn.q."),
        ("attn", "*attn would mean blocks.0.attn and blocks.1.attn and blocks.10.attn."),
    ],
)
def test_what_a_glob_may_have_been_meant_for(base: Path, lora: Path, glob: str, meant: str) -> None:
    with pytest.raises(Refused) as caught:
        plan(base, [lora], blocks=[f"{glob}=0"])
    assert caught.value.hint == f"A glob is for whole names: {meant}"


@pytest.mark.parametrize("glob", ["lock", "att", "blocks.7", "*ff"])
def test_no_glob_is_proposed_that_means_nothing_either(base: Path, lora: Path, glob: str) -> None:
    with pytest.raises(Refused) as caught:
        plan(base, [lora], blocks=[f"{glob}=0"])
    assert (caught.value.hint or "").startswith("There are modules like ")


def test_where_no_lora_fits_nothing_is_said_of_blocks(base: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    save_file({"x.lora_down.weight": torch.ones(1, 4), "x.lora_up.weight": torch.ones(4, 1)}, other)
    with pytest.raises(Refused) as caught:
        plan(base, [other], blocks=["blocks.0=0"])
    assert [fault.kind for fault in caught.value.faults] == ["no_match"]


def test_a_component_that_no_lora_is_for(base: Path, lora: Path) -> None:
    with pytest.raises(Refused, match=r"--blocks transformer_2=blocks\.1: no LoRA is for transformer_2"):
        plan(base, [lora], blocks=["low=blocks.1=0"])


def test_every_module_left_out(base: Path, lora: Path) -> None:
    values, _ = fused(base, lora, "*=0")
    assert set(values.values()) == {1.0}


def test_strict_takes_what_the_user_asked_for(base: Path, lora: Path) -> None:
    planned = plan(base, [lora], blocks=["*.q=0"], strict=True)
    assert [len(matching.skipped) for matching in planned.matchings] == [3]


def test_other_blocks_are_another_artifact(base: Path, lora: Path) -> None:
    prints = {
        plan(base, [lora], blocks=blocks, content=True).fingerprint
        for blocks in ([], ["blocks.1.ffn=0.5"], ["*.bias=0.5"])
    }
    assert len(prints) == 3


def test_the_marker_is_held_against_its_own_blocks(base: Path, lora: Path) -> None:
    fused(base, lora, "blocks.1=0.5")
    marker = base.with_name("out") / "fused.json"
    document = json.loads(marker.read_text())
    document["loras"][0]["blocks"][0]["strength"] = 0.25
    marker.write_text(json.dumps(document))
    report = verify(marker.parent, base=str(base), loras=[str(lora)])
    assert not report.ok


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("blocks.0=0", BlockSpec("blocks.0", 0.0)),
        ("low=blocks.0.*=0.5", BlockSpec("blocks.0.*", 0.5, "transformer_2")),
        ("transformer=*.ffn=-1e-1", BlockSpec("*.ffn", -0.1, "transformer")),
        ("other=x=2", BlockSpec("other=x", 2.0)),
    ],
)
def test_reading_one(text: str, found: BlockSpec) -> None:
    assert parse_block(text) == found


@pytest.mark.parametrize("text", ["", "blocks.0", "=1", "all=x=1", "x=nan", "x=inf", "x=", "x=a"])
def test_what_is_none(text: str) -> None:
    with pytest.raises(UsageError):
        parse_block(text)
