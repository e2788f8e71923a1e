"""One output file: right bytes in few buffers, and every way in which reading or writing can fail."""

from __future__ import annotations

import errno
import gc
import hashlib
import itertools
import os
import signal
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

import fuselora
from fuselora.engine import sink, stream
from fuselora.engine.blocks import blocks, buffer_bytes
from fuselora.engine.kernel import BF16, FLOAT32, Kernels, Loaded
from fuselora.engine.means import Means
from fuselora.engine.sink import NO_FALLOCATE, Sink
from fuselora.engine.stream import WrittenFile, write_file
from fuselora.errors import ChangedError, NumericError, OutputError, ReadError
from fuselora.planning import OutputFile
from fuselora.steps import Fuse
from tests.engine.watch import CountingPool, Disk, Gauge, Limited, watched
from tests.small import lora, noise, pair, planned, tree, write

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

_watched = pytest.fixture(autouse=True)(watched)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks for a small file, none of it in the page cache, and a disk that need not turn."""
    monkeypatch.setattr("fuselora.steps.CHUNK_ELEMENTS", 64 * 32)
    monkeypatch.setattr("fuselora.engine.blocks.BLOCK_BYTES", 1000)
    monkeypatch.setattr("fuselora.engine.source.NOWAIT", None)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


BOTH = Kernels((BF16, FLOAT32))


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
        self.out = folder / "written"
        self.planned_again(**options)

    def planned_again(self, **options: Any) -> None:
        self.plan = planned(self.base, [self.lora], **options)
        (self.file,) = self.plan.files

    def write(
        self,
        advance: Callable[[int], None] = lambda done: None,
        *,
        jobs: int = 2,
        digest: bool = True,
        direct: bool = True,
    ) -> WrittenFile:
        return write_file(self.file, self.out, Means(BOTH, jobs, digest, direct), advance=advance)

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


def test_many_blocks_were_moved(case: Case) -> None:
    """The other tests here mean something: there is more than the buffers hold at once."""
    found = list(blocks(case.file))
    assert len(found) > 2 * Means(BOTH, 2).n_buffers
    assert sum(part.step is not None for block in found for part in block.parts) > 6
    assert sum(block.out_bytes for block in found) + len(case.file.header) == case.file.n_bytes
    assert all(block.in_place for block in found)


def test_threads_and_buffers_by_jobs() -> None:
    found = [(means.workers, means.n_buffers) for means in (Means(BOTH, jobs) for jobs in (0, 1, 2, 8, 99))]
    assert found == [(1, 7), (1, 7), (2, 8), (8, 14), (8, 14)]


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
    written = write_file(file, tmp_path / "out", Means(BOTH, 2), advance=lambda done: None)
    assert written.base_sha256 == hashlib.sha256(base.read_bytes()).hexdigest()
    assert written.sha256 == hashlib.sha256((tmp_path / "out").read_bytes()).hexdigest()


def test_another_file_in_the_place_of_a_reordered_base(tmp_path: Path) -> None:
    """Its digest is taken at the end, and the marker would name the path that holds the other one now."""
    tensors = {"odd.weight": noise(1, 1), "s": torch.arange(5), "m.weight": noise(130, 32)}
    base = write(tmp_path / "base.safetensors", tensors)
    one = lora(tmp_path / "l.safetensors", pair("m", noise(130, 1), noise(1, 32)))
    (file,) = planned(base, [one], dtype="bfloat16").files

    def replaced(done: int) -> None:
        del done
        if base.exists():
            base.rename(tmp_path / "moved")
            base.write_bytes(b"another")

    with pytest.raises(ChangedError, match=r"base\.safetensors: was changed"):
        write_file(file, tmp_path / "out", Means(BOTH, 2), advance=replaced)
    assert base.read_bytes() == b"another"


def test_no_factor_is_left_by_a_file_that_ends_with_a_fused_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the garbage collector, which need not run between two files."""
    loaded: list[weakref.ref[Loaded]] = []
    load = Kernels.load

    def noted(kernels: Kernels, step: Fuse) -> Loaded:
        found = load(kernels, step)
        loaded.append(weakref.ref(found))
        return found

    monkeypatch.setattr(Kernels, "load", noted)
    base = write(tmp_path / "base.safetensors", {"m.weight": noise(400, 32)})
    one = lora(tmp_path / "l.safetensors", pair("m", noise(400, 4), noise(4, 32)))
    (file,) = planned(base, [one]).files
    gc.disable()
    try:
        write_file(file, tmp_path / "out", Means(BOTH, 2), advance=lambda done: None)
        assert loaded
        assert not any(found() for found in loaded)
    finally:
        gc.enable()


def test_progress_adds_up_to_the_file(case: Case) -> None:
    done: list[int] = []
    case.write(done.append)
    assert sum(done) == case.file.n_bytes
    assert min(done) > 0
    assert max(done[1:]) == max(block.out_bytes for block in blocks(case.file))


