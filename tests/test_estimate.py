"""The estimate is its model's arithmetic on probed rates; the rates themselves are not tested."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from fuselora import estimate as room
from fuselora.cli import app
from fuselora.engine.kernel import Kernels, Lost, choose
from fuselora.engine.means import Means
from fuselora.errors import OutputError
from fuselora.estimate import START_SECONDS, Estimate, Rates, estimate
from fuselora.steps import Factor, Fuse
from tests.deltas import full
from tests.small import lora, noise, pair, planned, tree, write

if TYPE_CHECKING:
    import torch

    from fuselora.planning import FusePlan

RATES = Rates(read=1.0, write=1.0, sha256=1.0)


@pytest.mark.parametrize(
    ("times", "limit"),
    [((9.0, 2.0, 3.0), "disk"), ((1.0, 5.0, 3.0), "cores"), ((1.0, 2.0, 3.0), "digest")],
)
def test_the_slowest_limit_is_the_time(times: tuple[float, float, float], limit: str) -> None:
    found = Estimate(*times, rates=RATES)
    assert found.limit == limit
    assert found.seconds == START_SECONDS + max(times)


@pytest.fixture(autouse=True)
def _small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "PROBE_BYTES", 1 << 20)
    monkeypatch.setattr(room, "HASH_BYTES", 1 << 20)


def make_plan(folder: Path, **options: Any) -> FusePlan:
    base = write(folder / "base.safetensors", {"m.weight": noise(400, 32), "b": noise(70)})
    one = lora(folder / "lora.safetensors", pair("m", noise(400, 4), noise(4, 32)))
    return planned(base, [one], **options)


def fixed(monkeypatch: pytest.MonkeyPatch, kernel_seconds: float = 8.0) -> None:
    monkeypatch.setattr(room, "_read_rate", lambda plan: 100.0)
    monkeypatch.setattr(room, "_write_rate", lambda out: 50.0)
    monkeypatch.setattr(room, "_hash_rate", lambda: 10.0)
    monkeypatch.setattr(room, "_kernel_seconds", lambda plan, kernels: kernel_seconds)


def test_bytes_over_bandwidth_and_operations_over_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(tmp_path)
    fixed(monkeypatch)
    monkeypatch.setattr(room, "cores", lambda: 4)
    found = estimate(plan, Means(choose("auto"), 2), tmp_path / "out")
    assert found.disk == plan.bytes_in / 100 + plan.bytes_out / 50
    assert found.cores == (8 + (plan.bytes_in + plan.bytes_out) / 10) / 2
    assert found.digest == max(plan.bytes_in, plan.bytes_out) / 10
    assert found.rates == Rates(100.0, 50.0, 10.0)


def test_without_digests_nothing_is_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fixed(monkeypatch)
    monkeypatch.setattr(room, "cores", lambda: 4)
    found = estimate(make_plan(tmp_path, digest=False), Means(choose("auto"), 4), tmp_path / "out")
    assert (found.cores, found.digest) == (2.0, 0.0)


@pytest.mark.parametrize(("jobs", "n_cores", "side_by_side"), [(4, 2, 2), (3, 64, 3), (64, 64, 8)])
def test_no_more_sums_run_at_once_than_there_are_workers_and_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int, n_cores: int, side_by_side: int
) -> None:
    fixed(monkeypatch, kernel_seconds=24.0)
    monkeypatch.setattr(room, "cores", lambda: n_cores)
    found = estimate(make_plan(tmp_path, digest=False), Means(choose("auto"), jobs), tmp_path / "out")
    assert found.cores == 24 / side_by_side


def test_a_probe_measures_and_leaves_nothing(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    before = tree(tmp_path)
    found = estimate(plan, Means(choose("auto"), 2), tmp_path / "not" / "there" / "out")
    assert min(found.rates.read, found.rates.write, found.rates.sha256) > 0
    assert min(found.disk, found.cores, found.digest) > 0
    assert tree(tmp_path) == before


def test_a_base_of_less_than_a_page_is_read_too(tmp_path: Path) -> None:
    base = write(tmp_path / "base.safetensors", {"m.weight": noise(4, 4)})
    one = lora(tmp_path / "lora.safetensors", pair("m", noise(4, 1), noise(1, 4)))
    found = estimate(planned(base, [one]), Means(choose("auto"), 2), tmp_path / "out")
    assert 0 < found.rates.read < math.inf


def test_twice_the_elements_of_a_sort_take_twice_as_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(tmp_path)
    (step,) = plan.fused_steps
    monkeypatch.setattr(room, "_chunk_seconds", lambda step, kernels: 0.5)
    assert room._kernel_seconds(plan, choose("auto")) == 0.5 * step.rows * step.columns


def some_step(rows: int, n_full: int = 0) -> Fuse:
    diff = full(Factor(Path("lora"), "diff", "F32", (rows, 32), 0, rows * 128), 1.0)
    return Fuse(Path("base"), "m.weight", "F32", "F32", rows, 32, 0, 0, ((0, rows),), (diff,) * n_full, 32)


def timed_rows(monkeypatch: pytest.MonkeyPatch, *steps: Fuse) -> tuple[list[int], float]:
    """The rows of the steps that are timed, each of which takes its rows in seconds; and the estimate."""
    found: list[int] = []

    def seconds(step: Fuse, kernels: Kernels) -> float:
        found.append(step.rows)
        return float(step.rows)

    monkeypatch.setattr(room, "_chunk_seconds", seconds)
    plan: Any = SimpleNamespace(fused_steps=steps)
    return found, room._kernel_seconds(plan, choose("auto"))


def test_the_largest_step_of_a_sort_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    found, total = timed_rows(monkeypatch, some_step(1), some_step(9), some_step(5))
    assert found == [9]
    assert total == 9 * (1 + 9 + 5) * 32


def test_differences_make_a_sort_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = timed_rows(monkeypatch, some_step(7, n_full=2), some_step(9, n_full=1), some_step(5))
    assert sorted(found) == [5, 7, 9]


@dataclass
class Noted:
    """A kernel that computes nothing and notes which rows it was asked for."""

    asked: list[tuple[int, int]]
    name: str = "noted"
    accumulate: str = "float32"

    def fits(self, step: Fuse) -> bool:
        return True

    def load(self, step: Fuse) -> Noted:
        return self

    def rows(self, base: torch.Tensor, out: torch.Tensor, first: int, last: int) -> Lost:
        assert base.shape == out.shape == (last - first, 32)
        self.asked.append((first, last))
        return Lost()


def test_the_last_chunk_is_timed() -> None:
    """The first one alone counts what rounding loses."""
    kernel = Noted([])
    room._chunk_seconds(replace(some_step(400), chunks=((0, 64), (64, 400))), Kernels((kernel,)))
    assert set(kernel.asked) == {(64, 400)}


def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryDirectory", refuse)
    with pytest.raises(OutputError, match="Permission denied"):
        estimate(make_plan(tmp_path), Means(choose("auto"), 2), tmp_path / "out")


def test_the_document_says_seconds_limit_and_rates() -> None:
    found = Estimate(9.04, 2.0, 3.0, rates=Rates(10.0, 20.0, 30.0))
    assert found.document() == {
        "seconds": 11.5,
        "limit": "disk",
        "limits": {"disk": 9.0, "cores": 2.0, "digest": 3.0},
        "bytes_per_second": {"read": 10.0, "write": 20.0, "sha256": 30.0},
    }


def asking(folder: Path) -> list[str]:
    make_plan(folder)
    return ["plan", "--base", str(folder / "base.safetensors"), "--lora", str(folder / "lora.safetensors")]


def test_plan_prints_it(tmp_path: Path) -> None:
    asked = asking(tmp_path)
    result = CliRunner().invoke(app, [*asked, "--estimate", "--jobs", "2", "--out", str(tmp_path / "out")])
    assert result.exit_code == 0
    assert re.search(r"About \d+ s: the \w+ (is|are) the limit", result.stdout)
    result = CliRunner().invoke(app, [*asked, "--estimate", "--json", "--out", str(tmp_path / "out")])
    document = json.loads(result.stdout)["estimate"]
    assert document["seconds"] > 0
    assert document["limit"] in {*document["limits"], "start"}
    assert not (tmp_path / "out").exists()


def test_a_plan_without_it_says_null(tmp_path: Path) -> None:
    asked = asking(tmp_path)
    assert json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)["estimate"] is None
