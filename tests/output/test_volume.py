from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fuselora.errors import MarkerError, OutputError
from fuselora.filenames import FORMER_NAME, STAGE_NAME
from fuselora.marker import FILE_NAME, JOURNAL_NAME, read_marker
from fuselora.output import volume
from fuselora.output.staging import discard, open_stage, prepare, publish
from tests.output import kills
from tests.output.fused_folder import SHARDS, expected, fill, run, tree, write_fused

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(autouse=True)
def _mounts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every folder named ``volume`` counts as a mount point, and cannot be renamed."""
    rename = Path.rename

    def refusing(self: Path, target: Path) -> Path:
        assert "volume" not in (self.name, Path(target).name)
        return rename(self, target)

    monkeypatch.setattr(volume, "is_mount", lambda path: path.name == "volume")
    monkeypatch.setattr(Path, "rename", refusing)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    file = tmp_path / "base.safetensors"
    file.write_bytes(b"base")
    return file


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "volume"
    folder.mkdir()
    return folder


def test_files_are_staged_inside_and_move_up(out: Path, base: Path) -> None:
    stage = prepare(out, inputs=[base], overwrite=False, restart=False)
    assert stage.mounted
    assert stage.folder == out / "fuselora.partial"
    assert run(out, base, "one") == []
    assert tree(out) == expected("one")
    assert sorted(path.name for path in out.parent.iterdir()) == ["base.safetensors", "volume"]
    assert not [path for path in out.iterdir() if path.name.startswith("fuselora")]


def test_the_lost_and_found_of_a_new_file_system_is_no_obstacle(out: Path, base: Path) -> None:
    (out / "lost+found").mkdir()
    (out / "lost+found" / "#12").touch()
    run(out, base, "one")
    run(out, base, "two", overwrite=True)
    assert tree(out) == {**expected("two"), "lost+found/#12": b""}


def test_a_partial_run_is_kept_or_forgotten(out: Path, base: Path) -> None:
    for restart, kept in ((False, [SHARDS[0]]), (True, [])):
        stage = prepare(out, inputs=[base], overwrite=True, restart=False)
        with open_stage(stage) as stage:
            fill(stage.folder, base, "one", stop_after=1)
        assert run(out, base, "one", overwrite=True, restart=restart) == kept
        assert tree(out) == expected("one")


def test_overwrite_leaves_nothing_of_the_old(out: Path, base: Path) -> None:
    write_fused(out, "old")
    with pytest.raises(OutputError, match="fused checkpoint"):
        prepare(out, inputs=[base], overwrite=False, restart=False)
    run(out, base, "new", overwrite=True)
    assert tree(out) == expected("new")
    assert not (out / FORMER_NAME).exists()


@pytest.mark.parametrize("foreign", ["notes.txt", "transformer/x.safetensors", "fuselora.partial/x"])
def test_a_foreign_file_is_refused(out: Path, base: Path, foreign: str) -> None:
    write_fused(out, "old")
    (out / foreign).parent.mkdir(exist_ok=True)
    (out / foreign).touch()
    with pytest.raises(OutputError, match=Path(foreign).parts[0]):
        prepare(out, inputs=[base], overwrite=True, restart=True)
    assert tree(out) == {**expected("old"), foreign: b""}


def test_a_foreign_file_beside_a_former_output_is_refused(out: Path, base: Path) -> None:
    write_fused(out / FORMER_NAME, "old")
    (out / FORMER_NAME / "mine").touch()
    with pytest.raises(OutputError, match=r"fuselora\.former/mine"):
        prepare(out, inputs=[base], overwrite=True, restart=False)


def test_a_volume_in_use_is_refused(out: Path, base: Path) -> None:
    (out / "notes.txt").touch()
    with pytest.raises(OutputError, match=r"notes\.txt"):
        prepare(out, inputs=[base], overwrite=True, restart=False)


def test_discard_leaves_the_volume_empty(out: Path, base: Path) -> None:
    stage = prepare(out, inputs=[base], overwrite=False, restart=False)
    with open_stage(stage) as stage:
        fill(stage.folder, base, "one")
        discard(stage)
    assert list(out.iterdir()) == []


def state(out: Path) -> str:
    """What a reader of the marker sees."""
    try:
        marker = read_marker(out)
    except MarkerError as error:
        return str(error.facts["reason"])
    return "absent" if marker is None else "whole"


def published(out: Path) -> dict[str, bytes]:
    own = (JOURNAL_NAME, STAGE_NAME, FORMER_NAME)
    return {path: content for path, content in tree(out).items() if not path.startswith(own)}


@pytest.mark.parametrize("replace", [True, False])
def test_killed_while_files_move_up_readers_see_it_and_a_rerun_finishes(
    tmp_path: Path, base: Path, replace: bool
) -> None:
    ended, step, unfinished = kills.KILLED, 0, 0
    while ended == kills.KILLED:
        out = tmp_path / str(step) / "volume"
        out.mkdir(parents=True)
        if replace:
            write_fused(out, "old")
        ended = kills.outcome(
            lambda arm, out=out: run(out, base, "new", overwrite=replace, before_publish=arm),  # type: ignore[misc]
            step,
        )
        assert ended in (kills.KILLED, kills.DONE)
        if state(out) == "whole":
            assert published(out) in (expected("old"), expected("new")), f"step {step}"
        elif state(out) == "absent":
            assert published(out) == {}, f"step {step}"
        unfinished += state(out) == "unfinished"
        if published(out) != expected("new"):
            assert run(out, base, "new", overwrite=replace) == list(SHARDS), f"step {step}"
            assert tree(out) == expected("new"), f"step {step}"
            assert sorted(path.name for path in out.iterdir() if path.is_dir()) == ["transformer", "vae"]
        step += 1
    assert step > 25
    assert unfinished > 3


def interrupted(out: Path, base: Path) -> Path:
    """A volume whose ``old`` was being replaced by ``new`` when a kill came, all but the marker moved."""
    rename = Path.rename

    def dying(self: Path, target: Path) -> Path:
        if target == out / FILE_NAME:
            os._exit(kills.KILLED)
        return rename(self, target)

    def action(_: Callable[[], None]) -> None:
        pytest.MonkeyPatch().setattr(Path, "rename", dying)
        run(out, base, "new", overwrite=True)

    write_fused(out, "old")
    assert kills.outcome(action, 0) == kills.KILLED
    assert state(out) == "unfinished"
    assert (out / SHARDS[1]).is_file()
    return out


def settle(out: Path, base: Path) -> None:
    with open_stage(prepare(out, inputs=[base], overwrite=True, restart=False)):
        pass


def test_killed_while_rolling_back_the_next_run_goes_on_with_that(tmp_path: Path, base: Path) -> None:
    torn = interrupted(tmp_path / "torn" / "volume", base)
    ended, step = kills.KILLED, 0
    while ended == kills.KILLED:
        out = tmp_path / str(step) / "volume"
        shutil.copytree(torn, out)

        def action(arm: Callable[[], None], out: Path = out) -> None:
            arm()
            settle(out, base)

        ended = kills.outcome(action, step)
        assert ended in (kills.KILLED, kills.DONE)
        settle(out, base)
        assert published(out) == expected("old"), f"step {step}"
        assert state(out) == "whole"
        staged = {path: content for path, content in tree(out / STAGE_NAME).items() if path != JOURNAL_NAME}
        assert staged == expected("new"), f"step {step}"
        step += 1
    assert step > 20
    assert run(out, base, "new", overwrite=True) == list(SHARDS)
    assert tree(out) == expected("new")


def test_an_interrupted_replacement_needs_overwrite_again(tmp_path: Path, base: Path) -> None:
    out = interrupted(tmp_path / "volume", base)
    with pytest.raises(OutputError, match="fused checkpoint"):
        prepare(out, inputs=[base], overwrite=False, restart=False)
    assert run(out, base, "other", overwrite=True, restart=True) == []
    assert tree(out) == expected("other")


@pytest.mark.parametrize("dropped", [True, False])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
def test_a_move_that_fails_is_undone(
    out: Path, base: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, dropped: bool
) -> None:
    write_fused(out, "old")
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name == name and STAGE_NAME in self.parts:
            raise error
        return rename(self, target)

    for name in (JOURNAL_NAME, "only-new.txt", FILE_NAME):
        stage = prepare(out, inputs=[base], overwrite=True, restart=False)
        with open_stage(stage) as stage:
            kept = fill(stage.folder, base, "new")
            with monkeypatch.context() as patch:
                patch.setattr(Path, "rename", failing)
                with pytest.raises((OutputError, KeyboardInterrupt)):
                    publish(stage, overwrite=True)
            assert published(out) == expected("old")
            assert kept == ([] if dropped or name == JOURNAL_NAME else list(SHARDS))
            if dropped:
                discard(stage)
                assert tree(out) == {**expected("old"), f"{STAGE_NAME}.lock": stage.lock.read_bytes()}


def test_a_torn_publication_without_its_stage_is_refused(tmp_path: Path, base: Path) -> None:
    out = interrupted(tmp_path / "volume", base)
    shutil.rmtree(out / STAGE_NAME)
    before = tree(out)
    for overwrite in (False, True):
        with pytest.raises(OutputError, match=r"fuselora\.partial is gone"):
            prepare(out, inputs=[base], overwrite=overwrite, restart=False)
    assert tree(out) == before


def test_discarding_a_torn_publication_brings_the_old_output_back(tmp_path: Path, base: Path) -> None:
    out = interrupted(tmp_path / "volume", base)
    with open_stage(prepare(out, inputs=[base], overwrite=True, restart=False)) as stage:
        discard(stage)
    assert published(out) == expected("old")
    assert not stage.folder.exists()


def test_what_was_replaced_and_cannot_be_removed_is_said(
    out: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_fused(out, "old")
    unlink = Path.unlink

    def failing(self: Path, missing_ok: bool = False) -> None:
        if FORMER_NAME in self.parts:
            raise OSError(errno.EPERM, "Operation not permitted", str(self))
        unlink(self, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", failing)
        with pytest.raises(OutputError, match="is complete") as caught:
            run(out, base, "new", overwrite=True)
    assert caught.value.facts["published"] is True
    assert FORMER_NAME in (caught.value.hint or "")
    assert state(out) == "whole"
    assert published(out) == expected("new")
    run(out, base, "newer", overwrite=True)
    assert tree(out) == expected("newer")


# a mount point for real, where the system lets us make one

REAL = """
import errno, os, sys
from pathlib import Path
from fuselora.output import volume
from tests.output.fused_folder import expected, run, tree
out, base, pretend = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "pretend"
if pretend:
    volume.is_mount = lambda path: path == out
