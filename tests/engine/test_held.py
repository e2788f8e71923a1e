"""Factors under way: read once for each tensor, given up with the last block, and never too many."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from fuselora.engine.held import Held
from fuselora.engine.kernel import Loaded, Lost
from fuselora.engine.lanes import Flow, Stopped
from fuselora.steps import Factor, Fuse
from tests.deltas import low_rank

if TYPE_CHECKING:
    from pathlib import Path

    from fuselora.engine.kernel import Sum

ROOM = 100


class _Nothing:
    def rows(self, base: torch.Tensor, out: torch.Tensor, first: int, last: int) -> Lost:
        raise AssertionError("no block is computed here")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuselora.engine.held.FACTOR_ELEMENTS", ROOM)


def step_of(folder: Path, name: str, elements: int) -> Fuse:
    """A step whose factors have that many elements."""
    down = Factor(folder / "lora.safetensors", "down", "BF16", (1, elements // 2), 0, elements)
    delta = low_rank(replace(down, shape=(elements // 2, 1)), down, 1.0)
    return Fuse(folder / "base", name, "BF16", "BF16", 1, 1, 0, 0, ((0, 1),), (delta,), 1)


class _Loading:
    """Counts what is loaded."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.sum: Sum = _Nothing()

    def __call__(self, step: Fuse) -> Loaded:
        self.names.append(step.base_key)
        return Loaded(step, self.sum)


def taken_soon(held: Held, *steps: Fuse) -> tuple[threading.Thread, list[dict[str, Loaded]]]:
    """``take`` in a thread of its own, and where its answer will be."""
    found: list[dict[str, Loaded]] = []
    thread = threading.Thread(target=lambda: found.append(dict(held.take(steps))), daemon=True)
    thread.start()
    return thread, found


def test_a_tensor_that_several_blocks_hold_is_loaded_once(tmp_path: Path) -> None:
    loading = _Loading()
    held = Held(loading, Flow())
    a, b = step_of(tmp_path, "a", 10), step_of(tmp_path, "b", 10)
    first = dict(held.take([a]))
    second = dict(held.take([a, b]))
    third = dict(held.take([b]))
    assert loading.names == ["a", "b"]
    assert first["a"] is second["a"]
    assert second["b"] is third["b"]
    assert set(third) == {"b"}


def test_a_block_waits_until_earlier_ones_have_let_go(tmp_path: Path) -> None:
    held = Held(_Loading(), Flow())
    first = dict(held.take([step_of(tmp_path, "a", 60)]))
    second = dict(held.take([step_of(tmp_path, "b", 40)]))
    thread, found = taken_soon(held, step_of(tmp_path, "c", 60))
    time.sleep(0.3)
    assert not found
    second.clear()
    time.sleep(0.3)
    assert not found  # 60 and 60 are still too many
    first.clear()
    thread.join(30)
    assert set(found[0]) == {"c"}


def test_a_block_that_needs_more_than_there_is_gets_it_alone(tmp_path: Path) -> None:
    held = Held(_Loading(), Flow())
    first = dict(held.take([step_of(tmp_path, "a", 10)]))
    thread, found = taken_soon(held, step_of(tmp_path, "b", 150), step_of(tmp_path, "c", 150))
    time.sleep(0.3)
    assert not found
    first.clear()
    thread.join(30)
    assert set(found[0]) == {"b", "c"}


def test_a_tensor_that_goes_on_does_not_wait_for_itself(tmp_path: Path) -> None:
    held = Held(_Loading(), Flow())
    a = step_of(tmp_path, "a", 90)
    first = dict(held.take([a]))
    thread, found = taken_soon(held, a, step_of(tmp_path, "b", 90))
    thread.join(30)
    assert set(found[0]) == {"a", "b"}
    assert first


def test_waiting_ends_when_the_flow_fails(tmp_path: Path) -> None:
    flow = Flow()
    held = Held(_Loading(), flow)
    first = dict(held.take([step_of(tmp_path, "a", 90)]))
    threading.Timer(0.05, lambda: flow.fail(ValueError())).start()
    with pytest.raises(Stopped):
        held.take([step_of(tmp_path, "b", 90)])
    assert first


def test_nothing_is_left_when_all_is_done(tmp_path: Path) -> None:
    """Without the garbage collector: the factors of a finished file must not wait for it."""
    held = Held(_Loading(), Flow())
    last = weakref.ref(held.take([step_of(tmp_path, "a", 10)])["a"])
    gc.disable()
    try:
        assert last() is not None
        del held
        assert last() is None
    finally:
        gc.enable()
