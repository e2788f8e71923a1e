"""Safetensors files: the seed's values in every dtype, written as they are made."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from safetensors.torch import load_file

from fuselora import synth
from fuselora.header import read_header
from fuselora.synth import Spec, files, tiny, write_file, write_safetensors
from tests.synth.names import T2V

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def test_values_are_a_function_of_the_seed(tmp_path: Path) -> None:
    first, again, other = (
        write_file(tmp_path / str(n), tiny(T2V), seed=seed) for n, seed in enumerate((1, 1, 2))
    )
    assert first.read_bytes() == again.read_bytes()
    assert first.read_bytes() != other.read_bytes()


@pytest.mark.parametrize("dtype", sorted(synth.TORCH_DTYPES))
def test_every_dtype_is_written_as_itself(tmp_path: Path, dtype: str) -> None:
    path = write_safetensors(tmp_path / "one", [Spec("a", dtype, (3, 5), mean=2.0), Spec("b", dtype, (0, 4))])
    found = load_file(path)
    assert str(found["a"].dtype) == f"torch.{synth.TORCH_DTYPES[dtype]}"
    assert found["a"].float().eq(2).all()
    assert found["b"].shape == (0, 4)


def test_data_starts_anywhere_as_in_published_files(tmp_path: Path) -> None:
    header = read_header(write_file(tmp_path / "model", tiny(T2V)))
    assert header.data_start % 8 == 0
    assert header.data_start % 4096 != 0


def test_blocks_are_written_as_they_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, mib = tmp_path / "big", 1 << 20
    on_disk = []

    def blocks(spec: Spec, seed: int, *, repeat: bool) -> Iterator[memoryview]:
        for _ in range(spec.n_bytes // mib):
            on_disk.append(path.stat().st_size)
            yield memoryview(bytes(mib))

    monkeypatch.setattr(files, "value_blocks", blocks)
    write_safetensors(path, [Spec("a", "U8", (8, mib))])
    assert all(size >= (number - 1) * mib for number, size in enumerate(on_disk))
    assert read_header(path).tensors[0].n_bytes == 8 * mib


@pytest.mark.parametrize(("fill", "imported"), [("hole", False), ("noise", True)])
def test_torch_waits_until_values_are_made(tmp_path: Path, fill: str, imported: bool) -> None:
    code = (
        "import sys; from pathlib import Path; from fuselora import synth;"
        "synth.write_lora(Path(sys.argv[1]), synth.tiny('wan2.2-t2v-a14b'), fill=sys.argv[2]);"
        "print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "lora"), fill]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.split() == [
        str(imported)
    ]
