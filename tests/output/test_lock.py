from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fuselora.errors import OutputError
from fuselora.output import lock
from fuselora.output.staging import Stage, open_stage, prepare
from tests.output.fused_folder import expected, run, tree

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    file = tmp_path / "base.safetensors"
    file.write_bytes(b"base")
    return file


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "made").mkdir()
    return tmp_path / "made" / "out"


def ready(out: Path, *inputs: Path, restart: bool = False) -> Stage:
    return prepare(out, inputs=inputs, overwrite=False, restart=restart)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


HOLDER = """
import sys, time
from pathlib import Path
from fuselora.output.staging import open_stage, prepare
with open_stage(prepare(Path(sys.argv[1]), inputs=[], overwrite=False, restart=False)):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_lock_that_cannot_be_signed_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(descriptor: int, data: bytes) -> int:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr(os, "write", refused)
    with pytest.raises(OutputError, match="File too large"), lock.held(tmp_path / "x.lock"):
        pass
    assert names(tmp_path) == []


def test_a_live_holder_is_refused_and_a_dead_one_ignored(out: Path, base: Path) -> None:
    early = ready(out, base)
    command = [sys.executable, "-c", HOLDER, str(out)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            for restart in (False, True):
                with pytest.raises(OutputError, match=f"process {holder.pid} on ") as caught:
                    ready(out, base, restart=restart)
            assert caught.value.facts["pid"] == holder.pid
            with pytest.raises(OutputError, match=f"process {holder.pid} on "), open_stage(early):
                pass
        finally:
            holder.kill()
    assert names(out.parent) == ["out.partial", "out.partial.lock"]
    run(out, base, "one")
    assert names(out.parent) == ["out"]


def test_one_stage_is_held_once_even_in_one_process(out: Path, base: Path) -> None:
    stage = ready(out, base)
    with open_stage(stage) as stage:
        with pytest.raises(OutputError, match=f"process {os.getpid()} on "), open_stage(stage):
            pass
        assert stage.lock.is_file()
    assert not stage.lock.exists()


@pytest.mark.parametrize("kind", ["file", "link", "folder"])
def test_a_foreign_file_in_the_locks_place_is_refused(out: Path, base: Path, kind: str) -> None:
    lock = out.with_name("out.partial.lock")
    if kind == "link":
        lock.symlink_to(base)
    elif kind == "folder":
        lock.mkdir()
    else:
        lock.write_text("a list of mine\n")
    with pytest.raises(OutputError, match="lock"):
        ready(out, base)
    assert base.read_bytes() == b"base"


def test_a_file_system_without_locks_is_written_all_the_same(
    out: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(descriptor: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", unsupported)
    run(out, base, "one")
    assert tree(out) == expected("one")


def test_a_lock_removed_by_its_former_holder_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.partial.lock"
    flock, taken = fcntl.flock, list[int]()

    def late(descriptor: int, kind: int) -> None:
        if not taken:
            path.unlink()
        taken.append(descriptor)
        flock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", late)
    with lock.held(path):
        assert len(taken) == 2
        assert path.read_text().startswith(f"fuselora pid {os.getpid()} on ")
    assert names(tmp_path) == []


def test_a_lock_that_always_vanishes_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.partial.lock"
    monkeypatch.setattr(fcntl, "flock", lambda descriptor, kind: path.unlink())
    with pytest.raises(OutputError, match="another process"), lock.held(path):
        pass


def test_the_lock_of_another_at_the_same_path_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "out.partial.lock"
    with lock.held(path):
        path.rename(tmp_path / "moved")
        path.write_bytes(b"")
    assert names(tmp_path) == ["moved", "out.partial.lock"]


def test_a_holder_that_wrote_no_name_yet_is_refused_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "out.partial.lock"
    with path.open("wb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        for attempt in (lock.refuse_held, lambda path: lock.held(path).__enter__()):
            with pytest.raises(OutputError, match=r"out\.partial: another process is writing it"):
                attempt(path)
    lock.refuse_held(path)


def test_a_lock_that_fails_otherwise_is_an_output_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(descriptor: int, kind: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", broken)
    with pytest.raises(OutputError, match="Input/output"), lock.held(tmp_path / "lock"):
        pass


@pytest.mark.parametrize("left", ["", "fuse", "fuselora pid 4", "fuselora pid 41 o", "fuselora pid 41 on ho"])
def test_a_lock_whose_line_was_cut_short_blocks_nobody(out: Path, base: Path, left: str) -> None:
    """A full disk took half of it."""
    out.with_name("out.partial.lock").write_text(left)
    run(out, base, "one")
    assert tree(out) == expected("one")
    assert names(out.parent) == ["out"]


def test_a_lock_that_goes_while_it_is_looked_at_is_no_foreign_file(
    out: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, lstat = out.with_name("out.partial.lock"), Path.lstat
    path.write_text("")

    def last_seen(self: Path) -> os.stat_result:
        found = lstat(self)
        if self == path:
            self.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(Path, "lstat", last_seen)
    assert ready(out, base).lock == path


def test_a_second_name_of_a_users_empty_file_is_no_lock(tmp_path: Path) -> None:
    mine, lock_file = tmp_path / "mine.txt", tmp_path / "out.partial.lock"
    mine.touch()
    os.link(mine, lock_file)
    with pytest.raises(OutputError, match="is in the place of fuselora's lock file"), lock.held(lock_file):
        pass
    assert mine.read_bytes() == b""
    assert lock_file.exists()
