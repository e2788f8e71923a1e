"""Ranks that fail: what ``test_worlds`` launches."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

NOTE, HANGS = "pid", "hangs"


def work(rank: int, size: int, folder: Path) -> None:
    """Rank 0 waits for ever; rank 1 fails as soon as it does, unless the folder says that it hangs too."""
    (folder / f"{NOTE}-{rank}").write_text(str(os.getpid()))
    if rank == 1 and not (folder / HANGS).exists():
        while not (folder / f"{NOTE}-0").exists():
            time.sleep(0.01)
        raise ValueError("what rank 1 has to say")
    wait_for_ever()


def wait_for_ever() -> None:
    while True:
        time.sleep(60)
