"""`make crash`: every cut of every setting on all cores, and what came of them."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.crash.cuts import Case, at_calls, at_times, tried
from tests.crash.nursery import Nursery
from tests.crash.trial import SETTINGS, Scene, Trial

TIMED = 60  # signals at random times, for each setting


@dataclass
class Tally:
    """What all trials came to."""

    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    borne: Counter[str] = field(default_factory=Counter)
    kept: int = 0
    faults: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def say(self) -> str:
        lines = [f"{action:20} {end:40} {count:6}" for (action, end), count in sorted(self.ends.items())]
        calls = ", ".join(f"{count} {name}" for name, count in self.calls.most_common())
        total = f"{sum(self.ends.values())} cuts, {self.kept} shards kept, {len(self.faults)} faults"
        borne = ", ".join(f"{count} {name}" for name, count in self.borne.most_common())
        return "\n".join([*lines, f"calls cut: {calls}", f"errors that the merge bore: {borne}", total])


def main() -> int:
    """Runs all that was asked for; 1 if something did not hold."""
    asked = _asked()
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(asked.jobs) as pool:
        turns = [pool.submit(_turn, Path(folder) / str(job), job, asked, tally) for job in range(asked.jobs)]
        for turn in turns:
            turn.result()
    sys.stdout.write(tally.say() + "\n")
    return 1 if tally.faults else 0


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [setting.name for setting in SETTINGS]
    parser.add_argument("--settings", nargs="*", choices=names, default=names)
    parser.add_argument("--actions", nargs="*", help="such as SIGKILL or EIO")
    parser.add_argument("--every", type=int, default=1, help="only each n-th cut")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    return parser.parse_args()


def _turn(folder: Path, job: int, asked: argparse.Namespace, tally: Tally) -> None:
    """The cuts of one of several threads, with a nursery of its own."""
    with Nursery(folder / "said") as nursery:
        scene = Scene(folder, nursery)
        for setting in SETTINGS:
            if setting.name in asked.settings:
                run, whole = scene.undisturbed(setting)
                trial = Trial(scene, setting, whole)
                cases = [*at_calls(setting, run.points), *at_times(setting, run.seconds, TIMED, seed=job)]
                for case in cases[job * asked.every :: asked.jobs * asked.every]:
                    if not asked.actions or case.action in asked.actions:
                        _try(trial, folder / "trial", case, tally)
                _say(f"{setting.name}: {len(run.points)} calls that write")


def _try(trial: Trial, folder: Path, case: Case, tally: Tally) -> None:
    try:
        outcome = tried(case, trial, folder)
    except AssertionError as error:
        number = len(tally.faults)
        if folder.exists():
            folder.rename(folder.with_name(f"fault-{number}"))
        with tally.lock:
            tally.faults.append(str(case))
        _say(f"FAULT {error}")
        return
    with tally.lock:
        tally.ends[case.action, f"status {outcome.status}, OUT {outcome.out}"] += 1
        tally.calls[case.point.name if case.point else "any time"] += 1
        tally.kept += outcome.kept
        if case.cut.error and outcome.status == 0 and case.point:
            tally.borne[f"{case.action} at {case.point.name}"] += 1


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
