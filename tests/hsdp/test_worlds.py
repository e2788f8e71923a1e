"""A rank that fails or hangs is seen, says why, and leaves no process behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.hsdp.broken import HANGS, NOTE
from tests.hsdp.worlds import launch

BROKEN = "tests.hsdp.broken"
LIMIT = 60


def left_running(folder: Path) -> list[str]:
    """Ranks that started and still run."""
    notes = sorted(folder.glob(f"{NOTE}-*"))
    assert notes
    return [note.name for note in notes if runs(int(note.read_text()))]


def runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_first_failure_ends_all(tmp_path: Path) -> None:
    ended = launch(BROKEN, tmp_path, [2, 4], limit=LIMIT)
    assert ended.code == 1
    assert "Process rank 1 of 2:\nTraceback" in ended.printed
    assert "ValueError: what rank 1 has to say" in ended.printed
    assert ended.printed.endswith("rank 1 of 2 ended with 1\n")
    assert left_running(tmp_path) == []
    assert not (tmp_path / f"{NOTE}-2").exists(), "the next world should not start"


def test_a_rank_that_hangs_says_where(tmp_path: Path) -> None:
    (tmp_path / HANGS).touch()
    ended = launch(BROKEN, tmp_path, [2], limit=3)
    assert ended.code == 1
    assert "in wait_for_ever" in ended.printed
    assert left_running(tmp_path) == []


def test_an_import_that_hangs_is_ended(tmp_path: Path) -> None:
    ended = launch("tests.hsdp.stuck", tmp_path, [], limit=LIMIT, imports=2)
    assert ended.code < 0
    assert ended.printed.endswith("it took too long")


def test_what_cannot_be_imported_is_said(tmp_path: Path) -> None:
    ended = launch("tests.hsdp.absent", tmp_path, [1], limit=LIMIT)
    assert (ended.code, "No module named 'tests.hsdp.absent'" in ended.printed) == (1, True)


@pytest.mark.parametrize("name", ["fuselora", "peft"])
def test_no_rank_can_import(name: str, tmp_path: Path) -> None:
    ended = launch(name, tmp_path, [1], limit=LIMIT)
    assert ended.code == 1
    assert f"import of {name} halted" in ended.printed
