"""The kind that CONTRIBUTING adds as an example works with the two rows that it says are needed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[2]
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


def test_the_example_of_a_kind(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.DOTALL)
    row, term = (block.replace("from __future__", "# from __future__") for block in blocks)
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
