from __future__ import annotations

import signal
import threading
from collections.abc import Callable

import pytest

from fuselora.engine.lanes import Flow, Lane, Stopped, lanes
from tests.engine.watch import watched

_watched = pytest.fixture(autouse=True)(watched)


def raises(error: BaseException) -> Callable[[], None]:
    def job() -> None:
        raise error

    return job


def test_each_lane_does_its_jobs_in_order_on_a_thread_of_its_own() -> None:
    done: dict[str, list[int]] = {"a": [], "b": []}
    threads: dict[str, set[str]] = {"a": set(), "b": set()}

    def job(name: str, number: int) -> Callable[[], None]:
        def run() -> None:
            done[name].append(number)
            threads[name].add(threading.current_thread().name)

        return run

    with lanes(Flow(), ("a", "b"), depth=3) as (a, b):
        for number in range(50):
            a.put(job("a", number))
            b.put(job("b", number))
    assert done == {"a": list(range(50)), "b": list(range(50))}
    assert threads == {"a": {"a"}, "b": {"b"}}


def test_a_full_lane_makes_the_giver_wait() -> None:
    gate, started = threading.Event(), threading.Event()

    def first() -> None:
        started.set()
        gate.wait(30)

    queued = 0
    with lanes(Flow(), ("a",), depth=2) as (a,):
        a.put(first)
        assert started.wait(30)
        for _ in range(2):
            a.put(lambda: None)
        threading.Timer(0.2, gate.set).start()
        assert not gate.is_set()
        a.put(lambda: None)
        queued = int(gate.is_set())
    assert queued == 1


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), SystemExit(3), MemoryError()])
def test_the_error_of_a_lane_is_raised_and_stops_the_others(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, lanes(Flow(), ("a", "b"), depth=1) as (a, b):
        a.put(raises(error))
        for _ in range(10_000):
            b.put(lambda: None)
            threading.Event().wait(0.001)
    assert caught.value is error


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt()])
def test_the_error_of_the_body_is_raised_and_stops_the_lanes(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, lanes(Flow(), ("a",), depth=4) as (a,):
        a.put(lambda: None)
        raise error
    assert caught.value is error


def test_the_first_of_several_errors_counts() -> None:
    first = ValueError("first")
    with pytest.raises(ValueError, match="first") as caught, lanes(Flow(), ("a", "b"), depth=1) as (a, b):
        a.put(raises(first))
        a.join()
        b.put(raises(ValueError("second")))
    assert caught.value is first


def test_the_cause_of_an_error_stays_with_it() -> None:
    def job() -> None:
        raise ValueError("cannot be read") from OSError("the reason")

    with (
        pytest.raises(ValueError, match="cannot be read") as caught,
        lanes(Flow(), ("a", "b"), depth=1) as (a, b),
    ):
        a.put(job)
        while True:
            b.put(lambda: None)
    assert str(caught.value.__cause__) == "the reason"
    assert caught.value.__suppress_context__  # that the body was stopped explains nothing


def test_an_error_in_the_last_job_is_not_lost() -> None:
    with pytest.raises(ValueError, match="last"), lanes(Flow(), ("a", "b"), depth=4) as (a, b):
        b.put(lambda: None)
        a.put(raises(ValueError("last")))


def test_a_lane_that_waits_for_another_ends_when_that_one_fails() -> None:
    """The reader waits for a hasher that has failed: nobody may wait for good."""
    with pytest.raises(ValueError, match="hash"), lanes(Flow(), ("read", "hash"), depth=1) as (read, hashing):

        def fill() -> None:
            hashing.put(raises(ValueError("hash")))
            while True:
                hashing.put(lambda: None)

        read.put(fill)


def test_waiting_for_what_another_lane_does() -> None:
    done = threading.Event()
    flow = Flow()
    with lanes(flow, ("a", "b"), depth=1) as (a, b):
        a.put(lambda: flow.wait(done))
        b.put(done.set)
    flow.wait(done)  # also after the flow, for what has been done


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt()])
def test_waiting_ends_when_the_lane_that_was_waited_for_fails(error: BaseException) -> None:
    flow, never = Flow(), threading.Event()
    with pytest.raises(type(error)) as caught, lanes(flow, ("a", "b"), depth=1) as (a, b):
        a.put(lambda: flow.wait(never))
        b.put(raises(error))
    assert caught.value is error


