"""Merges in processes of their own, whose bytes are compared with an undisturbed one's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fuselora.synth import tiny, write_lora, write_pipeline
from tests.small import tree

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOT = Path(__file__).resolve().parents[2]
SIZE = tiny("wan2.2-t2v-a14b", blocks=1)
EPOCH = "1700000000"
COMMAND = (sys.executable, "-m", "fuselora")


@dataclass(frozen=True, slots=True)
class Inputs:
    """A pipeline, a LoRA, and what a merge of them writes."""

    base: Path
    lora: Path
    wanted: Mapping[str, bytes]

    def arguments(self, out: Path | str, *, base: Path | str = "", lora: Path | str = "") -> list[str]:
        given = ["--base", base or self.base, "--lora", lora or self.lora, "--out", out]
        return ["merge", *(os.fspath(word) for word in given)]

    def copied(self, folder: Path, base: str, lora: str) -> None:
        """Both under other names."""
        shutil.copytree(self.base, folder / base)
        shutil.copyfile(self.lora, folder / lora)


def make(folder: Path) -> Inputs:
    base = write_pipeline(folder / "base", SIZE, dtype="BF16")
    lora = write_lora(folder / "lora.safetensors", SIZE, style="lightning", alpha=2, dtype="F32", seed=1)
    inputs = Inputs(base, lora, {})
    done = run(inputs.arguments(folder / "out"))
    assert done.returncode == 0, done.stderr
    return Inputs(base, lora, tree(folder / "out"))


def environment(
    more: Mapping[str, str] | None = None, without: Sequence[str] = (), *, bare: bool = False
) -> dict[str, str]:
    """This process's, or none, with this code on Python's path."""
    kept = {} if bare else {k: v for k, v in os.environ.items() if k not in without}
    return {**kept, "PYTHONPATH": str(ROOT), "SOURCE_DATE_EPOCH": EPOCH, **(more or {})}


def run(
    arguments: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    before: Sequence[str] = (),
    command: Sequence[str] = COMMAND,
) -> subprocess.CompletedProcess[bytes]:
    """The command with these arguments, started by what stands ``before`` it."""
    env = environment() if env is None else env
    return subprocess.run(
        [*before, *command, *arguments], env=env, cwd=cwd, capture_output=True, timeout=300, check=False
    )


def assert_merged(done: subprocess.CompletedProcess[bytes], out: Path, wanted: Mapping[str, bytes]) -> None:
    """It ended well, said so plainly, and OUT holds what it should, with nothing beside it."""
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr and b"Warning" not in done.stderr, done.stderr
    assert done.stdout.strip()
    assert tree(out) == wanted
    assert [path.name for path in out.parent.iterdir() if path.name.startswith(out.name)] == [out.name]


def assert_refused(done: subprocess.CompletedProcess[bytes], *says: str) -> None:
    said = done.stderr.decode()
    assert done.returncode in (1, 2), said
    assert "Traceback" not in said
    for words in says:
        assert words in said


def can(before: Sequence[str]) -> bool:
    """Whether this machine gives a process what stands ``before`` it."""
    return (
        bool(shutil.which(before[0]))
        and not subprocess.run([*before, "true"], capture_output=True).returncode
    )
