"""Memory follows blocks, factors and threads, not the model: estimated here, and measured."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fuselora.engine.threads import FACTOR_ELEMENTS, blocks_under_way, cores, workers
from fuselora.header import PAGE, read_header
from fuselora.memory import RESIDENT_BYTES, SCRATCH_BYTES, peak_memory
from fuselora.steps import BLOCK_BYTES, CHUNK_ELEMENTS
from fuselora.synth import SIZES, Spec, value_blocks, write_file, write_lora, write_safetensors
from tests.small import planned

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fuselora.planning import FusePlan

WAN = SIZES["wan2.2-t2v-a14b"]
LIMIT = 768 << 20
JOBS = 2
BUFFER = BLOCK_BYTES + 2 * PAGE
# VmHWM, because ru_maxrss begins at what the parent process held when it started this one
CHILD = """
import json, re, sys
from pathlib import Path
import fuselora
from fuselora.memory import peak_memory

report = fuselora.merge(sys.argv[1], [sys.argv[2]], sys.argv[3], jobs=2)
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
print(json.dumps({"peak": peak, "estimate": peak_memory(report.plan), "bytes": report.plan.bytes_out}))
"""


def plan_of(
    folder: Path, blocks: int, rank: int, stored: str = "BF16", strength: float = 1, **options: Any
) -> FusePlan:
    """A full-width plan, from files that are all holes."""
    size = WAN.with_blocks(blocks)
    base = write_file(folder / f"{blocks}.{stored}.safetensors", size, dtype=stored, fill="hole")
    one = write_lora(folder / f"l{blocks}.{rank}.safetensors", size, rank=rank, fill="hole")
    return planned(base, [f"{one}:{strength}"], content=False, **{"jobs": JOBS, **options})


def estimate(folder: Path, blocks: int, rank: int, **options: Any) -> int:
    return peak_memory(plan_of(folder, blocks, rank, **options))


def test_the_estimate_does_not_follow_the_number_of_blocks(tmp_path: Path) -> None:
    assert estimate(tmp_path, 1, 64) == estimate(tmp_path, 40, 64) < LIMIT


def test_the_estimate_follows_the_rank(tmp_path: Path) -> None:
    small = estimate(tmp_path, 1, 4)
    assert small < estimate(tmp_path, 1, 64) < estimate(tmp_path, 1, 512) < LIMIT
    # at most by the factors in float32 of the tensors that are under way at once, which are two here
    assert estimate(tmp_path, 1, 512) - small <= 2 * (512 - 4) * (WAN.ffn + WAN.dim) * 4


def test_the_reference_needs_more_for_its_float64(tmp_path: Path) -> None:
    more = estimate(tmp_path, 1, 64, kernel="reference") - estimate(tmp_path, 1, 64)
    assert 64 << 20 < more < 512 << 20


@pytest.mark.parametrize("jobs", [1, 2, 5, 8, 20])
def test_a_plan_that_copies_needs_its_buffers_only(tmp_path: Path, jobs: int) -> None:
    plan = plan_of(tmp_path, 1, 4, strength=0, jobs=jobs)
    assert peak_memory(plan) == RESIDENT_BYTES + blocks_under_way(jobs) * BUFFER
    assert blocks_under_way(jobs) == {1: 7, 2: 8, 5: 11}.get(jobs, 14)


@pytest.mark.parametrize(
    ("stored", "dtype", "writes"),
    [("F32", "bfloat16", BLOCK_BYTES // 2), ("BF16", "float32", 2 * BLOCK_BYTES)],
)
def test_results_of_another_width_need_buffers_of_their_own(
    tmp_path: Path, stored: str, dtype: str, writes: int
) -> None:
    base, one = pairs_of(tmp_path, 1, 4096, 4096, rank=8, stored=stored)
    plan = planned(base, [f"{one}:0"], content=False, jobs=JOBS, dtype=dtype)
    buffers = blocks_under_way(JOBS) * (BUFFER + writes + 2 * PAGE)
    assert (
        peak_memory(plan) == RESIDENT_BYTES + buffers + workers(JOBS) * SCRATCH_BYTES["auto"] * CHUNK_ELEMENTS
    )


def test_more_jobs_need_more(tmp_path: Path) -> None:
    found = [estimate(tmp_path, 1, 64, jobs=jobs) for jobs in (1, 2, 4, 8)]
    assert found == sorted(set(found))
    assert estimate(tmp_path, 1, 64, jobs=8) == estimate(tmp_path, 1, 64, jobs=64)
    assert estimate(tmp_path, 1, 64, jobs=None) == estimate(tmp_path, 1, 64, jobs=cores())


@pytest.mark.parametrize(("rank", "n_modules"), [(8, 1024), (128, 1024), (128, 100)])
def test_factors_of_small_tensors_under_way_count_up_to_what_there_is_room_for(
    tmp_path: Path, rank: int, n_modules: int
) -> None:
    """Many tensors fit into the blocks that are under way at once, each with its factors."""
    base, one = pairs_of(tmp_path, n_modules, 256, 256, rank=rank)
    plan = planned(base, [one], content=False, jobs=JOBS)
    under_way = min(n_modules, blocks_under_way(JOBS) * (BLOCK_BYTES // (256 * 256 * 2)))
    factors = min(under_way * 2 * rank * 256, FACTOR_ELEMENTS) * 4
    scratch = workers(JOBS) * 256 * 256 * SCRATCH_BYTES["auto"]
    assert peak_memory(plan) == RESIDENT_BYTES + blocks_under_way(JOBS) * BUFFER + scratch + factors


def pairs_of(
    folder: Path, n_modules: int, rows: int, columns: int, rank: int, stored: str = "BF16"
) -> tuple[Path, Path]:
    """A base of zeros and a bfloat16 LoRA with a pair for each of its matrices, all of the same values."""
    names = [f"m{number:04}" for number in range(n_modules)]
    weights = [Spec(f"{name}.weight", stored, (rows, columns)) for name in names]
    ups = [Spec(f"{name}.lora_up.weight", "BF16", (rows, rank)) for name in names]
    downs = [Spec(f"{name}.lora_down.weight", "BF16", (rank, columns)) for name in names]
    base = write_safetensors(folder / "base.safetensors", weights, fill="hole")
    one = write_safetensors(folder / "lora.safetensors", [*ups, *downs], fill="hole")
    block = b"".join(value_blocks(Spec("values", "BF16", (1 << 20,), std=0.1), 0))
    with one.open("r+b") as stream:
        left = one.stat().st_size - stream.seek(read_header(one).data_start)
        while left > 0:
            left -= stream.write(block[:left])
    return base, one


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Path]:
    """A folder that is emptied at once: pytest would keep the gigabytes of its last runs."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def merged_in_a_process_of_its_own(folder: Path, blocks: int) -> dict[str, int]:
    size = WAN.with_blocks(blocks)
    base = write_file(folder / "base.safetensors", size, dtype="BF16", fill="repeat")
    return measured(folder, base, write_lora(folder / "lora.safetensors", size, rank=512, fill="repeat"))


