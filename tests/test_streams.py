"""A merge is decided by its inputs: never by what its report is written to."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fuselora.interrupts import INTERRUPTED
from fuselora.streams import Tolerant
from fuselora.synth import tiny, write_lora, write_pipeline

SIZE = tiny("wan2.2-t2v-a14b", blocks=1)
ROOT = Path(__file__).resolve().parents[1]
COMMAND = f"{sys.executable} -m fuselora"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_lora(folder / "lora.safetensors", SIZE, style="lightning", alpha=2, dtype="F32", seed=1)
    return write_pipeline(folder / "base", SIZE, dtype="BF16")


def shell(base: Path, out: Path, redirection: str, *options: str) -> subprocess.CompletedProcess[str]:
    lora = base.with_name("lora.safetensors")
    merge = f"merge --base '{base}' --lora '{lora}' --out '{out}' {' '.join(options)}"
    # COMMAND's own status, not that of what reads it
    script = f"set -o pipefail; {COMMAND} {merge} {redirection}"
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120)


def is_whole(out: Path) -> bool:
    check = f"{COMMAND} check --digest '{out}'".split("'")
    return subprocess.run([*check[0].split(), check[1]], capture_output=True).returncode == 0


@pytest.mark.parametrize("options", [(), ("--json",)], ids=["tables", "json"])
@pytest.mark.parametrize(
    "redirection", [">&-", "| head -c 0", "2>&-", "2>/dev/full", "2> >(head -c 0)", "<&-"]
)
def test_a_stream_that_nobody_reads(
    base: Path, tmp_path: Path, redirection: str, options: tuple[str, ...]
) -> None:
    done = shell(base, tmp_path / "out", redirection, *options)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr
    assert is_whole(tmp_path / "out")


@pytest.mark.parametrize("options", [(), ("--json",)], ids=["tables", "json"])
def test_a_report_that_is_lost_is_an_error_after_the_work(
    base: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    done = shell(base, tmp_path / "out", ">/dev/full", *options)
    assert done.returncode == 1
    assert "error: stdout: cannot be written: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert is_whole(tmp_path / "out")


def test_a_lost_help_text_is_an_error() -> None:
    done = subprocess.run(["bash", "-c", f"{COMMAND} --help >/dev/full"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "error: stdout: cannot be written: No space left on device\n"


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full"])
def test_a_usage_error_that_nobody_reads_is_one(redirection: str) -> None:
    done = subprocess.run(["bash", "-c", f"{COMMAND} merge --nope {redirection}"], capture_output=True)
    assert (done.returncode, done.stdout) == (2, b"")


def test_no_file_takes_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    """What a library writes to number 2 would end in it."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "from fuselora.streams import fill_gaps\n"
        "fill_gaps()\n"
        "sys.exit(os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY))\n"
    )
    command = f"exec {sys.executable} {script} {tmp_path / 'new'} <&- >&- 2>&-"
    done = subprocess.run(["bash", "-c", command], env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode > 2


def test_the_first_failure_is_kept() -> None:
    full = open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115, PTH123
    stream = Tolerant(full)
    stream.write("a")
    stream.flush()
    first = stream.failure
    assert first is not None and first.errno == errno.ENOSPC
    stream.write("b")
    stream.flush()
    assert stream.lost() is stream.failure is first
    with pytest.raises(OSError):
        full.close()


def test_no_stream_at_all() -> None:
    stream = Tolerant(None)
    assert stream.write("a") == 1
    stream.flush()
    assert (stream.isatty(), stream.lost()) == (False, None)
    with pytest.raises(OSError):
        stream.fileno()


# Ctrl-C at any time

WATCHED = """
import signal, sys, time, types
import fuselora.__main__ as entry
from fuselora.engine.sink import Sink

def install(number, handler):
    signal.signal(number, handler)
    print("ready", flush=True)

def finish(sink):
    print("fusing", flush=True)
    time.sleep(60)

Sink.finish = finish
entry.signal = types.SimpleNamespace(signal=install, SIGINT=signal.SIGINT)
entry.main()
"""


@pytest.mark.parametrize("delay", [0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, None])
def test_an_interruption_at_any_time(base: Path, tmp_path: Path, delay: float | None) -> None:
    """From the first line of the command on: one word, one exit code, nothing left."""
    lora = base.with_name("lora.safetensors")
    options = ["--base", str(base), "--lora", str(lora), "--out", str(tmp_path / "out")]
    command = [sys.executable, "-c", WATCHED, "merge", *options]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stdout is not None and running.stdout.readline() == "ready\n"
    if delay is None:
        assert running.stdout.readline() == "fusing\n"
    time.sleep(delay or 0)
    for _ in range(5):
        running.send_signal(signal.SIGINT)
        time.sleep(0.005)
    _, said = running.communicate(timeout=60)
    assert (running.returncode, said.count("interrupted")) == (INTERRUPTED, 1), said
    assert said.endswith("interrupted\n") and "Traceback" not in said
    assert not any(tmp_path.iterdir())
