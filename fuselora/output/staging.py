"""Where a run writes, and how that becomes OUT in one step. Standard library only.

``prepare`` refuses before anything is written; inside ``open_stage`` the caller fills ``Stage.folder``,
marker last; ``publish`` puts it in OUT's place and ``discard`` leaves nothing of it. Killed at any
moment, OUT is what it was, absent or complete, and a rerun goes on.
"""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from fuselora.errors import OutputError
from fuselora.filenames import FORMER_ENDING, FORMER_NAME, LOCK_ENDING, STAGE_ENDING, STAGE_NAME, is_reserved
from fuselora.marker import JOURNAL_NAME, NEW_JOURNAL_NAME
from fuselora.output import claims, lock, occupancy, volume
from fuselora.output.disk import HINTS, sync_folder, sync_tree, write_file, writing
from fuselora.output.exchange import exchange
from fuselora.output.inputs import refuse_inputs, refuse_links
from fuselora.output.space import nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

__all__ = ["Stage", "discard", "open_stage", "prepare", "publish"]


@dataclass(frozen=True, slots=True)
class Opened:
    """The staging folder and the lock, by their descriptors."""

    folder: int
    lock: int


@dataclass(frozen=True, slots=True)
class Stage:
    """Where the files of ``out`` are written until they are published.

    ``folder`` takes the files: ``OUT.partial`` beside OUT, or a folder inside OUT if that is a mount
    point (``mounted``). ``lock`` guards it. ``former`` is where an output being replaced may stand for
    a moment. ``replaces`` says that OUT held a fused checkpoint of ours, ``restart`` that an earlier
    partial run is dropped, and ``made`` are the parents of OUT that did not exist, outermost first.
    ``opened`` says which folder and lock these are, inside ``open_stage``.
    """

    out: Path
    folder: Path
    lock: Path
    former: Path
    mounted: bool
    replaces: bool
    restart: bool
    made: tuple[Path, ...]
    opened: Opened | None = None

    def place(self, *paths: str | PurePosixPath) -> Path:
        """Where the file at the last of ``paths`` is written, once the folders of all are this run's own.

        Who may write beside OUT can put another folder, or a link into the base, in the place of the stage
        or of a folder in it. Raises ``OutputError``.
        """
        if (what := self._lost()) is not None:
            occupancy.refuse(self.folder, what, "Find out what else works there, and run again.")
        folders = {self.folder / parent for path in paths for parent in PurePosixPath(path).parents}
        for folder in sorted(folders - {self.folder}):
            if os.path.lexists(folder) and (volume.is_mount(folder) or not claims.is_real_folder(folder)):
                what = "is no folder of this run: something was put in its place"
                occupancy.refuse(folder, what, "Find out what else works there, and run again.")
        return self.folder.joinpath(*paths[-1:])

    def stands(self) -> bool:
        """Whether ``folder`` and ``lock`` are still what ``open_stage`` opened."""
        return self._lost() is None

    def _lost(self) -> str | None:
        """What became of the folder or the lock."""
        assert self.opened is not None  # a stage is written to inside ``open_stage`` alone
        if not os.path.lexists(self.folder):
            return "is gone"
        found = self.folder.lstat()
        if not os.path.samestat(os.fstat(self.opened.folder), found):
            return "is no longer the folder that this run writes to"
        if not lock.is_at(self.lock, self.opened.lock):
            return f"is no longer this run's alone: its lock {self.lock.name} was removed"
        return None


def prepare(out: Path, *, inputs: Sequence[Path], overwrite: bool, restart: bool) -> Stage:
    """Where to write for ``out``; nothing is written yet.

    ``inputs`` are the base's folder or file and the LoRA files. Raises ``OutputError`` if OUT is taken
    and may not be replaced, is tangled with an input or cannot be made, if what stands in the
    staging folder's place is not ours, or if a live process is writing there.
    """
    with writing(out):
        try:
            return _looked_over(out, inputs, overwrite=overwrite, restart=restart)
        except (OutputError, FileNotFoundError):
            pass  # what another run is moving at this moment looks like nobody's: it has its lock by now
        return _looked_over(out, inputs, overwrite=overwrite, restart=restart)


