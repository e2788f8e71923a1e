"""Runs the README's console examples in a fresh folder and puts their real output into it.

    python scripts/readme.py          say whether the README is true
    python scripts/readme.py --write  make it so

In a block marked ``console``, a line that starts with ``$ `` is a command of fuselora and what follows
is its standard output. Times and rates are not compared.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"
BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)
# what differs from run to run and from one CPU to the next
MOVING = re.compile(r"(?i)[\d.]+ s \([\d.]+ \w+\/s\)|99\.\d+ %|largest error [\d.]+|memory about [\d.]+ MB")


def run_block(block: str, folder: Path) -> str:
    """The block with every command's output as it is now."""
    commands = [line[2:] for line in block.replace("\\\n", " ").splitlines() if line.startswith("$ ")]
    shown = _shown_commands(block)
    return "".join(f"{text}\n{run(command, folder)}" for text, command in zip(shown, commands, strict=True))


def run(command: str, folder: Path) -> str:
    """What one ``fuselora`` command prints on standard output."""
    name, *arguments = shlex.split(command)
    if name != "fuselora":
        raise SystemExit(f"the README runs {name}, which is not fuselora")
    return subprocess.run(
        [sys.executable, "-m", "fuselora", *arguments],
        cwd=folder, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "100"},
    ).stdout  # fmt: skip


def settled(text: str) -> str:
    """``text`` without what may differ."""
    lines = (line.rstrip() for line in MOVING.sub("...", text).splitlines())
    return "\n".join(lines)


def rewritten(readme: str) -> str:
    """The README with the output of all its examples, run in order in one fresh folder."""
    with tempfile.TemporaryDirectory() as folder:
        return BLOCK.sub(lambda found: f"```console\n{run_block(found[1], Path(folder))}```", readme)


def _shown_commands(block: str) -> list[str]:
    """Each command as the README shows it, continuation lines included."""
    return re.findall(r"^\$ (?:.*\\\n)*.*$", block, re.MULTILINE)


def main() -> int:
    """0 if the README's examples are true."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    before = README.read_text()
    after = rewritten(before)
    if options.write:
        README.write_text("\n".join(line.rstrip() for line in after.splitlines()) + "\n")
        return 0
    return int(settled(before) != settled(after))


if __name__ == "__main__":
    sys.exit(main())
