"""A function in processes that form a world: one process imports, then forks each rank.

``launch`` is pytest's side. Run as a module this is the other side, which needs only the standard
library until it imports what the ranks are to do.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection, get_context
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Work = Callable[[int, int, Path], None]  # rank, world size, folder

ROOT = Path(__file__).parents[2]
FORK = get_context("fork")
# no rank can import them
ABSENT = ("fuselora", "peft")
ALONE = {
    "OMP_NUM_THREADS": "1",  # a pool of threads would not survive the fork
    "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True)
class Ended:
    """How the ranks ended; ``printed`` holds the traceback of each that failed or hung."""

    code: int
    printed: str


def launch(module: str, folder: Path, sizes: Sequence[int], *, limit: int, imports: int = 300) -> Ended:
    """Run ``module.work`` in a world of each size, one after the other.

    A rank that takes over ``limit`` seconds prints where it hangs and ends. ``imports``: seconds for
    all that comes before the ranks.
    """
    command = [sys.executable, "-m", "tests.hsdp.worlds", module, str(folder), str(limit), *map(str, sizes)]
    running = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | ALONE, text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        printed, _ = running.communicate(timeout=imports + limit * len(sizes))
    except subprocess.TimeoutExpired:
        kill_all(running)
        printed, _ = running.communicate()
        printed += "it took too long"
    finally:
        kill_all(running)
    return Ended(running.returncode, printed)


def kill_all(running: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(running.pid, signal.SIGKILL)


def run_world(work: Work, size: int, folder: Path, limit: int) -> list[str]:
    """What failed. The first rank that fails ends the others."""
    ranks = [
        FORK.Process(target=_rank, name=f"rank {rank} of {size}", args=(work, rank, size, folder, limit))
        for rank in range(size)
    ]
    try:
        for rank in ranks:
            rank.start()
        while not any(rank.exitcode for rank in ranks):
            running = [rank.sentinel for rank in ranks if rank.exitcode is None]
            if not running:
                break
            connection.wait(running)
        return [f"{rank.name} ended with {rank.exitcode}" for rank in ranks if rank.exitcode]
    finally:
        for rank in ranks:
            if rank.pid is not None:
                rank.kill()
                rank.join()


def _rank(work: Work, rank: int, size: int, folder: Path, limit: int) -> None:
    faulthandler.dump_traceback_later(limit, exit=True)
    work(rank, size, folder)


def main(module: str, folder: str, limit: str, *sizes: str) -> None:
    for name in ABSENT:
        sys.modules[name] = None  # type: ignore[assignment] # what makes an import fail
    work: Work = importlib.import_module(module).work
    for size in map(int, sizes):
        if failed := run_world(work, size, Path(folder), int(limit)):
            sys.exit("\n".join(failed))


if __name__ == "__main__":
    main(*sys.argv[1:])
