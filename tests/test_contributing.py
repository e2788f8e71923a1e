"""The kind and the family that CONTRIBUTING adds as examples work with the rows that it says are needed."""

from __future__ import annotations

import os
import re
import shutil
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
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.DOTALL)


def test_the_example_of_a_kind(tmp_path: Path) -> None:
    """Put where the page says, into a copy of the package: merged, inspected, verified."""
    _add_the_kind(tmp_path / "package")
    base, gain = torch.arange(12.0).view(4, 3), torch.tensor([[1.0], [-1.0], [0.5], [0.0]])
    save_file({"layer.weight": base, "other.weight": base.clone()}, tmp_path / "base.safetensors")
    save_file({"diffusion_model.layer.gain": gain}, tmp_path / "lora.safetensors")
    assert "1 gain" in _run(tmp_path, "inspect", "lora.safetensors")
    _run(tmp_path, "merge", "--base", "base.safetensors", "--lora", "lora.safetensors", "--out", "out")
    found = load_file(tmp_path / "out" / "base.safetensors")
    assert torch.equal(found["layer.weight"], base * (1 + gain))
    assert torch.equal(found["other.weight"], base)
    _run(tmp_path, "verify", "out", "--base", "base.safetensors", "--lora", "lora.safetensors")


def _add_the_kind(package: Path) -> None:
    shutil.copytree(ROOT / "fuselora", package / "fuselora", ignore=shutil.ignore_patterns("__pycache__"))
    row, term, definition, _ = BLOCKS
    (package / "fuselora/kinds/gain.py").write_text(row)
    (package / "fuselora/delta/gain.py").write_text(term)
    rows = {
        "kinds/__init__.py": (
            "KINDS: tuple[Kind, ...] = (",
            " GAIN,",
            "from fuselora.kinds.gain import GAIN",
        ),
        "delta/adders.py": ("Sums], Term]] = {", '"gain": gain.term,', "from fuselora.delta import gain"),
        "definitions.py": ("SUMS: Mapping[str, Sum] = {", '"gain": _gain,', ""),
    }
    for name, (table, row, imported) in rows.items():
        file = package / "fuselora" / name
        text = file.read_text().replace(table, table + row)
        text = text.replace("import annotations\n", f"import annotations\n{imported}\n", 1)
        file.write_text(text.replace("\nSUMS:", f"\n{definition}\nSUMS:"))


def _run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "fuselora", *command],
        capture_output=True, text=True, cwd=folder, env={**os.environ, "PYTHONPATH": str(folder / "package")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_of_a_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused LoRA on a split base, and one on halves that are the other way round."""
    found: dict[str, Any] = {}
    exec(BLOCKS[3], found)  # the text of our own page
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