@contextmanager
def open_stage(stage: Stage) -> Iterator[Stage]:
    """Holds the lock of ``stage`` with its folder in place; ``publish`` and ``discard`` belong inside.

    A publication that a kill interrupted is undone first, and with ``restart`` the earlier run's
    files go. The folder stays when this ends. Raises ``OutputError``.
    """
    try:
        with writing(stage.folder):
            stage.lock.parent.mkdir(parents=True, exist_ok=True)
        with lock.held(stage.lock) as held:
            with writing(stage.folder):
                _settle(stage)
                folder = os.open(stage.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                yield replace(stage, opened=Opened(folder, held))
            finally:
                os.close(folder)
    finally:
        _remove_made(stage)


def publish(stage: Stage, *, overwrite: bool) -> None:
    """Puts the staged folder, whose marker is its last file, in OUT's place: one rename, or an exchange.

    All files must be on disk. The marker must list every file there is, but itself. Raises
    ``OutputError``; the stage is then still there, unless ``facts["published"]`` says OUT is complete.
    """
    with writing(stage.out):
        occupancy.refuse_incomplete(stage.place())
        stage.place(*claims.files_in(stage.folder))
        replaces = occupancy.refuse_occupied(stage, overwrite)
        sync_tree(stage.folder)
        if stage.mounted:
            volume.move_up(stage.folder, stage.out, stage.former)
        elif replaces:
            _replace(stage)
        else:
            _rename(stage.folder, stage.out)
    with _published(stage, "the system does not say that its name is on disk"):
        sync_folder(stage.out if stage.mounted else stage.out.parent)
    with _published(stage, "what it replaced could not be removed", remove=stage.folder):
        _drop_former(stage, overwrite)


def discard(stage: Stage) -> None:
    """Removes what was staged; files that are not ours stay. ``open_stage`` takes the parents it made."""
    with writing(stage.folder):
        if not stage.stands():
            return
        if stage.mounted:
            volume.roll_back(stage.folder, stage.out, stage.former)
        if occupancy.is_ours(stage.folder):
            claims.remove(stage.folder)


def _looked_over(out: Path, inputs: Sequence[Path], *, overwrite: bool, restart: bool) -> Stage:
    stage = _stage(_resolved(out), restart)
    emptied = (stage.folder, *((stage.former,) if overwrite else ()))
    refuse_inputs((stage.out, *emptied), inputs)
    _refuse_parent(stage)
    lock.refuse_held(stage.lock)
    replaced = (stage.out,) if occupancy.refuse_occupied(stage, overwrite) else ()
    occupancy.refuse_foreign(stage.folder)
    refuse_links((*replaced, *emptied), inputs)
    lock.refuse_held(stage.lock)
    return stage


def _stage(out: Path, restart: bool) -> Stage:
    mounted = volume.is_mount(out)
    folder = out / STAGE_NAME if mounted else out.with_name(out.name + STAGE_ENDING)
    former = out / FORMER_NAME if mounted else out.with_name(out.name + FORMER_ENDING)
    made = [parent for parent in reversed(out.parents) if not parent.exists()]
    return Stage(
        out=out,
        folder=folder,
        lock=folder.with_name(folder.name + LOCK_ENDING),
        former=former,
        mounted=mounted,
        replaces=occupancy.holds_output(out, former, mounted),
        restart=restart,
        made=tuple(made),
    )


def _resolved(out: Path) -> Path:
    """``out`` as one absolute path, its parents' links followed; a link itself is refused."""
    if out.is_symlink():
        occupancy.refuse(out, f"is a link to {out.readlink()}", "Name the folder itself.")
    try:
        resolved = out.resolve()
    except RuntimeError as error:  # a loop of links, before Python 3.13
        occupancy.refuse(out, str(error), occupancy.APART)
    if is_reserved(resolved.name):
        what = "has the name of a folder that a run beside it takes for its own and empties"
        occupancy.refuse(out, what, occupancy.APART)
    return resolved


def _refuse_parent(stage: Stage) -> None:
    parent = nearest(stage.lock.parent)
    if not parent.is_dir():
        occupancy.refuse(stage.out, f"cannot be made: {parent} is not a folder", occupancy.APART)
    if not os.access(parent, os.W_OK | os.X_OK):
        occupancy.refuse(stage.out, f"cannot be made: {parent} cannot be written", occupancy.APART)


def _settle(stage: Stage) -> None:
    """Under the lock: what ``prepare`` saw is seen again, as another run may have ended meanwhile."""
    occupancy.refuse_foreign(stage.folder)
    if stage.mounted:
        volume.roll_back(stage.folder, stage.out, stage.former)
    if claims.is_marked(stage.out) and not stage.replaces:
        what, hint = "was written by another run meanwhile", "--overwrite replaces it."
        occupancy.refuse(stage.out, what, hint)
    if stage.restart and stage.folder.exists():
        claims.remove(stage.folder)
    stage.folder.mkdir(exist_ok=True)


def _rename(folder: Path, out: Path) -> None:
    """The rename that publishes; an empty OUT is replaced by it."""
    _without_journal(folder, lambda: folder.rename(out).exists())


def _replace(stage: Stage) -> None:
    if not _without_journal(stage.folder, lambda: exchange(stage.folder, stage.out)):
        _replace_in_two_steps(stage)


def _replace_in_two_steps(stage: Stage) -> None:
    """Without an exchange OUT is absent for a moment; what was there stands in ``OUT.old``."""
    if os.path.lexists(stage.former):
        if not occupancy.is_set_aside(stage.former) and not occupancy.is_bare(stage.former):
            what, hint = f"is in the way of replacing {stage.out}", "Move it away and run again."
            occupancy.refuse(stage.former, what, hint)
        claims.remove(stage.former)
    # The journal tells this folder from a copy that the user keeps under that name.
    write_file(stage.out / JOURNAL_NAME, b"")
    try:
        stage.out.rename(stage.former)
        _rename(stage.folder, stage.out)
    except BaseException:
        if not os.path.lexists(stage.out):
            stage.former.rename(stage.out)
        (stage.out / JOURNAL_NAME).unlink(missing_ok=True)
        raise


def _drop_former(stage: Stage, overwrite: bool) -> None:
    """After an exchange the former output is where the stage was, after two renames it is in ``OUT.old``."""
    if stage.mounted:
        volume.sweep(stage.folder, stage.out, stage.former)
        return
    if claims.is_marked(stage.folder):
        claims.remove(stage.folder)
    if overwrite and occupancy.is_set_aside(stage.former):
        claims.remove(stage.former)


@contextmanager
def _published(stage: Stage, what: str, *, remove: Path | None = None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        hint = f"Remove {error.filename or remove} by hand." if remove else HINTS.get(error.errno or 0)
        text = f"{stage.out}: is complete, but {what}: {error.strerror}"
        raise OutputError(text, hint=hint, path=str(stage.out), published=True) from error


def _without_journal(folder: Path, move: Callable[[], bool]) -> bool:
    """What ``move`` says; the journal is out of the folder for it, and back if nothing moved."""
    journal = folder / JOURNAL_NAME
    (folder / NEW_JOURNAL_NAME).unlink(missing_ok=True)
    content = journal.read_bytes() if journal.is_file() else None
    journal.unlink(missing_ok=True)
    moved = False
    try:
        moved = move()
    finally:
        if not moved and content is not None and folder.is_dir():
            write_file(journal, content)
    return moved


def _remove_made(stage: Stage) -> None:
    for parent in reversed(stage.made):
        with suppress(OSError):
            parent.rmdir()