def measured(folder: Path, base: Path, one: Path) -> dict[str, int]:
    """Peak, estimate and bytes of a merge in a process of its own; the files are gone afterwards."""
    command = [sys.executable, "-c", CHILD, str(base), str(one), str(folder / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    for path in (folder / "out", base, one):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    found: dict[str, int] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_memory_is_the_same_for_a_model_of_any_size(room: Path) -> None:
    small, large = (merged_in_a_process_of_its_own(room, blocks) for blocks in (1, 3))
    assert small["bytes"] > 10**9
    assert large["bytes"] > 2.4 * 10**9
    assert small["peak"] <= LIMIT
    assert large["peak"] <= LIMIT
    assert abs(large["peak"] - small["peak"]) <= 0.05 * small["peak"]
    for seen in (small, large):
        assert 0.6 * seen["peak"] <= seen["estimate"] <= 2 * seen["peak"]


@pytest.mark.slow
def test_memory_is_the_same_for_a_tensor_and_a_lora_of_any_size(room: Path) -> None:
    """A matrix of 0.1 and of 1 GB; LoRAs of 0.1 and of 1 GB, each as large as what it is added to."""
    tensors = [measured(room, *pairs_of(room, 1, rows, 8192, rank=64)) for rows in (6400, 65_536)]
    loras = [measured(room, *pairs_of(room, n_modules, 1024, 1024, rank=512)) for n_modules in (50, 500)]
    for small, large in (tensors, loras):
        assert large["bytes"] > 9 * small["bytes"]
        assert large["peak"] <= LIMIT
        assert abs(large["peak"] - small["peak"]) <= 0.05 * small["peak"]
        assert 0.6 * large["peak"] <= large["estimate"] <= 2 * large["peak"]
