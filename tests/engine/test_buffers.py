from __future__ import annotations

import mmap
import threading

import pytest

from fuselora.engine.buffers import Pool
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


def test_a_buffer_shows_its_first_bytes_writable_and_aligned() -> None:
    import torch

    buffer = Pool(1, 5000).take(Flow())
    content = buffer.bytes(3)
    content[:] = b"abc"
    assert bytes(buffer.bytes(5)) == b"abc\0\0"
    assert len(buffer.bytes(5000)) == 5000
    assert torch.frombuffer(buffer.bytes(8), dtype=torch.uint8).data_ptr() % mmap.PAGESIZE == 0


def test_a_pool_for_pieces_of_no_bytes() -> None:
    assert len(Pool(1, 0).take(Flow()).bytes(0)) == 0
