"""One output file: right bytes in few buffers, and every way in which reading or writing can fail."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

import fuselora
from fuselora.engine import stream
from fuselora.engine.kernel import FLOAT32
from fuselora.engine.stream import READ_AHEAD, WRITE_BEHIND, WrittenFile, buffer_bytes, pieces, write_file
from fuselora.errors import ChangedError, NumericError, OutputError, ReadError
from fuselora.planning import Copy, Fuse, OutputFile
from tests.engine.watch import CountingPool, Limited, watched
from tests.small import lora, noise, pair, planned, tree, write

if TYPE_CHECKING:
    from collections.abc import Callable

_watched = pytest.fixture(autouse=True)(watched)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many pieces for a small file, and a disk that need not turn."""
    monkeypatch.setattr("fuselora.planning.CHUNK_ELEMENTS", 64 * 32)
    monkeypatch.setattr("fuselora.engine.stream.COPY_BYTES", 1000)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


class Case:
    """A base of copied, fused and copied tensors, a LoRA for the one in the middle, and their plan."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.tensors = {
            "a.weight": noise(50, 30, seed=1),
            "m.weight": noise(400, 32, seed=2),
            "m.bias": noise(400, seed=3),
            "z.weight": noise(70, 30, seed=4).bfloat16(),
        }
        self.folder = folder
        self.base = write(folder / "base.safetensors", self.tensors, pad=72)
        parts = {**pair("m", noise(400, 4, seed=5), noise(4, 32, seed=6)), "m.diff_b": noise(400, seed=7)}
        self.lora = lora(folder / "lora.safetensors", parts)
        self.plan = planned(self.base, [self.lora], **options)
        (self.file,) = self.plan.files
        self.out = folder / "written"

    def write(
        self, advance: Callable[[int], None] = lambda done: None, *, digest: bool = True
    ) -> WrittenFile:
        return write_file(self.file, self.out, FLOAT32, digest=digest, advance=advance)

    def merge(self, **options: Any) -> None:
        fuselora.merge(self.base, [str(self.lora)], self.folder / "out", **options)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def once(act: Callable[[], object], after: int = 1) -> Callable[[int], None]:
    """An ``advance`` that acts at its ``after``-th call: mid-run, in the thread that reports progress."""
    calls = iter(range(1, 1 << 30))

    def advance(done: int) -> None:
        if next(calls) == after:
            act()

    return advance


def raising(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


# what is written


def test_the_file_holds_what_was_planned(case: Case) -> None:
    written = case.write()
    content = case.out.read_bytes()
    found = load_file(case.out)
    assert len(content) == case.file.n_bytes
    assert content.startswith(case.file.header)
    for name in ("a.weight", "z.weight"):
        assert torch.equal(found[name], case.tensors[name])
    parts = load_file(case.lora)
    delta = parts["m.lora_up.weight"].double() @ parts["m.lora_down.weight"].double()
    assert torch.allclose(found["m.weight"].double(), case.tensors["m.weight"].double() + delta, atol=1e-5)
    assert torch.allclose(found["m.bias"], case.tensors["m.bias"] + parts["m.diff_b"], atol=1e-6)
    assert written.sha256 == hashlib.sha256(content).hexdigest()
    assert written.base_sha256 == hashlib.sha256(case.base.read_bytes()).hexdigest()
    assert written.base_status.st_ino == case.base.stat().st_ino


def test_many_pieces_were_moved(case: Case) -> None:
    """The other tests here mean something: there is more than the buffers hold at once."""
    found = list(pieces(case.file))
    assert sum(piece.step is None for piece in found) > READ_AHEAD + WRITE_BEHIND
    assert sum(piece.step is not None for piece in found) > READ_AHEAD
    assert sum(piece.out_bytes for piece in found) + len(case.file.header) == case.file.n_bytes


def test_no_digest_takes_none_and_writes_the_same(case: Case) -> None:
    case.write()
    with_digest = case.out.read_bytes()
    written = case.write(digest=False)
    assert (written.sha256, written.base_sha256) == (None, None)
    assert case.out.read_bytes() == with_digest


def test_a_reordered_file_has_the_bases_digest_too(tmp_path: Path) -> None:
    tensors = {"odd.weight": noise(1, 1), "s": torch.arange(5), "m.weight": noise(130, 32)}
    base = write(tmp_path / "base.safetensors", tensors)
    one = lora(tmp_path / "l.safetensors", pair("m", noise(130, 1), noise(1, 32)))
    (file,) = planned(base, [one], dtype="bfloat16").files
    assert not file.in_base_order
    written = write_file(file, tmp_path / "out", FLOAT32, digest=True, advance=lambda done: None)
    assert written.base_sha256 == hashlib.sha256(base.read_bytes()).hexdigest()
    assert written.sha256 == hashlib.sha256((tmp_path / "out").read_bytes()).hexdigest()


def test_progress_adds_up_to_the_file(case: Case) -> None:
    done: list[int] = []
    case.write(done.append)
    assert sum(done) == case.file.n_bytes
    assert min(done) > 0


def test_a_longer_file_of_an_earlier_try_is_replaced(case: Case) -> None:
    case.out.write_bytes(b"\xff" * (case.file.n_bytes + 999))
    case.write()
    assert case.out.stat().st_size == case.file.n_bytes
    assert load_file(case.out).keys() == case.tensors.keys()


def test_permissions_follow_the_base_without_execution(case: Case) -> None:
    case.base.chmod(0o750)
    case.write()
    assert case.out.stat().st_mode & 0o777 == 0o640


def test_a_file_of_nothing_but_a_header(tmp_path: Path) -> None:
    base = write(tmp_path / "base.safetensors", {"none": torch.zeros(0), "a.weight": noise(2, 2)})
    one = lora(tmp_path / "l.safetensors", pair("a", noise(2, 1), noise(1, 2)))
    (file,) = planned(base, [one]).files
    empty = OutputFile(file.path, file.base, file.header, (), len(file.header), 0, 0, True)
    assert buffer_bytes(empty) == (0, 0)
    write_file(empty, tmp_path / "out", FLOAT32, digest=True, advance=lambda done: None)
    assert (tmp_path / "out").read_bytes() == file.header


# buffers


@pytest.mark.parametrize("digest", [True, False])
def test_buffers_are_few_and_all_come_back(case: Case, monkeypatch: pytest.MonkeyPatch, digest: bool) -> None:
    monkeypatch.setattr(CountingPool, "made", [])
    monkeypatch.setattr(stream, "Pool", CountingPool)
    case.write(digest=digest)
    reads, writes = CountingPool.made
    assert (reads.n_buffers, writes.n_buffers) == (READ_AHEAD, WRITE_BEHIND)
    assert (reads.n_bytes, writes.n_bytes) == buffer_bytes(case.file)
    assert 1 <= reads.most <= READ_AHEAD
    assert 1 <= writes.most <= WRITE_BEHIND
    assert (reads.taken, writes.taken) == (0, 0)


def test_a_slow_disk_holds_the_reader_back(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read beyond the buffers while the first write has not ended."""
    gate, reads = threading.Event(), Limited(os.preadv)
    pwrite: Any = os.pwrite

    def slow(descriptor: int, content: memoryview, offset: int) -> int:
        if offset and not gate.is_set():
            gate.wait(0.3)
            assert reads.made <= 1 + READ_AHEAD
            gate.set()
        done: int = pwrite(descriptor, content, offset)
        return done

    monkeypatch.setattr(os, "preadv", reads)
    monkeypatch.setattr(os, "pwrite", slow)
    case.write()
    assert gate.is_set()
    assert reads.made > 1 + READ_AHEAD