else:
    assert volume.is_mount(out)
    out.with_name("other").mkdir()
    try:
        out.with_name("other").rename(out)
        sys.exit("a mount point was renamed")
    except OSError as error:
        assert error.errno == errno.EBUSY
    out.with_name("other").rmdir()
assert not volume.is_mount(out.parent)
run(out, base, "one")
assert tree(out) == expected("one")
run(out, base, "two", overwrite=True)
assert tree(out) == expected("two")
assert sorted(path.name for path in out.parent.iterdir()) == [out.name]
"""


@pytest.mark.parametrize("mount", ["mount -t tmpfs none", "mount --bind /usr/share"])
def test_a_real_mount_point(tmp_path: Path, base: Path, mount: str) -> None:
    out = tmp_path / "parent" / "a volume"
    source = tmp_path / "source"
    out.mkdir(parents=True)
    source.mkdir()
    mount = mount.replace("/usr/share", f"'{source}'")
    command = [sys.executable, "-c", REAL, str(out), str(base)]
    private = ["unshare", "-rm", "sh", "-c", f'{mount} "$0" && exec "$@"', str(out)]
    can = shutil.which("unshare") and subprocess.run([*private, "true"], capture_output=True).returncode == 0
    command = [*private, *command, "real"] if can else [*command, "pretend"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    if can and "bind" in mount:
        assert (source / FILE_NAME).is_file()


def test_mount_points_of_one_device_are_read_from_the_kernels_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    table = tmp_path / "mountinfo"
    table.write_text(
        "22 28 0:21 / /proc rw - proc proc rw\n"
        f"30 28 8:1 /data {tmp_path}/a\\040b\\134c rw,relatime shared:1 - ext4 /dev/vda rw\n"
        "short\n"
    )
    monkeypatch.setattr(volume, "_MOUNTS", table)
    assert volume.is_mount(tmp_path / "a b\\c")
    assert not volume.is_mount(tmp_path / "a b")
    monkeypatch.setattr(volume, "_MOUNTS", tmp_path / "absent")
    assert not volume.is_mount(tmp_path / "a b\\c")
