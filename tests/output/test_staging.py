from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fuselora.errors import OutputError
from fuselora.marker import FILE_NAME, JOURNAL_NAME
from fuselora.output import occupancy, staging
from fuselora.output.journal import Journal
from fuselora.output.staging import Stage, discard, open_stage, prepare, publish
from tests.output import kills
from tests.output.fused_folder import SHARDS, contents, expected, fill, marker_bytes, run, tree, write_fused

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk need not turn: no test here cuts the power."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    file = tmp_path / "base" / "model.safetensors"
    file.parent.mkdir()
    file.write_bytes(b"base")
    return file


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "made").mkdir()
    return tmp_path / "made" / "out"


def ready(out: Path, *inputs: Path, overwrite: bool = False, restart: bool = False) -> Stage:
    return prepare(out, inputs=inputs, overwrite=overwrite, restart=restart)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# publishing


def test_out_appears_whole_by_one_rename(out: Path, base: Path) -> None:
    assert run(out, base, "one") == []
    assert tree(out) == expected("one")
    assert names(out.parent) == ["out"]


def test_an_empty_out_is_taken(out: Path, base: Path) -> None:
    out.mkdir()
    run(out, base, "one")
    assert tree(out) == expected("one")


def test_missing_parents_are_made(tmp_path: Path, base: Path) -> None:
    run(tmp_path / "a" / "b" / "out", base, "one")
    assert tree(tmp_path / "a" / "b" / "out") == expected("one")


