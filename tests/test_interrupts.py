"""SIGINT that is put off: noted, told where it does no harm, and at the end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from fuselora.interrupts import deferred


@pytest.fixture(autouse=True)
def _python_s_own_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_it_is_raised_at_the_end() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), deferred():
        signal.raise_signal(signal.SIGINT)
        reached.append(1)
    assert reached == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_it_is_raised_once_where_it_is_delivered() -> None:
    with deferred() as held:
        held.deliver()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            held.deliver()
        held.deliver()


def test_what_is_raised_already_is_not_hidden() -> None:
    with pytest.raises(ValueError, match="first"), deferred():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("first")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_that_raises_nothing_is_told_and_all_goes_on() -> None:
    told = []
    signal.signal(signal.SIGINT, lambda number, frame: told.append(number))
    with deferred() as held:
        signal.raise_signal(signal.SIGINT)
        assert told == []
        held.deliver()
        assert told == [signal.SIGINT]
    assert told == [signal.SIGINT]


@pytest.mark.parametrize("way", [signal.SIG_IGN, signal.SIG_DFL])
def test_the_system_s_own_ways_stay(way: signal.Handlers) -> None:
    signal.signal(signal.SIGINT, way)
    with deferred() as held:
        assert signal.getsignal(signal.SIGINT) is way
        held.deliver()


def test_other_threads_get_none_and_are_told_none() -> None:
    seen: list[object] = []

    def elsewhere() -> None:
        with deferred() as own:
            seen.append(signal.getsignal(signal.SIGINT))
            held.deliver()
            own.deliver()

    with pytest.raises(KeyboardInterrupt), deferred() as held:
        signal.raise_signal(signal.SIGINT)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert seen == [held.note]
        held.deliver()
