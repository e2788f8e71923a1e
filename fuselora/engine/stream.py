"""One output file: base bytes in, fused bytes out, both hashed on the way, in a few fixed buffers.

Each block goes through lanes of threads: read, hash as base, load factors, compute, place, hash as
output, write. Every lane takes the blocks in the same order, so that none waits for a later one.
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fuselora.digest import read_range
from fuselora.engine.blocks import Block, Part, blocks, buffer_bytes
from fuselora.engine.buffers import Buffer, Pool, own_memory
from fuselora.engine.held import Held
from fuselora.engine.kernel import Kernels, Loaded, Lost
from fuselora.engine.lanes import Flow, Lane, lanes
from fuselora.engine.means import Means
from fuselora.engine.settings import one_thread
from fuselora.engine.sink import Sink, created
from fuselora.engine.source import Source, opened
from fuselora.engine.threads import READERS, WRITERS
from fuselora.errors import NumericError
from fuselora.header import PAGE, check_unchanged
from fuselora.reading import changed, reading, state
from fuselora.tensors import bytes_finite

if TYPE_CHECKING:
    from fuselora.planning import OutputFile
    from fuselora.steps import Fuse

Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """Hex digests of the output and of the base shard (None without digests), and what rounding lost.

    ``base_status`` is the base shard's ``stat`` from before it was read.
    """

    sha256: str | None
    base_sha256: str | None
    base_status: os.stat_result
    lost: Lost


def write_file(file: OutputFile, target: Path, means: Means, *, advance: Advance) -> WrittenFile:
    """Write, hash and fsync one output file; ``advance`` is told the output bytes as they come.

    Raises ``ChangedError`` if the base is not what the plan saw, ``NumericError`` for a result that
    is not finite, ``ReadError`` where an input cannot be read, and ``OSError`` from the output as it is.
    """
    with opened(file.base.path, direct=means.direct) as source:
        mode = stat.S_IMODE(source.before.st_mode) & 0o666
        with created(target, file.n_bytes, mode, direct=means.direct) as sink:
            run = _Run(file, source, sink, means, advance)
            run.header()
            run.blocks()
            sink.finish()
        base_sha256 = run.base_sha256()
        check_unchanged(file.base)  # the marker names a path: what was read has to be there still
    return WrittenFile(run.sha256(), base_sha256, source.before, run.lost)


@dataclass(slots=True)
class _Slot:
    """One block under way: its buffers, and what has become of it."""

    block: Block
    reads: Buffer
    writes: Buffer | None
    loaded: dict[str, Loaded] = field(default_factory=dict)
    read: threading.Event = field(default_factory=threading.Event)
    hashed: threading.Event = field(default_factory=threading.Event)
    ready: threading.Event = field(default_factory=threading.Event)
    computed: threading.Event = field(default_factory=threading.Event)

    @property
    def out(self) -> Buffer:
        return self.writes or self.reads

    @property
    def base_bytes(self) -> memoryview:
        head = self.block.source % PAGE
        return self.reads.room[head : head + self.block.n_bytes]

    @property
    def out_bytes(self) -> memoryview:
        head = self.block.target % PAGE
        return self.out.room[head : head + self.block.out_bytes]


class _Run:
    """The lanes of one file."""

    def __init__(self, file: OutputFile, source: Source, sink: Sink, means: Means, advance: Advance) -> None:
        self._file, self._source, self._sink = file, source, sink
        self._means, self._advance = means, advance
        self._hash_base = means.digest and file.in_base_order
        self._base_hash, self._out_hash = hashlib.sha256(), hashlib.sha256()
        self._flow = Flow()
        self._cpu = threading.BoundedSemaphore(max(1, means.jobs))
        # not a method of this run, which would keep the last factors until the garbage collector comes
        self._held = Held(partial(_load_factors, means.kernels, self._cpu), self._flow)
        self._tally, self._telling = threading.Lock(), threading.Lock()
        self.lost = Lost()

    def header(self) -> None:
        """Both headers; the base's must be the one that the plan was made from."""
        base, header = self._file.base, self._file.header
        room = memoryview(own_memory(max(base.data_start, len(header)) + 2 * PAGE))
        found = self._source.read(room, 0, base.data_start)
        same = base.state.is_same(state(self._source.before))
        if hashlib.sha256(found).hexdigest() != base.sha256 or not same:
            raise changed(base.path)
        self._base_hash.update(found)
        self._out_hash.update(header)
        room[: len(header)] = header
        self._sink.write(self._sink.place(room, len(header)))
        self._advance(len(header))

    def blocks(self) -> None:
        # lanes are finished in this order: one is before those that it gives work to
        names = (*(f"read-{i}" for i in range(READERS)), "hash-base", "load",
                 *(f"compute-{i}" for i in range(self._means.workers)), "place", "hash-out",
                 *(f"write-{i}" for i in range(WRITERS)))  # fmt: skip
        with lanes(self._flow, names, self._means.n_buffers) as opened_lanes:
            self._schedule(dict(zip(names, opened_lanes, strict=True)))

    def sha256(self) -> str | None:
        return self._out_hash.hexdigest() if self._means.digest else None

    def base_sha256(self) -> str | None:
        if not self._means.digest:
            return None
        # Out of order, the base's bytes do not pass by as the file holds them.
        if self._hash_base:
            return self._base_hash.hexdigest()
        return self._source_sha256()

    def _source_sha256(self) -> str:
        """Of the open file: its path may be another file's by now."""
        hasher = hashlib.sha256()
        for block in self._source.first(self._file.base.n_bytes):
            hasher.update(block)
        return hasher.hexdigest()

    def _schedule(self, lane: dict[str, Lane]) -> None:
        """Buffers are given out here, in the order of the blocks: with one in hand a block can end."""
        read_bytes, write_bytes = buffer_bytes(blocks(self._file))
        n_buffers, allocate = self._means.n_buffers, self._means.allocate
        reads, writes = Pool(n_buffers, read_bytes, allocate), Pool(n_buffers, write_bytes, allocate)
        for number, block in enumerate(blocks(self._file)):
            slot = _Slot(block, reads.take(self._flow), None)
            slot.writes = None if block.in_place else writes.take(self._flow)
            lane[f"read-{number % READERS}"].put(partial(self._read, slot))
            if self._hash_base:
                lane["hash-base"].put(partial(self._digest_base, slot))
            lane["load"].put(partial(self._load, slot))
            lane[f"compute-{number % self._means.workers}"].put(partial(self._compute, slot))
            write = lane[f"write-{number % WRITERS}"]
            lane["place"].put(partial(self._place, slot, lane["hash-out"], write))

    def _read(self, slot: _Slot) -> None:
        self._source.read(slot.reads.room, slot.block.source, slot.block.n_bytes)
        slot.read.set()
        if not self._hash_base:
            slot.hashed.set()

    def _digest_base(self, slot: _Slot) -> None:
        self._flow.wait(slot.read)
        with self._cpu:
            self._base_hash.update(slot.base_bytes)
        slot.hashed.set()

    def _load(self, slot: _Slot) -> None:
        one_thread()
        slot.loaded.update(self._held.take(part.step for part in slot.block.parts if part.step))
        slot.ready.set()

    def _compute(self, slot: _Slot) -> None:
        """The result may take the place of the base's bytes, so they have to be hashed before."""
        self._flow.wait(slot.ready)
        self._flow.wait(slot.hashed)
        one_thread()
        with self._cpu:
            for part in slot.block.parts:
                self._compute_part(slot, part)
        slot.loaded.clear()
        if slot.writes:
            slot.reads.release()
        slot.computed.set()

    def _compute_part(self, slot: _Slot, part: Part) -> None:
        source = slot.base_bytes[part.source - slot.block.source :][: part.n_bytes]
        target = slot.out_bytes[part.target - slot.block.target :][: part.out_bytes]
        if part.step is not None:
            with _told(self._file, part.step):
                lost = slot.loaded[part.step.base_key].fuse(source, target, part.chunks, self._flow.check)
            with self._tally:
                self.lost += lost
        elif slot.writes:
            target[:] = source

    def _place(self, slot: _Slot, hasher: Lane, writer: Lane) -> None:
        self._flow.wait(slot.computed)
        n_bytes = slot.block.out_bytes
        segment = self._sink.place(slot.out.room, n_bytes)
        if self._means.digest:
            slot.out.hold(1)
            hasher.put(lambda: self._digest_out(slot))

        def write() -> None:
            self._sink.write(segment)
            slot.out.release()
            with self._telling:  # several threads write, and progress is told by one at a time
                self._advance(n_bytes)

        writer.put(write)

    def _digest_out(self, slot: _Slot) -> None:
        with self._cpu:
            self._out_hash.update(slot.out_bytes)
        slot.out.release()


def _load_factors(kernels: Kernels, cpu: threading.BoundedSemaphore, step: Fuse) -> Loaded:
    with cpu:
        return kernels.load(step)


@contextmanager
def _told(file: OutputFile, step: Fuse) -> Iterator[None]:
    """A kernel knows neither the file nor what the base's bytes were before they were overwritten."""
    try:
        yield
    except NumericError as error:
        if _base_is_finite(file.base.path, step):
            why, hint = f"{'the sum' if step.deltas else 'it'} does not fit {step.dtype}", error.hint
        else:
            why, hint = "the base itself holds NaN or infinity there", "The base itself is broken."
        text = f"{file.base.path}: {error.message}: {why}"
        raise NumericError(text, hint=hint, path=str(file.base.path), **error.facts) from error


def _base_is_finite(path: Path, step: Fuse) -> bool:
    with reading(path), path.open("rb") as stream:
        found = read_range(stream, step.source, step.base_bytes)
        return all(bytes_finite(block, step.base_dtype) for block in found)
