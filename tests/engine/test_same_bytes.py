"""The same inputs give the same bytes: whatever the folder, threads, shards, digests or the time of day."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fuselora
from fuselora import synth
from fuselora.engine.blocks import Block, blocks
from fuselora.engine.kernel import BF16, FLOAT32, Kernels
from fuselora.engine.means import Means
from fuselora.engine.stream import write_file
from fuselora.header import PAGE, read_header
from fuselora.planning import OutputFile
from tests.engine.watch import Disk, Refusal, watched
from tests.small import lora, noise, pair, planned, tree, write

SIZE = synth.WanSize(heads=4, ffn=500, blocks=1, head_dim=36, text_dim=48, freq_dim=32)
_watched = pytest.fixture(autouse=True)(watched)
LAYOUTS = [10**9, 400_000, 1]  # bytes of a shard: one, a few, one tensor each


@pytest.fixture(autouse=True)
def _quick_and_dated(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(monkeypatch)


def prepare(patched: pytest.MonkeyPatch) -> None:
    """Several chunks for most tensors, a fixed date, and a disk that need not turn."""
    patched.setattr("fuselora.steps.CHUNK_ELEMENTS", 64 * 144)
    patched.setattr("os.fsync", lambda descriptor: None)
    patched.setenv("SOURCE_DATE_EPOCH", "1700000000")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One pair of experts in several shard layouts, and two LoRAs."""
    folder = tmp_path_factory.mktemp("inputs")
    for number, shard_bytes in enumerate(LAYOUTS):
        base = folder / f"{number}" / "Wan"
        synth.write_pipeline(base, SIZE, experts=True, dtype="BF16", mixed=True, shard_bytes=shard_bytes)
    synth.write_lora(folder / "one.safetensors", SIZE, rank=8, alpha=4, dtype="F32", diffs=True)
    synth.write_lora(folder / "two.safetensors", SIZE, rank=3, style="peft", seed=5)
    return folder


def merge(inputs: Path, out: Path, layout: int = 0, **options: Any) -> Path:
    loras = [f"all={inputs / 'one.safetensors'}", f"high={inputs / 'two.safetensors'}:0.7"]
    fuselora.merge(inputs / f"{layout}" / "Wan", loras, out, **options)
    return out


def tensors_of(folder: Path) -> dict[str, bytes]:
    """Component and name -> bytes, from however many shards."""
    found: dict[str, bytes] = {}
    for path in folder.glob("transformer*/*.safetensors"):
        header, content = read_header(path), path.read_bytes()
        for tensor in header.tensors:
            start = header.data_start + tensor.start
            found[f"{path.parent.name}/{tensor.name}"] = content[start : start + tensor.n_bytes]
    return found


