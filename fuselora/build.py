"""Carries a plan out: shards into the stage, then index, side files and marker, then one rename."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fuselora import marker
from fuselora.engine.kernel import Lost
from fuselora.engine.means import Means, choose_means
from fuselora.engine.settings import cpu_type, exact_settings
from fuselora.engine.stream import WrittenFile, write_file
from fuselora.errors import FuseloraError, Notice, OutputError, ReadError, ResourceError
from fuselora.header import check_unchanged
from fuselora.output import assets, claims, disk, journal, space, staging
from fuselora.output.index import encode_index
from fuselora.output.journal import BaseState, Entry, Journal, reusable
from fuselora.reading import real_path
from fuselora.record import Machine, SideRecord, WeightRecord, marker_document
from fuselora.side_files import survey

if TYPE_CHECKING:
    from datetime import datetime
    from pathlib import Path, PurePosixPath

    from fuselora.output.staging import Stage
    from fuselora.planning import FusePlan, OutputFile
    from fuselora.progress import Progress
    from fuselora.side_files import SideFile

Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Built:
    """A published folder: its marker, all notices, and the shards kept from an earlier, interrupted run."""

    out: Path
    marker: marker.Marker
    notices: tuple[Notice, ...]
    kept: tuple[str, ...]


def build(plan: FusePlan, stage: Stage, progress: Progress, created: datetime) -> Built:
    """Write and publish everything.

    After a failure that a rerun can finish, finished shards stay in the stage and the error says so; after
    a refusal, or where no shard is finished, nothing of it is left.
    """
    means = choose_means(plan.request, plan.fused_steps)
    identity = _identity(plan, means)
    with (
        staging.open_stage(stage) as opened,
        _kept_or_discarded(opened, identity, resumable=plan.request.digest),
    ):
        run = _Build(plan, opened, means, identity)
        side_files = run.side_files()
        n_side = sum(side.n_bytes for side in side_files)
        space.require(opened.folder, run.missing_bytes(n_side))
        phase = progress.phase("fuse", plan.bytes_out + n_side)
        with exact_settings(), phase as advance:
            return run.everything(side_files, advance, created)


@dataclass(frozen=True, slots=True)
class _Build:
    plan: FusePlan
    stage: Stage
    means: Means
    identity: str

    def everything(self, side_files: tuple[SideFile, ...], advance: Advance, created: datetime) -> Built:
        weights, lost, kept = self._shards(side_files, advance)
        self._check_loras()
        sides = [*self._indexes(), *self._edited(), *self._placed(side_files, advance)]
        notices = (*self.plan.notices, *self.means.notices, *_lost_notices(lost))
        document = marker_document(
            self.plan, weights, sides, _machine(self.plan, self.means), notices, created
        )
        content = marker.encode(document)
        disk.write_file(self.stage.place(marker.FILE_NAME), content)
        staging.publish(self.stage, overwrite=self.plan.request.overwrite)
        return Built(self.stage.out, marker.decode(content), notices, kept)

    def side_files(self) -> tuple[SideFile, ...]:
        """What there is beside the weights, less what is written anew or was left out on purpose."""
        rest = self.plan.rest
        if rest.root.is_file() or self.plan.request.assets == "skip":
            return ()
        edited = {str(path) for path in self.plan.edited}
        adapters = [matching.assignment.adapter for matching in self.plan.matchings]
        loras = {real_path(path) for adapter in adapters for path in adapter.paths}

        def exclude(path: str) -> bool:
            return path in edited or real_path(rest.root / path) in loras or not rest.takes_along(path)

        return survey(rest.root, exclude=exclude)

    def missing_bytes(self, side_bytes: int) -> int:
        """Bytes still to be written: what an earlier run wrote is there already, or freed first."""
        there = sum(space.held(self.stage.folder / path) for path in claims.claimed(self.stage.folder))
        copied = side_bytes if self.plan.request.assets == "copy" else 0
        return max(0, self.plan.bytes_out + copied - there)

    def _shards(
        self, side_files: tuple[SideFile, ...], advance: Advance
    ) -> tuple[dict[str, WeightRecord], dict[str, Lost], tuple[str, ...]]:
        records: dict[str, WeightRecord] = {}
        lost: dict[str, Lost] = {}
        kept: list[str] = []
        with Journal.open(self.stage.folder, self.identity, files=self._paths(side_files)) as opened:
            for component in self.plan.components:
                for file in component.files:
                    entry = opened.finished().get(str(file.path))
                    if entry and reusable(entry, self.stage.folder / file.path, file.base.path):
                        kept.append(entry.path)
                        records[entry.path] = _record(file, entry.sha256, entry.base.sha256)
                        lost[component.name] = lost.get(component.name, Lost()) + _lost(entry)
                        advance(file.n_bytes)
                        continue
                    written = self._write(file, opened, advance)
                    records[str(file.path)] = _record(file, written.sha256, written.base_sha256)
                    lost[component.name] = lost.get(component.name, Lost()) + written.lost
        return records, lost, tuple(kept)

    def _check_loras(self) -> None:
        """What the marker will say of the LoRAs has to be true of what was added."""
        for matching in self.plan.matchings:
            for file in matching.assignment.adapter.files:
                check_unchanged(file)

    def _write(self, file: OutputFile, opened: Journal, advance: Advance) -> WrittenFile:
        target = self.stage.place(file.path)
        with disk.writing(target, file.n_bytes):
            target.parent.mkdir(parents=True, exist_ok=True)
            written = write_file(file, target, self.means, advance=advance)
        self.stage.place(file.path)  # what is recorded is there, and no other run writes to it
        if written.sha256 and written.base_sha256:
            state = BaseState.of(written.base_status, written.base_sha256)
            lost = written.lost
            entry = Entry(str(file.path), file.n_bytes, written.sha256, state, lost.touched, lost.unchanged)
            opened.record(entry)
        return written

    def _paths(self, side_files: tuple[SideFile, ...]) -> list[str]:
        indexes = [str(c.index) for c in self.plan.components if c.index]
        weights = [str(file.path) for file in self.plan.files]
        return [
            *weights,
            *indexes,
            *map(str, self.plan.edited),
            *(side.path for side in side_files),
            marker.FILE_NAME,
        ]

    def _indexes(self) -> Iterator[SideRecord]:
        for component in self.plan.components:
            if component.index:
                content = encode_index(component.weight_map, component.total_size, component.index_metadata)
                yield self._small(component.index, content)

    def _edited(self) -> Iterator[SideRecord]:
        if self.plan.request.assets != "skip":
            for path, content in self.plan.edited.items():
                yield self._small(path, content)

    def _small(self, path: PurePosixPath, content: bytes) -> SideRecord:
        disk.write_file(self.stage.place(path), content)
        sha256 = hashlib.sha256(content).hexdigest() if self.plan.request.digest else None
        return SideRecord(str(path), len(content), sha256)

    def _placed(self, side_files: tuple[SideFile, ...], advance: Advance) -> Iterator[SideRecord]:
        request = self.plan.request
        for side in side_files:
            placed = assets.place(side, self.stage.place(side.path), request.assets, digest=request.digest)
            advance(side.n_bytes)
            link = placed.how if placed.how in ("symlink", "hardlink") else None
            yield SideRecord(side.path, side.n_bytes, placed.sha256, link)


def _identity(plan: FusePlan, means: Means) -> str:
    """The plan, and the machine where the bytes depend on it."""
    assert plan.fingerprint is not None  # a plan without the data pass is never executed
    return f"{plan.fingerprint} by {_machine(plan, means)}"


def _machine(plan: FusePlan, means: Means) -> Machine:
    kernels = [means.kernels.of(step) for step in plan.fused_steps]
    used = {kernel.name: kernel.accumulate for kernel in kernels or means.kernels.choices[-1:]}
    sums = " + ".join(sorted(set(used.values())))
    return Machine(" + ".join(sorted(used)), sums, means.device, cpu_type(), torch.__version__)


def _lost(entry: Entry) -> Lost:
    return Lost(entry.touched, entry.unchanged)


def _record(file: OutputFile, sha256: str | None, base_sha256: str | None) -> WeightRecord:
    return WeightRecord(str(file.path), file.n_bytes, sha256, base_sha256)


def _lost_notices(lost: Mapping[str, Lost]) -> Iterator[Notice]:
    """Deltas that are mostly too small for the dtype, by the sample of rows that the kernel counted."""
    for component, counts in lost.items():
        if counts.touched and counts.unchanged * 2 > counts.touched:
            share = 100 * counts.unchanged / counts.touched
            text = (
                f"{component}: {share:.0f} % of the sampled elements that the LoRA touches did not change: "
                "the delta is smaller than the dtype's step"
            )
            facts = {"component": component, "touched": counts.touched, "unchanged": counts.unchanged}
            yield Notice("delta_lost", text, facts)


@contextmanager
def _kept_or_discarded(stage: Stage, identity: str, *, resumable: bool) -> Iterator[None]:
    """What becomes of a stage that fails: finished shards are kept, unless the inputs are at fault."""
    try:
        yield
    except BaseException as error:
        # then OUT is complete; only what it replaced could not be removed
        if not (isinstance(error, OutputError) and error.facts.get("published")):
            _keep_or_discard(stage, error, identity, resumable=resumable)
        raise


def _keep_or_discard(stage: Stage, error: BaseException, identity: str, *, resumable: bool) -> None:
    is_expected = isinstance(error, FuseloraError)
    at_fault = is_expected and not isinstance(error, (OutputError, ReadError, ResourceError))
    if at_fault or not resumable or not journal.has_finished(stage.folder):
        staging.discard(stage)
    elif isinstance(error, FuseloraError) and journal.read(stage.folder, identity):
        keep = f"{stage.folder} keeps what is finished: run the same command again to go on."
        error.hint = f"{error.hint} {keep}" if error.hint else keep
