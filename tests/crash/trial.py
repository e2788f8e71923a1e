"""One cut: a merge that does not end as it should, what must hold after it, and the rerun that finishes."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fuselora import synth
from fuselora.check.folder import check
from fuselora.filenames import BESIDE, STAGE_NAME
from fuselora.marker import FILE_NAME, JOURNAL_NAME
from fuselora.output import claims
from tests.crash.nursery import Nursery, Run
from tests.crash.points import NEVER, Cut

SIZE = synth.tiny("wan2.2-t2v-a14b")
SHARD_BYTES = 100_000
SAYS = "Input/output error", "No space left on device"
Tree = dict[str, bytes]


@dataclass(frozen=True, slots=True)
class Setting:
    """What stands at OUT when a merge begins, and how it may replace that.

    ``old``: another fused checkpoint of ours, to be overwritten; ``partial``: what a killed run left;
    ``exchanges``: the system has renameat2; ``mounted``: OUT is a mount point.
    """

    name: str
    options: tuple[str, ...] = ()
    old: bool = False
    partial: bool = False
    exchanges: bool = True
    mounted: bool = False


NEW = Setting("new")
OVERWRITE = Setting("overwrite", ("--overwrite",), old=True)
SETTINGS = (
    NEW,
    OVERWRITE,
    Setting("rerun", partial=True),
    Setting("two-steps", ("--overwrite",), old=True, exchanges=False),
    Setting("hard-links", ("--assets", "hardlink")),
    Setting("symlinks", ("--assets", "symlink", "--overwrite"), old=True),
    Setting("volume", mounted=True),
    Setting("volume-overwrite", ("--overwrite",), old=True, mounted=True),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a cut run ended, what OUT was then, and how many shards its rerun kept."""

    status: int
    out: str
    kept: int


