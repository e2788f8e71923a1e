"""A merge of local files needs no network, and no place to write in but OUT's parent."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.environment.merges import Inputs, assert_merged, can, environment, run

# what Python does, libraries' own Python included, is told to a hook; each line goes to the log as it happens
WATCHED = """
import os, sys

log = os.open(sys.argv.pop(1), os.O_WRONLY | os.O_APPEND)
PATHS = {"os.mkdir": 1, "os.rename": 2, "os.link": 2, "os.symlink": 2, "os.truncate": 1, "shutil.copyfile": 2}

def written(event, args):
    if event == "open":
        path, mode, flags = args
        # without a mode it is os.open's, with its own flags alone
        return [path] if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) else []
    return args[: PATHS.get(event, 0)]

def hook(event, args):
    if event.startswith("socket.") and event != "socket.gethostname":
        os.write(log, f"socket {event}\\n".encode())
    for path in written(event, args):
        if not isinstance(path, int):
            os.write(log, b"write " + os.fsencode(os.path.abspath(path)) + b"\\n")

sys.addaudithook(hook)
from fuselora.__main__ import main
main()
"""


def watched(inputs: Inputs, folder: Path, before: list[str]) -> list[str]:
    """What a merge into ``folder/parent/out`` asked the system for."""
    (folder / "log").touch()
    (folder / "parent").mkdir()
    out = folder / "parent" / "out"
    env = environment({"PYTHONDONTWRITEBYTECODE": "1"})
    command = (sys.executable, "-c", WATCHED, str(folder / "log"))
    assert_merged(run(inputs.arguments(out), env=env, before=before, command=command), out, inputs.wanted)
    return (folder / "log").read_text("utf-8").splitlines()


def test_nothing_is_asked_of_a_network_or_written_elsewhere(inputs: Inputs, tmp_path: Path) -> None:
    seen = watched(inputs, tmp_path, [])
    assert [line for line in seen if line.startswith("socket")] == []
    written = {line.removeprefix("write ") for line in seen}
    assert any(path.endswith("/parent/out.partial/fused.json") for path in written)
    parent = str(tmp_path / "parent")
    apart = {path for path in written if not f"{path}/".startswith(f"{parent}/")}
    assert apart <= {os.devnull}


def test_without_a_network(inputs: Inputs, tmp_path: Path, alone: list[str]) -> None:
    done = run(inputs.arguments(tmp_path / "out"), before=alone)
    assert_merged(done, tmp_path / "out", inputs.wanted)


@pytest.fixture
def alone() -> list[str]:
    """Starts a process that has no network but a loopback that is down."""
    before = ["unshare", "-n"] if os.geteuid() == 0 else ["unshare", "-rn"]
    if not can(before):
        pytest.skip("this machine gives no network namespace: unshare -n is refused")
    return before


def test_where_everything_but_outs_parent_is_read_only(inputs: Inputs, tmp_path: Path) -> None:
    """The install, the home, the base, /tmp and the current folder are what nobody can write."""
    parent = tmp_path / "parent"
    parent.mkdir()
    unshare = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    script = 'mount --bind "$0" "$0" && mount -o remount,bind,ro / && exec "$@"'
    before = [*unshare, "sh", "-c", script, str(parent)]
    if not can(before):
        pytest.skip("this machine mounts nothing for a process of its own: unshare -m is refused")
    touched = run([str(tmp_path / "x")], before=before, command=("touch",))
    assert b"Read-only file system" in touched.stderr
    done = run(inputs.arguments(parent / "out"), before=before, cwd=tmp_path)
    assert_merged(done, parent / "out", inputs.wanted)
