"""``scripts/bench.py`` at a tiny size: everything in it runs and is counted; no time is judged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))

import bench
from benchmark import commands, inputs, measuring, profiled, running, sampling, tables
from benchmark.commands import COPY, DIGESTED_COPY, MERGE, PEERS, Command
from benchmark.inputs import Case, Inputs
from benchmark.measuring import CommandFailed, Row, Sample, Turns
from benchmark.results import Found

from fuselora.engine import held
from fuselora.engine.lanes import Flow, Lane
from fuselora.engine.sink import Sink
from fuselora.report import Reporter

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchmark.measuring import Cache

SCRIPT = Path(bench.__file__)
LIMIT = 300  # seconds, of a bench or of one command in it
LANES = {"read", "hash-base", "load", "compute", "place", "hash-out", "write"}
NO_DIGEST = f"{MERGE} --no-digest"
AWAIT = "await_at_most"


def run_bench(*arguments: str) -> dict[str, Any]:
    """The document of a bench in a process of its own; it and what it started end with the limit."""
    command = [sys.executable, str(SCRIPT), "--tiny", "--json", "--rounds", "1", *arguments]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, start_new_session=True)
    try:
        printed, said = process.communicate(timeout=LIMIT)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    assert process.returncode == 0, said.decode()
    document: dict[str, Any] = json.loads(printed)
    return document


def title(peer: str) -> str:
    return PEERS[peer].title


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def document(work: Path) -> dict[str, Any]:
    """One case with every peer, and a profile."""
    chosen = ["--cases", "bf16+1xbf16", "--peers", "plain,diffusers,peft", "--profile", "--no-startup"]
    return run_bench("--work", str(work), *chosen)


@pytest.fixture
def rows(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    (case,) = document["cases"]
    return {row["command"]: row for row in case["rows"]}


def test_copies_merges_and_peers_are_measured(rows: dict[str, dict[str, Any]]) -> None:
    assert list(rows) == [COPY, DIGESTED_COPY, MERGE, NO_DIGEST, *map(title, inputs.ALL_PEERS)]
    for row in rows.values():
        assert row["left_out"] is None, row["left_out"]
        (sample,) = row["samples"]
        assert sample["seconds"] == row["min"] == row["median"] == row["max"] > 0
        assert sample["peak_bytes"] == row["peak_bytes"] > 0
        assert row["ratio_to_copy"] == row["median"] / rows[COPY]["median"]
        assert row["ratio_to_digested_copy"] == row["median"] / rows[DIGESTED_COPY]["median"]


def test_peers_do_the_same_work(rows: dict[str, dict[str, Any]]) -> None:
    assert rows[COPY]["equal"] is None
    assert rows[NO_DIGEST]["equal"] == 1
    for name in inputs.ALL_PEERS:
        assert rows[title(name)]["equal"] > 0.8


def test_the_document_says_what_ran_where(document: dict[str, Any], work: Path) -> None:
    (case,) = document["cases"]
    assert document["machine"]["cores"] >= 1
    assert set(document["machine"]["versions"]) >= {"torch", "safetensors", "diffusers", "peft"}
    assert document["cache"] == "cold"
    assert case["math"]["kernel"]
    assert case["io"].keys() == {"read", "write"}
    assert set(case["io"].values()) <= {"direct", "buffered"}
    assert case["lora_bytes"] > 0
    assert list(work.iterdir()) == []


def test_the_document_becomes_tables(document: dict[str, Any]) -> None:
    lines = tables.text(document).splitlines()
    starts = [line for line in lines if line.startswith((COPY, MERGE, *(p.title for p in PEERS.values())))]
    assert len(starts) == 7
    assert any(line.startswith("bf16+1xbf16: ") for line in lines)


def test_a_profile_holds_phases_and_lanes(document: dict[str, Any]) -> None:
    (case,) = document["cases"]
    profile = case["profile"]
    assert {lane["name"] for lane in profile["lanes"]} == LANES | {"last fsync"}
    assert {phase["name"] for phase in profile["phases"]} == {"imports", "read LoRAs", "fuse"}
    assert all(lane["wall"] >= lane["waiting"] >= 0 for lane in profile["lanes"])
    assert profile["seconds"] > profile["inside"] > sum(phase["wall"] for phase in profile["phases"])
    printed = tables.text(document)
    assert "lane compute" in printed
    assert "\nmatch, plan  " in printed


def test_start_up_is_measured(tmp_path: Path) -> None:
    found = run_bench("--work", str(tmp_path), "--cases", "none", "--cache", "warm", "--keep")
    assert [len(row["samples"]) for row in found["startup"]] == [1, 1, 1]
    assert (found["cases"], found["cache"]) == ([], "warm")
    (kept,) = tmp_path.iterdir()
    assert (kept / "startup" / "base" / "transformer_2").is_dir()


def test_every_mix_of_dtypes_and_loras_is_a_case() -> None:
    cases = {case.name: case for case in inputs.all_cases(4, tiny=False)}
    mixes = product(("bf16", "f32"), ("1x", "4x"), ("bf16", "f32"), ("", "-mixed"))
    wanted = {f"{base}+{n}{lora}{kind}" for base, n, lora, kind in mixes if (n, kind) != ("1x", "-mixed")}
    assert set(cases) == wanted | {"one-tensor", "shards", "rank-256"}
    assert cases["bf16+1xbf16"].base_bytes >= 4e9
    assert cases["f32+1xbf16"].base_bytes == 2 * cases["bf16+1xbf16"].base_bytes
    assert cases["bf16+1xf32"].lora_bytes == 2 * cases["bf16+1xbf16"].lora_bytes
    assert len(set(cases["bf16+4xbf16"].strengths)) == 1
    assert len(set(cases["bf16+4xbf16-mixed"].strengths)) == 4
    assert len(sampling.fused_names(cases["one-tensor"])) == 1
    assert len(sampling.fused_names(cases["rank-256"])) == 40
    assert cases["shards"].base_bytes == 8 * cases["shards"].shard_bytes == 8 << 28


def test_memory_is_measured_over_files_tensors_and_loras() -> None:
    cases = inputs.memory_cases([2, 4], [0.1, 5])
    assert [case.name for case in cases] == [
        "2 GB", "4 GB", "2 GB, tensors of 0.1 GB", "2 GB, tensors of 1 GB",
        "4 GB, LoRA of 0.1 GB", "4 GB, LoRA of 5 GB",
    ]  # fmt: skip
    tensors = [max(spec.n_bytes for spec in case.base_specs()) / 1e9 for case in cases[2:4]]
    assert tensors == pytest.approx([0.1, 1], rel=0.01)
    assert [case.lora_bytes / 1e9 for case in cases[4:]] == pytest.approx([0.1, 5], rel=0.1)


class Recorder:
    """Stands in for what is started: notes the names, and fails those it is told to."""

    def __init__(self, failing: Iterable[str] = ()) -> None:
        self.started: list[str] = []
        self._failing = set(failing)

    def timed(self, command: Command, limit: float) -> Sample:
        del limit
        self.started.append(command.name)
        if command.name in self._failing:
            raise CommandFailed(command, "KeyError: 'blocks'")
        return Sample(float(len(self.started)), 1.0, 1 << 20)


def some_rows() -> list[Row]:
    peer = Command("peer", ("false",), peer=PEERS["plain"])
    return [Row(Command("a", ("true",))), Row(Command("b", ("true",))), Row(peer)]


def take(turns: Turns, rows: list[Row]) -> None:
    turns.take(rows, lambda command: None, lambda row: None)


def test_commands_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setattr(measuring, "timed", recorder.timed)
    take(Turns(3, 2, LIMIT), some_rows())
    first, second, third = recorder.started[:3], recorder.started[3:6], recorder.started[6:]
    assert sorted(first) == sorted(second) == ["a", "b", "peer"]
    assert sorted(third) == ["a", "b"]
    assert first != second


def test_a_peer_that_fails_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(failing=["peer"])
    monkeypatch.setattr(measuring, "timed", recorder.timed)
    rows = some_rows()
    take(Turns(3, 3, LIMIT), rows)
    assert recorder.started.count("peer") == 1
    assert rows[-1].left_out == "failed: KeyError: 'blocks'"
    assert [len(row.samples) for row in rows] == [3, 3, 0]


def test_a_merge_that_fails_ends_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "timed", Recorder(failing=["b"]).timed)
    with pytest.raises(CommandFailed, match="b: KeyError: 'blocks'"):
        take(Turns(1, 1, LIMIT), some_rows())


def python(code: str) -> Command:
    return Command("python", (sys.executable, "-c", code))


PEAKS = """
import sys
from benchmark.commands import Command
from benchmark.measuring import timed
for n_mib in (1, 256):
    code = f"held = bytes(range(256)) * {n_mib << 12}"
    print(timed(Command("python", (sys.executable, "-c", code)), 60).peak_bytes)
