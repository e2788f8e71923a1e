"""The kind and the family that CONTRIBUTING adds as examples work with the rows that it says are needed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fuselora.pipeline import merge
from fuselora.supported import supported

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = """
import sys, types
import fuselora.kinds as kinds

{row}

kinds.KINDS += (GAIN,)
kinds.KIND_OF["gain"] = GAIN

from fuselora.delta.adders import TERMS

{term}

TERMS["gain"] = term

from fuselora.pipeline import merge

report = merge(*sys.argv[1:3], sys.argv[3])
print(report.marker.loras[0].raw["applied"]["gain"])
"""

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.DOTALL)


def test_the_example_of_a_kind(tmp_path: Path) -> None:
    row, term, _ = BLOCKS
    base, gain = torch.arange(12.0).view(4, 3), torch.tensor([[1.0], [-1.0], [0.5], [0.0]])
    save_file({"layer.weight": base, "other.weight": base.clone()}, tmp_path / "base.safetensors")
    save_file({"diffusion_model.layer.gain": gain}, tmp_path / "lora.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(row=row, term=term),
         *(str(tmp_path / name) for name in ("base.safetensors", "lora.safetensors", "out"))],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert done.stdout == "1\n", done.stderr
    found = load_file(tmp_path / "out" / "base.safetensors")
    assert torch.equal(found["layer.weight"], base * (1 + gain))
    assert torch.equal(found["other.weight"], base)


def test_the_example_of_a_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused LoRA on a split base, and one on halves that are the other way round."""
    found: dict[str, Any] = {}
    exec(BLOCKS[2], found)  # the text of our own page
    for module in ("families.recognition", "supported"):
        monkeypatch.setattr(f"fuselora.{module}.FAMILIES", (found["EXAMPLE"],))
    names = ["x_embedder", *(f"blocks.0.attn.to_{part}" for part in "qkv")]
    save_file(
        {
            **{f"{name}.weight": torch.zeros(4, 4) for name in names},
            "norm_out.linear.weight": torch.zeros(8, 4),
        },
        tmp_path / "base.safetensors",
    )
    rows = {"blocks.0.attn.qkv": torch.arange(12.0), "final_layer.adaLN": torch.arange(8.0)}
    diffs = {f"{name}.diff": row[:, None].repeat(1, 4) for name, row in rows.items()}
    save_file(diffs, tmp_path / "lora.safetensors")
    report = merge(tmp_path / "base.safetensors", [tmp_path / "lora.safetensors"], tmp_path / "out")
    assert report.plan.checkpoint.family is found["EXAMPLE"]
    tensors = load_file(tmp_path / "out" / "base.safetensors")
    assert [tensors[f"blocks.0.attn.to_{part}.weight"][0, 0].item() for part in "qkv"] == [0, 4, 8]
    assert tensors["norm_out.linear.weight"][:, 0].tolist() == [4, 5, 6, 7, 0, 1, 2, 3]
    assert [family.models for family in supported()] == [("Example-1B",)]
