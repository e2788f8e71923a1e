"""Memory follows the widest tensor and its factors, not the model: estimated here, and measured."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fuselora.memory import N_BUFFERS, RESIDENT_BYTES, peak_memory
from fuselora.planning import COPY_BYTES
from fuselora.synth import SIZES, write_file, write_lora
from tests.small import planned

if TYPE_CHECKING:
    from collections.abc import Iterator

WAN = SIZES["wan2.2-t2v-a14b"]
LIMIT = int(1.2 * 2**30)
# VmHWM, because ru_maxrss begins at what the parent process held when it started this one
CHILD = """
import json, re, sys
from pathlib import Path
import fuselora
from fuselora.memory import peak_memory

report = fuselora.merge(sys.argv[1], [sys.argv[2]], sys.argv[3])
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
print(json.dumps({"peak": peak, "estimate": peak_memory(report.plan), "bytes": report.plan.bytes_out}))
"""


def estimate(folder: Path, blocks: int, rank: int, dtype: str = "BF16", kernel: str = "auto") -> int:
    """Of a full-width plan, from files that are all holes."""
    size = WAN.with_blocks(blocks)
    base = write_file(folder / f"{blocks}.{dtype}.safetensors", size, dtype=dtype, fill="hole")
    one = write_lora(folder / f"l{blocks}.{rank}.safetensors", size, rank=rank, fill="hole")
    return peak_memory(planned(base, [one], content=False, kernel=kernel))


def test_the_estimate_does_not_follow_the_number_of_blocks(tmp_path: Path) -> None:
    assert estimate(tmp_path, 1, 64) == estimate(tmp_path, 40, 64) < LIMIT


def test_the_estimate_follows_the_rank_and_the_dtype(tmp_path: Path) -> None:
    small = estimate(tmp_path, 1, 4)
    assert small < estimate(tmp_path, 1, 64) < estimate(tmp_path, 1, 512) < LIMIT
    # at most by the widest pair of a block in float32
    assert estimate(tmp_path, 1, 512) - small <= (512 - 4) * (WAN.ffn + WAN.dim) * 4
    assert estimate(tmp_path, 1, 4, dtype="F32") > small


def test_the_reference_needs_more_for_its_float64(tmp_path: Path) -> None:
    more = estimate(tmp_path, 1, 64, kernel="reference") - estimate(tmp_path, 1, 64)
    assert 64 << 20 < more < 512 << 20


def test_a_plan_that_copies_needs_its_buffers_only(tmp_path: Path) -> None:
    size = WAN.with_blocks(1)
    base = write_file(tmp_path / "base.safetensors", size, fill="hole")
    one = write_lora(tmp_path / "l.safetensors", size, fill="hole")
    plan = planned(base, [f"{one}:0"], content=False)
    assert peak_memory(plan) == RESIDENT_BYTES + N_BUFFERS * COPY_BYTES


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Path]:
    """A folder that is emptied at once: pytest would keep the gigabytes of its last runs."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def merged_in_a_process_of_its_own(folder: Path, blocks: int) -> dict[str, int]:
    size = WAN.with_blocks(blocks)
    base = write_file(folder / "base.safetensors", size, dtype="BF16", fill="repeat")
    one = write_lora(folder / "lora.safetensors", size, rank=512, fill="repeat")
    command = [sys.executable, "-c", CHILD, str(base), str(one), str(folder / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for path in (folder / "out", base, one):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    found: dict[str, int] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_memory_is_the_same_for_a_model_of_any_size(room: Path) -> None:
    small, large = (merged_in_a_process_of_its_own(room, blocks) for blocks in (1, 4))
    assert small["bytes"] > 10**9
    assert large["bytes"] > 3 * 10**9
    assert small["peak"] <= LIMIT
    assert large["peak"] <= LIMIT
    assert abs(large["peak"] - small["peak"]) <= 0.05 * small["peak"]
    for seen in (small, large):
        assert 0.6 * seen["peak"] <= seen["estimate"] <= 2 * seen["peak"]
