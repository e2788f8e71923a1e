from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fuselora import __version__
from fuselora.digest import sha256_file
from fuselora.errors import OutputError
from fuselora.marker import JOURNAL_NAME
from fuselora.output.journal import SCHEMA, BaseState, Entry, Journal, read, reusable
from tests.output.fused_folder import sha256, tree

PLAN = "sha256:plan"
BASE = BaseState(
    sha256="b" * 64,
    n_bytes=4,
    mtime_ns=1_700_000_000_123_456_789,
    ctime_ns=1_700_000_000_123_456_790,
    inode=1 << 40,
)


def entry(path: str, content: bytes = b"shard") -> Entry:
    return Entry(path, len(content), sha256(content), BASE)


A, B = entry("transformer/a.safetensors"), entry("b ü\udcff.safetensors", b"other")


def filled(folder: Path) -> bytes:
    """A journal of two shards, both of them there."""
    with Journal.open(folder, PLAN, files=[A.path, B.path, "side.json"]) as journal:
        for item in (A, B):
            put(folder / item.path, b"shard" if item is A else b"other")
            journal.record(item)
    return (folder / JOURNAL_NAME).read_bytes()


def put(path: Path, content: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)


def test_what_is_recorded_is_read_again(tmp_path: Path) -> None:
    text = filled(tmp_path)
    assert read(tmp_path, PLAN) == {A.path: A, B.path: B}
    header, *lines = [json.loads(line) for line in text.splitlines()]
    assert header == {
        "schema": SCHEMA,
        "fingerprint": PLAN,
        "tool": __version__,
        "files": [B.path, "side.json", A.path],
    }
    assert lines[0] == {
        "path": A.path,
        "n_bytes": 5,
        "touched": 0,
        "unchanged": 0,
        "sha256": A.sha256,
        "base": {
            "sha256": "b" * 64,
            "n_bytes": 4,
            "mtime_ns": BASE.mtime_ns,
            "ctime_ns": BASE.ctime_ns,
            "inode": BASE.inode,
        },
    }


def test_opened_again_it_goes_on(tmp_path: Path) -> None:
    filled(tmp_path)
    third = entry("c.safetensors")
    files = [A.path, B.path, third.path]
    with Journal.open(tmp_path, PLAN, files=files) as journal:
        assert journal.finished() == {A.path: A, B.path: B}
        journal.record(third)
        assert journal.finished() == {A.path: A, B.path: B, third.path: third}
    assert read(tmp_path, PLAN) == {A.path: A, B.path: B, third.path: third}


def test_cut_at_any_byte_every_whole_line_is_read(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    text = filled(tmp_path / "whole")
    ends = [at + 1 for at, byte in enumerate(text) if byte == ord("\n")]
    for length in range(len(text) + 1):
        folder = tmp_path / str(length)
        folder.mkdir()
        (folder / JOURNAL_NAME).write_bytes(text[:length])
        lines = sum(end <= length for end in ends)
        kept = dict([(A.path, A), (B.path, B)][: max(0, lines - 1)])
        assert read(folder, PLAN) == kept, length


@pytest.mark.parametrize("length", [0, 10, -1, -20])
def test_a_torn_journal_is_whole_again_once_it_is_opened(tmp_path: Path, length: int) -> None:
    text = filled(tmp_path)
    (tmp_path / JOURNAL_NAME).write_bytes(text[:length])
    with Journal.open(tmp_path, PLAN, files=[A.path, B.path]) as journal:
        kept = dict(journal.finished())
        journal.record(B)
    assert kept == ({} if length >= 0 else {A.path: A})
    assert read(tmp_path, PLAN) == {**kept, B.path: B}


@pytest.mark.parametrize(
    "line",
    [
        b"\x00\x00\x00",
        b"[]",
        b'{"path": "x"}',
        b'{"path": 1, "bytes": 1, "sha256": "x", "base": {}}',
        b"[" * 99999,
    ],
)
def test_a_line_of_something_else_is_no_shard(tmp_path: Path, line: bytes) -> None:
    text = filled(tmp_path)
    (tmp_path / JOURNAL_NAME).write_bytes(text + line + b"\n")
    assert read(tmp_path, PLAN) == {A.path: A, B.path: B}


@pytest.mark.parametrize("path", ["../out.safetensors", "/etc/passwd", ""])
def test_a_path_that_leaves_the_folder_is_no_shard(tmp_path: Path, path: str) -> None:
    with Journal.open(tmp_path, PLAN, files=[]) as journal:
        journal.record(entry(path))
    assert read(tmp_path, PLAN) == {}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"sha256:plan", b"sha256:else"),
        (b"journal/1", b"journal/9"),
        (f'"tool":"{__version__}"'.encode(), b'"tool":"0.0.9"'),
    ],
)
def test_of_another_plan_schema_or_version_nothing_is_kept(tmp_path: Path, old: bytes, new: bytes) -> None:
    text = filled(tmp_path)
    assert old in text
    (tmp_path / JOURNAL_NAME).write_bytes(text.replace(old, new))
    assert read(tmp_path, PLAN) == {}
    with Journal.open(tmp_path, PLAN, files=["c.safetensors"]) as journal:
        assert journal.finished() == {}
    assert list(tree(tmp_path)) == [JOURNAL_NAME]
    assert not (tmp_path / "transformer").exists()


