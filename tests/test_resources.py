"""What a machine does not give is one error with a hint, and leaves nothing behind."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fuselora.errors import InstallationError, ReadError, ResourceError
from fuselora.output.disk import refusal
from fuselora.pipeline import merge
from fuselora.reading import reading
from fuselora.resources import enough
from fuselora.synth import tiny, write_lora, write_pipeline

SIZE = tiny("wan2.2-t2v-a14b", blocks=1)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("can't start new thread"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
    ],
)
def test_a_shortage_is_one_error(error: Exception) -> None:
    with pytest.raises(ResourceError) as caught, enough():
        raise error
    assert caught.value.hint
    assert str(error) in caught.value.message


@pytest.mark.parametrize(
    ("error", "says", "hint"),
    [
        (ModuleNotFoundError("No module named 'rich'", name="rich"), "rich is not installed", "pip install"),
        (
            ImportError("no name x", name="torch"),
            "torch cannot be loaded",
            "--force-reinstall torch",
        ),
        (OSError("libgomp.so.1: cannot open shared object file"), "a library cannot be loaded", "broken"),
    ],
)
def test_a_library_that_is_absent_or_broken_is_no_shortage(error: Exception, says: str, hint: str) -> None:
    with pytest.raises(InstallationError, match=says) as caught, enough():
        raise error
    assert hint in (caught.value.hint or "")


def test_a_module_of_our_own_that_is_missing_is_a_bug() -> None:
    with pytest.raises(ModuleNotFoundError), enough():
        raise ModuleNotFoundError("No module named 'fuselora.x'", name="fuselora.x")


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="of another sort"), enough():
        raise RuntimeError("of another sort")


@pytest.fixture
def inputs(tmp_path: Path) -> tuple[Path, Path]:
    base = write_pipeline(tmp_path / "base", SIZE, dtype="BF16")
    return base, write_lora(tmp_path / "l.safetensors", SIZE, style="lightning", alpha=2, dtype="F32", seed=1)


@pytest.mark.parametrize("number", [1, 2, 5, 9])
def test_threads_that_cannot_be_started(
    inputs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    start, started = threading.Thread.start, []

    def fail_later(thread: threading.Thread) -> None:
        started.append(thread)
        if len(started) == number:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail_later)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        merge(*inputs, tmp_path / "out")  # type: ignore[arg-type]
    monkeypatch.undo()
    assert len(started) == number
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "l.safetensors"]
    assert not any(thread.is_alive() for thread in started)


@pytest.mark.parametrize("megabytes", [400, 800, 1200, 1600, 2400, 3200])
def test_little_address_space(inputs: tuple[Path, Path], tmp_path: Path, megabytes: int) -> None:
    """It is enough, or one error says that it is not."""
    base, lora = inputs
    out = tmp_path / "out"
    command = f"ulimit -v {megabytes * 1000}; {sys.executable} -m fuselora merge --quiet"
    done = subprocess.run(
        ["bash", "-c", f"{command} --base {base} --lora {lora} --out {out}"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    if done.returncode == 0:
        return
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[0].startswith("error: "), done.stderr
    assert "hint: " in done.stderr and "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "l.safetensors"]


def test_too_many_open_files(tmp_path: Path) -> None:
    wrong = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    assert "ulimit -n" in (refusal(tmp_path, wrong).hint or "")
    with pytest.raises(ReadError) as caught, reading(tmp_path):
        raise wrong
    assert "ulimit -n" in (caught.value.hint or "")


def test_an_input_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(ReadError) as caught, reading(tmp_path / "a"):
        (tmp_path / "a").read_bytes()
    assert "moved or removed" in (caught.value.hint or "")
