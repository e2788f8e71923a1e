from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from fuselora.errors import OutputError
from fuselora.output import disk


@pytest.mark.parametrize("code", ["ENOSPC", "EDQUOT", "EROFS", "EACCES", "EIO", "EFBIG"])
def test_what_a_disk_refuses_is_said_with_path_and_advice(tmp_path: Path, code: str) -> None:
    number = getattr(errno, code)
    path = tmp_path / "shard.safetensors"
    with pytest.raises(OutputError) as caught, disk.writing(path, 12345):
        raise OSError(number, os.strerror(number))
    error = caught.value
    assert error.message.startswith(
        f"{path}: cannot be written: {os.strerror(number)} (12345 bytes to write, "
    )
    assert error.facts["errno"] == code
    assert error.facts["needed"] == 12345
    assert isinstance(error.facts["available"], int)
    assert error.hint


def test_a_full_disk_says_what_there_is_even_of_an_unknown_write() -> None:
    full = Path("/dev/full")
    with (
        pytest.raises(OutputError, match=r"No space left on device \([0-9]+ bytes") as caught,
        disk.writing(full),
    ):
        full.write_bytes(b"x")
    assert caught.value.facts["errno"] == "ENOSPC"
    assert "needed" not in caught.value.facts


def test_other_errors_pass(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), disk.writing(tmp_path):
        raise ZeroDivisionError


def test_a_small_file_replaces_a_link_and_not_its_target(tmp_path: Path) -> None:
    target = tmp_path / "base.json"
    target.write_bytes(b"base")
    link = tmp_path / "out" / "config.json"
    link.parent.mkdir()
    link.symlink_to(target)
    disk.write_file(link, b"new")
    assert target.read_bytes() == b"base"
    assert not link.is_symlink()
    assert link.read_bytes() == b"new"


def test_a_small_file_is_on_disk_when_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[int, int]] = []

    def note(descriptor: int) -> None:
        status = os.fstat(descriptor)
        synced.append((status.st_ino, status.st_size))

    monkeypatch.setattr(os, "fsync", note)
    path = tmp_path / "a" / "b.json"
    disk.write_file(path, b"content")
    assert synced == [(path.stat().st_ino, 7)]


def test_a_file_in_the_place_of_a_folder_is_an_output_error(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(OutputError, match=r"a/b\.json: cannot be written"):
        disk.write_file(tmp_path / "a" / "b.json", b"x")


def test_every_folder_of_a_tree_is_synced_the_root_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / "a" / "b", tmp_path / "c", tmp_path / "a", tmp_path]
    for folder in folders[:2]:
        folder.mkdir(parents=True)
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    disk.sync_tree(tmp_path)
    assert sorted(synced) == sorted(folder.stat().st_ino for folder in folders)
    assert synced[-1] == tmp_path.stat().st_ino


def test_a_file_system_that_cannot_sync_folders_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refused)
    number = errno.EINVAL
    disk.sync_folder(tmp_path)
    number = errno.EIO
    with pytest.raises(OSError, match="Input/output"):
        disk.sync_folder(tmp_path)
