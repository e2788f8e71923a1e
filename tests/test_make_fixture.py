"""``scripts/make_fixture.py`` as a developer runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from fuselora.header import read_header
from tests.synth.names import q

SCRIPT = Path(__file__).parents[1] / "scripts" / "make_fixture.py"


def test_the_script_writes_a_pair_and_its_loras(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path), "--experts", "--shard-bytes", "100000", "--mixed"]
    command += ["--dtype", "BF16", "--lora", "lightning", "--lora", "adapter", "--alpha", "8"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    loras = [Path(line).name for line in printed[1:]]
    assert printed[0] == str(tmp_path / "base")
    assert loras == [
        "lightning.high.safetensors",
        "lightning.low.safetensors",
        "adapter.high",
        "adapter.low",
    ]
    high, low = (load_file(tmp_path / "loras" / name) for name in loras[:2])
    assert high.keys() == low.keys()
    assert not torch.equal(*(lora[f"diffusion_model.{q()}.lora_up.weight"] for lora in (high, low)))
    shards = list((tmp_path / "base" / "transformer_2").glob("*.safetensors"))
    assert len(shards) > 1
    assert {tensor.dtype for path in shards for tensor in read_header(path).tensors} == {"BF16", "F32"}
