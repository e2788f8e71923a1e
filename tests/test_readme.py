"""The README's examples print what it says they print, and its tables are those of the code."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

from fuselora.specs import SHORT_NAMES

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("readme_script", ROOT / "scripts" / "readme.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_console_example_prints_what_the_readme_shows() -> None:
    script = _script()
    assert len(script.BLOCK.findall(README)) >= 4
    assert script.settled(script.rewritten(README)) == script.settled(README)


def test_the_comparison_sees_a_changed_word() -> None:
    script = _script()
    assert script.settled("fused and whole") != script.settled("fused and whale")


def test_the_readme_lists_the_short_names() -> None:
    rows = re.findall(r"^\| `([^`/]+)` \| ([\w.-]+/[\w.-]+) \|$", README, re.MULTILINE)
    assert dict(rows) == SHORT_NAMES
