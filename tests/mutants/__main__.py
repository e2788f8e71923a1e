"""`make mutants`: every mutant of the table, on all cores."""

from __future__ import annotations

import argparse
import os
import queue
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants.table import MUTANTS, Mutant
from tests.mutants.trial import copy_project, killed, run_tests


def main() -> int:
    """1 if the tests fail without a mutant, or pass with one."""
    asked = _asked()
    chosen = _chosen(asked.names)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(asked.jobs) as pool:
        projects: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for job in range(asked.jobs):
            projects.put(copy_project(Path(folder) / str(job)))
        tests = sorted({test for mutant in chosen for test in mutant.tests})
        if not asked.unsound:
            status, output = run_tests(["--numprocesses", str(asked.jobs), *tests], Path(folder) / "0")
            if status:
                _say(output)
                return 1
        survivors = [name for name in pool.map(lambda m: _tried(m, projects), chosen) if name]
    _say(f"{len(chosen)} mutants, {len(chosen) - len(survivors)} killed, {len(survivors)} survived")
    return 1 if survivors else 0


def _tried(mutant: Mutant, projects: queue.SimpleQueue[Path]) -> str | None:
    """The name of a mutant that survives."""
    project = projects.get()
    try:
        test = killed(mutant, project)
    finally:
        projects.put(project)
    _say(f"{mutant.name}: {'killed by ' + test.partition(' - ')[0] if test else 'SURVIVED'}")
    return None if test else mutant.name


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="words in the names of those to try")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--unsound", action="store_true", help="do not run the tests without a mutant first")
    asked = parser.parse_args()
    if not _chosen(asked.names):
        parser.error("no mutant has such a name")
    return asked


def _chosen(words: Sequence[str]) -> list[Mutant]:
    return [mutant for mutant in MUTANTS if any(word in mutant.name for word in words or [""])]


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