def test_opening_leaves_only_finished_shards_of_the_plan(tmp_path: Path) -> None:
    filled(tmp_path)
    put(tmp_path / "side.json", b"{}")
    put(tmp_path / "foreign.txt", b"mine")
    with Journal.open(tmp_path, PLAN, files=[A.path]) as journal:
        assert journal.finished() == {A.path: A}
    assert list(tree(tmp_path)) == ["foreign.txt", JOURNAL_NAME, A.path]
    assert len((tmp_path / JOURNAL_NAME).read_bytes().splitlines()) == 2


def test_a_link_in_the_journals_place_is_not_written_through(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("mine")
    folder = tmp_path / "stage"
    folder.mkdir()
    (folder / JOURNAL_NAME).symlink_to(target)
    with Journal.open(folder, PLAN, files=[]) as journal:
        journal.record(A)
    assert target.read_text() == "mine"
    assert read(folder, PLAN) == {A.path: A}


@contextmanager
def largest_file(n_bytes: int) -> Iterator[None]:
    """The kernel refuses to grow a file beyond ``n_bytes``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_line_that_does_not_fit_is_taken_back(tmp_path: Path) -> None:
    with Journal.open(tmp_path, PLAN, files=[A.path]) as journal:
        size = (tmp_path / JOURNAL_NAME).stat().st_size
        with largest_file(size + 30), pytest.raises(OutputError, match="File too large") as caught:
            journal.record(A)
        assert caught.value.facts["errno"] == "EFBIG"
        assert journal.finished() == {}
        assert (tmp_path / JOURNAL_NAME).stat().st_size == size
        journal.record(B)
    assert read(tmp_path, PLAN) == {B.path: B}


def test_each_line_is_on_disk_when_record_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    with Journal.open(tmp_path, PLAN, files=[A.path]) as journal:
        monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
        journal.record(A)
    assert synced == [(tmp_path / JOURNAL_NAME).stat().st_size]


def test_a_folder_that_is_not_there_is_an_output_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="No such file"):
        Journal.open(tmp_path / "absent", PLAN, files=[])


# what may be kept


@pytest.fixture
def made(tmp_path: Path) -> tuple[Entry, Path, Path]:
    file, base = tmp_path / "out.safetensors", tmp_path / "base.safetensors"
    file.write_bytes(b"fused")
    base.write_bytes(b"base")
    state = BaseState.of(base.stat(), sha256_file(base))
    return Entry("out.safetensors", 5, sha256(b"fused"), state), file, base


def test_an_untouched_shard_of_an_untouched_base_is_reusable(made: tuple[Entry, Path, Path]) -> None:
    assert reusable(*made)


@pytest.mark.parametrize("content", [b"fusex", b"fuse", b"", None])
def test_a_shard_with_other_bytes_is_not(made: tuple[Entry, Path, Path], content: bytes | None) -> None:
    item, file, base = made
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    assert not reusable(item, file, base)


def test_a_shard_that_became_a_link_is_not(made: tuple[Entry, Path, Path]) -> None:
    item, file, base = made
    file.rename(file.with_name("moved"))
    file.symlink_to("moved")
    assert not reusable(item, file, base)


@pytest.mark.parametrize("change", ["size", "time", "inode", "gone"])
def test_a_shard_of_a_changed_base_is_not(made: tuple[Entry, Path, Path], change: str) -> None:
    item, file, base = made
    before = base.stat()
    if change == "size":
        base.write_bytes(b"longer")
        os.utime(base, ns=(before.st_atime_ns, before.st_mtime_ns))
    elif change == "time":
        os.utime(base, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000))
    elif change == "inode":
        base.rename(base.with_name("moved"))
        base.write_bytes(b"base")
        os.utime(base, ns=(before.st_atime_ns, before.st_mtime_ns))
    else:
        base.unlink()
    assert not reusable(item, file, base)