def test_a_system_that_moves_few_bytes_at_a_time(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    case.write()
    wanted = case.out.read_bytes()
    preadv, pwrite = os.preadv, os.pwrite
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:333]], at))
    monkeypatch.setattr(os, "pwrite", lambda fd, content, at: pwrite(fd, content[:77], at))
    written = case.write()
    assert case.out.read_bytes() == wanted
    assert written.sha256 == hashlib.sha256(wanted).hexdigest()


# inputs that change


def touch(path: Path) -> None:
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def grow(path: Path) -> None:
    with path.open("ab") as stream:
        stream.write(b"x")


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 3)


@pytest.mark.parametrize("edit", [touch, grow, cut])
@pytest.mark.parametrize("after", [1, 4])
def test_a_base_that_changes_while_it_is_read(case: Case, edit: Callable[[Path], None], after: int) -> None:
    with pytest.raises(ChangedError, match=r"base\.safetensors: was changed while it was read") as caught:
        case.write(once(lambda: edit(case.base), after))
    assert caught.value.facts["path"] == str(case.base)


def test_a_base_that_changed_after_the_plan(case: Case) -> None:
    write(case.base, {**case.tensors, "a.weight": case.tensors["a.weight"].view(30, 50)}, pad=72)
    with pytest.raises(ChangedError, match=r"base\.safetensors"):
        case.write()


