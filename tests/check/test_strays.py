"""What check makes of files that the marker does not list."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from fuselora.check import strays
from fuselora.check.folder import check
from fuselora.filenames import WEIGHT_ENDINGS
from fuselora.marker import FILE_NAME, JOURNAL_NAME
from tests.marked import (
    CONFIG,
    INDEX,
    artifact_of,
    codes,
    entry,
    load,
    store,
    write_fused,
)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A pipeline: beside the component there is a listed tokenizer."""
    folder = write_fused(tmp_path / "out")
    put(folder / "model_index.json")
    put(folder / "tokenizer" / "tokenizer.json")
    document = load(folder)
    document["side_files"] += [entry(folder, "model_index.json"), entry(folder, "tokenizer/tokenizer.json")]
    store(folder, document | {"artifact": artifact_of(document)})
    assert check(folder, digest=True).ok
    return folder


def put(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"{}")
    return path


def found(folder: Path) -> set[tuple[str, str]]:
    return codes(check(folder))


WEIGHTS = [f"x{ending}" for ending in WEIGHT_ENDINGS]
INDEXES = [
    "diffusion_pytorch_model.safetensors.index.fp16.json",
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
]


@pytest.mark.parametrize("name", [*WEIGHTS, *INDEXES])
@pytest.mark.parametrize("place", ["", "transformer/", "tokenizer/", "new/", "transformer/deep/er/"])
def test_a_weight_file_or_index_is_a_stray_anywhere(out: Path, place: str, name: str) -> None:
    put(out / f"{place}{name}")
    assert found(out) == {("stray", f"{place}{name}")}


def test_a_hidden_weight_file_is_globbed_as_well(out: Path) -> None:
    put(out / "transformer" / "._x.safetensors")  # as macOS leaves them on other file systems
    assert found(out) == {("stray", "transformer/._x.safetensors")}


@pytest.mark.parametrize(
    "name", ["config.json", "added_tokens.json", "merges.txt", "model.py", "spiece.model"]
)
def test_a_new_file_where_loaders_read_is_found(out: Path, name: str) -> None:
    put(out / "tokenizer" / name)
    assert found(out) == {("unlisted", f"tokenizer/{name}")}


@pytest.mark.parametrize("name", ["config.json", "pipeline.py"])
def test_what_loaders_read_in_the_root_is_found(out: Path, name: str) -> None:
    put(out / name)
    assert found(out) == {("unlisted", name)}


def test_a_model_index_that_is_not_listed_is_found(out: Path) -> None:
    document = load(out)
    document["side_files"] = [one for one in document["side_files"] if one["path"] != "model_index.json"]
    store(out, document | {"artifact": artifact_of(document)})
    assert found(out) == {("unlisted", "model_index.json")}


HARMLESS = [
    ".gitattributes",
    "README.md",
    "LICENSE.txt",
    "notes.txt",
    "sbom.json",
    "assets/sample.mp4",
    "docs/config.json",
    "transformer/README.md",
    "transformer/LICENSE",
    "transformer/.DS_Store",
    ".git/lfs/objects/x.safetensors",
    ".cache/huggingface/download/transformer/x.safetensors",
    ".cache/huggingface/.gitignore",
    "lost+found/x.bin",
    "fuselora.partial/transformer/x.safetensors",
    "fuselora.former/transformer/x.safetensors",
    "fuselora.partial.lock",
    JOURNAL_NAME,
]


def test_what_people_and_a_download_leave_is_nobodys_business(out: Path) -> None:
    for name in HARMLESS:
        put(out / name)
    assert check(out).ok


@pytest.mark.parametrize(
    "name", ["x.git/a.safetensors", ".cache/other/a.safetensors", "sub/lost+found/a.bin"]
)
def test_only_the_private_folders_themselves_are_left_out(out: Path, name: str) -> None:
    put(out / name)
    assert found(out) == {("stray", name)}


@pytest.mark.parametrize("name", ["transformer_2", "unet"])
@pytest.mark.parametrize("holds", ["", "config.json"])
def test_a_folder_called_as_another_component_is_a_stray(out: Path, name: str, holds: str) -> None:
    (out / name).mkdir()
    if holds:
        put(out / name / holds)
    assert found(out) == {("stray", name)}


def test_a_link_or_a_file_called_as_another_component_is_a_stray_once(out: Path) -> None:
    (out / "transformer_2").symlink_to("transformer")
    put(out / "unet")
    assert found(out) == {("stray", "transformer_2"), ("stray", "unet")}


# Where the marker lists weights alone


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """As ``--assets skip`` leaves it."""
    folder = write_fused(tmp_path / "out")
    (folder / CONFIG).unlink()
    document = load(folder)
    document["side_files"] = [entry(folder, INDEX)]
    store(folder, document | {"artifact": artifact_of(document)})
    return folder


def test_the_rest_of_a_skipped_pipeline_may_be_added(weights: Path) -> None:
    for name in (
        CONFIG,
        "model_index.json",
        "vae/config.json",
        "vae/model.safetensors",
        "text_encoder/x.bin",
    ):
        put(weights / name)
    (weights / "tokenizer").symlink_to(weights / "vae")
    assert check(weights).ok


def test_beside_skipped_weights_other_weights_are_strays(weights: Path) -> None:
    put(weights / "transformer" / "x.safetensors")
    assert found(weights) == {("stray", "transformer/x.safetensors")}


def test_beside_skipped_weights_another_component_is_a_stray(weights: Path) -> None:
    (weights / "transformer_2").mkdir()
    assert found(weights) == {("stray", "transformer_2")}


# Links, and what cannot be searched


def test_a_linked_folder_is_a_stray_and_is_not_entered(out: Path, tmp_path: Path) -> None:
    put(tmp_path / "elsewhere" / "x.safetensors")
    (out / "new").symlink_to(tmp_path / "elsewhere")
    (out / "again").symlink_to(out)
    assert found(out) == {("stray", "new"), ("stray", "again")}


def test_a_linked_folder_with_listed_files_is_said_to_leave_and_no_more(out: Path, tmp_path: Path) -> None:
    (out / "tokenizer").rename(tmp_path / "elsewhere")
    (out / "tokenizer").symlink_to(tmp_path / "elsewhere")
    assert found(out) == {("outside", "tokenizer/tokenizer.json")}


def test_a_linked_weight_file_is_a_stray(out: Path, tmp_path: Path) -> None:
    (out / "x.safetensors").symlink_to(put(tmp_path / "x"))
    (out / "y.safetensors").symlink_to("nowhere")
    (out / "z.safetensors").symlink_to("z.safetensors")
    assert found(out) == {("stray", f"{name}.safetensors") for name in "xyz"}


def test_a_folder_that_cannot_be_searched_is_found(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (out / "secret").mkdir()
    scandir = os.scandir

    def refused(path: os.PathLike[str]) -> Any:
        if Path(path).name == "secret":
            raise PermissionError
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    assert found(out) == {("unreadable", "secret")}


def test_the_search_is_bounded(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(20):
        (out / f"{n:02}").mkdir()
    assert check(out).ok
    monkeypatch.setattr(strays, "MAX_ENTRIES", 10)
    report = check(out)
    assert codes(report) == {("stray", "10")}
    assert "over 10" in report.findings[0].message


def test_folders_deeper_than_the_stack_are_searched(out: Path) -> None:
    deep = out
    for _ in range(400):
        deep /= "d"
    put(deep / "x.bin")
    assert {code for code, _ in found(out)} == {"stray"}
    shutil.rmtree(out / "d")


def test_names_that_are_no_text_are_names(out: Path) -> None:
    path = os.fsdecode(b"new/\xff.bin")
    put(out / path)
    assert found(out) == {("stray", path)}
    assert (out / FILE_NAME).exists()
