"""`make fuzz`: every target in turn for some minutes, with seeds that nobody has tried."""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from time import monotonic

from tests.fuzz.targets import TARGETS
from tests.fuzz.trial import Crash, Trial

ROUND = 50


def main() -> int:
    """1 if anything crashed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    first = random.SystemRandom().randrange(1 << 48)
    runs: Counter[str] = Counter()
    values: Counter[str] = Counter()
    crashes: list[str] = []
    with ProcessPoolExecutor(asked.jobs) as pool:
        jobs = [pool.submit(fuzz, first + (job << 32), asked.minutes * 60) for job in range(asked.jobs)]
        for job in jobs:
            tried, valued, found = job.result()
            runs, values, crashes = runs + tried, values + valued, crashes + found
    for name, count in runs.items():
        sys.stdout.write(f"{name:26} {count:8} executions, {values[name]:7} were readable all the same\n")
    sys.stdout.write("".join(f"CRASH {text}\n" for text in crashes))
    sys.stdout.write(f"{runs.total()} executions, {len(crashes)} crashes\n")
    return 1 if crashes else 0


def fuzz(seed: int, seconds: float) -> tuple[Counter[str], Counter[str], list[str]]:
    """Executions, readable files and crashes, by target."""
    began, crashes = monotonic(), list[str]()
    runs: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        trials = [Trial(target, Path(folder) / str(n)) for n, target in enumerate(TARGETS)]
        while monotonic() - began < seconds:
            for trial in trials:
                for _ in range(ROUND):
                    seed += 1
                    runs[trial.target.name] += 1
                    try:
                        trial.run(seed)
                    except Crash as crash:
                        crashes.append(str(crash))
    return runs, Counter({trial.target.name: trial.n_values for trial in trials}), crashes


if __name__ == "__main__":
    sys.exit(main())