def test_a_base_that_shrank_below_its_header(case: Case) -> None:
    os.truncate(case.base, 20)
    with pytest.raises(ChangedError, match=r"base\.safetensors"):
        case.write()


def test_a_base_that_is_gone(case: Case) -> None:
    case.base.unlink()
    with pytest.raises(ReadError, match=r"base\.safetensors: cannot be read: No such file"):
        case.write()


@pytest.mark.parametrize("edit", [touch, grow, cut])
def test_a_lora_that_changes_during_a_merge(tmp_path: Path, edit: Callable[[Path], None]) -> None:
    """The marker must not name a content that was not what was added."""
    case = Case(tmp_path)
    before = set(tree(tmp_path))
    progress = Acting({"fuse": once(lambda: edit(case.lora))})
    with pytest.raises(ChangedError, match=r"lora\.safetensors: was changed") as caught:
        case.merge(progress=progress)
    assert caught.value.facts["path"] == str(case.lora)
    assert set(tree(tmp_path)) == before


def test_a_lora_that_is_replaced_during_a_merge(tmp_path: Path) -> None:
    case = Case(tmp_path)
    other = lora(tmp_path / "other.safetensors", {k: v + 1 for k, v in load_file(case.lora).items()})
    with pytest.raises(ChangedError, match=r"lora\.safetensors: was changed"):
        case.merge(progress=Acting({"fuse": once(lambda: other.replace(case.lora))}))
    assert not (tmp_path / "out").exists()


class Acting:
    """Progress that does something at the bytes of a phase."""

    def __init__(self, acts: dict[str, Callable[[int], None]]) -> None:
        self._acts = acts

    def phase(self, name: str, n_bytes: int) -> Any:
        from contextlib import nullcontext

        del n_bytes
        return nullcontext(self._acts.get(name, lambda done: None))


# a system that refuses


