"""Who may read and write what is written, and what is said where this user may not."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.environment.merges import Inputs, assert_merged, assert_refused, can, run

NOBODY = 65_534
WEIGHTS = "diffusion_pytorch_model.safetensors"
MODES = {
    "model_index.json": 0o644,
    f"transformer/{WEIGHTS}": 0o640,
    "transformer/config.json": 0o600,
    f"vae/{WEIGHTS}": 0o664,
    "vae/config.json": 0o755,
    "text_encoder/model.safetensors": 0o444,
}
FOLDER_MODE = 0o750


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def base(inputs: Inputs, tmp_path: Path) -> Path:
    """A base of many modes."""
    base = shutil.copytree(inputs.base, tmp_path / "base")
    for path, bits in MODES.items():
        (base / path).chmod(bits)
    for folder in base.iterdir():
        if folder.is_dir():
            folder.chmod(FOLDER_MODE)
    return base


@pytest.mark.parametrize("umask", ["000", "022", "027", "077"])
def test_modes_are_the_bases_as_far_as_the_umask_allows(
    inputs: Inputs, base: Path, tmp_path: Path, umask: str
) -> None:
    """One rule for fused and copied files; a copy can always be written by its owner."""
    out, denied = tmp_path / "parent" / "out", int(umask, 8)
    before = ["sh", "-c", f'umask {umask} && exec "$@"', "sh"]
    assert_merged(run(inputs.arguments(out, base=base), before=before), out, inputs.wanted)
    own = {path: bits | 0o600 for path, bits in MODES.items()}
    assert {path: mode(out / path) for path in MODES} == {path: own[path] & ~denied for path in MODES}
    assert mode(out / "fused.json") == 0o666 & ~denied
    assert {mode(folder) for folder in (out.parent, out, out / "transformer")} == {0o777 & ~denied}


def test_no_file_can_be_executed_that_could_not_be_before(inputs: Inputs, base: Path, tmp_path: Path) -> None:
    """Weights never can; a side file that could still can."""
    (base / "transformer" / WEIGHTS).chmod(0o755)
    out = tmp_path / "out"
    assert_merged(run(inputs.arguments(out, base=base)), out, inputs.wanted)
    executable = {p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file() and mode(p) & 0o111}
    assert executable == {"vae/config.json"}


def test_a_folder_that_hands_down_its_group(inputs: Inputs, tmp_path: Path) -> None:
    team = tmp_path / "team"
    team.mkdir()
    if os.geteuid() == 0:
        os.chown(team, -1, NOBODY)
    team.chmod(0o2775)
    group = team.stat().st_gid
    out = team / "new" / "out"
    assert_merged(run(inputs.arguments(out)), out, inputs.wanted)
    made = [team / "new", out, *out.rglob("*")]
    assert {path.stat().st_gid for path in made} == {group}
    assert all(mode(path) & stat.S_ISGID for path in made if path.is_dir())


# a user who may not


@pytest.fixture
def nobody(tmp_path: Path) -> Iterator[list[str]]:
    """Starts a process that is not root, and may read what is here."""
    if os.geteuid() != 0:
        yield []
        return
    before = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    if not can(before):
        pytest.skip("this machine has no setpriv, by which root becomes another user")
    opened = [p for p in (tmp_path, *tmp_path.parents) if p.stat().st_uid == 0 and not mode(p) & 0o001]
    modes = {path: mode(path) for path in opened}
    for path, bits in modes.items():
        path.chmod(bits | 0o055)
    yield before
    for path, bits in modes.items():
        path.chmod(bits)


@pytest.fixture
def theirs(inputs: Inputs, tmp_path: Path, nobody: list[str]) -> Inputs:
    """Inputs that everybody can read, and ``ours``, a folder that this user can write."""
    inputs.copied(tmp_path, "base", "lora.safetensors")
    ours = tmp_path / "ours"
    ours.mkdir()
    if nobody:
        os.chown(ours, NOBODY, NOBODY)
    return Inputs(tmp_path / "base", tmp_path / "lora.safetensors", inputs.wanted)


def test_a_user_who_owns_nothing_but_outs_parent(theirs: Inputs, tmp_path: Path, nobody: list[str]) -> None:
    out = tmp_path / "ours" / "out"
    assert_merged(run(theirs.arguments(out), before=nobody), out, theirs.wanted)
    assert {path.stat().st_uid for path in out.rglob("*")} == {NOBODY if nobody else os.geteuid()}


UNREADABLE = {
    "base": "Permission denied",
    "lora.safetensors": "Permission denied",
    f"base/transformer/{WEIGHTS}": "Permission denied",
    "base/transformer/config.json": "Permission denied",
    "base/transformer": "Permission denied",
    "base/model_index.json": "Permission denied",
    f"base/vae/{WEIGHTS}": "Permission denied",
    "base/tokenizer": "Permission denied",
}


@pytest.mark.parametrize("path", UNREADABLE)
def test_an_input_that_this_user_cannot_read(
    theirs: Inputs, tmp_path: Path, nobody: list[str], path: str
) -> None:
    (tmp_path / path).chmod(0)
    try:
        done = run(theirs.arguments(tmp_path / "ours" / "out"), before=nobody)
        assert_refused(done, Path(path).name, UNREADABLE[path])
    finally:
        (tmp_path / path).chmod(0o755)
    assert list((tmp_path / "ours").iterdir()) == []


def test_a_place_that_this_user_cannot_write(theirs: Inputs, tmp_path: Path, nobody: list[str]) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    closed.chmod(0o555)
    done = run(theirs.arguments(closed / "out"), before=nobody)
    assert_refused(done, f"{closed} cannot be written")
    assert list(closed.iterdir()) == []
