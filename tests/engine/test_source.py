"""Reading the base: every range, by whichever way the system allows, and what is left in its page cache."""

from __future__ import annotations

import errno
import itertools
import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fuselora.engine.buffers import own_memory
from fuselora.engine.source import SAMPLES, Source, forget, opened
from fuselora.errors import ChangedError, ReadError
from fuselora.header import PAGE
from tests.engine.watch import NOWAIT, Disk, Refusal

if TYPE_CHECKING:
    from collections.abc import Callable

N_BYTES = 5 * PAGE + 1234
CONTENT = random.Random(1).randbytes(N_BYTES)
OFFSETS = [0, 1, 7, 511, 512, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 3 * PAGE + 999, N_BYTES - 1]
LENGTHS = [0, 1, 2, 500, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 3 * PAGE + 17]
REFUSALS: list[Refusal] = ["", "open", "access", "transfer"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "base.safetensors"
    path.write_bytes(CONTENT)
    return path


def room_for(n_bytes: int) -> memoryview:
    return memoryview(own_memory(n_bytes + 2 * PAGE))


def check_ranges(source: Source) -> None:
    for offset, n_bytes in itertools.product(OFFSETS, LENGTHS):
        if offset + n_bytes > N_BYTES:
            continue
        room = room_for(n_bytes)
        found = source.read(room, offset, n_bytes)
        assert found == CONTENT[offset : offset + n_bytes]
        assert room[offset % PAGE :][:n_bytes] == found


# every range


@pytest.mark.parametrize("direct", [True, False])
def test_every_range_on_the_file_system_of_the_tests(path: Path, direct: bool) -> None:
    with opened(path, direct=direct) as source:
        check_ranges(source)


@pytest.mark.parametrize("most", [None, 2 * PAGE, PAGE, 512, 77])
@pytest.mark.parametrize("refuse", REFUSALS)
def test_every_range_on_any_file_system(
    path: Path, monkeypatch: pytest.MonkeyPatch, refuse: Refusal, most: int | None
) -> None:
    """Reads may be short wherever the system likes."""
    disk = Disk(monkeypatch, refuse=refuse, most=most)
    with opened(path, direct=True) as source:
        check_ranges(source)
        assert source.direct is (refuse == "")
    assert bool(disk.direct) is (refuse in ("", "transfer"))
    assert disk.opened == {}


def test_whole_files_of_every_size_to_their_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last page of a file is never whole on disk, and direct reads of it are short."""
    disk = Disk(monkeypatch)
    for n_bytes in (1, 511, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 5):
        path = tmp_path / f"{n_bytes}"
        path.write_bytes(CONTENT[:n_bytes])
        with opened(path, direct=True) as source:
            assert source.read(room_for(n_bytes), 0, n_bytes) == CONTENT[:n_bytes]
    assert disk.buffered == []


@pytest.mark.parametrize("refuse", REFUSALS)
@pytest.mark.parametrize(
    ("offset", "n_bytes"), [(0, N_BYTES + 1), (N_BYTES, 1), (2 * N_BYTES, 10), (9000, N_BYTES)]
)
def test_a_range_beyond_the_end_says_that_the_file_changed(
    path: Path, monkeypatch: pytest.MonkeyPatch, refuse: Refusal, offset: int, n_bytes: int
) -> None:
    Disk(monkeypatch, refuse=refuse)
    with (
        opened(path, direct=True) as source,
        pytest.raises(ChangedError, match=r"base\.saf.* changed") as caught,
    ):
        source.read(room_for(n_bytes), offset, n_bytes)
    assert caught.value.facts["path"] == str(path)


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_that_shrinks_while_it_is_open(path: Path, direct: bool) -> None:
    with opened(path, direct=direct) as source:
        assert source.read(room_for(N_BYTES), 0, N_BYTES) == CONTENT
        os.truncate(path, PAGE + 10)
        assert source.read(room_for(PAGE), 10, PAGE) == CONTENT[10 : PAGE + 10]
        with pytest.raises(ChangedError, match=r"base\.safetensors: was changed"):
            source.read(room_for(PAGE), 11, PAGE)


# direct or not


def test_direct_reads_ask_for_whole_pages_only(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    with opened(path, direct=True) as source:
        source.read(room_for(100), PAGE + 4000, 100)
    assert disk.direct == [("preadv", PAGE, 2 * PAGE)]
    assert disk.buffered == []


def test_direct_reads_only_where_they_are_asked_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    with opened(path, direct=False) as source:
        assert not source.direct
        check_ranges(source)
    assert disk.direct == []


def test_a_refused_transfer_is_not_tried_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch, refuse="transfer")
    with opened(path, direct=True) as source:
        told = [source.direct]
        check_ranges(source)
        told.append(source.direct)
    assert told == [True, False]
    assert len(disk.direct) == 1


def test_a_disk_that_fails_is_not_asked_in_another_way(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only "invalid" means that direct I/O is refused; an error of the disk has to be heard."""
    disk = Disk(monkeypatch)

    def broken(*arguments: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with opened(path, direct=True) as source, pytest.raises(ReadError, match="Input/output error") as caught:
        monkeypatch.setattr(os, "preadv", broken)
        source.read(room_for(10), 0, 10)
    assert caught.value.facts["path"] == str(path)
    assert disk.buffered == []


def test_a_system_without_direct_reads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    monkeypatch.setattr("fuselora.engine.source.DIRECT", None)
    with opened(path, direct=True) as source:
        assert not source.direct
        check_ranges(source)
    assert disk.direct == []


def test_another_file_at_the_path_is_never_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Direct reads need a second open; what stands there by then may be another file."""
    other = path.with_name("other")
    other.write_bytes(bytes(N_BYTES))
    disk = Disk(monkeypatch)
    fstat = os.fstat
    replaced: list[Path] = []

    def replace_then(descriptor: int) -> os.stat_result:
        if not replaced:
            replaced.append(other.rename(path))
        return fstat(descriptor)

    monkeypatch.setattr(os, "fstat", replace_then)
    with opened(path, direct=True) as source:
        assert not source.direct
        check_ranges(source)
    assert disk.opened == {}


# what the page cache holds already


def test_a_cached_file_is_read_from_the_cache(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch, cached=True)
    with opened(path, direct=True) as source:
        assert not source.direct
        check_ranges(source)
    assert disk.direct == []
    assert disk.forgotten == []  # it was there before, for somebody else


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EOPNOTSUPP])
@pytest.mark.parametrize("missing", [0, 5, SAMPLES - 1])
def test_one_sample_that_is_not_there_is_enough(
    path: Path, monkeypatch: pytest.MonkeyPatch, missing: int, number: int
) -> None:
    Disk(monkeypatch, cached=True)
    preadv: Any = os.preadv
    asked: list[int] = []

    def some(descriptor: int, views: Any, offset: int, flags: int = 0) -> int:
        if flags == NOWAIT:
            asked.append(offset)
            if len(asked) == missing + 1:
                raise OSError(number, os.strerror(number))
        done: int = preadv(descriptor, views, offset, flags)
        return done

    monkeypatch.setattr(os, "preadv", some)
    with opened(path, direct=True) as source:
        assert source.direct
    assert len(asked) == missing + 1
    assert all(0 <= offset < N_BYTES for offset in asked)


def test_samples_are_spread_and_differ_between_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look makes the system fetch what it looked for, so the next one has to look elsewhere."""
    Disk(monkeypatch, cached=True)
    preadv: Any = os.preadv
    asked: list[int] = []

    def noting(descriptor: int, views: Any, offset: int, flags: int = 0) -> int:
        asked.append(offset)
        done: int = preadv(descriptor, views, offset, flags)
        return done

    monkeypatch.setattr(os, "preadv", noting)
    for _ in range(4):
        random.seed(0)
        with opened(path, direct=True):
            pass
    assert len(asked) == 4 * SAMPLES
    assert len(set(asked)) > 3 * SAMPLES
    assert max(asked) - min(asked) > N_BYTES // 2


def test_the_caller_s_random_numbers_are_left_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Disk(monkeypatch, cached=True)
    before = random.getstate()
    with opened(path, direct=True):
        pass
    assert random.getstate() == before


def test_a_system_that_cannot_tell_what_is_cached(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Disk(monkeypatch, cached=True)
    monkeypatch.setattr("fuselora.engine.source.NOWAIT", None)
    with opened(path, direct=True) as source:
        assert source.direct


def test_an_empty_file_is_not_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    Disk(monkeypatch, cached=True)
    with opened(empty, direct=True) as source, pytest.raises(ChangedError, match="empty"):
        source.read(room_for(1), 0, 1)


# what the page cache is left with


@pytest.mark.parametrize("refuse", ["open", "transfer"])
def test_buffered_reads_drop_their_pages_behind(
    path: Path, monkeypatch: pytest.MonkeyPatch, refuse: Refusal
) -> None:
    disk = Disk(monkeypatch, refuse=refuse)
    with opened(path, direct=True) as source:
        for at in range(0, N_BYTES, 5000):
            source.read(room_for(5000), at, min(5000, N_BYTES - at))
    pages = {page for offset, n_bytes in disk.forgotten for page in range(offset, offset + n_bytes, PAGE)}
    assert pages == set(range(0, N_BYTES, PAGE))
    assert all(offset % PAGE == 0 and n_bytes % PAGE == 0 for offset, n_bytes in disk.forgotten)


def test_direct_reads_have_nothing_to_drop(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    with opened(path, direct=True) as source:
        check_ranges(source)
    assert disk.forgotten == []


def test_an_advice_that_the_system_refuses_is_no_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Disk(monkeypatch, refuse="open")

    def refuse(*arguments: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    with opened(path, direct=True) as source:
        check_ranges(source)


def test_a_system_that_takes_no_advice(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Disk(monkeypatch, refuse="open")
    monkeypatch.delattr(os, "posix_fadvise")
    forget(0, 0, 0)
    with opened(path, direct=True) as source:
        check_ranges(source)


# what is left open


def test_a_file_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    with pytest.raises(ReadError, match="gone: cannot be read: No such file") as caught:
        Source(tmp_path / "gone", direct=True)
    assert caught.value.facts["path"] == str(tmp_path / "gone")
    assert disk.opened == {}


def test_a_folder_is_not_read(tmp_path: Path) -> None:
    with opened(tmp_path, direct=True) as source, pytest.raises(ReadError, match="Is a directory"):
        source.read(room_for(10), 0, 10)


@pytest.mark.parametrize("error", [OSError(errno.ESTALE, "stale"), KeyboardInterrupt()])
@pytest.mark.parametrize("calls", [1, 2])
def test_an_opening_that_fails_leaves_nothing_open(
    path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, calls: int
) -> None:
    disk = Disk(monkeypatch)
    monkeypatch.setattr(os, "fstat", failing(os.fstat, calls, error))
    with pytest.raises((ReadError, KeyboardInterrupt)):
        Source(path, direct=True)
    assert disk.opened == {}


def failing(call: Callable[[int], os.stat_result], calls: int, error: BaseException) -> Callable[[int], Any]:
    """``call``, whose ``calls``-th run fails."""
    made = itertools.count(1)

    def run(descriptor: int) -> os.stat_result:
        if next(made) == calls:
            raise error
        return call(descriptor)

    return run


@pytest.mark.parametrize("refuse", REFUSALS)
def test_both_descriptors_are_closed(path: Path, monkeypatch: pytest.MonkeyPatch, refuse: Refusal) -> None:
    disk = Disk(monkeypatch, refuse=refuse)
    with pytest.raises(ZeroDivisionError), opened(path, direct=True) as source:
        assert len(disk.opened) == (2 if source.direct else 1)
        raise ZeroDivisionError
    assert disk.opened == {}