@pytest.fixture(scope="module")
def plain(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    with pytest.MonkeyPatch.context() as patched:
        prepare(patched)
        return tree(merge(inputs, tmp_path_factory.mktemp("plain") / "out"))


def test_two_runs_in_two_folders_give_the_same_tree(
    inputs: Path, plain: dict[str, bytes], tmp_path: Path
) -> None:
    """Inputs and output elsewhere, fused.json and all; the base keeps its folder's own name."""
    elsewhere = tmp_path / "deep" / "er"
    shutil.copytree(inputs / "0", elsewhere / "0")
    for name in ("one.safetensors", "two.safetensors"):
        shutil.copyfile(inputs / name, elsewhere / name)
    assert tree(merge(elsewhere, tmp_path / "another name")) == plain
    assert "fused.json" in plain


def test_no_path_of_this_machine_is_in_the_tree(inputs: Path, plain: dict[str, bytes]) -> None:
    for content in plain.values():
        assert str(inputs).encode() not in content
        assert b"/tmp/" not in content


def test_a_relative_base_gives_the_same_tree(
    inputs: Path, plain: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(inputs / "0" / "Wan")
    loras = ["all=../../one.safetensors", "high=../../two.safetensors:0.7"]
    fuselora.merge(".", loras, tmp_path / "out")
    assert tree(tmp_path / "out") == plain


@pytest.mark.parametrize("jobs", [1, 2, 5, 9])
def test_any_number_of_jobs_gives_the_same_tree(
    inputs: Path, plain: dict[str, bytes], tmp_path: Path, jobs: int
) -> None:
    assert tree(merge(inputs, tmp_path / "out", jobs=jobs)) == plain


def test_the_callers_threads_do_not_matter(inputs: Path, plain: dict[str, bytes], tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert tree(merge(inputs, tmp_path / "out")) == plain
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_shards_cut_elsewhere_hold_the_same_tensors(inputs: Path, tmp_path: Path, kernel: str) -> None:
    options = {"kernel": kernel, "assets": "skip"}
    found = [tensors_of(merge(inputs, tmp_path / f"{n}", n, **options)) for n in range(len(LAYOUTS))]
    n_shards = [
        len(list((tmp_path / f"{n}" / "transformer").glob("*.safetensors"))) for n in range(len(LAYOUTS))
    ]
    assert n_shards[0] == 1
    assert n_shards[0] < n_shards[1] < n_shards[2] == len(synth.base_tensors(SIZE))
    assert found[0] == found[1] == found[2]
    base = tensors_of(inputs / "0" / "Wan")
    assert found[0].keys() == base.keys()
    assert sum(found[0][name] != base[name] for name in base) > len(base) // 2


def test_without_digests_the_weights_are_the_same(
    inputs: Path, plain: dict[str, bytes], tmp_path: Path
) -> None:
    found = tree(merge(inputs, tmp_path / "out", digest=False))
    marker = json.loads(found.pop("fused.json"))
    assert found == {name: content for name, content in plain.items() if name != "fused.json"}
    assert "artifact" not in marker
    assert marker["fingerprint"] == json.loads(plain["fused.json"])["fingerprint"]


def test_only_the_date_changes_with_the_date(
    inputs: Path, plain: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1800000000")
    found = tree(merge(inputs, tmp_path / "out"))
    ours, theirs = (json.loads(files["fused.json"]) for files in (found, plain))
    assert (ours.pop("created"), theirs.pop("created")) == ("2027-01-15T08:00:00Z", "2023-11-14T22:13:20Z")
    assert ours == theirs
    assert {**found, "fused.json": b""} == {**plain, "fused.json": b""}


def test_an_interrupted_and_finished_run_gives_the_same_tree(inputs: Path, tmp_path: Path) -> None:
    class Interrupting:
        left = 12

        def phase(self, name: str, n_bytes: int) -> Any:
            from contextlib import nullcontext

            del n_bytes
            return nullcontext(self.advance if name == "fuse" else lambda done: None)

        def advance(self, done: int) -> None:
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt

    whole = tree(merge(inputs, tmp_path / "whole", 1))
    with pytest.raises(KeyboardInterrupt):
        merge(inputs, tmp_path / "out", 1, progress=Interrupting())
    loras = [f"all={inputs / 'one.safetensors'}", f"high={inputs / 'two.safetensors'}:0.7"]
    report = fuselora.merge(inputs / "1" / "Wan", loras, tmp_path / "out")
    assert report.kept
    assert tree(tmp_path / "out") == whole


# one file in every way in which the engine may write it


@dataclass(frozen=True)
class Way:
    """How a file is written; none of it may show in its bytes."""

    jobs: int = 2
    n_buffers: int | None = None
    block_bytes: int = 20_000
    refuse: Refusal = ""
    most: int | None = None
    cached: bool = False
    direct: bool = True
    digest: bool = True
    in_place: bool = True

    def write(self, file: OutputFile, out: Path) -> bytes:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("fuselora.engine.blocks.BLOCK_BYTES", self.block_bytes)
            if self.n_buffers:
                patched.setattr("fuselora.engine.means.blocks_under_way", lambda jobs: self.n_buffers)
            if not self.in_place:
                patched.setattr(Block, "in_place", False)
            Disk(patched, refuse=self.refuse, most=self.most, cached=self.cached)
            means = Means(Kernels((BF16, FLOAT32)), self.jobs, self.digest, self.direct)
            written = write_file(file, out, means, advance=lambda done: None)
        content = out.read_bytes()
        base = file.base.path.read_bytes()
        digests = [hashlib.sha256(one).hexdigest() if self.digest else None for one in (content, base)]
        assert [written.sha256, written.base_sha256] == digests
        return content


CHOICES: dict[str, list[Any]] = {
    "jobs": [1, 2, 5, 9],
    "n_buffers": [1, 3, 40],
    "block_bytes": [500, 3000, 8 << 20],
    "refuse": ["open", "access", "transfer"],
    "most": [5000, PAGE, 700],
    "cached": [True],
    "direct": [False],
    "digest": [False],
    "in_place": [False],
}
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def ways() -> Iterator[Way]:
    """One thing changed at a time, and some of all that is possible."""
    for name, values in CHOICES.items():
        for value in values:
            yield replace(Way(), **{name: value})
    some = random.Random(5)
    for _ in range(10):
        yield Way(**{name: some.choice([getattr(Way(), name), *values]) for name, values in CHOICES.items()})


def file_of(folder: Path, base_dtype: str, dtype: str, pad: int) -> OutputFile:
    """Tensors copied, cast and fused, with one LoRA or two, by both kernels; odd sizes throughout."""
    of = DTYPES[base_dtype]
    tensors = {
        "a.weight": noise(333, 77, seed=1, dtype=of),
        "a.bias": noise(333, seed=2, dtype=of),
        "b.weight": noise(64 * 4 + 9, 131, seed=3, dtype=of),
        "ids": torch.arange(321),
        "norm.weight": noise(5, seed=4, dtype=of),
        "z.weight": noise(64, 150, seed=5, dtype=of),
    }
    base = write(folder / "base.safetensors", tensors, pad=pad)
    half = torch.bfloat16
    first = {
        **pair("a", noise(333, 6, seed=6, dtype=half), noise(6, 77, seed=7, dtype=half)),
        **pair("b", noise(265, 4, seed=8), noise(4, 131, seed=9)),
        "a.diff_b": noise(333, seed=10),
    }
    second = pair("a", noise(333, 3, seed=11, dtype=half), noise(3, 77, seed=12, dtype=half))
    loras = [lora(folder / "1.safetensors", first), lora(folder / "2.safetensors", second)]
    (file,) = planned(base, loras, dtype=dtype).files
    return file


@pytest.mark.parametrize("pad", [0, 1, 72, PAGE - 3])
@pytest.mark.parametrize(
    ("base_dtype", "dtype"),
    [
        ("BF16", "keep"), ("F32", "keep"), ("F16", "keep"),
        ("F32", "bfloat16"), ("BF16", "float32"), ("BF16", "float16"), ("F32", "float16"),
    ],
)  # fmt: skip
def test_one_file_in_every_way(tmp_path: Path, base_dtype: str, dtype: str, pad: int) -> None:
    file = file_of(tmp_path, base_dtype, dtype, pad)
    wanted = Way(jobs=1).write(file, tmp_path / "out")
    assert len(wanted) == file.n_bytes
    for way in ways():
        assert way.write(file, tmp_path / "out") == wanted, way


def test_the_ways_differ(tmp_path: Path) -> None:
    """In place and apart, a block for each part and one for all, are what the test above compares."""
    kept, narrow = (file_of(tmp_path / dtype, "F32", dtype, 1) for dtype in ("keep", "bfloat16"))
    assert all(block.in_place for block in blocks(kept))
    assert {block.in_place for block in blocks(narrow)} == {False}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("fuselora.engine.blocks.BLOCK_BYTES", 500)
        assert all(len(block.parts) == 1 for block in blocks(kept))
        assert len(list(blocks(kept))) > 20
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("fuselora.engine.blocks.BLOCK_BYTES", 8 << 20)
        (block,) = blocks(kept)
        assert len(block.parts) == 4
