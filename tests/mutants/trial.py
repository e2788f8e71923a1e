"""One mutant: a copy of the project with it, and what its tests say there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.mutants.table import Mutant

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("fuselora", "tests", "scripts", "pyproject.toml", "README.md", "CONTRIBUTING.md", "Makefile")
FAILED = 1  # pytest's exit status for tests that fail, and for fixtures that do


def copy_project(folder: Path) -> Path:
    """What tests need, without what runs left behind."""
    folder.mkdir(parents=True)
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(ROOT / name, folder / name)
    return folder


def mutated(mutant: Mutant, text: str) -> str:
    """Raises ``ValueError`` unless the place is there once: the table has to follow the code."""
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name}: {mutant.file} has {mutant.old!r} {text.count(mutant.old)} times")
    return text.replace(mutant.old, mutant.new)


def killed(mutant: Mutant, project: Path) -> str | None:
    """The first test that fails with the mutant in a copy of the project; None if none does."""
    file = project / "fuselora" / mutant.file
    sound = file.read_text("utf-8")
    file.write_text(mutated(mutant, sound), "utf-8")
    try:
        status, output = run_tests(mutant.tests, project)
    finally:
        file.write_text(sound, "utf-8")
    if status == FAILED:
        return next(line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))).partition(
            " "
        )[2]
    if status:
        raise RuntimeError(f"{mutant.name}: pytest ended with {status}\n{output}")
    return None


def run_tests(tests: Iterable[str], project: Path) -> tuple[int, str]:
    """The exit status of pytest, up to the first failure, and what it printed."""
    done = subprocess.run(
        [sys.executable, "-B", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests],
        cwd=project, env={**os.environ, "PYTHONPATH": str(project)}, capture_output=True, text=True,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr
