"""One component of a fused folder: its tensors, dtypes and index against the base's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fuselora import synth
from fuselora.compare import same_bytes
from fuselora.header import read_header
from fuselora.pipeline import merge
from fuselora.verify import verify
from fuselora.verify_report import VerifyReport
from tests.fused_pair import (
    COPIED,
    FUSED,
    SIZE,
    Pair,
    codes,
    edit_json,
    edit_marker,
    edit_tensor,
    found,
    shard_of,
    write_pair,
)

if TYPE_CHECKING:
    from collections.abc import Callable

INDEX = "transformer_2/diffusion_pytorch_model.safetensors.index.json"
KEPT = "blocks.0.scale_shift_table"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_pair(tmp_path_factory.mktemp("pair"))


def rewrite(out: Path, shard: Path, change: Callable[[Tensors], object]) -> None:
    """Write a shard anew with other tensors, and have the marker say its size and header."""
    metadata = dict(read_header(shard).metadata)
    tensors = {key: value.clone() for key, value in load_file(shard).items()}
    change(tensors)
    save_file(tensors, shard, metadata)
    path = shard.relative_to(out).as_posix()

    def agree(marker: Any) -> None:
        for component in marker["components"].values():
            for entry in component["files"]:
                if entry["path"] == path:
                    entry.update(bytes=shard.stat().st_size, header_sha256=read_header(shard).sha256)

    edit_marker(out, agree)


def with_shard(pair: Pair, folder: Path, key: str, change: Callable[[Tensors], object]) -> VerifyReport:
    """The report on a copy in which the shard of transformer_2 that holds ``key`` was changed."""
    out = pair.copy(folder / "out")
    rewrite(out, shard_of(out, "transformer_2", key), change)
    return pair.verify(out)


# Tensors


def test_a_shard_written_anew_with_the_same_values_holds(pair: Pair, tmp_path: Path) -> None:
    assert with_shard(pair, tmp_path, FUSED, lambda tensors: None).ok


def test_a_tensor_that_is_missing(pair: Pair, tmp_path: Path) -> None:
    report = with_shard(pair, tmp_path, COPIED, lambda tensors: tensors.pop(COPIED))
    assert ("tensor", COPIED) in found(report)
    assert codes(report) == {"tensor", "index", "count"}
    assert report.components[1].compared == 68


def test_a_tensor_that_the_base_does_not_have(pair: Pair, tmp_path: Path) -> None:
    report = with_shard(pair, tmp_path, FUSED, lambda tensors: tensors.update(more=torch.zeros(2)))
    assert ("tensor", "more") in found(report)
    assert codes(report) == {"tensor", "index", "count"}


def test_a_tensor_of_another_shape(pair: Pair, tmp_path: Path) -> None:
    report = with_shard(pair, tmp_path, FUSED, lambda t: t.update({FUSED: t[FUSED].view(24, 96)}))
    assert found(report) == {("tensor", FUSED)}
    assert "[24, 96], in the base [48, 48]" in report.findings[0].message
    assert report.components[1].compared == 68


def test_a_component_of_other_tensors_is_another_bases(pair: Pair, tmp_path: Path) -> None:
    wider = synth.write_pipeline(tmp_path / "base", synth.tiny("wan2.2-t2v-a14b", blocks=6), experts=True)
    report = verify(pair.plain, base=wider, loras=pair.loras)
    assert "another-base" in codes(report)
    assert not report.ok
    assert report.components == ()


@pytest.mark.parametrize("damage", [b"", b"short"])
def test_a_file_that_cannot_be_read(pair: Pair, tmp_path: Path, damage: bytes) -> None:
    out = pair.copy(tmp_path / "out")
    shard = shard_of(out, "transformer_2", FUSED)
    shard.write_bytes(damage)
    report = pair.verify(out)
    assert {"size", "not-compared"} == codes(report)
    assert [part.name for part in report.components] == ["transformer"]


# Dtypes


def test_a_tensor_of_another_dtype(pair: Pair, tmp_path: Path) -> None:
    report = with_shard(pair, tmp_path, COPIED, lambda t: t.update({COPIED: t[COPIED].half()}))
    assert ("dtype", COPIED) in found(report)


def test_a_tensor_that_should_have_stayed_in_float32(pair: Pair, tmp_path: Path) -> None:
    report = with_shard(pair, tmp_path, KEPT, lambda t: t.update({KEPT: t[KEPT].bfloat16()}))
    assert ("dtype", KEPT) in found(report)
    assert codes(report) == {"dtype", "index"}, "total_size is another, too"


def test_a_tensor_that_was_not_cast_with_the_others(pair: Pair, tmp_path: Path) -> None:
    base = synth.write_pipeline(tmp_path / "base", SIZE)
    out = merge(base, [str(pair.low)], tmp_path / "out", dtype="bfloat16", digest=False).out
    rewrite(out, shard_of(out, "transformer", COPIED), lambda t: t.update({COPIED: t[COPIED].float()}))
    assert found(verify(out, base=base, loras=[pair.low])) >= {("dtype", COPIED)}


def test_a_cast_tensor_that_is_not_the_bases(pair: Pair, tmp_path: Path) -> None:
    base = synth.write_pipeline(tmp_path / "base", SIZE)
    out = merge(base, [str(pair.low)], tmp_path / "out", dtype="bfloat16", digest=False).out
    assert verify(out, base=base, loras=[pair.low]).ok
    shard = shard_of(out, "transformer", COPIED)
    # one unit in the last place of one element
    edit_tensor(shard, COPIED, lambda held: (held.view(torch.int16) ^ first_bit(held)).view(torch.bfloat16))
    report = verify(out, base=base, loras=[pair.low])
    assert found(report) == {("cast", COPIED)}
    assert report.findings[0].message.startswith(f"1 of {48 * 16 * 4} elements")


def first_bit(like: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(like.shape, dtype=torch.int16)
    mask.view(-1)[0] = 1
    return mask


# Index and counts


def test_an_index_that_places_a_tensor_elsewhere(pair: Pair, tmp_path: Path) -> None:
    out = pair.copy(tmp_path / "out")

    def move(index: Any) -> None:
        files = sorted(set(index["weight_map"].values()))
        index["weight_map"][FUSED] = next(name for name in files if name != index["weight_map"][FUSED])

    edit_json(out / INDEX, move)
    edit_marker(out, lambda marker: resize(marker, INDEX, (out / INDEX).stat().st_size))
    report = pair.verify(out)
    assert [(f.code, f.file) for f in report.findings] == [("index", INDEX)]


@pytest.mark.parametrize("metadata", [{"total_size": 1}, {}, None])
def test_an_index_with_a_wrong_size(pair: Pair, tmp_path: Path, metadata: object) -> None:
    out = pair.copy(tmp_path / "out")
    edit_json(out / INDEX, lambda index: index.update(metadata=metadata))
    edit_marker(out, lambda marker: resize(marker, INDEX, (out / INDEX).stat().st_size))
    report = pair.verify(out)
    assert [(f.code, f.file) for f in report.findings] == [("index", INDEX)]
    assert "total_size" in report.findings[0].message


def test_an_index_that_is_no_json(pair: Pair, tmp_path: Path) -> None:
    out = pair.copy(tmp_path / "out")
    (out / INDEX).write_text("{", encoding="utf-8")
    edit_marker(out, lambda marker: resize(marker, INDEX, 1))
    assert [(f.code, f.file) for f in pair.verify(out).findings] == [("index", INDEX)]


def test_shards_without_an_index(pair: Pair, tmp_path: Path) -> None:
    out = pair.copy(tmp_path / "out")
    (out / INDEX).unlink()

    def forget(marker: Any) -> None:
        marker["side_files"] = [side for side in marker["side_files"] if side["path"] != INDEX]
        marker["components"]["transformer_2"]["index"] = None

    edit_marker(out, forget)
    assert [(f.code, f.file) for f in pair.verify(out).findings] == [("index", "transformer_2")]


def resize(marker: Any, path: str, n_bytes: int) -> None:
    next(side for side in marker["side_files"] if side["path"] == path)["bytes"] = n_bytes


@pytest.mark.parametrize(("field", "said"), [("tensors", 70), ("fused", 21)])
def test_a_marker_that_counts_wrongly(pair: Pair, tmp_path: Path, field: str, said: int) -> None:
    out = pair.copy(tmp_path / "out")

    def change(marker: Any) -> None:
        component = marker["components"]["transformer_2"]
        component[field] = said
        shard = next(file for file in component["files"] if file["fused"])
        shard["fused"] += field == "fused"

    edit_marker(out, change)
    report = pair.verify(out)
    assert codes(report) == {"count"}
    assert f"says {said}" in report.findings[0].message


# Bytes


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [([], [], True), ([b"ab", b"c"], [b"ab", b"c"], True), ([b"ab"], [b"ac"], False), ([b"ab"], [], False)],
)
def test_streams_of_blocks(first: list[bytes], second: list[bytes], same: bool) -> None:
    assert same_bytes(iter(first), iter(second)) is same
