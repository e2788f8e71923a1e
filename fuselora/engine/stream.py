"""One output file: base bytes in, fused bytes out, both hashed on the way, in a few fixed buffers."""

from __future__ import annotations

import errno
import hashlib
import os
import queue
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from fuselora.digest import sha256_file
from fuselora.engine.buffers import Buffer, Pool
from fuselora.engine.kernel import Kernel, LoadedStep, Lost
from fuselora.engine.lanes import Flow, Lane, lanes
from fuselora.errors import NumericError
from fuselora.header import DTYPE_BITS
from fuselora.planning import COPY_BYTES, Fuse
from fuselora.reading import changed, reading, state

if TYPE_CHECKING:
    from fuselora.planning import OutputFile

# the answers of file systems that cannot preallocate
NO_FALLOCATE = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
READ_AHEAD = 4
WRITE_BEHIND = 4


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """Hex digests of the output and of the base shard (None without digests), and what rounding lost.

    ``base_status`` is the base shard's ``stat`` from before it was read.
    """

    sha256: str | None
    base_sha256: str | None
    base_status: os.stat_result
    lost: Lost


@dataclass(frozen=True, slots=True)
class Piece:
    """One move of bytes: a block of a copied range (``step`` None) or a chunk of rows of a tensor."""

    source: int
    n_bytes: int
    target: int
    out_bytes: int
    step: Fuse | None = None
    rows: tuple[int, int] = (0, 0)


def pieces(file: OutputFile) -> Iterator[Piece]:
    """The file's steps cut to buffer size, in output order."""
    for step in file.steps:
        if isinstance(step, Fuse):
            yield from _chunks(step)
            continue
        for at in range(0, step.n_bytes, COPY_BYTES):
            n_bytes = min(COPY_BYTES, step.n_bytes - at)
            yield Piece(step.source + at, n_bytes, step.target + at, n_bytes)


def buffer_bytes(file: OutputFile) -> tuple[int, int]:
    """The largest input piece and the largest computed output piece of a file."""
    reads = max((piece.n_bytes for piece in pieces(file)), default=0)
    writes = max((piece.out_bytes for piece in pieces(file) if piece.step), default=0)
    return reads, writes


def write_file(
    file: OutputFile, target: Path, kernel: Kernel, *, digest: bool, advance: Callable[[int], None]
) -> WrittenFile:
    """Write, hash and fsync one output file; ``advance`` is told the output bytes as they come.

    Raises ``ChangedError`` if the base is not what the plan saw, ``NumericError`` for a result that
    is not finite, ``ReadError`` where an input cannot be read, and ``OSError`` from the output as it is.
    """
    with _opened(file.base.path) as base, target.open("wb") as out:
        before = os.fstat(base.fileno())
        os.fchmod(out.fileno(), stat.S_IMODE(before.st_mode) & 0o666)
        _reserve(out.fileno(), file.n_bytes)
        run = _Run(file, base.fileno(), out.fileno(), kernel, digest, advance)
        run.start()
        with _naming(file.base.path):
            lost = run.body()
        os.fsync(out.fileno())
        base_sha256 = run.base_sha256()
        if state(os.fstat(base.fileno())) != state(before):
            raise changed(file.base.path)
    return WrittenFile(run.sha256(), base_sha256, before, lost)