def test_prepare_writes_nothing(tmp_path: Path, base: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    stage = ready(tmp_path / "a" / "b" / "out", base)
    assert sorted(tmp_path.rglob("*")) == before
    assert stage.folder == tmp_path / "a" / "b" / "out.partial"
    assert stage.made == (tmp_path / "a", tmp_path / "a" / "b")


def test_a_relative_out_is_understood(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path / "base")
    run(Path("../out"), base, "one")
    assert tree(tmp_path / "out") == expected("one")


def test_a_stage_without_a_marker_is_not_published(out: Path, base: Path) -> None:
    stage = ready(out, base)
    with open_stage(stage) as stage:
        fill(stage.folder, base, "one", stop_after=1)
        with pytest.raises(OutputError, match=r"no valid fused\.json"):
            publish(stage, overwrite=False)
    assert not out.exists()


@pytest.mark.parametrize("extra", [True, False])
def test_a_stage_at_odds_with_its_marker_is_not_published(out: Path, base: Path, extra: bool) -> None:
    stage = ready(out, base)
    with open_stage(stage) as stage:
        fill(stage.folder, base, "one")
        if extra:
            (stage.folder / "transformer" / "stale.safetensors").write_bytes(b"x")
        else:
            (stage.folder / SHARDS[0]).unlink()
        with pytest.raises(OutputError, match="stale" if extra else SHARDS[0]):
            publish(stage, overwrite=False)
    assert not out.exists()
    assert (stage.folder / JOURNAL_NAME).is_file()


def swapped_for_a_link(folder: Path, other: Path) -> None:
    folder.rename(folder.with_name("moved"))
    folder.symlink_to(other)


def swapped_for_a_folder(folder: Path, other: Path) -> None:
    folder.rename(folder.with_name("moved"))
    shutil.copytree(other, folder)


def gone(folder: Path, other: Path) -> None:
    shutil.rmtree(folder)


@pytest.mark.parametrize("swap", [swapped_for_a_link, swapped_for_a_folder, gone])
def test_another_folder_in_the_stages_place_is_left_alone(
    out: Path, base: Path, tmp_path: Path, swap: Callable[[Path, Path], None]
) -> None:
    """What takes its place may be a whole output of ours, and so look like the stage."""
    write_fused(tmp_path / "precious", "old")
    stage = ready(out, base)
    with open_stage(stage) as stage:
        fill(stage.folder, base, "one")
        swap(stage.folder, tmp_path / "precious")
        there = tree(stage.folder) if stage.folder.exists() else None
        for act in (lambda: publish(stage, overwrite=True), lambda: stage.place(SHARDS[0])):
            with pytest.raises(OutputError, match=r"out\.partial: is (no longer the folder|gone)"):
                act()
        discard(stage)
        assert (tree(stage.folder) if stage.folder.exists() else None) == there
    assert tree(tmp_path / "precious") == expected("old")
    assert not out.exists()


@pytest.mark.parametrize("folder", ["vae", "transformer"])
def test_a_link_in_the_place_of_a_folder_of_the_stage(
    out: Path, base: Path, tmp_path: Path, folder: str
) -> None:
    """What is written through it would take the place of the base's own files."""
    write_fused(tmp_path / "precious", "old")
    with open_stage(ready(out, base)) as stage:
        fill(stage.folder, base, "one")
        shutil.rmtree(stage.folder / folder)
        (stage.folder / folder).symlink_to(tmp_path / "precious" / folder)
        with pytest.raises(OutputError, match=rf"out\.partial/{folder}: is no folder of this run"):
            stage.place(f"{folder}/x/config.json")
        with pytest.raises(OutputError, match="at odds with its"):
            publish(stage, overwrite=True)
    assert tree(tmp_path / "precious") == expected("old")
    assert not out.exists()


def test_a_mount_in_the_place_of_a_folder_of_the_stage(
    out: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_stage(ready(out, base)) as stage:
        fill(stage.folder, base, "one")
        monkeypatch.setattr("fuselora.output.volume.is_mount", lambda path: path.name == "vae")
        assert stage.place(SHARDS[0]) == stage.folder / SHARDS[0]
        for act in (lambda: publish(stage, overwrite=True), lambda: stage.place("vae/config.json")):
            with pytest.raises(OutputError, match="vae: is no folder of this run"):
                act()


def test_a_lock_that_is_removed_means_that_another_run_may_write(out: Path, base: Path) -> None:
    with open_stage(ready(out, base)) as first:
        fill(first.folder, base, "one")
        first.lock.unlink()
        with open_stage(ready(out, base)) as second:
            fill(second.folder, base, "one", stop_after=1)
            for act in (lambda: publish(first, overwrite=True), lambda: first.place(SHARDS[0])):
                with pytest.raises(OutputError, match=r"its lock out\.partial\.lock was removed"):
                    act()
            discard(first)
            assert (second.folder / JOURNAL_NAME).is_file()
    assert not out.exists()
    assert run(out, base, "one") == list(SHARDS)


def test_a_shard_that_was_cut_after_it_was_written_is_not_published(out: Path, base: Path) -> None:
    with open_stage(ready(out, base)) as stage:
        fill(stage.folder, base, "one")
        os.truncate(stage.folder / SHARDS[1], 3)
        with pytest.raises(OutputError, match=f"holds {SHARDS[1]} of another size"):
            publish(stage, overwrite=True)
    assert not out.exists()


def test_a_failed_rename_keeps_the_finished_shards(
    out: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Path, target: Path) -> Path:
        raise OSError(errno.EBUSY, "Device or resource busy")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refused)
        with pytest.raises(OutputError, match="busy"):
            run(out, base, "one")
    assert not out.exists()
    assert run(out, base, "one") == list(SHARDS)
    assert names(out.parent) == ["out"]


def test_out_that_filled_up_meanwhile_is_kept(out: Path, base: Path) -> None:
    stage = ready(out, base)
    with open_stage(stage) as stage:
        fill(stage.folder, base, "one")
        out.mkdir()
        (out / "precious").touch()
        with pytest.raises(OutputError, match="precious"):
            publish(stage, overwrite=True)
    assert names(out) == ["precious"]
    assert stage.folder.is_dir()


# what is refused before anything is written


def test_out_that_is_not_empty_is_refused(out: Path, base: Path) -> None:
    out.mkdir()
    (out / "notes.txt").touch()
    for overwrite in (False, True):
        with pytest.raises(OutputError, match=r"notes\.txt"):
            ready(out, base, overwrite=overwrite)


def test_out_that_is_a_file_or_a_link_is_refused(out: Path, base: Path, tmp_path: Path) -> None:
    out.touch()
    with pytest.raises(OutputError, match="not a folder"):
        ready(out, base, overwrite=True)
    for target in (tmp_path / "absent", tmp_path / "base"):
        out.unlink()
        out.symlink_to(target)
        with pytest.raises(OutputError, match=f"is a link to {target}"):
            ready(out, base, overwrite=True)


def test_a_fused_out_needs_overwrite(out: Path, base: Path) -> None:
    write_fused(out, "old")
    with pytest.raises(OutputError, match="fused checkpoint") as caught:
        ready(out, base)
    assert "--overwrite" in (caught.value.hint or "")
    assert ready(out, base, overwrite=True).replaces


@pytest.mark.parametrize("foreign", ["notes.txt", "transformer/other.safetensors", "new/x"])
def test_overwrite_refuses_a_folder_with_one_foreign_file(out: Path, base: Path, foreign: str) -> None:
    write_fused(out, "old")
    (out / foreign).parent.mkdir(exist_ok=True)
    (out / foreign).touch()
    before = tree(out)
    with pytest.raises(OutputError, match=foreign) as caught:
        ready(out, base, overwrite=True)
    assert caught.value.facts["files"] == [foreign]
    assert tree(out) == before


def test_overwrite_refuses_a_linked_folder_inside(out: Path, base: Path) -> None:
    write_fused(out, "old")
    shutil.move(out / "transformer", out.parent / "elsewhere")
    (out / "transformer").symlink_to(out.parent / "elsewhere")
    with pytest.raises(OutputError, match="transformer"):
        ready(out, base, overwrite=True)


@pytest.mark.parametrize(
    ("old", "new"),
    [(b"fuselora.fused/1.0", b"fuselora.fused/2.0"), (b"model_index.json", b"../base/model.s"), (b"}", b"")],
)
def test_overwrite_needs_a_valid_marker(out: Path, base: Path, old: bytes, new: bytes) -> None:
    write_fused(out, "old")
    marker = out / FILE_NAME
    marker.write_bytes(marker.read_bytes().replace(old, new))
    with pytest.raises(OutputError, match="holds no fused checkpoint"):
        ready(out, base, overwrite=True)


def test_out_must_be_apart_from_the_inputs(tmp_path: Path, base: Path) -> None:
    lora = tmp_path / "loras" / "lora.safetensors"
    lora.parent.mkdir()
    lora.touch()
    folder = base.parent
    (tmp_path / "alias").symlink_to(folder)
    cases = {
        "is the input": [(folder, [folder]), (lora, [folder, lora])],
        "is inside": [(folder / "out", [folder]), (tmp_path / "alias" / "deep" / "out", [folder])],
        "contains": [(tmp_path, [folder]), (lora.parent, [folder, lora])],
    }
    for relation, attempts in cases.items():
        for place, inputs in attempts:
            with pytest.raises(OutputError, match=relation):
                ready(place, *inputs, overwrite=True)
    assert ready(tmp_path / "loras" / "out", folder, lora).out == tmp_path / "loras" / "out"


def test_an_input_that_a_link_hides_in_out_is_found(tmp_path: Path, out: Path) -> None:
    write_fused(out, "old")
    (tmp_path / "lora.safetensors").symlink_to(out / SHARDS[0])
    with pytest.raises(OutputError, match="contains"):
        ready(out, tmp_path / "lora.safetensors", overwrite=True)


@pytest.mark.parametrize("whole_folder", [True, False])
def test_a_base_made_of_links_into_out_is_refused(tmp_path: Path, out: Path, whole_folder: bool) -> None:
    write_fused(out, "old")
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    (mirror / "x").symlink_to(out / "transformer" if whole_folder else out / SHARDS[0])
    with pytest.raises(OutputError, match="links to"):
        ready(out, mirror, overwrite=True)


def test_the_staging_folder_may_not_be_an_input(tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    with pytest.raises(OutputError, match="is the input"):
        ready(tmp_path / "out", tmp_path / "out.partial", restart=True)


def test_where_the_former_output_is_set_aside_may_not_be_an_input(tmp_path: Path) -> None:
    """The base may be a fused folder of ours that was cut off while it was replaced: it has a journal."""
    write_fused(tmp_path / "out", "new")
    write_fused(tmp_path / "out.old", "old")
    (tmp_path / "out.old" / JOURNAL_NAME).touch()
    before = tree(tmp_path / "out.old")
    with pytest.raises(OutputError, match=r"out\.old: is the input"):
        ready(tmp_path / "out", tmp_path / "out.old", overwrite=True)
    assert tree(tmp_path / "out.old") == before


def test_a_base_called_old_is_no_trouble_where_nothing_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "out.old").mkdir()
    assert not ready(tmp_path / "out", tmp_path / "out.old").replaces


@pytest.mark.parametrize("name", ["out.partial", "out.partial.lock", "fuselora.partial", "fuselora.former"])
def test_out_may_not_have_a_name_that_runs_take_for_their_own(tmp_path: Path, name: str) -> None:
    with pytest.raises(OutputError, match=f"{name}: has the name of a folder"):
        ready(tmp_path / name)


@pytest.mark.parametrize("out_is", ["the folder", "in the folder"])
def test_a_folder_of_the_base_that_is_mounted_at_out_is_found(tmp_path: Path, out_is: str) -> None:
    base, mounted = tmp_path / "base", tmp_path / "mounted"
    (base / "transformer").mkdir(parents=True)
    mounted.mkdir()
    out = mounted if out_is == "the folder" else mounted / "out"
    said = bound(base / "transformer", mounted, out, base)
    assert f"OutputError: {out}: is inside the input {base}" in said


def test_a_folder_of_the_base_that_is_mounted_in_out_is_found(tmp_path: Path, out: Path) -> None:
    write_fused(out, "old")
    shutil.copytree(out, tmp_path / "base")
    base = tmp_path / "base"
    said = bound(base / "transformer", out / "transformer", out, base)
    assert f"OutputError: {out}: holds a folder of the input {base}" in said


def bound(source: Path, place: Path, out: Path, base: Path) -> str:
    """What ``prepare`` raises, in a process of its own, where ``source`` is mounted at ``place`` as well."""
    script = (
        "import sys; from pathlib import Path; from fuselora.output.staging import prepare; "
        "prepare(Path(sys.argv[1]), inputs=[Path(sys.argv[2])], overwrite=True, restart=False)"
    )
    private = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    bind = [*private, "sh", "-c", 'mount --bind "$0" "$1" && shift && exec "$@"', str(source), str(place)]
    if not shutil.which("unshare") or subprocess.run([*bind, "true"], capture_output=True).returncode:
        pytest.skip("this machine mounts nothing for a process of its own: unshare -m is refused")
    command = [sys.executable, "-c", script, str(out), str(base)]
    return subprocess.run([*bind, *command], capture_output=True, text=True).stderr


def test_a_parent_that_is_a_file_is_refused(tmp_path: Path, base: Path) -> None:
    for place in (base / "out", base / "deep" / "out"):
        with pytest.raises(OutputError, match=r"model\.safetensors is not a folder"):
            ready(place)


def test_a_parent_that_cannot_be_written_is_refused(
    out: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(OutputError, match="cannot be written"):
        ready(out, base)


def test_a_parent_that_cannot_be_made_is_an_output_error(tmp_path: Path) -> None:
    stage = ready(tmp_path / "a" / "b" / "out")
    (tmp_path / "a").touch()
    with (
        pytest.raises(OutputError, match=r"out\.partial: cannot be written: Not a directory"),
        open_stage(stage),
    ):
        pass


def test_parents_that_link_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(OutputError, match="circle"):
        ready(tmp_path / "circle" / "out")


def test_an_input_that_is_not_there_is_not_this_ones_to_judge(tmp_path: Path, out: Path) -> None:
    assert ready(out, tmp_path / "absent").out == out


# the staging folder


def test_a_foreign_staging_folder_is_refused(out: Path, base: Path) -> None:
    stage_folder = out.with_name("out.partial")
    for restart in (False, True):
        stage_folder.mkdir()
        (stage_folder / "mine.txt").write_text("mine")
        with pytest.raises(OutputError, match="fuselora did not make it"):
            ready(out, base, restart=restart)
        assert names(stage_folder) == ["mine.txt"]
        shutil.rmtree(stage_folder)
        stage_folder.touch()
        with pytest.raises(OutputError, match="not a folder"):
            ready(out, base, restart=restart)
        stage_folder.unlink()


def test_a_linked_staging_folder_is_refused(out: Path, base: Path, tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    fill(real, base, "one", stop_after=1)
    out.with_name("out.partial").symlink_to(real)
    for restart in (False, True):
        with pytest.raises(OutputError, match="not a folder"):
            ready(out, base, restart=restart)
    assert (real / SHARDS[0]).is_file()


@pytest.mark.parametrize("restart", [False, True])
def test_a_foreign_file_in_our_staging_folder_is_refused(out: Path, base: Path, restart: bool) -> None:
    stage_folder = leave_partial(out, base)
    (stage_folder / "transformer" / "mine.safetensors").touch()
    with pytest.raises(OutputError, match=r"transformer/mine\.safetensors"):
        ready(out, base, restart=restart)
    assert (stage_folder / SHARDS[0]).is_file()


def leave_partial(out: Path, base: Path) -> Path:
    """A run of ``one`` that stopped with one shard finished and the second torn."""
    stage = ready(out, base)
    with open_stage(stage) as stage:
        fill(stage.folder, base, "one", stop_after=1)
        (stage.folder / SHARDS[1]).write_bytes(b"torn")
    return stage.folder


def test_a_rerun_keeps_finished_shards(out: Path, base: Path) -> None:
    leave_partial(out, base)
    assert run(out, base, "one") == [SHARDS[0]]
    assert tree(out) == expected("one")


def test_restart_forgets_a_partial_run(out: Path, base: Path) -> None:
    leave_partial(out, base)
    assert run(out, base, "one", restart=True) == []
    assert tree(out) == expected("one")
    assert names(out.parent) == ["out"]


def test_another_plan_keeps_nothing_and_leaves_nothing(out: Path, base: Path) -> None:
    stage_folder = leave_partial(out, base)
    (stage_folder / "only-one.txt").touch()
    assert run(out, base, "two") == []
    assert tree(out) == expected("two")


def test_discard_leaves_nothing(tmp_path: Path, base: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    stage = ready(tmp_path / "a" / "b" / "out", base)
    with open_stage(stage) as stage:
        fill(stage.folder, base, "one")
        discard(stage)
    assert sorted(tmp_path.rglob("*")) == before


def test_discard_keeps_what_is_not_ours(out: Path, base: Path) -> None:
    stage = ready(out, base)
    with open_stage(stage) as stage:
        fill(stage.folder, base, "one")
        (stage.folder / "vae" / "mine.txt").touch()
        discard(stage)
    assert list(tree(stage.folder)) == ["vae/mine.txt"]


def test_discard_leaves_a_foreign_folder_alone(out: Path, base: Path) -> None:
    with open_stage(ready(out, base)) as stage:
        (stage.folder / "empty").mkdir()
        (stage.folder / "mine.txt").touch()
        discard(stage)
    assert names(stage.folder) == ["empty", "mine.txt"]


def test_parents_stay_while_a_partial_run_is_in_them(tmp_path: Path, base: Path) -> None:
    assert leave_partial(tmp_path / "a" / "out", base).is_dir()


def test_out_written_between_prepare_and_open_is_refused(out: Path, base: Path) -> None:
    stage = ready(out, base)
    run(out, base, "one")
    with pytest.raises(OutputError, match="another run"), open_stage(stage):
        pass
    assert names(out.parent) == ["out"]


# overwriting


def without_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "exchange", lambda first, second: False)


@pytest.mark.parametrize("atomic", [True, False])
def test_overwrite_replaces_and_leaves_nothing_of_the_old(
    out: Path, base: Path, atomic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not atomic:
        without_exchange(monkeypatch)
    write_fused(out, "old")
    run(out, base, "new", overwrite=True)
    assert tree(out) == expected("new")
    assert names(out.parent) == ["out"]


def test_overwrite_of_nothing_is_a_plain_run(out: Path, base: Path) -> None:
    run(out, base, "new", overwrite=True)
    assert tree(out) == expected("new")


def test_a_users_own_old_folder_is_never_removed(
    out: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = out.with_name("out.old")
    write_fused(out, "old")
    write_fused(old, "backup")
    run(out, base, "new", overwrite=True)
    assert tree(old) == expected("backup")
    without_exchange(monkeypatch)
    with pytest.raises(OutputError, match=r"out\.old: is in the way"):
        run(out, base, "newer", overwrite=True)
    assert tree(out) == expected("new")
    assert tree(old) == expected("backup")
    shutil.rmtree(old)
    assert run(out, base, "newer", overwrite=True) == list(SHARDS)


def test_a_file_that_came_into_out_meanwhile_stops_the_exchange(out: Path, base: Path) -> None:
    write_fused(out, "old")
    stage = ready(out, base, overwrite=True)
    with open_stage(stage) as stage:
        fill(stage.folder, base, "new")
        (out / "mine.txt").touch()
        with pytest.raises(OutputError, match=r"mine\.txt"):
            publish(stage, overwrite=True)
    assert tree(out) == {**expected("old"), "mine.txt": b""}


@pytest.mark.parametrize("name", ["out", "out.partial"])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
def test_a_failed_step_puts_the_old_output_back(
    out: Path, base: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, name: str
) -> None:
    write_fused(out, "old")
    without_exchange(monkeypatch)
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name == name:
            raise error
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", failing)
        with pytest.raises((OutputError, KeyboardInterrupt)):
            run(out, base, "new", overwrite=True)
    assert tree(out) == expected("old")
    assert names(out.parent) == ["out", "out.partial"]
    assert run(out, base, "new", overwrite=True) == list(SHARDS)
    assert names(out.parent) == ["out"]


def test_what_was_replaced_and_cannot_be_removed_is_said(
    out: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_fused(out, "old")
    without_exchange(monkeypatch)
    unlink = Path.unlink

    def failing(self: Path, missing_ok: bool = False) -> None:
        if "out.old" in self.parts:
            raise OSError(errno.EPERM, "Operation not permitted")
        unlink(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", failing)
    with pytest.raises(OutputError, match="is complete") as caught:
        run(out, base, "new", overwrite=True)
    assert caught.value.facts["published"] is True
    assert tree(out) == expected("new")


def test_a_name_that_the_disk_does_not_confirm_is_said(
    out: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(folder: Path) -> None:
        if folder == out.parent:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(staging, "sync_folder", failing)
    with pytest.raises(OutputError, match="out: is complete, but the system") as caught:
        run(out, base, "one")
    assert caught.value.facts["published"] is True
    assert "system's log" in (caught.value.hint or "")
    assert tree(out) == expected("one")


@pytest.mark.parametrize("error", [FileNotFoundError(errno.ENOENT, "gone"), OutputError("looks foreign")])
def test_what_another_run_moves_while_it_is_looked_at_is_looked_at_again(
    out: Path, base: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    looked = list[Path]()

    def moving(folder: Path) -> None:
        looked.append(folder)
        if len(looked) == 1:
            raise error

    monkeypatch.setattr(occupancy, "refuse_foreign", moving)
    assert ready(out, base).out == out
    assert len(looked) == 2


# kills: at every step, nothing cleaned up


def whole(out: Path, *tags: str) -> bool:
    """OUT is absent, or one of the outputs with nothing missing; a control file may be left in it."""
    if not out.exists():
        return True
    found = {path: content for path, content in tree(out).items() if path != JOURNAL_NAME}
    return any(found == expected(tag) for tag in tags)


@pytest.mark.parametrize("atomic", [True, False])
def test_killed_while_replacing_out_is_whole_and_a_rerun_finishes(
    tmp_path: Path, base: Path, atomic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not atomic:
        without_exchange(monkeypatch)
    ended, step = kills.KILLED, 0
    while ended == kills.KILLED:
        out = tmp_path / str(step) / "out"
        write_fused(out, "old")
        ended = kills.outcome(
            lambda arm, out=out: run(out, base, "new", overwrite=True, before_publish=arm),  # type: ignore[misc]
            step,
        )
        assert ended in (kills.KILLED, kills.DONE)
        assert whole(out, "old", "new"), f"step {step}"
        run(out, base, "new", overwrite=True)
        assert tree(out) == expected("new"), f"step {step}"
        assert names(out.parent) == ["out"], f"step {step}"
        step += 1
    assert step > 25


def test_killed_at_any_step_a_rerun_finishes(tmp_path: Path, base: Path) -> None:
    ended, step, lost = kills.KILLED, 0, 0
    while ended == kills.KILLED:
        out = tmp_path / str(step) / "out"
        leave_partial(out, base)
        ended = kills.outcome(lambda arm, out=out: (arm(), run(out, base, "one")), step)  # type: ignore[misc]
        assert ended in (kills.KILLED, kills.DONE)
        assert whole(out, "one"), f"step {step}"
        if not out.exists():
            lost += SHARDS[0] not in run(out, base, "one")
        assert tree(out) == expected("one"), f"step {step}"
        # Once OUT is complete there is no rerun to sweep up after it.
        assert names(out.parent) in (["out"], ["out", "out.partial.lock"]), f"step {step}"
        step += 1
    assert step > 40
    # Only between the journal's removal and the rename does nothing vouch for a finished shard.
    assert lost <= 1


def test_everything_is_on_disk_before_the_rename(
    out: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    rename, at_rename = Path.rename, list[set[int]]()

    def renamed(self: Path, target: Path) -> Path:
        at_rename.append({path.stat().st_ino for path in (self, *self.rglob("*"))} - set(synced))
        synced.clear()
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", renamed)
    run(out, base, "one")
    assert at_rename == [set()]
    assert synced == [out.parent.stat().st_ino]


def test_a_marker_torn_by_a_kill_is_our_own(out: Path, base: Path) -> None:
    stage_folder = leave_partial(out, base)
    shards, side = contents("one")
    (stage_folder / FILE_NAME).write_bytes(marker_bytes(shards, side)[:100])
    run(out, base, "one")
    assert tree(out) == expected("one")


def test_a_stage_that_was_complete_but_not_renamed_is_ours(out: Path, base: Path) -> None:
    write_fused(out.with_name("out.partial"), "one")
    run(out, base, "two")
    assert tree(out) == expected("two")
    assert names(out.parent) == ["out"]


def test_a_staging_folder_of_empty_folders_is_taken(out: Path, base: Path) -> None:
    (out.with_name("out.partial") / "transformer").mkdir(parents=True)
    run(out, base, "one")
    assert tree(out) == expected("one")


def test_a_journal_of_a_newer_schema_is_ours_and_kept_from_nothing(out: Path, base: Path) -> None:
    stage_folder = leave_partial(out, base)
    journal = stage_folder / JOURNAL_NAME
    journal.write_bytes(journal.read_bytes().replace(b"fuselora.journal/1", b"fuselora.journal/2"))
    assert run(out, base, "one") == []
    assert tree(out) == expected("one")


def test_the_journal_is_open_in_the_stage(out: Path, base: Path) -> None:
    stage = ready(out, base)
    with open_stage(stage) as stage, Journal.open(stage.folder, "f", files=[]) as journal:
        assert journal.finished() == {}
        assert names(stage.folder) == [JOURNAL_NAME]