"""


def test_a_peak_is_that_of_the_process_that_ran() -> None:
    """Measured from a small process: a peak is at least that of the Python which starts the command."""
    command = [sys.executable, "-c", PEAKS]
    done = subprocess.run(
        command, env=commands.environment(), capture_output=True, text=True, check=True, timeout=LIMIT
    )
    small, large = (int(line) for line in done.stdout.split())
    assert large > small + (200 << 20)


def test_what_is_done_afterwards_is_counted_in() -> None:
    seen: list[str] = []
    command = replace(python("pass"), then=lambda: seen.append("then"))
    assert measuring.timed(command, LIMIT).seconds > 0
    assert seen == ["then"]


def test_why_a_command_failed() -> None:
    with pytest.raises(CommandFailed, match="python: ZeroDivisionError"):
        measuring.timed(python("1 / 0"), LIMIT)
    with pytest.raises(CommandFailed, match="SIGKILL"):
        measuring.timed(python("import time; time.sleep(60)"), 0.5)


@pytest.mark.parametrize(("cache", "wanted"), [("cold", "forget"), ("warm", "read")])
def test_settling_removes_the_last_output_and_caches_the_inputs_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Cache, wanted: str
) -> None:
    done: list[tuple[str, Path]] = []
    monkeypatch.setattr(measuring, "_forget", lambda path: done.append(("forget", path)))
    monkeypatch.setattr(measuring, "_read", lambda path: done.append(("read", path)))
    (tmp_path / "out").mkdir()
    measuring.settle(tmp_path / "out", [tmp_path / "input"], cache)
    assert not (tmp_path / "out").exists()
    assert done == [(wanted, tmp_path / "input")]


def test_files_are_read_and_forgotten(tmp_path: Path) -> None:
    (tmp_path / "input").write_bytes(b"abc")
    for cache in ("cold", "warm"):
        measuring.settle(None, [tmp_path / "input"], cache)
    assert (tmp_path / "input").read_bytes() == b"abc"


def test_waiting_for_room_for_factors_is_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = ((Lane, "put"), (Reporter, "phase"), (Sink, "finish"), (Flow, "wait"), (held._Count, AWAIT))
    for owner, name in (*watched, (threading.BoundedSemaphore, "__enter__")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # so that it is given back
    times = profiled.Times()
    profiled.watch(times)
    with times.inside("load"):
        held._Count().await_at_most(0, Flow())
    assert times.spent["load"].waiting > 0


def test_no_more_memory_is_touched_than_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, ...]] = []
    monkeypatch.setattr(subprocess, "run", lambda argv, check: started.append(argv))
    monkeypatch.setattr(measuring, "unused_memory", lambda: 1000)
    for n_bytes in (500, 5000):
        measuring.touch(n_bytes)
    assert ["mmap(-1, 500," in code for _, _, code in started] == [True, False]
    assert "mmap(-1, 900," in started[1][2]


def test_equal_elements_are_counted() -> None:
    assert sampling.equal_share(b"aabbccdd", b"aabbccdx") == 0.75
    assert sampling.equal_share(b"", b"") is None
    assert sampling.equal_share(b"aabb", b"aa") is None


def test_jobs_and_a_device_reach_the_merge(tmp_path: Path) -> None:
    case = inputs.all_cases(4, tiny=True)[0]
    out = tmp_path / "out"
    found = commands.merges(case, Inputs.of(case, tmp_path), out, [1, 2], ("--device", "cuda"))
    names = [MERGE, NO_DIGEST, f"{MERGE} --jobs 1", f"{MERGE} --jobs 1 --no-digest", f"{MERGE} --jobs 2"]
    assert [command.name for command in found][:5] == names
    assert all("cuda" in command.argv for command in found)
    argv = commands.profiled(found[0], tmp_path / "p.json").argv
    assert argv[2:5] == ("benchmark.profiled", str(tmp_path / "p.json"), "merge")


def in_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[dict[str, Any], Recorder]:
    """A bench whose inputs are not made and whose commands are not run; the first takes 1 s, the next 2 s."""
    recorder = Recorder()
    monkeypatch.setattr(measuring, "timed", recorder.timed)
    monkeypatch.setattr(running, "timed", recorder.timed)
    monkeypatch.setattr(measuring, "touch", lambda n_bytes: None)
    monkeypatch.setattr(inputs, "make", lambda case, made: made.base.mkdir())
    monkeypatch.setattr(running, "io_path", lambda base, folder: {"read": "direct", "write": "direct"})
    monkeypatch.setattr(Inputs, "shards", [tmp_path])
    path = tmp_path / "bench.json"
    bench.main(["--work", str(tmp_path), "--json", str(path), "--no-startup", *arguments])
    return json.loads(path.read_text()), recorder


def left_out(document: dict[str, Any]) -> dict[str, str]:
    (case,) = document["cases"]
    return {row["command"]: row["left_out"] for row in case["rows"] if row["left_out"]}


def test_a_peer_that_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(running, "find_spec", lambda name: None if name == "peft" else find_spec(name))
    found, recorder = in_process(tmp_path, monkeypatch, "--tiny", "--cases", "bf16+1xbf16")
    why = "peft is not installed"
    assert left_out(found) == {PEERS["diffusers"].title: why, PEERS["peft"].title: why}
    assert PEERS["plain"].title in recorder.started
    assert f"left out: {why}" in capsys.readouterr().out


def test_a_peer_that_needs_too_much_memory_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "free_memory", lambda: 1 << 20)
    found, recorder = in_process(tmp_path, monkeypatch, "--tiny", "--cases", "bf16+1xbf16")
    assert set(left_out(found)) == {PEERS[name].title for name in inputs.ALL_PEERS}
    assert all("0.0 GB are free" in why for why in left_out(found).values())
    assert not set(left_out(found)) & set(recorder.started)


def test_a_case_that_does_not_fit_the_disk_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(running, "free_disk", lambda folder: int(15e9))
    chosen = ("--cases", "*+1xbf16", "--peers", "none", "--memory", "4,16", "--reserve", "5")
    found, _ = in_process(tmp_path, monkeypatch, *chosen)
    reasons = {case["case"]: case["left_out"] for case in (*found["cases"], *found["memory"])}
    fit = ["bf16+1xbf16", "4 GB", "4 GB, tensors of 0.1 GB", "4 GB, tensors of 1 GB"]
    assert [name for name, why in reasons.items() if why is None] == fit
    assert reasons["16 GB"] == "needs 33.6 GB of disk, 10.0 GB may be used"
    printed = capsys.readouterr().out
    assert printed.count("left out: needs") == len(reasons) - len(fit)


def test_medians_and_ratios_come_from_the_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = in_process(
        tmp_path, monkeypatch, "--tiny", "--peers", "none", "--cases", "one-tensor", "--rounds", "5"
    )
    (case,) = found["cases"]
    rows = {row["command"]: row for row in case["rows"]}
    seconds = {name: [sample["seconds"] for sample in row["samples"]] for name, row in rows.items()}
    assert all(len(set(found)) == 5 for found in seconds.values())
    for name, row in rows.items():
        assert (row["min"], row["max"]) == (min(seconds[name]), max(seconds[name]))
        assert row["median"] == median(seconds[name])
        assert row["ratio_to_copy"] == row["median"] / median(seconds[COPY])
        assert row["ratio_to_digested_copy"] == row["median"] / median(seconds[DIGESTED_COPY])


def test_float32_bases_may_have_fewer_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = ("--tiny", "--peers", "none", "--cases", "*+1xf32", "--rounds", "3", "--float32-rounds", "2")
    _, recorder = in_process(tmp_path, monkeypatch, *chosen)
    assert recorder.started.count(MERGE) == 5


@pytest.mark.parametrize(
    "arguments", [["--cases", "bf17"], ["--peers", "plane"], ["--rounds", "0"], ["--jobs", "1,0"]]
)
def test_an_unknown_name_or_number_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench.main(arguments)
    assert stopped.value.code == 2
    assert arguments[1].split(",")[-1] in capsys.readouterr().err


def test_ratios_need_something_to_compare_with() -> None:
    found = Found(Case("c", inputs.Layers(1, 8, 8)), rows=[Row(Command(MERGE, ()), [Sample(1, 1, 1)])])
    (row,) = found.document()["rows"]
    assert row["ratio_to_copy"] is None