class _Run:
    """The lanes of one file: a reader that runs ahead, the kernel here, hashers and a writer behind."""

    def __init__(
        self,
        file: OutputFile,
        base: int,
        out: int,
        kernel: Kernel,
        digest: bool,
        advance: Callable[[int], None],
    ) -> None:
        self._file, self._base, self._out = file, base, out
        self._kernel, self._digest, self._advance = kernel, digest, advance
        self._hash_base = digest and file.in_base_order
        self._base_hash, self._out_hash = hashlib.sha256(), hashlib.sha256()
        read_bytes, write_bytes = buffer_bytes(file)
        self._reads = Pool(READ_AHEAD, read_bytes)
        self._writes = Pool(WRITE_BEHIND, write_bytes)
        self._ready: queue.Queue[tuple[Piece, Buffer] | None] = queue.Queue()
        self._flow = Flow()

    def start(self) -> None:
        """Both headers; the base's must be the one that the plan was made from."""
        header = bytearray(self._file.base.data_start)
        _read_all(self._file.base.path, self._base, memoryview(header), 0)
        if hashlib.sha256(header).hexdigest() != self._file.base.sha256:
            raise changed(self._file.base.path)
        self._base_hash.update(header)
        self._out_hash.update(self._file.header)
        _write_all(self._out, memoryview(self._file.header), 0)
        self._advance(len(self._file.header))

    def body(self) -> Lost:
        names = ("read", "write", "hash-base", "hash-out")
        with lanes(self._flow, names, READ_AHEAD + WRITE_BEHIND) as (reader, writer, base_hasher, out_hasher):
            reader.put(lambda: self._read_ahead(base_hasher))
            return self._consume(writer, out_hasher)

    def sha256(self) -> str | None:
        return self._out_hash.hexdigest() if self._digest else None

    def base_sha256(self) -> str | None:
        if not self._digest:
            return None
        # Out of order, the base's bytes do not pass by as the file holds them.
        if self._hash_base:
            return self._base_hash.hexdigest()
        with reading(self._file.base.path):
            return sha256_file(self._file.base.path)

    def _read_ahead(self, base_hasher: Lane) -> None:
        for piece in pieces(self._file):
            buffer = self._reads.take(self._flow)
            content = buffer.bytes(piece.n_bytes)
            _read_all(self._file.base.path, self._base, content, piece.source)
            if self._hash_base:
                buffer.hold(1)
                base_hasher.put(_update(self._base_hash, content, buffer))
            self._ready.put((piece, buffer))
        self._ready.put(None)

    def _consume(self, writer: Lane, hasher: Lane) -> Lost:
        lost = Lost()
        loaded: LoadedStep | None = None
        while (item := self._next()) is not None:
            piece, buffer = item
            if piece.step is None:
                self._send(writer, hasher, piece, buffer)
                continue
            if loaded is None or loaded.step is not piece.step:
                loaded = None  # let go of the last factors before the next ones are read
                loaded = self._kernel.load(piece.step)
            out = self._writes.take(self._flow)
            lost += loaded.fuse(buffer.bytes(piece.n_bytes), out.bytes(piece.out_bytes), *piece.rows)
            buffer.release()
            self._send(writer, hasher, piece, out)
        return lost

    def _next(self) -> tuple[Piece, Buffer] | None:
        while True:
            self._flow.check()
            try:
                return self._ready.get(timeout=0.1)
            except queue.Empty:
                continue

    def _send(self, writer: Lane, hasher: Lane, piece: Piece, buffer: Buffer) -> None:
        """Hand a finished piece to the writer and, with digests, to the hasher."""
        content = buffer.bytes(piece.out_bytes)
        if self._digest:
            buffer.hold(1)
            hasher.put(_update(self._out_hash, content, buffer))

        def write() -> None:
            _write_all(self._out, content, piece.target)
            buffer.release()
            self._advance(len(content))

        writer.put(write)


def _update(hasher: hashlib._Hash, content: memoryview, buffer: Buffer) -> Callable[[], None]:
    def update() -> None:
        hasher.update(content)
        buffer.release()

    return update


def _chunks(step: Fuse) -> Iterator[Piece]:
    base_row = step.columns * DTYPE_BITS[step.base_dtype] // 8
    out_row = step.columns * DTYPE_BITS[step.dtype] // 8
    for first, last in step.chunks:
        n_rows = last - first
        yield Piece(
            step.source + first * base_row, n_rows * base_row,
            step.target + first * out_row, n_rows * out_row, step, (first, last),
        )  # fmt: skip


def _reserve(out: int, n_bytes: int) -> None:
    """Claim the space now, so that a full disk is met before the work and not after it."""
    try:
        os.posix_fallocate(out, 0, n_bytes)
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in NO_FALLOCATE:
            raise
        os.ftruncate(out, n_bytes)


def _opened(path: Path) -> BinaryIO:
    with reading(path):
        return path.open("rb")


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """A kernel knows tensors, not files; both experts of a base hold the same names."""
    try:
        yield
    except NumericError as error:
        text = f"{path}: {error.message}"
        raise NumericError(text, hint=error.hint, path=str(path), **error.facts) from error


def _read_all(path: Path, base: int, content: memoryview, offset: int) -> None:
    done = 0
    while done < len(content):
        with reading(path):
            got = os.preadv(base, [content[done:]], offset + done)
        if got == 0:
            raise changed(path)
        done += got


def _write_all(out: int, content: memoryview, offset: int) -> None:
    done = 0
    while done < len(content):
        done += os.pwrite(out, content[done:], offset + done)
