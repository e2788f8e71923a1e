"""Side files: which there are, and which cannot be taken over."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from fuselora.errors import CheckpointError
from fuselora.marker import FILE_NAME, JOURNAL_NAME, NEW_JOURNAL_NAME
from fuselora.reading import state
from fuselora.side_files import SideFile, survey
from tests.side_files import CONTENT, hub_snapshot, put


def paths(root: Path) -> list[str]:
    return [side.path for side in survey(root, exclude=lambda path: False)]


def test_every_side_file_is_found_in_one_order(tmp_path: Path) -> None:
    names = [
        "vae/config.json",
        "README.md",
        "scheduler/a/b.json",
        "model_index.json",
        ".gitattributes",
        "x.py",
    ]
    for name in names:
        put(tmp_path / name)
    (tmp_path / "empty").mkdir()
    assert paths(tmp_path) == sorted(names)
    found = {side.path: side for side in survey(tmp_path, exclude=lambda path: False)}
    source = tmp_path / "vae" / "config.json"
    assert found["vae/config.json"] == SideFile("vae/config.json", source, state(source.stat()))
    assert found["vae/config.json"].n_bytes == len(CONTENT)


def test_what_a_cut_off_run_leaves_in_a_base_is_not_taken_along(tmp_path: Path) -> None:
    for name in (FILE_NAME, JOURNAL_NAME, NEW_JOURNAL_NAME, "x.json"):
        put(tmp_path / name)
    assert paths(tmp_path) == ["x.json"]


def test_what_is_excluded_is_left_out_and_not_judged(tmp_path: Path) -> None:
    put(tmp_path / "transformer" / "config.json")
    (tmp_path / "transformer" / "model.safetensors").symlink_to("/absent")
    found = survey(tmp_path, exclude=lambda path: path == "transformer/model.safetensors")
    assert [side.path for side in found] == ["transformer/config.json"]


def test_private_folders_and_earlier_markers_are_not_taken(tmp_path: Path) -> None:
    for name in (
        ".git/config",
        "vae/.git",
        ".cache/huggingface/download/x.lock",
        "fused.json",
        "fuselora.journal",
    ):
        put(tmp_path / name)
    kept = [".cache/other", ".github/x", "vae/fused.json", "x.git/y"]
    for name in kept:
        put(tmp_path / name)
    assert paths(tmp_path) == sorted(kept)


def test_a_relative_root_gives_absolute_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "base" / "a.json")
    monkeypatch.chdir(tmp_path)
    (side,) = survey(Path("base"), exclude=lambda path: False)
    assert side.source == tmp_path / "base" / "a.json"


def test_links_to_the_blobs_of_the_hub_cache_are_followed(tmp_path: Path) -> None:
    snapshot = hub_snapshot(tmp_path)
    (tmp_path / "alias").symlink_to(snapshot)
    for root in (snapshot, tmp_path / "alias"):
        (side,) = survey(root, exclude=lambda path: False)
        assert (side.path, side.n_bytes) == ("vae/config.json", len(CONTENT))
    assert paths(snapshot / "vae") == ["config.json"]


def test_links_to_other_places_of_the_hub_cache_are_refused(tmp_path: Path) -> None:
    snapshot = hub_snapshot(tmp_path)
    other = put(tmp_path / "models--c--d" / "blobs" / "4567")
    deeper = put(tmp_path / "models--a--b" / "blobs" / "deep" / "89")
    for target in (other, deeper, put(tmp_path / "models--a--b" / "refs" / "main")):
        link = snapshot / "link"
        link.symlink_to(target)
        with pytest.raises(CheckpointError, match="out of the folder"):
            survey(snapshot, exclude=lambda path: False)
        link.unlink()


def test_links_inside_are_followed(tmp_path: Path) -> None:
    put(tmp_path / "vae" / "config.json")
    (tmp_path / "copy.json").symlink_to("vae/config.json")
    (tmp_path / "vae2").symlink_to("vae")
    assert paths(tmp_path) == ["copy.json", "vae/config.json", "vae2/config.json"]


def outside_file(root: Path) -> None:
    (root / "bad").symlink_to(put(root.parent / "secret"))


def outside_folder(root: Path) -> None:
    put(root.parent / "elsewhere" / "x")
    (root / "bad").symlink_to(root.parent / "elsewhere")


def dangling(root: Path) -> None:
    (root / "bad").symlink_to("absent")


def circle(root: Path) -> None:
    (root / "bad").symlink_to("bad")


def own_parent(root: Path) -> None:
    (root / "bad").symlink_to(root)


def fifo(root: Path) -> None:
    os.mkfifo(root / "bad")


def unix_socket(root: Path) -> None:
    here = Path.cwd()
    os.chdir(root)  # the path of a socket may be 108 bytes long
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind("bad")
    finally:
        os.chdir(here)


def odd_name(root: Path) -> None:
    put(root / "bad\nname")


BAD = [
    (outside_file, "out of the folder"),
    (outside_folder, "out of the folder"),
    (dangling, "does not exist"),
    (circle, "does not exist"),
    (own_parent, "a folder that it lies in"),
    (fifo, "not a regular file"),
    (unix_socket, "not a regular file"),
    (odd_name, "cannot record"),
]


@pytest.mark.parametrize(("make", "reason"), BAD, ids=lambda value: getattr(value, "__name__", ""))
def test_what_cannot_be_taken_over_is_refused_by_name(tmp_path: Path, make: object, reason: str) -> None:
    root = tmp_path / "base"
    put(root / "good.json")
    assert callable(make)
    make(root)
    with pytest.raises(CheckpointError, match=f"bad.*{reason}|bad\nname.*{reason}") as caught:
        survey(root, exclude=lambda path: False)
    assert str(root) in caught.value.message


def test_a_file_that_may_not_be_read_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "secret.json")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(CheckpointError, match=r"secret\.json cannot be read: Permission denied"):
        paths(tmp_path)


def test_all_that_is_wrong_comes_in_one_message(tmp_path: Path) -> None:
    for at in range(15):
        (tmp_path / f"bad{at:02}").symlink_to("absent")
    with pytest.raises(CheckpointError, match="bad00") as caught:
        survey(tmp_path, exclude=lambda path: False)
    assert "bad11" in caught.value.message
    assert "bad12" not in caught.value.message
    assert "and 3 more" in caught.value.message
    faults = caught.value.facts["faults"]
    assert isinstance(faults, list)
    assert len(faults) == 15


def test_a_root_that_is_not_there_is_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="absent: cannot be read"):
        survey(tmp_path / "absent", exclude=lambda path: False)
