"""A part of `make fuzz` that is the same each time, and what was found by the rest."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from tests.fuzz.targets import TARGETS, Target
from tests.fuzz.trial import Crash, Trial

SEEDS = range(250)


@pytest.mark.parametrize("target", TARGETS, ids=[target.name for target in TARGETS])
def test_a_broken_file_is_a_value_or_an_error_of_ours(target: Target, tmp_path: Path) -> None:
    trial = Trial(target, tmp_path)
    for seed in SEEDS:
        trial.run(seed)
    assert trial.n_values < len(SEEDS)


@pytest.mark.parametrize("target", TARGETS, ids=[target.name for target in TARGETS])
def test_files_are_broken_in_many_ways(target: Target, tmp_path: Path) -> None:
    trial = Trial(target, tmp_path)
    found = {target.broken(Random(seed), trial.sound) for seed in SEEDS}
    assert len(found) > len(SEEDS) * 0.5


def test_a_crash_is_told(tmp_path: Path) -> None:
    def crashes(folder: Path) -> object:
        if (folder / "x").read_bytes() != b"{}":
            raise KeyError(folder)
        return 1

    def write(folder: Path) -> None:
        (folder / "x").write_bytes(b"{}")

    trial = Trial(Target("x", "x", write, crashes, lambda chance, text: b"broken"), tmp_path)
    with pytest.raises(Crash, match=r"x, seed 1: KeyError"):
        trial.run(1)
