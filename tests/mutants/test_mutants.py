"""The table follows the code, and a sample of `make mutants`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutants.table import MUTANTS, Mutant
from tests.mutants.trial import ROOT, copy_project, killed, mutated

# Quick ones: their tests import no torch.
SAMPLE = (
    "the stored alpha is dropped",
    "an index knows a wrong size",
    "a shard in the journal is trusted unread",
)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield copy_project(tmp_path_factory.mktemp("mutants") / "project")


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_every_place_is_in_the_code_once(mutant: Mutant) -> None:
    changed = mutated(mutant, (ROOT / "fuselora" / mutant.file).read_text("utf-8"))
    compile(changed, mutant.file, "exec")
    assert all((ROOT / test).exists() for test in mutant.tests)


def test_names_are_told_apart() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_is_killed(name: str, project: Path) -> None:
    (mutant,) = (mutant for mutant in MUTANTS if mutant.name == name)
    assert killed(mutant, project)


def test_what_changes_nothing_survives(project: Path) -> None:
    """Or `killed` would say so of anything."""
    (mutant,) = (mutant for mutant in MUTANTS if mutant.name == SAMPLE[1])
    harmless = Mutant("harmless", mutant.file, mutant.old, mutant.old, mutant.tests)
    assert killed(harmless, project) is None


def test_a_place_that_is_gone_is_an_error(project: Path) -> None:
    with pytest.raises(ValueError, match="has 'not there' 0 times"):
        killed(Mutant("stale", "escape.py", "not there", "", ()), project)
