"""Two merges into one OUT: one writes it, the other says who does."""

from __future__ import annotations

import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.crash.nursery import Nursery, Run
from tests.crash.points import Cut
from tests.crash.trial import NEW, OVERWRITE, Scene, contents

LOST = r"process [0-9]+ on \S+ is writing it|another process is writing it|fused checkpoint|by another run"


@pytest.mark.parametrize("options", [(), ("--overwrite",), ("--restart",)])
def test_the_second_names_the_first_and_changes_nothing(
    scene: Scene, tmp_path: Path, options: tuple[str, ...]
) -> None:
    whole, wanted = scene.undisturbed(NEW)
    out = tmp_path / "out"
    first = len(whole.points) // 2
    paused = scene.nursery.run(scene.argv(out), Cut(first, signal=signal.SIGSTOP), name="first")
    assert paused.status == -signal.SIGSTOP, paused.errors
    owner = re.search(r"pid ([0-9]+)", (tmp_path / "out.partial.lock").read_text())
    assert owner is not None
    before = contents(tmp_path / "out.partial")
    second = scene.nursery.run(scene.argv(out, *options), name="second")
    assert second.status == 1
    assert f"out.partial: process {owner[1]} on " in second.errors
    assert contents(tmp_path / "out.partial") == before
    ended = scene.nursery.resume(name="first")
    assert ended.status == 0, ended.errors
    assert contents(out) == wanted
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_of_two_that_start_at_once_one_wins(scene: Scene, tmp_path: Path, overwrite: bool) -> None:
    setting = OVERWRITE if overwrite else NEW
    _, wanted = scene.undisturbed(setting)
    with Nursery(tmp_path / "said") as other, ThreadPoolExecutor(2) as pool:
        for number in range(5):
            out = tmp_path / str(number) / "out"
            scene.begin(out, setting)

            def raced(nursery: Nursery, out: Path = out) -> Run:
                return nursery.run(scene.argv(out, *setting.options))

            runs = list(pool.map(raced, (scene.nursery, other)))
            lost = [run for run in runs if run.status != 0]
            # without --overwrite a late one finds OUT taken, with it it writes the same again
            assert len(lost) == 1 or (overwrite and not lost), [run.errors for run in lost]
            assert all(run.status == 1 and re.search(LOST, run.errors) for run in lost), lost
            assert contents(out) == wanted
            assert [path.name for path in out.parent.iterdir()] == ["out"]
