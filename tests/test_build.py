"""What becomes of a run whose inputs are moved, replaced or removed under it."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fuselora.engine.sink import Sink
from fuselora.errors import ChangedError, CheckpointError, FuseloraError, OutputError, ReadError
from fuselora.marker import FILE_NAME
from fuselora.output import space, staging
from fuselora.output.staging import Stage
from fuselora.pipeline import merge
from fuselora.synth import tiny, write_file, write_lora, write_pipeline

SIZE = tiny("wan2.2-t2v-a14b", blocks=1)


def _replaced(path: Path) -> None:
    copy = path.with_name("copy")
    shutil.copy2(path, copy)
    copy.replace(path)


def _overwritten(path: Path) -> None:
    """As ``cp -p`` of a file that has the same size and date."""
    before = path.stat()
    _edited(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _edited(path: Path) -> None:
    with path.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\1")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (_replaced, ChangedError),
        (_edited, ChangedError),
        (_overwritten, ChangedError),
        (Path.unlink, ReadError),
    ],
)
@pytest.mark.parametrize("which", ["base", "lora"])
def test_an_input_that_changes_under_the_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path], None],
    error: type[FuseloraError],
    which: str,
) -> None:
    inputs = {
        "base": write_file(tmp_path / "base.safetensors", SIZE, dtype="BF16"),
        "lora": write_lora(tmp_path / "l.safetensors", SIZE, style="lightning", alpha=2, dtype="F32", seed=1),
    }
    finish = Sink.finish

    def late(sink: Sink) -> None:
        change(inputs[which])
        finish(sink)

    monkeypatch.setattr(Sink, "finish", late)
    with pytest.raises(error, match=inputs[which].name):
        merge(inputs["base"], [inputs["lora"]], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_shard_that_is_edited_before_its_turn_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a base is still being downloaded: half of the result would be of another version."""
    base = write_pipeline(tmp_path / "base", SIZE, dtype="BF16", experts=True)
    lora = write_lora(tmp_path / "l.safetensors", SIZE, style="lightning", alpha=2, dtype="F32", seed=1)
    (later,) = (base / "transformer_2").glob("*.safetensors")
    finish = Sink.finish

    def late(sink: Sink) -> None:
        finish(sink)
        _edited(later)

    monkeypatch.setattr(Sink, "finish", late)
    with pytest.raises(ChangedError, match=re.escape(str(later))):
        merge(base, [f"high={lora}", f"low={lora}"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_link_of_the_base_that_leads_in_a_circle(tmp_path: Path) -> None:
    base = write_pipeline(tmp_path / "base", SIZE, dtype="BF16")
    lora = write_lora(tmp_path / "l.safetensors", SIZE, style="lightning", alpha=2, dtype="F32", seed=1)
    (base / "vae" / "circle").symlink_to("circle")
    with pytest.raises(CheckpointError, match="vae/circle is a link"):
        merge(base, [lora], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def _a_link_to_the_base(stage: Path, base: Path) -> None:
    stage.rename(stage.with_name("moved"))
    stage.symlink_to(base)


def _gone(stage: Path, base: Path) -> None:
    shutil.rmtree(stage)


@pytest.mark.parametrize("swap", [_a_link_to_the_base, _gone])
def test_the_base_stays_whole_where_its_link_takes_the_stages_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swap: Callable[[Path, Path], None]
) -> None:
    base = write_pipeline(tmp_path / "base", SIZE, dtype="BF16")
    lora = write_lora(tmp_path / "l.safetensors", SIZE, style="lightning", alpha=2, dtype="F32", seed=1)
    before = _tree(base)
    finish = Sink.finish
    done: list[Sink] = []

    def late(sink: Sink) -> None:
        finish(sink)
        if not done:
            swap(tmp_path / "out.partial", base)
        done.append(sink)

    monkeypatch.setattr(Sink, "finish", late)
    with pytest.raises(OutputError, match=r"out\.partial"):
        merge(base, [lora], tmp_path / "out")
    assert done
    assert _tree(base) == before
    assert not (tmp_path / "out").exists()


def _tree(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_that_goes_on_warns_of_what_the_first_one_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The marker of a rerun has the same bytes, whichever shards were kept."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    base = write_pipeline(tmp_path / "base", SIZE, dtype="BF16", experts=True)
    lora = write_lora(tmp_path / "l.safetensors", SIZE, style="lightning", alpha=2, dtype="F32", seed=1)
    loras = [f"all={lora}:0.0001"]
    whole = merge(base, loras, tmp_path / "whole")
    assert [notice.code for notice in whole.notices] == ["delta_lost"] * 2
    publish, name = staging.publish, tmp_path / "again"

    def torn(stage: Stage, *, overwrite: bool) -> None:
        raise OutputError("no more", path=str(stage.out))

    with monkeypatch.context() as patch:
        patch.setattr(staging, "publish", torn)
        with pytest.raises(OutputError, match="no more"):
            merge(base, loras, name)
    assert staging.publish is publish
    again = merge(base, loras, name)
    assert len(again.kept) == 2
    assert (name / FILE_NAME).read_bytes() == (tmp_path / "whole" / FILE_NAME).read_bytes()


def _left_by_another_plan(base: Path, lora: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """The bytes of a run at another strength, cut off when all its shards were finished."""

    def torn(stage: Stage, *, overwrite: bool) -> None:
        raise OutputError("no more", path=str(stage.out))

    with monkeypatch.context() as patch:
        patch.setattr(staging, "publish", torn)
        with pytest.raises(OutputError) as caught:
            merge(base, [f"{lora}:0.5"], out)
    assert "keeps what is finished" in str(caught.value.hint)
    return sum(path.stat().st_size for path in out.with_name(f"{out.name}.partial").rglob("*.safetensors"))


def test_room_that_another_plans_shards_take_is_freed_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = write_pipeline(tmp_path / "base", SIZE, dtype="BF16")
    lora = write_lora(tmp_path / "l.safetensors", SIZE, style="lightning", alpha=2, dtype="F32", seed=1)
    n_bytes = _left_by_another_plan(base, lora, tmp_path / "out", monkeypatch)
    small = write_file(tmp_path / "other.safetensors", SIZE, dtype="BF16")
    monkeypatch.setattr(space, "available", lambda folder: small.stat().st_size - n_bytes // 2)
    merge(small, [lora], tmp_path / "out")


def test_shards_of_another_plan_are_no_help_and_no_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = write_pipeline(tmp_path / "base", SIZE, dtype="BF16")
    lora = write_lora(tmp_path / "l.safetensors", SIZE, style="lightning", alpha=2, dtype="F32", seed=1)
    _left_by_another_plan(base, lora, tmp_path / "out", monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(space, "available", lambda folder: -(1 << 40))
        with pytest.raises(OutputError, match="needs") as caught:
            merge(base, [lora], tmp_path / "out")
    assert "run the same command again" not in str(caught.value.hint)
    assert len(merge(base, [f"{lora}:0.5"], tmp_path / "out").kept) == 1
