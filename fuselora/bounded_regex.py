"""Regular expressions out of configurations, matched in bounded time. Standard library only.

Python's own matcher goes back on its choices, so that ``(a+)+$`` takes for ever on a long name. Here all
choices are followed at once (https://swtch.com/~rsc/regexp/regexp1.html): a match takes at most the length
of the name times the size of the pattern, and once more the length where the pattern looks ahead. What a
pattern means is Python's word: ``re`` judges whether it is one, and what a single character of it takes.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NoReturn

from fuselora.escape import short

Matcher = Callable[[str], bool]

MAX_CHARS = 2000
MAX_STEPS = 2000  # of a program, where repeats are written out
MAX_LOOKING_STEPS = 200  # of one that looks ahead, which it does at every character
MAX_MOVES = 20_000  # remembered at once
SPECIAL = frozenset("*+?{|(")  # without these nothing is to be chosen
TOO_LARGE = "a regular expression that is too large to be matched"
REPEAT = re.compile(r"(?:\*|\+|\?|\{(?P<low>[0-9]*)(?P<comma>,)?(?P<high>[0-9]*)\})\??")
GROUP = re.compile(r"\(\?:|\((?P<named>\?P<\w+>)?(?!\?)|\(\?(?P<look>[=!])")
# One character: an escape, a set, or itself. \b and the like are places, not characters.
ATOM = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|0[0-7]{0,2}|[0-3][0-7]{2}|[DdSsWw]|[^A-Za-z0-9])"
    r"|\\[aftnrv]|\[\^?\]?(?:\\.|[^\]\\])*\]|[^\\\[]",
    re.DOTALL,
)
PLACES = ("^", "$", r"\A", r"\Z", r"\b", r"\B")


class BadPattern(ValueError):
    """A pattern that is no regular expression, or one that is not matched; the text says why."""


@lru_cache(1 << 14)
def whole(pattern: str) -> Matcher:
    """Whether the whole of a text fits ``pattern``. Raises ``BadPattern``."""
    judged = _judged(pattern)
    if SPECIAL.isdisjoint(pattern):
        return lambda text: judged.fullmatch(text) is not None
    return _program(pattern).takes


@lru_cache(1 << 14)
def tail_of(pattern: str) -> Matcher:
    """Whether a name, or a dotted tail of it, fits ``pattern``, as PEFT reads it. Raises ``BadPattern``."""
    spelled = rf"(.*\.)?({pattern})"
    judged = _judged(spelled)
    if SPECIAL.isdisjoint(pattern):
        return lambda text: judged.fullmatch(text) is not None
    return _program(spelled).takes


def _judged(pattern: str) -> re.Pattern[str]:
    if len(pattern) > MAX_CHARS:
        raise BadPattern(f"a regular expression of over {MAX_CHARS} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return re.compile(pattern)
    except (re.error, ValueError, OverflowError, RecursionError) as error:
        raise BadPattern(f"no regular expression: {error}") from None


@dataclass(frozen=True, slots=True)
class _Take:
    """Goes on to the next step by one character that fits."""

    fits: re.Pattern[str]


@dataclass(frozen=True, slots=True)
class _Fork:
    """Goes on to each of these steps."""

    to: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Place:
    """Goes on to the next step where the text is at such a place."""

    kind: str


@dataclass(frozen=True, slots=True)
class _Look:
    """Goes on to ``to`` where what begins with the next step fits from here on, or does not."""

    wanted: bool
    to: int


class _End:
    """The text was taken."""


Step = _Take | _Fork | _Place | _Look | _End
Emit = Callable[["_Program"], None]


@dataclass(slots=True)
class _Program:
    """Steps, numbered from 0; ``moves`` remembers where a character leads, if places do not matter."""

    steps: list[Step] = field(default_factory=list)
    moves: dict[tuple[frozenset[int], str], frozenset[int]] = field(default_factory=dict)
    depends_on_place: bool = False

    def add(self, step: Step) -> int:
        if len(self.steps) >= MAX_STEPS:
            raise BadPattern(TOO_LARGE)
        self.steps.append(step)
        return len(self.steps) - 1

    def later(self) -> int:
        """The number of a step that is put in once it is known where it leads."""
        return self.add(_Fork(()))

    def takes(self, text: str) -> bool:
        """Whether the whole of ``text`` is taken."""
        run = _Run(self, text)
        return run.ends(run.reached([0], 0), whole=True)

    def move(self, run: _Run, states: frozenset[int], at: int) -> frozenset[int]:
        char = run.text[at]
        key = (states, char)
        found = self.moves.get(key)
        if found is None:
            on = [n + 1 for n in states if isinstance(s := self.steps[n], _Take) and s.fits.fullmatch(char)]
            found = run.reached(on, at + 1)
            if not self.depends_on_place:
                if len(self.moves) >= MAX_MOVES:
                    self.moves.clear()
                self.moves[key] = found
        return found


@dataclass(slots=True)
class _Run:
    """One text on its way through a program; ``looked`` remembers what each look ahead found."""

    program: _Program
    text: str
    looked: dict[tuple[int, int], bool] = field(default_factory=dict)

    def reached(self, steps: Iterable[int], at: int) -> frozenset[int]:
        """The steps that take a character, or end, that these lead to without one."""
        pending, seen, found = list(steps), set[int](), set[int]()
        while pending:
            number = pending.pop()
            if number in seen:
                continue
            seen.add(number)
            match self.program.steps[number]:
                case _Fork(to):
                    pending += to
                case _Place(kind):
                    pending += [number + 1] if self._is_place(kind, at) else []
                case _Look(wanted, to):
                    pending += [to] if self._fits_here(number + 1, at) is wanted else []
                case _:
                    found.add(number)
        return frozenset(found)

    def ends(self, states: frozenset[int], *, whole: bool, at: int = 0) -> bool:
        """Whether an end is reached, at the end of the text or before it."""
        steps = self.program.steps
        for place in range(at, len(self.text)):
            if not states or (not whole and any(isinstance(steps[n], _End) for n in states)):
                break
            states = self.program.move(self, states, place)
        return any(isinstance(steps[n], _End) for n in states)

    def _fits_here(self, step: int, at: int) -> bool:
        key = (step, at)
        if key not in self.looked:
            self.looked[key] = self.ends(self.reached([step], at), whole=False, at=at)
        return self.looked[key]

    def _is_place(self, kind: str, at: int) -> bool:
        last = len(self.text)
        if kind in ("^", r"\A"):
            return at == 0
        if kind in ("$", r"\Z"):
            return at == last or (kind == "$" and at == last - 1 and self.text.endswith("\n"))
        if not self.text:
            return False  # what Python says of either, up to 3.13
        around = [bool(re.match(r"\w", char)) for char in (self.text[at - 1 : at], self.text[at : at + 1])]
        return (around[0] != around[1]) is (kind == r"\b")


def _program(pattern: str) -> _Program:
    """What ``re`` has taken for a regular expression, as a program."""
    program = _Program()
    try:
        parsed = _Parser(pattern).whole()
        parsed(program)
    except RecursionError:
        raise BadPattern("a regular expression that is nested too deep") from None
    program.add(_End())
    looks = any(isinstance(step, _Look) for step in program.steps)
    if looks and len(program.steps) > MAX_LOOKING_STEPS:
        raise BadPattern(TOO_LARGE)
    program.depends_on_place = looks or any(isinstance(step, _Place) for step in program.steps)
    return program


@dataclass(slots=True)
class _Parser:
    text: str
    at: int = 0

    def whole(self) -> Emit:
        emit = self._choice()
        if self.at < len(self.text):
            self._refuse()
        return emit

    def _choice(self) -> Emit:
        branches = [self._sequence()]
        while self.text.startswith("|", self.at):
            self.at += 1
            branches.append(self._sequence())
        return branches[0] if len(branches) == 1 else _one_of(branches)

    def _sequence(self) -> Emit:
        parts: list[Emit] = []
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            parts.append(self._repeated(self._part()))
        return _all_of(parts)

    def _part(self) -> Emit:
        for place in PLACES:
            if self.text.startswith(place, self.at):
                self.at += len(place)
                return _step(_Place(place))
        if self.text[self.at] == "(":
            return self._group()
        found = ATOM.match(self.text, self.at)
        if found is None:
            self._refuse()
        self.at = found.end()
        return _step(_Take(_judged(found[0])))

    def _group(self) -> Emit:
        found = GROUP.match(self.text, self.at)
        if found is None:
            self._refuse()
        self.at = found.end()
        inner = self._choice()
        if not self.text.startswith(")", self.at):
            self._refuse()
        self.at += 1
        return _looking(inner, wanted=found["look"] == "=") if found["look"] else inner

    def _repeated(self, part: Emit) -> Emit:
        found = REPEAT.match(self.text, self.at)
        if found is None or found[0].startswith("{}"):
            return part
        self.at = found.end()
        if self.text.startswith("+", self.at):  # possessive: it gives nothing back
            self._refuse()
        return _times(part, *_bounds(found))

    def _refuse(self) -> NoReturn:
        what = short(self.text[self.at : self.at + 8])
        raise BadPattern(f"a regular expression with {what}, which fuselora does not match")


def _bounds(found: re.Match[str]) -> tuple[int, int | None]:
    """How often at least and at most; None for no end."""
    if found[0][0] != "{":
        return {"*": (0, None), "+": (1, None), "?": (0, 1)}[found[0][0]]
    low = int(found["low"] or 0)
    high = found["high"] if found["comma"] else found["low"]
    return low, int(high) if high else None


def _step(step: Step) -> Emit:
    def emit(program: _Program) -> None:
        program.add(step)

    return emit


def _all_of(parts: list[Emit]) -> Emit:
    def emit(program: _Program) -> None:
        for part in parts:
            part(program)

    return emit


def _one_of(branches: list[Emit]) -> Emit:
    def emit(program: _Program) -> None:
        fork, begins, ends = program.later(), [], []
        for branch in branches:
            begins.append(len(program.steps))
            branch(program)
            ends.append(program.later())
        program.steps[fork] = _Fork(tuple(begins))
        for end in ends:
            program.steps[end] = _Fork((len(program.steps),))

    return emit


def _times(part: Emit, low: int, high: int | None) -> Emit:
    def emit(program: _Program) -> None:
        for _ in range(low):
            program.add(_Fork((len(program.steps) + 1,)))  # so that repeating nothing ends, too
            part(program)
        if high is None:
            fork = program.later()
            part(program)
            program.add(_Fork((fork,)))
            program.steps[fork] = _Fork((fork + 1, len(program.steps)))
            return
        forks = []
        for _ in range(high - low):
            forks.append(program.later())
            part(program)
        for fork in forks:
            program.steps[fork] = _Fork((fork + 1, len(program.steps)))

    return emit


def _looking(inner: Emit, *, wanted: bool) -> Emit:
    def emit(program: _Program) -> None:
        look = program.later()
        inner(program)
        program.add(_End())
        program.steps[look] = _Look(wanted, len(program.steps))

    return emit
