"""Deep folders, links and what cannot be read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fuselora.errors import CheckpointError, OutputError
from fuselora.folders import entries, folders
from fuselora.pipeline import merge
from fuselora.synth import tiny, write_lora, write_pipeline
from fuselora.verify import verify

DEPTH = 1300  # over Python's limit of calls in one another, and of names that a path may have


def test_each_folder_before_what_is_in_it(tmp_path: Path) -> None:
    for name in ("a/b/c", "d"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "a" / "b" / "x").touch()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    found = [os.path.relpath(entry.path, tmp_path) for entry in entries(tmp_path)]
    assert sorted(found) == ["a", "a/b", "a/b/c", "a/b/x", "d", "link"]
    assert found.index("a") < found.index("a/b") < found.index("a/b/x")
    assert sorted(folders(tmp_path, skip=["a"])) == [tmp_path / "d"]
    (tmp_path / "d" / "a").mkdir()
    assert sorted(folders(tmp_path, skip=["a"])) == [tmp_path / "d", tmp_path / "d" / "a"]


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        list(entries(tmp_path / "absent"))
    assert list(entries(tmp_path / "absent", strict=False)) == []


def deepened(folder: Path) -> None:
    """Folders in one another, with a file in the last; no call is given their whole path."""
    folder.mkdir(exist_ok=True)
    here = os.open(folder, os.O_RDONLY)
    for _ in range(DEPTH):
        os.mkdir("d", dir_fd=here)
        inner = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(os.open("x.json", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.close(here)


@pytest.fixture
def short(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a short name, removed without Python's own recursion."""
    folder = tmp_path_factory.mktemp("s")
    yield folder
    for deep in reversed(folders(folder)):
        for entry in list(os.scandir(deep)):
            if not entry.is_dir(follow_symlinks=False):
                Path(entry.path).unlink()
        deep.rmdir()


def test_deep_folders_are_refused_or_named(short: Path) -> None:
    size = tiny("wan2.2-t2v-a14b", blocks=1)
    base = write_pipeline(short / "b", size, dtype="BF16")
    lora = write_lora(short / "l.safetensors", size, style="lightning", alpha=2, dtype="F32", seed=1)
    out = short / "o"
    merge(base, [lora], out)
    deepened(out)
    with pytest.raises(OutputError, match="which fuselora did not write"):
        merge(base, [lora], out, overwrite=True)
    assert verify(out, base=base, loras=[lora]).ok
    deepened(short / "p.partial")
    with pytest.raises(OutputError, match="is in the place of the staging folder"):
        merge(base, [lora], short / "p")
    deepened(base / "vae")
    with pytest.raises(CheckpointError, match="lies more than 200 folders deep"):
        merge(base, [lora], short / "q")
    assert not (short / "q").exists()
