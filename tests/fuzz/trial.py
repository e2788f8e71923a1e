"""One broken file after the other, each told by its number."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path
from random import Random
from time import monotonic

from tests.fuzz.targets import Target

MOST_SECONDS = 20.0  # of one file of some kilobytes: it hangs
MOST_BYTES = 200 << 20


class Crash(AssertionError):
    """What a broken file led to that is neither a value nor an error of ours."""


@dataclass(slots=True)
class Trial:
    """A target in a folder of its own."""

    target: Target
    folder: Path
    sound: bytes = b""
    n_values: int = 0

    def __post_init__(self) -> None:
        self.target.write(self.folder)
        self.sound = (self.folder / self.target.file).read_bytes()
        assert self.target.survives(self.folder), f"the sound {self.target.name} is refused"

    def run(self, seed: int) -> None:
        """Raises ``Crash``, with the bytes that did it."""
        content = self.target.broken(Random(seed), self.sound)
        (self.folder / self.target.file).write_bytes(content)
        began, before = monotonic(), _peak()
        try:
            self.n_values += self.target.survives(self.folder)
        except Exception as error:
            raise Crash(f"{self.target.name}, seed {seed}: {error!r} of {content[:2000]!r}") from error
        if monotonic() - began > MOST_SECONDS or _peak() - before > MOST_BYTES:
            raise Crash(f"{self.target.name}, seed {seed}: took too much, of {content[:2000]!r}")


def _peak() -> int:
    """Bytes of memory that this process had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
