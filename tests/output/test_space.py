from __future__ import annotations

import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from fuselora.errors import OutputError
from fuselora.output import space
from fuselora.output.disk import write_file

Usage = namedtuple("Usage", "total used free")


def test_room_enough_is_silent(tmp_path: Path) -> None:
    space.require(tmp_path / "not" / "yet" / "there", 0)
    space.require(tmp_path, 1)


def test_too_little_room_says_what_is_needed_and_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"needs 1000000000000000000 bytes \(1000000000\.0 GB\)") as caught:
        space.require(tmp_path / "not" / "yet", 10**18)
    facts = caught.value.facts
    assert facts["needed"] == 10**18
    assert isinstance(facts["available"], int)
    assert f"{facts['available']} bytes" in caught.value.message
    assert str(tmp_path / "not" / "yet") in caught.value.message
    assert caught.value.hint


def test_available_is_what_an_ordinary_user_may_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs(tmp_path)
    fields = [*real]
    fields[4] = 1000  # f_bavail; f_bfree, which counts root's reserve, stays
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))
    assert space.available(tmp_path) == 1000 * real.f_frsize


@pytest.mark.parametrize("usage", [Usage(0, 0, 0), OSError("gone")])
def test_a_file_system_that_does_not_say_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, usage: Usage | OSError
) -> None:
    def report(path: Path) -> Usage:
        if isinstance(usage, OSError):
            raise usage
        return usage

    monkeypatch.setattr(shutil, "disk_usage", report)
    assert space.available(tmp_path) is None
    space.require(tmp_path, 10**18)


def test_nearest_is_the_closest_path_that_exists(tmp_path: Path) -> None:
    assert space.nearest(tmp_path / "a" / "b") == tmp_path
    assert space.nearest(tmp_path) == tmp_path


def test_what_a_file_holds(tmp_path: Path) -> None:
    """Where space cannot be claimed, a killed run leaves a shard of its full size and no block."""
    file = tmp_path / "x"
    assert space.held(file) == 0
    write_file(file, b"x" * 10_000)
    assert space.held(file) == 10_000
    os.truncate(file, 1 << 40)
    assert 10_000 <= space.held(file) < 1 << 20
    (tmp_path / "link").symlink_to(file)
    assert space.held(tmp_path / "link") == space.held(tmp_path) == 0