def test_a_thread_that_cannot_be_started_stops_those_that_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may allow few threads. The watch sees that none is left."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "c":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="start new thread"), lanes(Flow(), ("a", "b", "c", "d"), depth=1):
        pass


@pytest.mark.parametrize("first", [KeyboardInterrupt(), ValueError("x")])
def test_a_second_interrupt_waits_until_no_lane_works_any_more(
    monkeypatch: pytest.MonkeyPatch, first: BaseException
) -> None:
    """What comes next closes the files that the lanes write to."""
    working, joining, gate, ended = (threading.Event() for _ in range(4))
    join = Lane.join

    def joined(lane: Lane) -> None:
        joining.set()
        join(lane)

    def work() -> None:
        working.set()
        gate.wait(30)
        ended.set()

    def press_again() -> None:
        assert joining.wait(30)
        for _ in range(3):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            threading.Event().wait(0.1)
        gate.set()

    monkeypatch.setattr(Lane, "join", joined)
    again = threading.Thread(target=press_again)
    with pytest.raises(type(first)) as caught, lanes(Flow(), ("a",), depth=1) as (a,):
        a.put(work)
        assert working.wait(30)
        again.start()
        raise first
    assert ended.is_set()
    assert caught.value is first
    again.join()


def test_stopped_never_hides_the_reason() -> None:
    flow = Flow()
    flow.fail(Stopped())
    assert flow.error is None
    flow.fail(ValueError("reason"))
    flow.fail(ValueError("later"))
    assert str(flow.error) == "reason"
    with pytest.raises(Stopped):
        flow.check()


def test_an_interrupt_while_the_lanes_are_told_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    working, gate, ended = (threading.Event() for _ in range(3))
    fail, pressed = Flow.fail, list[int]()

    def interrupted(flow: Flow, error: BaseException) -> None:
        if threading.current_thread() is threading.main_thread() and not pressed:
            pressed.append(1)
            threading.Timer(0.2, gate.set).start()
            signal.raise_signal(signal.SIGINT)
        fail(flow, error)

    def work() -> None:
        working.set()
        gate.wait(30)
        ended.set()

    first = ValueError("x")
    monkeypatch.setattr(Flow, "fail", interrupted)
    with pytest.raises(BaseException) as caught, lanes(Flow(), ("a",), depth=1) as (a,):
        a.put(work)
        assert working.wait(30)
        raise first
    was_ended = ended.is_set()
    gate.set()
    assert was_ended
    assert caught.value is first


@pytest.mark.parametrize("nth", range(1, 13))
def test_an_interrupt_in_a_lock_of_python_s_own_leaves_none_locked(
    monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    """Events and queues take theirs in Python, where an exception can come before what would give it back."""
    enter, n_entered = threading.Condition.__enter__, 0

    def interrupted(condition: threading.Condition) -> bool:
        nonlocal n_entered
        found = enter(condition)
        if threading.current_thread() is threading.main_thread():
            n_entered += 1
            if n_entered == nth:
                signal.raise_signal(signal.SIGINT)
        return found

    def hanging(number: int, frame: object) -> None:
        raise TimeoutError("a lock is not given back")

    before = signal.signal(signal.SIGALRM, hanging)
    signal.alarm(20)
    done: list[int] = []
    try:
        with pytest.raises(KeyboardInterrupt), lanes(Flow(), ("a", "b"), depth=1) as opened:
            monkeypatch.setattr(threading.Condition, "__enter__", interrupted)
            for number in range(20):
                for lane in opened:
                    lane.put(lambda number=number: done.append(number))  # type: ignore[misc]
        assert n_entered >= nth
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
