"""A process that dies at a chosen step of what it does to the file system, without cleaning up."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

STEPS = frozenset(
    {
        "open", "os.mkdir", "os.rmdir", "os.remove", "os.rename", "os.truncate", "os.link", "os.symlink",
        "os.scandir", "os.listdir", "fcntl.flock", "ctypes.dlsym",
    }
)  # fmt: skip
DONE, FAILED, KILLED = 0, 1, 9


Action = Callable[[Callable[[], None]], object]


def outcome(action: Action, step: int) -> int:
    """Runs ``action`` in a child that vanishes before its ``step``-th step, counted from 0.

    ``action`` is given a function, and steps count once it has called that.
    """
    child = os.fork()
    if child == 0:
        _live_until(action, step)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _live_until(action: Action, step: int) -> None:
    left = step

    def count(event: str, _: tuple[object, ...]) -> None:
        nonlocal left
        if event in STEPS:
            if left == 0:
                os._exit(KILLED)
            left -= 1

    try:
        action(lambda: sys.addaudithook(count))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(FAILED)
    os._exit(DONE)