class Scene:
    """A sharded pair with side files, a LoRA for each expert, and what undisturbed merges make of them."""

    def __init__(self, folder: Path, nursery: Nursery) -> None:
        self.folder, self.nursery = folder, nursery
        self._whole: dict[Setting, tuple[Run, Tree]] = {}
        self.base = synth.write_pipeline(
            folder / "base", SIZE, experts=True, dtype="BF16", mixed=True, shard_bytes=SHARD_BYTES
        )
        self.high, self.low = (
            synth.write_lora(folder / f"{name}.safetensors", SIZE, style="lightning", rank=4, seed=seed)
            for name, seed in (("high", 2), ("low", 3))
        )
        nursery.warm(["plan", *self.argv(folder / "unused")[1:]])
        self.old = self._merged(folder / "old", strength=0.5)
        self.old_tree = contents(self.old)
        self.partial = self._cut_off(folder / "cut")
        self.inputs = self._inputs()

    def argv(self, out: Path, *options: str, strength: float = 1) -> list[str]:
        loras = (f"transformer={self.high}:{strength}", f"transformer_2={self.low}:{strength}")
        return ["merge", "--base", str(self.base), *(f"--lora={lora}" for lora in loras),
                "--out", str(out), "--json", *options]  # fmt: skip

    def begin(self, out: Path, setting: Setting) -> None:
        """Puts what ``setting`` says at ``out``."""
        out.parent.mkdir(parents=True)
        if setting.old:
            shutil.copytree(self.old, out)
        elif setting.mounted:
            out.mkdir()
        if setting.partial:
            shutil.copytree(self.partial, out.with_name("out.partial"))

    def run(self, out: Path, setting: Setting, cut: Cut = NEVER, *, after: tuple[int, float] = (0, 0)) -> Run:
        return self.nursery.run(
            self.argv(out, *setting.options),
            cut,
            signal=after[0],
            after=after[1],
            exchanges=setting.exchanges,
            mounted=setting.mounted,
        )

    def undisturbed(self, setting: Setting) -> tuple[Run, Tree]:
        """A whole run, and the files that it makes; made once."""
        if setting not in self._whole:
            self._whole[setting] = self._made(setting)
        return self._whole[setting]

    def _made(self, setting: Setting) -> tuple[Run, Tree]:
        out = self.folder / f"whole-{setting.name}" / "out"
        self.begin(out, setting)
        run = self.run(out, setting)
        assert run.status == 0, run.errors
        _require_sound(out)
        return run, contents(out)

    def require_untouched(self) -> None:
        """Base and LoRAs have the bytes and times that they had."""
        assert self._inputs() == self.inputs, "an input was changed"

    def _inputs(self) -> dict[str, tuple[bytes, int]]:
        files = [path for path in sorted(self.base.rglob("*")) if path.is_file()]
        paths = (*files, self.high, self.low)
        return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}

    def _merged(self, out: Path, *, strength: float) -> Path:
        run = self.nursery.run(self.argv(out, strength=strength))
        assert run.status == 0, run.errors
        return out

    def _cut_off(self, folder: Path) -> Path:
        """A partial run with half of its shards finished and the next one begun."""
        points = self.nursery.run(self.argv(folder / "whole")).points
        recorded = [p.number for p in points if p.name == "fsync" and p.path.endswith(JOURNAL_NAME)]
        after = [p.number for p in points if p.name == "pwrite" and p.number > recorded[len(recorded) // 2]]
        self.nursery.run(self.argv(folder / "out"), Cut(after[0], signal=signal.SIGKILL))
        return folder / "out.partial"


@dataclass(frozen=True, slots=True)
class Trial:
    """Cuts of one setting, each in a folder of its own."""

    scene: Scene
    setting: Setting
    whole: Tree

    def cut(self, folder: Path, cut: Cut = NEVER, *, after: tuple[int, float] = (0, 0)) -> Outcome:
        """Raises ``AssertionError`` with what does not hold."""
        out = folder / "out"
        self.scene.begin(out, self.setting)
        run = self.scene.run(out, self.setting, cut, after=after)
        _require_expected_end(run, cut, after[0])
        found = self._found(out)
        if run.status == 0:
            assert found == "new", f"ended well, and OUT is {found}"
        self._require_message(run, cut, out, found)
        kept = self._finish(out, found)
        shutil.rmtree(folder)
        return Outcome(run.status, found, kept)

    def _found(self, out: Path) -> str:
        """What OUT is: absent, or the whole old or new one; and nothing else was touched."""
        self.scene.require_untouched()
        beside = {path.name for path in out.parent.iterdir()}
        allowed = {"out", "out.partial", "out.partial.lock", *({} if self.setting.exchanges else {"out.old"})}
        assert beside <= allowed, f"{beside - allowed} lie beside OUT"
        if not (out / FILE_NAME).exists() and (self.setting.mounted or not out.exists()):
            return "absent"
        found = contents(out)
        if not self.setting.exchanges or self.setting.mounted:
            found.pop(JOURNAL_NAME, None)
        _require_sound(out)
        if found == self.whole:
            return "new"
        assert self.setting.old, f"OUT is not whole: {_differ(found, self.whole)}"
        assert found == self.scene.old_tree, f"OUT is neither whole: {_differ(found, self.whole)}"
        return "old"

    def _require_message(self, run: Run, cut: Cut, out: Path, found: str) -> None:
        """A failure says what failed, and whether a rerun goes on."""
        if not cut.error or run.status == 0:
            return
        assert any(says in run.errors for says in SAYS), run.errors
        if cut.lasting:
            return  # then nothing can be put back or removed
        keeps = "run the same command again to go on" in run.errors
        assert (found == "new") == ("is complete" in run.errors), run.errors
        finished = self._finished(out, found)
        # before the lock is taken, an earlier run's shards are nobody's to speak of
        assert keeps == bool(finished) or self.setting.partial, f"finished are {finished}: {run.errors}"

    def _stage(self, out: Path) -> Path:
        return out / STAGE_NAME if self.setting.mounted else out.with_name("out.partial")

    def _finished(self, out: Path, found: str) -> list[str]:
        """The shards that the journal calls finished; on its way into a mount point it is in OUT."""
        moving = self.setting.mounted and (out / JOURNAL_NAME).exists()
        if moving and found == "new":
            return []
        at = out if moving else self._stage(out)
        return [str(line["path"]) for line in claims.journal_lines(at)[1:]]

    def _finish(self, out: Path, found: str) -> int:
        """The same command again, undisturbed; the number of shards that it kept."""
        finished = self._finished(out, found)
        run = self.scene.run(out, self.setting)
        if found == "new" and "--overwrite" not in self.setting.options:
            assert run.status == 1, f"a whole OUT was written again: {run.errors}"
            assert "exists and holds a fused checkpoint" in run.errors, run.errors
            assert self._found(out) == "new", "a refusal changed OUT"
            return 0
        assert run.status == 0, f"the rerun failed: {run.errors}"
        assert contents(out) == self.whole, f"the rerun: {_differ(contents(out), self.whole)}"
        _require_sound(out)
        beside = [path.name for path in out.parent.iterdir()]
        assert beside == ["out"], f"the rerun left {beside}"
        self.scene.require_untouched()
        assert sorted(run.kept) == sorted(finished), f"kept {run.kept}; finished were {finished}"
        again = {str(self._stage(out) / path) for path in finished} & run.opened()
        assert not again, f"{again} were finished, and written again"
        return len(run.kept)


def contents(folder: Path) -> Tree:
    """Every file, and where each link leads; not what may lie beside the files of a mount point."""
    return dict(_contents(folder, folder))


def _contents(root: Path, folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(folder.iterdir()):
        if folder == root and path.name in BESIDE:
            continue
        if path.is_dir() and not path.is_symlink():
            yield from _contents(root, path)
        else:
            link = b"-> " + bytes(path.readlink()) if path.is_symlink() else b""
            yield path.relative_to(root).as_posix(), link + path.read_bytes()


def _require_sound(out: Path) -> None:
    report = check(out, digest=True)
    assert report.marker is not None, f"{out} has no valid marker"
    assert not report.findings, f"{out}: {report.findings}"


def _require_expected_end(run: Run, cut: Cut, sent: int) -> None:
    number = cut.signal or sent
    ends = {0, 1} if cut.error else {0, -number} if number != signal.SIGINT else {0, 130}
    assert run.status in ends, f"ended with {run.status}: {run.errors}"
    assert "Traceback" not in run.errors, run.errors


def _differ(found: Tree, wanted: Tree) -> str:
    names = {name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name)}
    return f"{sorted(names)} differ"
