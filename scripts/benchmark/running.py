"""One run of the bench: makes inputs, measures, removes what no later case needs."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from benchmark import commands, inputs
from benchmark.commands import PEERS, Command
from benchmark.inputs import Inputs
from benchmark.machine import free_disk, free_memory, io_path, machine
from benchmark.measuring import Cache, CommandFailed, Row, Turns, settle, timed
from benchmark.results import Found, row_document
from benchmark.sampling import sample
from fuselora.marker import FILE_NAME

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from benchmark.inputs import Case

TOUCHES, PEER_TOUCHES = 2, 4  # times the base: read and written, and what a peer holds


@dataclass(frozen=True, slots=True)
class Choice:
    """What is to be measured. ``jobs`` and ``memory`` (in GB) may be empty.

    ``float32_turns``: for cases with a float32 base. ``warm_up``: import each peer once before.
    """

    cases: tuple[Case, ...]
    peers: list[str]
    peer_cases: frozenset[str]
    jobs: list[int]
    device: str | None
    cache: Cache
    touch: bool
    startup: bool
    warm_up: bool
    memory: list[float]
    memory_loras: list[float]
    profile: bool
    reserve_bytes: int
    turns: Turns
    float32_turns: Turns
    keep: bool


@dataclass(frozen=True, slots=True)
class Bench:
    """A choice, and the folder to work in."""

    choice: Choice
    work: Path

    def document(self) -> dict[str, Any]:
        """Everything that was chosen, measured."""
        return {
            "machine": asdict(machine(self.work)),
            "cache": self.choice.cache,
            "memory_touched": self.choice.touch,
            "startup": self._startup() if self.choice.startup else [],
            "cases": [found.document() for found in self._cases()],
            "memory": [found.memory_document() for found in self._memory()],
        }

    def _startup(self) -> list[dict[str, Any]]:
        _tell("making a pair of true size, without data")
        pairs = inputs.make_startup(self.work / "startup")
        rows = [Row(command) for command in commands.startup(*pairs)]
        self.choice.turns.take(
            rows, lambda command: settle(command.out, (), "warm"), partial(_tell_row, "start-up")
        )
        return [row_document(row) for row in rows]

    def _cases(self) -> Iterator[Found]:
        unusable = self._unusable_peers()
        for found in self._with_inputs(self.choice.cases):
            yield found if found.left_out else self._measured(found, unusable)

    def _memory(self) -> Iterator[Found]:
        """One merge for each size of file, of tensors and of LoRA."""
        choice = self.choice
        chosen = inputs.memory_cases(choice.memory, choice.memory_loras) if choice.memory else ()
        for found in self._with_inputs(chosen):
            if not found.left_out:
                row = Row(self._merges(found.case)[0])
                self._settle(found.case, row.command)
                row.samples.append(timed(row.command, choice.turns.limit))
                _tell_row(found.case.name, row)
                found.rows.append(row)
            yield found

    def _with_inputs(self, cases: Sequence[Case]) -> Iterator[Found]:
        """Each case once its files are there, or why not; afterwards, what is not needed again is removed."""
        for number, case in enumerate(cases):
            made = Inputs.of(case, self.work)
            found = Found(case, left_out=self._lacks_disk(case, made))
            if made.missing and not found.left_out:
                _tell(f"{case.name}: making inputs")
                inputs.make(case, made)
            yield found
            later = {path for other in cases[number + 1 :] for path in Inputs.of(other, self.work).paths}
            _remove([self._out, *(() if self.choice.keep else set(made.paths) - later)])

    def _measured(self, found: Found, unusable: dict[str, str]) -> Found:
        case = found.case
        made = Inputs.of(case, self.work)
        found.rows = [Row(command) for command in (*commands.copies(made, self._out), *self._merges(case))]
        self._settle(case, found.rows[0].command)
        found.io = io_path(made.shards[0], self.work)
        if case.name in self.choice.peer_cases:
            for command in commands.peers(case, made, self._out, self.choice.peers):
                found.rows.append(Row(command, left_out=_why_not(case, command, unusable)))
        turns = self.choice.turns if case.base == "bf16" else self.choice.float32_turns
        turns.take(found.rows, partial(self._settle, case), partial(self._look, found))
        if self.choice.profile:
            found.profile = self._profile(case)
        return found

    def _merges(self, case: Case) -> list[Command]:
        more = ("--device", self.choice.device) if self.choice.device else ()
        return commands.merges(case, Inputs.of(case, self.work), self._out, self.choice.jobs, more)

    def _settle(self, case: Case, command: Command) -> None:
        used = case.base_bytes * (PEER_TOUCHES if command.peer else TOUCHES) if self.choice.touch else 0
        settle(self._out, Inputs.of(case, self.work).files, self.choice.cache, touched=used)

    def _look(self, found: Found, row: Row) -> None:
        """What a command has left, while it is there."""
        _tell_row(found.case.name, row)
        if row.left_out or row.command.name in found.values:
            return
        marker = self._out / FILE_NAME
        if marker.exists():
            found.math = json.loads(marker.read_text())["math"]
        if marker.exists() or row.command.peer:
            found.values[row.command.name] = sample(found.case, self._out)

    def _profile(self, case: Case) -> dict[str, Any]:
        """Phases and lanes of one more merge."""
        path = self.work / "profile.json"
        merge = commands.profiled(self._merges(case)[0], path)
        self._settle(case, merge)
        run = timed(merge, self.choice.turns.limit)
        return {**asdict(run), **json.loads(path.read_text())}

    def _unusable_peers(self) -> dict[str, str]:
        """Why a chosen peer cannot run. Importing them all also brings their files into the page cache."""
        found = {}
        theirs = [case for case in self.choice.cases if case.name in self.choice.peer_cases]
        able = {name for case in theirs for name in case.peers}
        for peer in (PEERS[name] for name in self.choice.peers if name in able):
            if absent := [package for package in peer.packages if find_spec(package) is None]:
                found[peer.name] = f"{absent[0]} is not installed"
            elif self.choice.warm_up:
                argv = (sys.executable, "-c", f"import benchmark.peers.{peer.module}")
                try:
                    timed(Command(peer.title, argv), self.choice.turns.limit)
                except CommandFailed as error:
                    found[peer.name] = f"cannot be imported: {error.why}"
        return found

    def _lacks_disk(self, case: Case, made: Inputs) -> str | None:
        sizes = {made.base: case.base_bytes, **dict.fromkeys(made.loras, case.lora_bytes)}
        needed = case.base_bytes + sum(sizes[path] for path in made.missing)
        free = free_disk(self.work) - self.choice.reserve_bytes
        if needed <= free:
            return None
        return f"needs {needed / 1e9:.1f} GB of disk, {max(free, 0) / 1e9:.1f} GB may be used"

    @property
    def _out(self) -> Path:
        return self.work / "out"


def _why_not(case: Case, command: Command, unusable: dict[str, str]) -> str | None:
    """A peer is left out when it cannot be imported, or would need more memory than there is."""
    peer = command.peer
    if peer is None:
        return None
    needed, free = peer.memory_bytes(case), free_memory()
    if needed > free:
        return f"needs about {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free"
    return unusable.get(peer.name)


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _tell_row(name: str, row: Row) -> None:
    last = f"{row.samples[-1].seconds:.2f} s" if row.samples and not row.left_out else row.left_out
    _tell(f"{name}: {row.command.name}: {last}")


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
