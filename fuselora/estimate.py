"""How long a merge will take: bytes over bandwidth and operations over rate, from a quick probe.

The engine's lanes run side by side, so the slowest of them is what the whole takes: the disk, the
cores together, or one of the two digests, each of which is a single thread's work.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fuselora.engine.buffers import transfer_memory
from fuselora.engine.kernel import Kernels
from fuselora.engine.sink import Segment, created
from fuselora.engine.source import opened
from fuselora.engine.threads import cores
from fuselora.header import PAGE
from fuselora.output.disk import writing
from fuselora.steps import BLOCK_BYTES, Fuse
from fuselora.tensors import TORCH_DTYPES

if TYPE_CHECKING:
    from fuselora.engine.means import Means
    from fuselora.planning import FusePlan
    from fuselora.steps import Delta

PROBE_BYTES = 256 << 20
HASH_BYTES = 32 << 20
START_SECONDS = 2.5  # Python and torch; measured on a slow core


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured, all per second: bytes read and written past the page cache, and bytes that a core hashes."""

    read: float
    write: float
    sha256: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds of each limit; what ends last is what the whole takes."""

    disk: float
    cores: float
    digest: float
    rates: Rates

    @property
    def seconds(self) -> float:
        return START_SECONDS + max(self.disk, self.cores, self.digest)

    def document(self) -> dict[str, object]:
        """For ``--json``: seconds, and rates in bytes per second."""
        limits = {"disk": self.disk, "cores": self.cores, "digest": self.digest}
        return {
            "seconds": round(self.seconds, 1),
            "limit": self.limit,
            "limits": {name: round(seconds, 1) for name, seconds in limits.items()},
            "bytes_per_second": {
                "read": self.rates.read,
                "write": self.rates.write,
                "sha256": self.rates.sha256,
            },
        }

    @property
    def limit(self) -> str:
        """Which of the three it is, or the start of Python and torch."""
        rows = (("disk", self.disk), ("cores", self.cores), ("digest", self.digest), ("start", START_SECONDS))
        return max(rows, key=lambda row: row[1])[0]


def estimate(plan: FusePlan, means: Means, out: Path) -> Estimate:
    """Probe the base's disk, the disk of ``out`` and the kernels, for about a second each.

    A file of 256 MiB is written beside ``out`` and removed. Raises ``OutputError`` or ``ReadError``.
    """
    rates = Rates(_read_rate(plan), _write_rate(out), _hash_rate())
    digest = plan.request.digest
    hashed = (plan.bytes_in + plan.bytes_out) if digest else 0
    computing = _kernel_seconds(plan, means.kernels) + hashed / rates.sha256
    return Estimate(
        disk=plan.bytes_in / rates.read + plan.bytes_out / rates.write,
        cores=computing / min(means.workers, cores()),
        digest=max(plan.bytes_in, plan.bytes_out) / rates.sha256 if digest else 0.0,
        rates=rates,
    )


def _read_rate(plan: FusePlan) -> float:
    base = max(plan.files, key=lambda file: file.base.n_bytes).base
    direct = base.n_bytes >= PAGE  # such reads are of whole pages
    n_bytes = min(PROBE_BYTES, base.n_bytes // PAGE * PAGE if direct else base.n_bytes)
    with opened(base.path, direct=direct) as source:
        return n_bytes / _seconds(lambda: deque(source.first(n_bytes), maxlen=0))


def _write_rate(out: Path) -> float:
    folder = next(parent for parent in out.absolute().parents if parent.is_dir())
    room = transfer_memory(BLOCK_BYTES)
    with (
        writing(folder, PROBE_BYTES),
        tempfile.TemporaryDirectory(dir=folder, prefix=".fuselora-") as name,
        created(Path(name) / "probe", PROBE_BYTES, 0o600, direct=True) as sink,
    ):

        def write() -> None:
            for at in range(0, PROBE_BYTES, BLOCK_BYTES):
                sink.write(Segment(room, at))
            os.fsync(sink.descriptor)

        return PROBE_BYTES / _seconds(write)


def _hash_rate() -> float:
    content = bytearray(HASH_BYTES)
    return HASH_BYTES / _seconds(lambda: hashlib.sha256(content).digest())


def _kernel_seconds(plan: FusePlan, kernels: Kernels) -> float:
    """One chunk of the largest step of each sort is computed; the rest follows from the elements."""
    sorts: dict[tuple[object, ...], list[Fuse]] = {}
    for step in plan.fused_steps:
        if step.chunks:
            sort = (kernels.of(step).name, step.base_dtype, step.dtype, *map(_work, step.deltas))
            sorts.setdefault(sort, []).append(step)
    return sum(
        _chunk_seconds(max(steps, key=lambda step: step.n_elements), kernels)
        * sum(step.n_elements for step in steps)
        for steps in sorts.values()
    )


def _chunk_seconds(step: Fuse, kernels: Kernels) -> float:
    """Seconds for one element, from made-up base values.

    The last chunk, as the first one alone counts what rounding loses.
    """
    first, last = step.chunks[-1]
    shape = (last - first, step.columns)
    base = torch.ones(shape, dtype=TORCH_DTYPES[step.base_dtype])
    out = torch.empty(shape, dtype=TORCH_DTYPES[step.dtype])
    loaded = kernels.of(step).load(step)
    loaded.rows(base, out, first, last)  # the first run pays for memory and for oneDNN's choice of a kernel
    seconds = min(_seconds(lambda: loaded.rows(base, out, first, last)) for _ in range(3))
    return seconds / base.numel()


def _work(delta: Delta) -> tuple[str, int | None]:
    """What the cost of an element follows."""
    return delta.kind.name, delta.kind.rank({part: factor.shape for part, factor in delta.factors.items()})


def _seconds(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return max(time.perf_counter() - started, 1e-9)
