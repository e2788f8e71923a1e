"""A sample of what `make crash` does: some 60 cuts, the same ones each time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.cuts import Case, at_calls, at_times, sample, tried
from tests.crash.trial import NEW, OVERWRITE, SETTINGS, Scene, Setting, Trial

# More of what most merges are.
COUNTS = {NEW.name: 12, OVERWRITE.name: 10, "two-steps": 6, "volume-overwrite": 6}
FEW = 3
CALLS = {
    "open", "write", "pwrite", "fallocate", "fsync", "rename", "unlink", "mkdir", "truncate", "chmod",
    "flock", "ioctl",
}  # fmt: skip


def trial_of(scene: Scene, setting: Setting) -> Trial:
    return Trial(scene, setting, scene.undisturbed(setting)[1])


def test_every_call_that_writes_is_a_point(scene: Scene) -> None:
    run, whole = scene.undisturbed(NEW)
    assert {point.name for point in run.points} >= CALLS
    assert [point.number for point in sorted(run.points)] == list(range(len(run.points)))
    assert {Path(path).name for path in run.opened()} >= {Path(path).name for path in whole}
    assert "exchange" in {point.name for point in scene.undisturbed(OVERWRITE)[0].points}


def test_nothing_is_written_beside_out_and_its_stage(scene: Scene) -> None:
    run, _ = scene.undisturbed(NEW)
    parent = scene.folder / "whole-new"
    places = {Path(point.path).relative_to(parent).parts[:1] for point in run.points}
    assert places == {("out.partial",), ("out.partial.lock",), ()}
    assert [point.name for point in run.points if point.path == str(parent)] == ["mkdir", "fsync"]


@pytest.mark.parametrize("setting", SETTINGS, ids=[setting.name for setting in SETTINGS])
def test_out_is_absent_or_whole_after_a_cut_and_a_rerun_finishes(
    scene: Scene, setting: Setting, tmp_path: Path
) -> None:
    cases = [*at_calls(setting, scene.undisturbed(setting)[0].points)]
    for case in sample(cases, COUNTS.get(setting.name, FEW)):
        tried(case, trial_of(scene, setting), tmp_path / "trial")


def test_a_signal_at_any_time_leaves_out_absent_or_whole(scene: Scene, tmp_path: Path) -> None:
    cases = at_times(NEW, scene.undisturbed(NEW)[0].seconds, 6, seed=0)
    outcomes = [tried(case, trial_of(scene, NEW), tmp_path / "trial") for case in cases]
    assert {outcome.status for outcome in outcomes} != {0}


def test_a_rerun_keeps_as_many_shards_as_were_finished(scene: Scene, tmp_path: Path) -> None:
    run, _ = scene.undisturbed(NEW)
    recorded = [p for p in run.points if p.name == "fsync" and p.path.endswith("fuselora.journal")]
    assert len(recorded) >= 4
    # the line is in the file before it is synced, and only a power cut would take it back
    cases = [Case(NEW, "SIGKILL", point) for point in recorded]
    kept = [tried(case, trial_of(scene, NEW), tmp_path / "trial").kept for case in cases]
    assert kept == [*range(1, len(recorded) + 1)]
