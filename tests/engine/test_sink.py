"""Writing the output: lots of any size by whichever way the system allows, and all that it may refuse."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuselora.engine import sink as room
from fuselora.engine.buffers import own_memory
from fuselora.engine.sink import NO_FALLOCATE, Segment, Sink, created
from fuselora.header import PAGE
from tests.engine.watch import Disk, Limited, Refusal

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has fallocate(2)")

if TYPE_CHECKING:
    from collections.abc import Callable

REFUSALS: list[Refusal] = ["", "open", "access", "transfer"]
LOTS = [
    [1],
    [PAGE],
    [PAGE - 1, 1],
    [PAGE - 1, 2],
    [3 * PAGE + 5],
    [0, 7, 0, PAGE, 0],
    [1, 2, 3, 4000, 90, 1, PAGE, 2 * PAGE + 1, 5],
    [100] * 90,
    [PAGE + 1] * 9,
    [5 * PAGE, 4 * PAGE, 3 * PAGE],
]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out.safetensors"


def placed(sink: Sink, lot: bytes, position: int) -> Segment:
    """A lot in memory of its own, where it lies within its first page."""
    memory = memoryview(own_memory(len(lot) + 2 * PAGE))
    head = position % PAGE
    memory[head : head + len(lot)] = lot
    memory[:head] = b"\xff" * head  # whatever was there before
    return sink.place(memory, len(lot))


def write(path: Path, sizes: Sequence[int], *, direct: bool = True, shuffled: bool = False) -> bytes:
    """Lots of these sizes, written in order or not; what the file has to be."""
    content = random.Random(2).randbytes(sum(sizes))
    with created(path, len(content), 0o640, direct=direct) as sink:
        segments, at = [], 0
        for size in sizes:
            segments.append(placed(sink, content[at : at + size], at))
            at += size
        if shuffled:
            random.Random(3).shuffle(segments)
        for segment in segments:
            sink.write(segment)
        sink.finish()
    return content


# every lot


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("sizes", LOTS)
def test_lots_of_any_size_on_the_file_system_of_the_tests(path: Path, sizes: list[int], direct: bool) -> None:
    assert write(path, sizes, direct=direct) == path.read_bytes()


@pytest.mark.parametrize("most", [None, PAGE, 512, 77])
@pytest.mark.parametrize("refuse", REFUSALS)
@pytest.mark.parametrize("sizes", LOTS)
def test_lots_of_any_size_on_any_file_system(
    path: Path, monkeypatch: pytest.MonkeyPatch, sizes: list[int], refuse: Refusal, most: int | None
) -> None:
    """Writes may be short wherever the system likes."""
    disk = Disk(monkeypatch, refuse=refuse, most=most)
    assert write(path, sizes) == path.read_bytes()
    assert disk.opened == {}
    assert bool(disk.direct) is (refuse in ("", "transfer") and sum(sizes) >= PAGE)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 3 * PAGE), min_size=1, max_size=12), st.booleans())
def test_lots_are_written_in_any_order(tmp_path: Path, sizes: list[int], direct: bool) -> None:
    path = tmp_path / "out"
    assert write(path, sizes, direct=direct, shuffled=True) == path.read_bytes()


def test_segments_are_whole_pages_and_follow_on_one_another(path: Path) -> None:
    sizes, ends = [10, 5000, 1, 3000, 9000], list[int]()
    with created(path, sum(sizes), 0o600, direct=True) as sink:
        for number, size in enumerate(sizes):
            segment = placed(sink, bytes(size), sum(sizes[:number]))
            assert segment.offset % PAGE == len(segment.content) % PAGE == 0
            assert segment.offset == (ends[-1] if ends else 0)
            ends.append(segment.offset + len(segment.content))
    assert ends[-1] == sum(sizes) // PAGE * PAGE


def test_only_the_last_incomplete_page_goes_through_the_cache(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    write(path, [100, 3 * PAGE, 50])
    assert disk.direct == [("pwrite", 0, 3 * PAGE)]
    assert disk.buffered == [("pwrite", 3 * PAGE, 150)]


def test_several_threads_write_at_once(path: Path) -> None:
    """Each segment is a thread's own: 4 threads, 40 lots."""
    content = random.Random(4).randbytes(40 * 5001)
    with created(path, len(content), 0o600, direct=True) as sink:
        segments = [placed(sink, content[at : at + 5001], at) for at in range(0, len(content), 5001)]

        def write_some(number: int) -> None:
            for segment in segments[number::4]:
                sink.write(segment)

        threads = [threading.Thread(target=write_some, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        sink.finish()
    assert path.read_bytes() == content


# direct or not


@pytest.mark.parametrize("refuse", REFUSALS)
def test_what_is_refused_is_not_tried_again(
    path: Path, monkeypatch: pytest.MonkeyPatch, refuse: Refusal
) -> None:
    disk = Disk(monkeypatch, refuse=refuse)
    with created(path, 20 * PAGE, 0o600, direct=True) as sink:
        for number in range(20):
            sink.write(placed(sink, bytes(PAGE), number * PAGE))
        assert sink.direct is (refuse == "")
    assert len(disk.direct) == {"": 20, "transfer": 1}.get(refuse, 0)


def test_direct_writes_only_where_they_are_asked_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    assert write(path, [2 * PAGE, 5], direct=False) == path.read_bytes()
    assert disk.direct == []


def test_a_system_without_direct_writes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    monkeypatch.setattr(room, "DIRECT", None)
    assert write(path, [2 * PAGE, 5]) == path.read_bytes()
    assert disk.direct == []


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("direct", [True, False])
def test_a_disk_that_fails_is_heard(
    path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool, number: int
) -> None:
    """Only "invalid" means that direct I/O is refused; nothing else is tried in another way."""
    disk = Disk(monkeypatch)
    pwrite = Limited(os.pwrite, calls=1, error=OSError(number, os.strerror(number)))
    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        write(path, [PAGE] * 3, direct=direct)
    assert caught.value.errno == number
    assert pwrite.made == 2
    assert disk.opened == {}


def test_a_write_that_fails_in_the_last_page_is_heard(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", Limited(os.pwrite, calls=0, error=OSError(errno.EIO, "last page")))
    with pytest.raises(OSError, match="last page"):
        write(path, [10])


def test_a_sync_that_fails_is_heard(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    monkeypatch.setattr(os, "fsync", Limited(os.fsync, calls=0, error=OSError(errno.EIO, "sync")))
    with pytest.raises(OSError, match="sync"):
        write(path, [PAGE])
    assert disk.opened == {}


# buffered: pages go out while work goes on


@pytest.fixture
def buffered(monkeypatch: pytest.MonkeyPatch) -> Disk:
    monkeypatch.setattr(room, "FLUSH_BYTES", 4 * PAGE)
    return Disk(monkeypatch, refuse="open")


def test_dirty_pages_are_flushed_and_dropped_as_they_come(path: Path, buffered: Disk) -> None:
    assert write(path, [PAGE] * 17) == path.read_bytes()
    assert buffered.synced == 4
    assert buffered.forgotten == [(0, 0)] * 5  # all of it, and once more at the end


def test_dirty_pages_are_flushed_where_the_first_transfer_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "FLUSH_BYTES", 4 * PAGE)
    disk = Disk(monkeypatch, refuse="transfer")
    write(path, [PAGE] * 17)
    assert (disk.synced, len(disk.forgotten)) == (4, 5)


def test_direct_writes_leave_nothing_to_flush(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "FLUSH_BYTES", 4 * PAGE)
    disk = Disk(monkeypatch)
    write(path, [PAGE] * 17)
    assert (disk.synced, disk.forgotten) == (0, [])


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EINVAL])
def test_a_flush_that_fails_is_heard(
    path: Path, monkeypatch: pytest.MonkeyPatch, buffered: Disk, number: int
) -> None:
    """The system tells of pages that it could not write once; a later sync would say nothing."""
    error = OSError(number, "flush")
    monkeypatch.setattr(os, "fdatasync", Limited(lambda descriptor: None, calls=1, error=error))
    with pytest.raises(OSError, match="flush") as caught:
        write(path, [PAGE] * 17)
    assert caught.value is error
    assert buffered.opened == {}


def test_a_system_without_fdatasync_uses_fsync(
    path: Path, monkeypatch: pytest.MonkeyPatch, buffered: Disk
) -> None:
    monkeypatch.delattr(os, "fdatasync")
    fsync = Limited(lambda descriptor: None)
    monkeypatch.setattr(os, "fsync", fsync)
    write(path, [PAGE] * 17)
    assert fsync.made == 5
    assert buffered.synced == 0


# a new file


def test_space_is_claimed_before_anything_is_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claimed: list[tuple[int, int]] = []
    monkeypatch.setattr(room, "claim", lambda fd, n: claimed.append((fd, n)))
    with created(path, 12_345, 0o600, direct=True) as sink:
        assert claimed == [(sink.descriptor, 12_345)]


@LINUX
def test_a_claim_takes_the_space(path: Path) -> None:
    with path.open("wb") as stream:
        room.claim(stream.fileno(), 1 << 20)
        found = os.fstat(stream.fileno())
    assert found.st_size == 1 << 20
    assert found.st_blocks * 512 >= 1 << 20


@LINUX
def test_a_claim_says_what_the_system_says(path: Path) -> None:
    path.touch()
    with path.open("rb") as stream, pytest.raises(OSError, match=os.strerror(errno.EBADF)) as caught:
        room.claim(stream.fileno(), 100)
    assert caught.value.errno == errno.EBADF


def test_an_interrupted_claim_is_made_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [-1, 0]
    monkeypatch.setattr(room, "_fallocate", lambda: lambda *_: answers.pop(0))
    monkeypatch.setattr(ctypes, "get_errno", lambda: errno.EINTR)
    room.claim(0, 100)
    assert not answers


@pytest.mark.parametrize("number", sorted(NO_FALLOCATE))
@pytest.mark.parametrize("direct", [True, False])
def test_a_file_system_that_cannot_claim(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: int, direct: bool
) -> None:
    refuse(monkeypatch, number)
    assert write(path, [PAGE, 100], direct=direct) == path.read_bytes()


def test_a_system_that_cannot_claim(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_fallocate", lambda: None)
    with created(path, 12_345, 0o600, direct=True):
        assert path.stat().st_size == 12_345


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_a_disk_without_room_is_met_at_once(path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    disk = Disk(monkeypatch)
    refuse(monkeypatch, number)
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        Sink(path, 100, 0o600, direct=True)
    assert caught.value.errno == number
    assert disk.opened == {}


def refuse(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def claim(descriptor: int, n_bytes: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(room, "claim", claim)


@pytest.mark.parametrize("call", ["fuselora.engine.sink.claim", "os.fchmod"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), OSError(errno.EPERM, "no")])
def test_an_opening_that_fails_leaves_nothing_open(
    path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: BaseException
) -> None:
    disk = Disk(monkeypatch)

    def fail(*arguments: Any) -> None:
        assert len(disk.opened) == 2
        raise error

    monkeypatch.setattr(call, fail)
    with pytest.raises(type(error)):
        Sink(path, 100, 0o600, direct=True)
    assert disk.opened == {}


def test_both_descriptors_are_closed_after_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    with pytest.raises(ZeroDivisionError), created(path, 100, 0o600, direct=True):
        assert len(disk.opened) == 2
        raise ZeroDivisionError
    assert disk.opened == {}


def test_a_close_that_fails_is_heard_and_does_not_keep_the_other_open(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    close = os.close

    def failing(descriptor: int) -> None:
        last = len(disk.opened) == 1
        close(descriptor)
        if not last:
            raise OSError(errno.EDQUOT, "told at the close")

    monkeypatch.setattr(os, "close", failing)
    with pytest.raises(OSError, match="told at the close"):
        write(path, [PAGE])
    assert disk.opened == {}


@pytest.mark.parametrize("mode", [0o644, 0o600, 0o444, 0o400, 0o666])
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o027, 0o077])
def test_the_mode_is_the_one_given_as_far_as_the_umask_allows(path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        with created(path, 10, mode, direct=True):
            assert path.stat().st_mode & 0o777 == mode & ~umask
    finally:
        os.umask(before)


def test_a_read_only_mode_does_not_cost_direct_writes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A base that nobody may write, as a package cache keeps it: the second open comes before the mode."""
    disk = Disk(monkeypatch)
    at_open: list[int] = []
    fchmod = os.fchmod

    def noting(descriptor: int, mode: int) -> None:
        at_open.append(len(disk.opened))
        fchmod(descriptor, mode)

    monkeypatch.setattr(os, "fchmod", noting)
    with created(path, 10, 0o444, direct=True) as sink:
        assert sink.direct
    assert at_open == [2]


def left_readonly(path: Path) -> None:
    path.write_bytes(b"\xff" * 50_000)
    path.chmod(0o444)


def left_as_a_link(path: Path) -> None:
    (path.parent / "elsewhere").write_bytes(b"precious")
    path.symlink_to("elsewhere")


def left_as_a_second_name(path: Path) -> None:
    (path.parent / "elsewhere").write_bytes(b"precious")
    path.hardlink_to(path.parent / "elsewhere")


@pytest.mark.parametrize("leave", [left_readonly, left_as_a_link, left_as_a_second_name])
def test_what_an_earlier_try_left_is_replaced_and_not_written_through(
    path: Path, leave: Callable[[Path], None]
) -> None:
    leave(path)
    inode = path.stat().st_ino
    content = write(path, [1000])
    assert not path.is_symlink()
    assert path.read_bytes() == content
    assert path.stat().st_mode & 0o777 == 0o640
    elsewhere = path.parent / "elsewhere"
    if elsewhere.exists():
        assert elsewhere.read_bytes() == b"precious"
        assert path.stat().st_ino != inode


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Sink(tmp_path / "none" / "out", 10, 0o600, direct=True)