def test_progress_is_told_by_one_thread_at_a_time(case: Case) -> None:
    """Several write; what is told need not be safe for that."""
    gauge = Gauge()
    names: set[str] = set()

    def advance(done: int) -> None:
        with gauge.passed():
            names.add(threading.current_thread().name)
            threading.Event().wait(0.003)

    case.write(advance, jobs=4)
    assert gauge.most == 1
    assert {"write-0", "write-1"} < names


def test_a_longer_file_of_an_earlier_try_is_replaced(case: Case) -> None:
    case.out.write_bytes(b"\xff" * (case.file.n_bytes + 999))
    case.write()
    assert case.out.stat().st_size == case.file.n_bytes
    assert load_file(case.out).keys() == case.tensors.keys()


def test_permissions_follow_the_base_without_execution(case: Case) -> None:
    case.base.chmod(0o750)
    case.planned_again()
    case.write()
    assert case.out.stat().st_mode & 0o777 == 0o640


def test_a_file_of_nothing_but_a_header(tmp_path: Path) -> None:
    base = write(tmp_path / "base.safetensors", {"none": torch.zeros(0), "a.weight": noise(2, 2)})
    one = lora(tmp_path / "l.safetensors", pair("a", noise(2, 1), noise(1, 2)))
    (file,) = planned(base, [one]).files
    empty = OutputFile(file.path, file.base, file.header, (), len(file.header), 0, 0, True)
    assert buffer_bytes(blocks(empty)) == (0, 0)
    write_file(empty, tmp_path / "out", Means(BOTH, 2), advance=lambda done: None)
    assert (tmp_path / "out").read_bytes() == file.header


# buffers


@pytest.mark.parametrize("dtype", ["keep", "bfloat16"])
@pytest.mark.parametrize(("digest", "jobs"), [(True, 1), (True, 3), (False, 2)])
def test_buffers_are_few_and_all_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digest: bool, jobs: int, dtype: str
) -> None:
    case = Case(tmp_path, dtype=dtype)
    monkeypatch.setattr(CountingPool, "made", [])
    monkeypatch.setattr(stream, "Pool", CountingPool)
    case.write(digest=digest, jobs=jobs)
    reads, writes = CountingPool.made
    n_buffers = Means(BOTH, jobs).n_buffers
    assert reads.n_buffers == writes.n_buffers == n_buffers
    assert (reads.n_bytes, writes.n_bytes) == buffer_bytes(blocks(case.file))
    assert 1 <= reads.most <= n_buffers
    assert (0 if dtype == "keep" else 1) <= writes.most <= (0 if dtype == "keep" else n_buffers)
    assert (reads.taken, writes.taken) == (0, 0)


@pytest.mark.parametrize("dtype", ["keep", "bfloat16"])
def test_a_slow_disk_holds_the_reader_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """Nothing is read beyond the buffers while the first block has not been written."""
    case = Case(tmp_path, dtype=dtype)
    n_buffers = Means(BOTH, 2).n_buffers
    gate, reads = threading.Event(), Limited(os.preadv)
    write = Sink.write

    def slow(sink: Sink, segment: Any) -> None:
        if segment.offset and not gate.is_set():
            gate.wait(0.3)
            assert gate.is_set() or reads.made <= 1 + n_buffers
            gate.set()
        write(sink, segment)

    monkeypatch.setattr(os, "preadv", reads)
    monkeypatch.setattr(Sink, "write", slow)
    case.write()
    assert gate.is_set()
    assert reads.made > 1 + n_buffers