def fails(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize("calls", [0, 1, 5])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_write_that_fails(case: Case, monkeypatch: pytest.MonkeyPatch, calls: int, number: int) -> None:
    monkeypatch.setattr(os, "pwrite", Limited(os.pwrite, calls=calls, error=fails(number)))
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        case.write()
    assert caught.value.errno == number


@pytest.mark.parametrize("calls", [0, 1, 5])
def test_a_read_that_fails_is_about_the_base(case: Case, monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    monkeypatch.setattr(os, "preadv", Limited(os.preadv, calls=calls, error=fails(errno.EIO)))
    with pytest.raises(ReadError, match=r"base\.safetensors: cannot be read: Input/output error"):
        case.write()


@pytest.mark.parametrize("name", ["base_hash", "out_hash"])
def test_a_hasher_that_fails(case: Case, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    class Broken:
        def __init__(self) -> None:
            self.calls = 0

        def update(self, content: object) -> None:
            del content
            self.calls += 1
            if self.calls > 3:
                raise MemoryError

    init = stream._Run.__init__

    def patched(self: Any, *arguments: Any) -> None:
        init(self, *arguments)
        setattr(self, f"_{name}", Broken())

    monkeypatch.setattr(stream._Run, "__init__", patched)
    with pytest.raises(MemoryError):
        case.write()


def test_a_full_disk_is_met_before_the_work(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, n_bytes: int) -> None:
        assert (offset, n_bytes) == (0, case.file.n_bytes)
        raise fails(errno.ENOSPC)

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(os, "preadv", Limited(os.preadv, calls=0, error=fails(errno.EIO)))
    with pytest.raises(OSError, match="No space left") as caught:
        case.write()
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize("number", sorted(stream.NO_FALLOCATE))
def test_a_file_system_that_cannot_reserve(case: Case, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(descriptor: int, offset: int, n_bytes: int) -> None:
        raise fails(number)

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    case.write()
    assert case.out.stat().st_size == case.file.n_bytes


def test_a_system_without_fallocate(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    case.write()
    assert case.out.stat().st_size == case.file.n_bytes


@pytest.mark.parametrize("call", ["pwrite", "posix_fallocate"])
def test_a_merge_on_a_full_disk_says_what_it_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    case = Case(tmp_path)
    calls = 3 if call == "pwrite" else 0
    monkeypatch.setattr(os, call, Limited(getattr(os, call), calls=calls, error=fails(errno.ENOSPC)))
    with pytest.raises(OutputError, match=r"base\.safetensors: cannot be written: No space left") as caught:
        case.merge()
    facts = caught.value.facts
    assert facts["needed"] == case.file.n_bytes
    assert isinstance(facts["available"], int)
    assert facts["available"] > 0
    assert facts["errno"] == "ENOSPC"
    assert f"{case.file.n_bytes} bytes to write" in caught.value.message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("refusal", [OutputError, ReadError])
def test_a_rerun_after_the_system_recovered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: type[OutputError | ReadError]
) -> None:
    case = Case(tmp_path)
    call = "pwrite" if refusal is OutputError else "preadv"
    with monkeypatch.context() as patched:
        patched.setattr(os, call, Limited(getattr(os, call), calls=3, error=fails(errno.EIO)))
        with pytest.raises(refusal) as caught:
            case.merge()
    assert "out.partial" in (caught.value.hint or "")
    case.merge()
    assert (tmp_path / "out" / "fused.json").is_file()
    assert not (tmp_path / "out.partial").exists()


# results that do not fit


def test_a_result_that_is_not_finite_leaves_nothing_behind(tmp_path: Path) -> None:
    case = Case(tmp_path)
    huge = torch.zeros(400, 32)
    huge[399, 31] = 3e38
    one = lora(tmp_path / "huge.safetensors", {"m.diff": huge})
    before = tree(tmp_path)
    with pytest.raises(
        NumericError, match=r"base\.safetensors: m\.weight: the fused tensor is not fin"
    ) as caught:
        fuselora.merge(case.base, [f"{one}:4"], tmp_path / "out")
    assert caught.value.facts["tensor"] == "m.weight"
    assert tree(tmp_path) == before


# interruptions


@pytest.mark.parametrize("after", [1, 2, 9])
def test_an_interrupt_while_progress_is_told(case: Case, after: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        case.write(once(raising(KeyboardInterrupt()), after))


def test_an_interrupt_from_the_terminal(case: Case) -> None:
    """Delivered to the main thread wherever it waits, while the writer stands still."""
    hold = threading.Event()

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        hold.wait(0.5)

    with pytest.raises(KeyboardInterrupt):
        case.write(once(interrupt, 3))


def test_an_interrupt_while_the_last_write_is_awaited(case: Case) -> None:
    n_calls = sum(1 for _ in pieces(case.file)) + 1  # the header too
    hold = threading.Event()

    def interrupt() -> None:
        hold.wait(0.3)
        os.kill(os.getpid(), signal.SIGINT)
        hold.wait(0.3)

    with pytest.raises(KeyboardInterrupt):
        case.write(once(interrupt, n_calls))


def test_a_merge_that_was_interrupted_can_be_run_again(tmp_path: Path) -> None:
    case = Case(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        case.merge(progress=Acting({"fuse": once(raising(KeyboardInterrupt()), 5)}))
    assert not (tmp_path / "out").exists()
    case.merge()
    plain = tree(tmp_path / "out")["base.safetensors"]
    fuselora.merge(case.base, [str(case.lora)], tmp_path / "again")
    assert tree(tmp_path / "again")["base.safetensors"] == plain


def test_an_error_of_the_progress_bar_is_not_swallowed(case: Case) -> None:
    with pytest.raises(ZeroDivisionError):
        case.write(once(lambda: 1 // 0, 4))


# cutting steps to pieces


def test_pieces_of_a_copy_and_of_a_fusion(case: Case) -> None:
    copy = next(step for step in case.file.steps if isinstance(step, Copy))
    cut_up = [
        piece
        for piece in pieces(case.file)
        if piece.step is None and piece.source < copy.source + copy.n_bytes
    ]
    assert [piece.n_bytes for piece in cut_up] == [1000] * (copy.n_bytes // 1000)
    assert cut_up[0].source == copy.source
    assert cut_up[-1].target + cut_up[-1].out_bytes == copy.target + copy.n_bytes
    fuse = next(step for step in case.file.steps if isinstance(step, Fuse))
    chunks = [piece for piece in pieces(case.file) if piece.step is fuse]
    assert tuple(piece.rows for piece in chunks) == fuse.chunks
    assert sum(piece.n_bytes for piece in chunks) == fuse.base_bytes
    assert sum(piece.out_bytes for piece in chunks) == fuse.n_bytes
