"""A process that has imported everything and forks a child for each merge: one takes milliseconds.

It reads orders and answers them, each a line of JSON. Nothing else runs in it, so that a fork finds
no thread in the middle of something.
"""

from __future__ import annotations

import faulthandler
import gc
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fuselora.interrupts import Ending
from tests.crash.points import NEVER, Cut, Point, Points

REPOSITORY = Path(__file__).parents[2]
EPOCH = "1764590400"
LIMIT_SECONDS = 60  # a merge here takes a fifth of a second: this one hangs


@dataclass(frozen=True, slots=True)
class Run:
    """How a merge ended: its exit status or minus a signal's number, what it said, its writing calls."""

    status: int
    document: Any
    errors: str
    points: tuple[Point, ...]
    seconds: float = 0.0

    @property
    def kept(self) -> list[str]:
        return [str(path) for path in self.document["kept"]]

    def opened(self) -> set[str]:
        """What it opened for writing."""
        return {point.path for point in self.points if point.name == "open"}


class Nursery:
    """The parent's end. ``folder`` takes what the children say."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._paused = folder, ""
        home = {"HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.nursery"],
            cwd=REPOSITORY,
            env={**os.environ, **home, "SOURCE_DATE_EPOCH": EPOCH},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self,
        argv: Sequence[str],
        cut: Cut = NEVER,
        *,
        signal: int = 0,
        after: float = 0.0,
        exchanges: bool = True,
        mounted: bool = False,
        name: str = "run",
    ) -> Run:
        """``fuselora *argv``; with ``signal``, that is sent ``after`` seconds.

        A cut by SIGSTOP makes the child wait: the run's status is then minus that, until ``resume``.
        """
        order = {
            "argv": list(argv), "cut": asdict(cut), "signal": signal, "after": after,
            "exchanges": exchanges, "mounted": mounted, "says": str(self._folder / name),
        }  # fmt: skip
        return self._answered(order)

    def warm(self, argv: Sequence[str]) -> None:
        """Runs ``fuselora *argv`` in the nursery itself: what that imports and compiles, no child has to."""
        self._answered({"warm": list(argv), "says": str(self._folder / "warm")})

    def resume(self, name: str = "run") -> Run:
        """The rest of a run that waits."""
        return self._answered({"resume": True, "says": str(self._folder / name)})

    def _answered(self, order: dict[str, Any]) -> Run:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(order), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, "the nursery has ended: see above"
        found = json.loads(answer)
        files = [Path(f"{order['says']}.{kind}") for kind in KINDS]
        texts = [path.read_text(errors="replace") if path.exists() else "" for path in files]
        points = [line.split("\t") for line in texts[2].splitlines()]
        return Run(
            found["status"],
            json.loads(texts[0] or "null"),
            texts[1],
            tuple(Point(int(number), name, path) for number, name, path in points),
            found["seconds"],
        )

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


KINDS = ("stdout", "stderr", "points")


def serve() -> None:
    """Orders until the parent closes the pipe."""
    import torch

    import fuselora.build
    import fuselora.check.folder
    import fuselora.cli
    import fuselora.content
    import fuselora.pipeline
    import fuselora.report

    torch.set_num_threads(1)
    # as a process of its own has it from its first line: no child is without, however early the signal
    signal.signal(signal.SIGINT, Ending())
    paused = 0
    for line in sys.stdin:
        order = json.loads(line)
        began = time.monotonic()
        if "warm" in order:
            with redirect_stdout(io.StringIO()):
                fuselora.cli.app(order["warm"], standalone_mode=False)
            gc.collect()
            gc.freeze()
            _answer(0, 0)
            continue
        child = paused if order.get("resume") else _forked(order)
        if order.get("resume"):
            os.kill(child, signal.SIGCONT)
        elif order["signal"]:
            time.sleep(order["after"])
            os.kill(child, order["signal"])
        found = os.waitpid(child, os.WUNTRACED)[1]
        if os.WIFSTOPPED(found):
            paused, status = child, -signal.SIGSTOP
        else:
            status = os.waitstatus_to_exitcode(found)
        _answer(int(status), time.monotonic() - began)


def _answer(status: int, seconds: float) -> None:
    sys.stdout.write(json.dumps({"status": status, "seconds": seconds}) + "\n")
    sys.stdout.flush()


def _forked(order: dict[str, Any]) -> int:
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            _merge(order)
        finally:
            os._exit(70)
    return child


def _merge(order: dict[str, Any]) -> None:
    from fuselora.__main__ import main

    faulthandler.register(signal.SIGALRM, all_threads=True, chain=True)  # where it hangs, it says where
    signal.alarm(LIMIT_SECONDS)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    out, err, trace = (os.open(f"{order['says']}.{kind}", flags) for kind in KINDS)
    for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (out, 1), (err, 2)):
        os.dup2(source, target)
    sys.argv = ["fuselora", *order["argv"]]
    Points(Cut(**order["cut"]), trace).install(exchanges=order["exchanges"], mounted=order["mounted"])
    try:
        main()
    except Exception:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()


if __name__ == "__main__":
    serve()