@pytest.mark.parametrize("most", [333, 512, 4096])
def test_a_system_that_moves_few_bytes_at_a_time(
    case: Case, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    case.write()
    wanted = case.out.read_bytes()
    disk = Disk(monkeypatch, most=most)
    written = case.write()
    assert case.out.read_bytes() == wanted
    assert written.sha256 == hashlib.sha256(wanted).hexdigest()
    assert disk.opened == {}


def test_factors_are_read_once_for_a_tensor_of_many_blocks(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    load = Kernels.load

    def noting(kernels: Kernels, step: Any) -> Loaded:
        loaded.append(step.base_key)
        return load(kernels, step)

    monkeypatch.setattr(Kernels, "load", noting)
    case.write()
    assert sorted(loaded) == ["m.bias", "m.weight"]


# threads


def watch_work(monkeypatch: pytest.MonkeyPatch, gauge: Gauge) -> None:
    """Sees everything that takes a core: loading, computing, copying and both digests."""
    init, compute_part, load = stream._Run.__init__, stream._Run._compute_part, Kernels.load

    class Watched:
        def __init__(self, real: Any) -> None:
            self._real = real

        def update(self, content: Any) -> None:
            with gauge.passed():
                threading.Event().wait(0.001)
                self._real.update(content)

        def hexdigest(self) -> str:
            found: str = self._real.hexdigest()
            return found

    def patched(run: Any, *arguments: Any) -> None:
        init(run, *arguments)
        run._base_hash, run._out_hash = Watched(run._base_hash), Watched(run._out_hash)

    def computed(run: Any, *arguments: Any) -> None:
        with gauge.passed():
            threading.Event().wait(0.001)
            compute_part(run, *arguments)

    def loaded(kernels: Kernels, step: Any) -> Loaded:
        with gauge.passed():
            threading.Event().wait(0.001)
            return load(kernels, step)

    monkeypatch.setattr(stream._Run, "__init__", patched)
    monkeypatch.setattr(stream._Run, "_compute_part", computed)
    monkeypatch.setattr(Kernels, "load", loaded)


@pytest.mark.parametrize("dtype", ["keep", "bfloat16"])
@pytest.mark.parametrize("jobs", [1, 2, 3])
def test_no_more_threads_work_at_once_than_there_are_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int, dtype: str
) -> None:
    gauge = Gauge()
    case = Case(tmp_path, dtype=dtype)
    watch_work(monkeypatch, gauge)
    case.write(jobs=jobs)
    assert 1 <= gauge.most <= jobs


@pytest.mark.parametrize("jobs", [2, 3, 5])
def test_as_many_blocks_are_computed_at_once_as_there_are_jobs(
    case: Case, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    """Each of the first ones waits for the others: with fewer at once the barrier would break."""
    barrier, calls = threading.Barrier(jobs), itertools.count()
    compute_part = stream._Run._compute_part

    def computed(run: Any, *arguments: Any) -> None:
        if next(calls) < jobs:
            barrier.wait(60)
        compute_part(run, *arguments)

    monkeypatch.setattr(stream._Run, "_compute_part", computed)
    case.write(jobs=jobs, digest=False)
    assert not barrier.broken


@pytest.mark.parametrize("jobs", [1, 4, None])
def test_torch_computes_on_one_thread_in_every_lane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int | None
) -> None:
    found: list[int] = []
    fuse, load = Loaded.fuse, Kernels.load

    def fused(loaded: Loaded, *arguments: Any) -> Any:
        found.append(torch.get_num_threads())
        return fuse(loaded, *arguments)

    def loading(kernels: Kernels, step: Any) -> Loaded:
        found.append(torch.get_num_threads())
        return load(kernels, step)

    monkeypatch.setattr(Loaded, "fuse", fused)
    monkeypatch.setattr(Kernels, "load", loading)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        Case(tmp_path).merge(jobs=jobs)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert len(found) > 5
    assert set(found) == {1}


def test_the_base_is_hashed_before_results_take_its_place(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slow the digest is, and however quick everything else."""
    digest = stream._Run._digest_base

    def slowly(run: Any, slot: Any) -> None:
        threading.Event().wait(0.01)
        digest(run, slot)

    monkeypatch.setattr(stream._Run, "_digest_base", slowly)
    written = case.write(jobs=5)
    assert written.base_sha256 == hashlib.sha256(case.base.read_bytes()).hexdigest()
    assert written.sha256 == hashlib.sha256(case.out.read_bytes()).hexdigest()


LANES = ["_read", "_digest_base", "_load", "_compute", "_place", "_digest_out", "write"]


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "lane"), KeyboardInterrupt("lane"), MemoryError("lane")]
)
@pytest.mark.parametrize("calls", [1, 2, 11])
@pytest.mark.parametrize("name", LANES)
def test_a_lane_that_fails_while_others_wait_for_it(
    case: Case, monkeypatch: pytest.MonkeyPatch, name: str, calls: int, error: BaseException
) -> None:
    """The error comes out, every thread ends, and nothing is left open."""
    owner: Any = Sink if name == "write" else stream._Run
    act, made = getattr(owner, name), itertools.count(1)

    def failing(*arguments: Any) -> None:
        if next(made) == calls:
            raise error
        act(*arguments)

    monkeypatch.setattr(owner, name, failing)
    disk = Disk(monkeypatch)
    with pytest.raises(type(error), match="lane") as caught:
        case.write(jobs=3)
    assert caught.value is error
    assert disk.opened == {}


@pytest.mark.parametrize("n_buffers", [1, 2, 30])
@pytest.mark.parametrize("dtype", ["keep", "bfloat16"])
def test_any_number_of_buffers_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_buffers: int, dtype: str
) -> None:
    case = Case(tmp_path, dtype=dtype)
    case.write()
    wanted = case.out.read_bytes()
    monkeypatch.setattr("fuselora.engine.means.blocks_under_way", lambda jobs: n_buffers)
    written = case.write(jobs=3)
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
    def full(descriptor: int, n_bytes: int) -> None:
        assert n_bytes == case.file.n_bytes
        raise fails(errno.ENOSPC)

    monkeypatch.setattr("fuselora.engine.sink.claim", full)
    monkeypatch.setattr(os, "preadv", Limited(os.preadv, calls=0, error=fails(errno.EIO)))
    with pytest.raises(OSError, match="No space left") as caught:
        case.write()
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize("number", sorted(NO_FALLOCATE))
def test_a_file_system_that_cannot_reserve(case: Case, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(descriptor: int, n_bytes: int) -> None:
        raise fails(number)

    monkeypatch.setattr("fuselora.engine.sink.claim", refuse)
    case.write()
    assert case.out.stat().st_size == case.file.n_bytes


def test_a_system_without_fallocate(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuselora.engine.sink._fallocate", lambda: None)
    case.write()
    assert case.out.stat().st_size == case.file.n_bytes


@pytest.mark.parametrize(("module", "call"), [(os, "pwrite"), (sink, "claim")])
def test_a_merge_on_a_full_disk_says_what_it_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, call: str
) -> None:
    case = Case(tmp_path)
    calls = 3 if call == "pwrite" else 0
    monkeypatch.setattr(module, call, Limited(getattr(module, call), calls=calls, error=fails(errno.ENOSPC)))
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
    before = tree(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, call, Limited(getattr(os, call), calls=3, error=fails(errno.EIO)))
        with pytest.raises(refusal) as caught:
            case.merge()
    # no shard was finished: there is nothing to keep, nor to speak of
    assert "keeps what is finished" not in (caught.value.hint or "")
    assert tree(tmp_path) == before
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
    assert caught.value.facts == {"tensor": "m.weight", "path": str(case.base)}
    assert tree(tmp_path) == before


def beyond(folder: Path, tensors: dict[str, torch.Tensor], strength: float, **options: Any) -> NumericError:
    """What a merge into ``m.weight`` that cannot be finite says."""
    base = write(folder / "base.safetensors", tensors, pad=72)
    rows, columns = tensors["m.weight"].shape
    one = lora(folder / "l.safetensors", pair("m", torch.full((rows, 1), 10.0), torch.ones(1, columns)))
    with pytest.raises(NumericError, match=r"base\.safetensors: m\.weight: the fused tensor") as caught:
        fuselora.merge(base, [f"{one}:{strength}"], folder / "out", **options)
    return caught.value


ONES = torch.full((9,), -1)  # taken for floats, these bytes are NaN


@pytest.mark.parametrize("dtype", ["keep", "bfloat16"])
def test_a_sum_that_does_not_fit_is_told_from_a_base_that_is_broken(tmp_path: Path, dtype: str) -> None:
    """The base's bytes are gone from memory by then; those around the tensor say nothing about it."""
    whole = {"a.ids": ONES, "m.weight": noise(70, 9), "z.ids": ONES}
    said = beyond(tmp_path, whole, 1e38, dtype=dtype).message
    assert said.endswith(f"the sum does not fit {'F32' if dtype == 'keep' else 'BF16'}")


@pytest.mark.parametrize("dtype", ["keep", "bfloat16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [(0, 0), (69, 8)])
def test_a_base_that_is_not_finite_is_named(
    tmp_path: Path, dtype: str, value: float, place: tuple[int, int]
) -> None:
    weight = noise(70, 9)
    weight[place] = value
    said = beyond(tmp_path, {"m.weight": weight, "z.ids": ONES}, 1.0, dtype=dtype).message
    assert said.endswith("the base itself holds NaN or infinity there")


def test_a_large_base_is_looked_through_to_its_end(tmp_path: Path) -> None:
    weight = torch.zeros(1100, 1000).bfloat16()
    weight[1099, 999] = float("nan")
    assert "the base itself" in beyond(tmp_path, {"m.weight": torch.cat([weight] * 2)}, 1.0).message


def test_a_base_that_was_edited_since_it_was_planned_is_refused_at_once(case: Case) -> None:
    """Not when a shard of tens of gigabytes is written."""
    with case.base.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\1")
    told: list[int] = []
    with pytest.raises(ChangedError, match=r"base\.safetensors: was changed"):
        case.write(told.append)
    assert told == []


def test_a_base_that_is_gone_when_it_is_looked_through(case: Case) -> None:
    case.tensors["m.weight"][0, 0] = float("nan")
    write(case.base, case.tensors, pad=72)
    case.planned_again()
    with pytest.raises(ReadError, match=r"base\.safetensors: cannot be read: No such file") as caught:
        case.write(once(case.base.unlink))
    assert isinstance(caught.value.__cause__, OSError)


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
    n_calls = sum(1 for _ in blocks(case.file)) + 1  # the header too
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
