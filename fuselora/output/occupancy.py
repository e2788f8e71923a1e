"""Who what stands in the places of OUT and of its staging folder belongs to. Standard library only."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NoReturn

from fuselora.errors import OutputError
from fuselora.filenames import BESIDE, FORMER_NAME, STAGE_NAME
from fuselora.marker import FILE_NAME as MARKER_NAME
from fuselora.marker import JOURNAL_NAME, NEW_JOURNAL_NAME
from fuselora.output import claims

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fuselora.output.staging import Stage

APART = "Choose another --out."
SHOWN = 8


def holds_output(out: Path, former: Path, mounted: bool) -> bool:
    """A fused checkpoint of ours is in OUT, or was until a kill in the middle of replacing it there."""
    return claims.is_marked(out) or (mounted and claims.is_marked(former))


def refuse_occupied(stage: Stage, overwrite: bool) -> bool:
    """True if OUT holds a fused checkpoint of ours that may be replaced, False if it is absent or empty."""
    out = stage.out
    if not os.path.lexists(out):
        return False
    if not claims.is_real_folder(out):
        refuse(out, "exists and is not a folder", APART)
    marked = holds_output(out, stage.former, stage.mounted)
    if not _is_interrupted(stage) and not marked:
        _refuse_content(stage)
        return False
    if marked and not overwrite:
        refuse(out, "exists and holds a fused checkpoint", f"--overwrite replaces it. {APART}")
    _refuse_strangers(out, _strangers(stage))
    return marked


def _is_interrupted(stage: Stage) -> bool:
    """A kill stopped the publication into a mount point; ``volume.roll_back`` can undo it."""
    if not stage.mounted or not (stage.out / JOURNAL_NAME).is_file() or claims.is_marked(stage.out):
        return False
    if not claims.is_marked(stage.folder):
        what = f"is left from a publication that was cut off, and its {STAGE_NAME} is gone or not whole"
        refuse(stage.out, what, "Empty it by hand.")
    return True


def _refuse_content(stage: Stage) -> None:
    skip = BESIDE if stage.mounted else ()
    with os.scandir(stage.out) as entries:
        names = sorted(entry.name for entry in entries if entry.name not in skip)
    if names:
        what = f"exists, is not empty ({_shown(names)}) and holds no fused checkpoint"
        refuse(stage.out, what, f"--overwrite replaces only what fuselora wrote. {APART}", files=names)


def _strangers(stage: Stage) -> list[str]:
    if not stage.mounted:
        return claims.strangers(stage.out)
    own = [claims.claimed(f) for f in (stage.folder, stage.former) if claims.is_real_folder(f)]
    found = claims.strangers(stage.out, skip=BESIDE)
    if claims.is_real_folder(stage.former):
        found += [f"{FORMER_NAME}/{path}" for path in claims.strangers(stage.former)]
    return [path for path in found if not any(path in claimed for claimed in own)]


def refuse_foreign(folder: Path) -> None:
    """The staging folder's place is free, or holds a partial run of ours and nothing else."""
    if not os.path.lexists(folder):
        return
    if not claims.is_real_folder(folder):
        refuse(folder, "is in the place of the staging folder and is not a folder", "Move it away.")
    if not is_ours(folder):
        what = f"is in the place of the staging folder and holds no {JOURNAL_NAME}: fuselora did not make it"
        refuse(folder, what, "Move it away, or choose another --out.")
    _refuse_strangers(folder, claims.strangers(folder))


def is_ours(folder: Path) -> bool:
    """A real folder with our journal or marker in it, or with no file at all."""
    return is_bare(folder) or (claims.is_real_folder(folder) and bool(claims.claimed(folder)))


def is_bare(folder: Path) -> bool:
    """A real folder without any file, as a kill while it was being removed leaves it."""
    return claims.is_real_folder(folder) and not claims.files_in(folder)


def _refuse_strangers(folder: Path, strangers: list[str]) -> None:
    if strangers:
        what = f"holds {_shown(strangers)}, which fuselora did not write"
        refuse(folder, what, "Move that away; nothing was removed.", files=strangers)


def refuse_incomplete(folder: Path) -> None:
    """The marker in ``folder`` is valid and lists the files that are there, of their sizes, and no others."""
    sizes = claims.marked_sizes(folder)
    if sizes is None:
        refuse(folder, f"has no valid {MARKER_NAME} and is not published")
    marked = frozenset(sizes)
    present = set(claims.files_in(folder)) - {MARKER_NAME, JOURNAL_NAME, NEW_JOURNAL_NAME}
    for files, what in ((marked - present, "lacks"), (present - marked, "also holds")):
        if files:
            names = sorted(files)
            refuse(folder, f"{what} {_shown(names)}, at odds with its {MARKER_NAME}", files=names)
    if other := [path for path, n_bytes in sizes.items() if (folder / path).stat().st_size != n_bytes]:
        refuse(folder, f"holds {_shown(other)} of another size than its {MARKER_NAME} says", files=other)


def is_set_aside(former: Path) -> bool:
    """``former`` is an output that we moved there to replace it, and holds nothing else."""
    return (
        claims.is_real_folder(former) and (former / JOURNAL_NAME).is_file() and not claims.strangers(former)
    )


def refuse(path: Path, what: str, hint: str | None = None, **facts: object) -> NoReturn:
    """Raises the ``OutputError`` that says ``what`` of ``path``."""
    raise OutputError(f"{path}: {what}", hint=hint, path=str(path), **facts)


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
