from __future__ import annotations

import errno
import mmap
import threading
import weakref

import pytest
import torch

from fuselora.engine.buffers import HUGE_PAGE, Pool, own_memory, transfer_memory
from fuselora.engine.lanes import Flow, Stopped
from tests.engine.watch import watched

_watched = pytest.fixture(autouse=True)(watched)


def test_buffers_are_reused_and_never_more_than_the_pool_has() -> None:
    pool, flow = Pool(2, 100), Flow()
    first, second = pool.take(flow), pool.take(flow)
    assert first is not second
    first.release()
    assert pool.take(flow) is first


def test_a_buffer_returns_when_its_last_holder_lets_go() -> None:
    pool, flow = Pool(1, 10), Flow()
    buffer = pool.take(flow)
    buffer.hold(2)
    taken = threading.Event()

    def take() -> None:
        pool.take(flow)
        taken.set()

    waiting = threading.Thread(target=take)
    waiting.start()
    for _ in range(2):
        buffer.release()
        assert not taken.wait(0.15)
    buffer.release()
    assert taken.wait(30)
    waiting.join()


def test_waiting_for_a_buffer_ends_when_the_flow_fails() -> None:
    pool, flow = Pool(1, 10), Flow()
    pool.take(flow)
    threading.Timer(0.05, lambda: flow.fail(ValueError())).start()
    with pytest.raises(Stopped):
        pool.take(flow)


def test_a_buffer_is_writable_memory_that_starts_on_a_page() -> None:
    buffer = Pool(1, 5000).take(Flow())
    buffer.room[:3] = b"abc"
    assert bytes(buffer.room[:5]) == b"abc\0\0"
    assert len(buffer.room) == 5000
    assert torch.frombuffer(buffer.room, dtype=torch.uint8).data_ptr() % mmap.PAGESIZE == 0


def test_a_pool_of_buffers_that_nothing_needs() -> None:
    """A file whose blocks are all computed in place has no others."""
    assert len(Pool(3, 0).take(Flow()).room) == 0


def test_a_pool_does_not_outlive_its_file() -> None:
    """Buffers still on their way to disk do not keep the rest of the pool alive."""
    pool, flow = Pool(2, 10), Flow()
    gone = weakref.ref(pool)
    buffer = pool.take(flow)
    del pool
    assert gone() is None
    buffer.release()


def test_memory_that_the_system_does_not_have_is_not_taken_for_a_full_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*arguments: object, **more: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(MemoryError, match="123 bytes: Cannot allocate memory"):
        own_memory(123)


@pytest.mark.parametrize("n_bytes", [0, 1, 5000, HUGE_PAGE - 1, HUGE_PAGE, 2 * HUGE_PAGE + 5000])
def test_memory_for_transfers_starts_on_a_huge_page(n_bytes: int) -> None:
    room = transfer_memory(n_bytes)
    assert len(room) == n_bytes
    if n_bytes:
        room[-1:] = b"x"
        assert torch.frombuffer(room, dtype=torch.uint8).data_ptr() % HUGE_PAGE == 0


def test_huge_pages_are_asked_for_where_whole_ones_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []

    class Mapping(mmap.mmap):
        def madvise(self, *arguments: int) -> None:
            asked.append(arguments)
            super().madvise(*arguments)

    monkeypatch.setattr("fuselora.engine.buffers.mmap.mmap", Mapping)
    monkeypatch.setattr("fuselora.engine.buffers.mmap.MADV_HUGEPAGE", mmap.MADV_NORMAL, raising=False)
    transfer_memory(HUGE_PAGE - 1)
    transfer_memory(4 * HUGE_PAGE + 8192)
    ((advice, start, n_bytes),) = asked
    assert (advice, n_bytes) == (mmap.MADV_NORMAL, 4 * HUGE_PAGE)
    assert start < HUGE_PAGE


def test_a_system_without_huge_pages_gives_ordinary_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mapping(mmap.mmap):
        def madvise(self, *arguments: int) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr("fuselora.engine.buffers.mmap.mmap", Mapping)
    room = transfer_memory(3 * HUGE_PAGE)
    room[:] = bytes(3 * HUGE_PAGE)
