"""What the system itself refuses: room, long files, a file system that is read only."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.environment.merges import Inputs, environment
from tests.small import tree

COMMAND = f"{sys.executable} -m fuselora"
UNSHARE = ("unshare", "-rm")


def shell(script: str, folder: Path, *before: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*before, "bash", "-c", script], cwd=folder, env=environment(), capture_output=True, text=True
    )


def may_mount(folder: Path) -> bool:
    probe = folder / "probe"
    probe.mkdir()
    done = shell("mount -t tmpfs none probe", folder, *UNSHARE)
    probe.rmdir()
    return done.returncode == 0


@pytest.fixture
def mounts(tmp_path: Path) -> None:
    if not may_mount(tmp_path):
        pytest.skip("this machine mounts nothing for a process of its own")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("kilobytes", [0, 1, 8, 64])
def test_files_that_may_not_grow(kilobytes: int, inputs: Inputs, tmp_path: Path) -> None:
    """One error, nothing left but what a rerun keeps; and that makes what an undisturbed run makes."""
    words = " ".join(inputs.arguments("out"))
    done = shell(f"ulimit -f {kilobytes}; {COMMAND} {words} 2>&1 | cat", tmp_path)
    assert "error: " in done.stdout and "Traceback" not in done.stdout
    assert "File too large" in done.stdout
    assert names(tmp_path) in ([], ["out.partial"])
    again = shell(f"{COMMAND} {words}", tmp_path)
    assert again.returncode == 0, again.stderr
    assert tree(tmp_path / "out") == inputs.wanted
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("kilobytes", [0, 40, 100])
@pytest.mark.usefixtures("mounts")
def test_a_disk_that_is_full(kilobytes: int, inputs: Inputs, tmp_path: Path) -> None:
    """The room is looked at before anything is written: what is needed, and what there is."""
    (tmp_path / "disk").mkdir()
    words = " ".join(inputs.arguments("disk/out"))
    size = f"mount -t tmpfs -o size={kilobytes + 8}k none disk"
    fill = f"head -c {8 << 10} /dev/zero > disk/other"
    done = shell(f"{size} && {fill}; {COMMAND} {words}; echo rc $?; ls -A disk", tmp_path, *UNSHARE)
    assert done.stdout.split() == ["rc", "1", "other"], done.stdout + done.stderr
    assert ("needs " if kilobytes else "No space left on device") in done.stderr
    assert "available" in done.stderr
    assert "hint: " in done.stderr


@pytest.mark.parametrize("files", [3, 8, 14])
@pytest.mark.usefixtures("mounts")
def test_a_file_system_that_takes_no_more_files(files: int, inputs: Inputs, tmp_path: Path) -> None:
    """It may have all the bytes in the world."""
    (tmp_path / "disk").mkdir()
    words = " ".join(inputs.arguments("disk/out"))
    mount = f"mount -t tmpfs -o nr_inodes={files} none disk"
    again = "mount -o remount,nr_inodes=200 disk"
    script = f"{mount}; {COMMAND} {words}; echo rc $?; {again}; {COMMAND} {words}; echo rc $?; ls -A disk"
    done = shell(script, tmp_path, *UNSHARE)
    assert [line for line in done.stdout.splitlines() if line.startswith("rc")] == ["rc 1", "rc 0"]
    assert done.stdout.split()[-1] == "out"
    assert "takes no more files (no inodes left)" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("mounts")
def test_a_file_system_that_is_read_only(inputs: Inputs, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    words = " ".join(inputs.arguments("disk/out"))
    script = f"mount -t tmpfs -o ro none disk; {COMMAND} {words}; echo rc $?; ls -A disk"
    done = shell(script, tmp_path, *UNSHARE)
    assert done.stdout.split() == ["rc", "1"], done.stdout + done.stderr
    assert "disk" in done.stderr and "Traceback" not in done.stderr
    assert any(words in done.stderr for words in ("Read-only file system", "cannot be written"))


@pytest.mark.usefixtures("mounts")
def test_a_base_that_is_read_only_is_no_obstacle(inputs: Inputs, tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    words = " ".join(inputs.arguments("out", base="given"))
    bind = f"mount --bind {inputs.base} given && mount -o remount,bind,ro given"
    done = shell(f"{bind} && {COMMAND} {words}", tmp_path, *UNSHARE)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "fused.json").is_file()
