"""Which cuts there are: every action at every call, and signals at any time."""

from __future__ import annotations

import errno
import random
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.crash.points import NEVER, Cut, Point
from tests.crash.trial import NEW, OVERWRITE, Outcome, Setting, Trial

# name: signal, error, whether it lasts
ACTIONS = {
    "SIGKILL": (int(signal.SIGKILL), 0, False),
    "SIGTERM": (int(signal.SIGTERM), 0, False),
    "SIGINT": (int(signal.SIGINT), 0, False),
    "EIO": (0, errno.EIO, False),
    "ENOSPC": (0, errno.ENOSPC, False),
    "EIO from then on": (0, errno.EIO, True),
    "ENOSPC from then on": (0, errno.ENOSPC, True),
}
ALL = tuple(ACTIONS)
# SIGTERM ends a process as SIGKILL does, and the settings share most of their calls.
MOST = tuple(name for name in ALL if name != "SIGTERM")
FEWER = ("SIGKILL", "SIGINT", "EIO")
SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT")


@dataclass(frozen=True, slots=True)
class Case:
    """One trial: an action at a call, or a signal sent ``after`` seconds."""

    setting: Setting
    action: str
    point: Point | None
    after: float = 0.0

    @property
    def cut(self) -> Cut:
        if self.point is None:
            return NEVER
        number, error, lasting = ACTIONS[self.action]
        return Cut(self.point.number, number, error, lasting)

    @property
    def sent(self) -> tuple[int, float]:
        return (ACTIONS[self.action][0], self.after) if self.point is None else (0, 0.0)

    def __str__(self) -> str:
        where = f"after {self.after:.3f} s" if self.point is None else "{} {} {}".format(*self.point)
        return f"{self.setting.name}: {self.action} at {where}"


def tried(case: Case, trial: Trial, folder: Path) -> Outcome:
    """Raises ``AssertionError`` with the case and what did not hold after it."""
    try:
        return trial.cut(folder, case.cut, after=case.sent)
    except AssertionError as error:
        raise AssertionError(f"{case}: {error}") from None


def at_calls(setting: Setting, points: Sequence[Point]) -> Iterator[Case]:
    """Every action at every call of an undisturbed run."""
    for action in ALL if setting == NEW else MOST if setting == OVERWRITE else FEWER:
        for point in points:
            yield Case(setting, action, point)


def at_times(setting: Setting, seconds: float, count: int, seed: int) -> Iterator[Case]:
    """Signals at random times of a run that takes ``seconds``."""
    chance = random.Random(seed)
    for number in range(count):
        yield Case(setting, SIGNALS[number % len(SIGNALS)], None, chance.uniform(0, seconds))


def sample(cases: Sequence[Case], count: int) -> list[Case]:
    """``count`` of them, evenly spread."""
    return [cases[(2 * number + 1) * len(cases) // (2 * count)] for number in range(count)]
