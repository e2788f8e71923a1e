"""Public reports about size: single tensors that no 32-bit count holds."""
# ruff: noqa: N802 - cases keep their names

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fuselora.header import read_header
from fuselora.synth import Spec, write_safetensors
from tests.cases.builders import merge, save

SIDE, BYTES_SIDE = 33_000, 46_400  # over 2^31 bytes of bfloat16, and over 2^31 elements
ONES = torch.ones(1 << 20, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
WEIGHT_BYTES = 2 * SIDE * SIDE


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Path]:
    """A folder that is emptied at once: 9 GB."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def weight_blocks(n_bytes: int) -> Iterator[bytes]:
    for at in range(0, n_bytes, len(ONES)):
        yield ONES[: n_bytes - at]


# B56


@pytest.mark.slow
def test_B56_a_tensor_past_2_to_the_31(room: Path) -> None:
    """One element of the last row and column is touched; all the rest keeps its bytes."""
    specs = [Spec("a.weight", "BF16", (SIDE, SIDE)), Spec("b", "U8", (BYTES_SIDE, BYTES_SIDE))]
    base = write_safetensors(room / "base.safetensors", specs, fill="hole")
    with base.open("r+b") as stream:
        stream.seek(read_header(base).data_start)
        stream.writelines(weight_blocks(WEIGHT_BYTES))
        stream.write(b"first")
        stream.seek(-4, 2)
        stream.write(b"last")
    down, up = torch.zeros(1, SIDE), torch.zeros(SIDE, 1)
    down[0, -1] = up[-1, 0] = 1
    pair = {"a.lora_down.weight": down.bfloat16(), "a.lora_up.weight": up.bfloat16()}
    run = merge(base, [save(room / "x.safetensors", pair)], room / "out")
    assert run.exit_code == 0, run.said

    out = room / "out" / "base.safetensors"
    found = read_header(out)
    assert [tensor.n_bytes for tensor in found.tensors] == [WEIGHT_BYTES, BYTES_SIDE**2]
    with out.open("rb") as stream:
        stream.seek(found.data_start)
        for block in weight_blocks(WEIGHT_BYTES - 2):
            assert stream.read(len(block)) == block
        assert stream.read(2) == torch.tensor([2.0]).bfloat16().view(torch.uint8).numpy().tobytes()
        assert stream.read(5) == b"first"
        left, zeros = BYTES_SIDE**2 - 9, bytes(1 << 22)
        while left:
            block = stream.read(min(left, len(zeros)))
            assert block == zeros[: len(block)] != b""
            left -= len(block)
        assert stream.read() == b"last"
