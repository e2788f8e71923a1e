"""What the README says of the marker: its table of fields, its codes, and the example for an engine."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from fuselora.check.report import Code
from fuselora.marker import FILE_NAME
from tests.fused_pair import Pair, write_high, write_pair
from tests.marked import validator

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def section(name: str) -> str:
    return README.partition(f"\n## {name}\n")[2].partition("\n## ")[0]


def example() -> str:
    """The block of Python that does without fuselora."""
    blocks = re.findall(r"```python\n(.*?)```", section("The marker"), re.DOTALL)
    (found,) = (block for block in blocks if "import fuselora" not in block and "from fuselora" not in block)
    assert isinstance(found, str)
    return found


def first_column(name: str, heading: str) -> list[str]:
    """The quoted words in the first column of a section's table."""
    rows = section(name).partition(f"| {heading} |")[2].partition("\n\n")[0].splitlines()[2:]
    return [word for row in rows for word in re.findall(r"`([a-z_-]+)`", row.split("|")[1])]


def test_the_table_has_every_field_of_the_schema_once() -> None:
    assert sorted(first_column("The marker", "field")) == sorted(validator().schema["properties"])


def test_the_table_of_codes_has_every_code_once() -> None:
    assert sorted(first_column("In CI", "code")) == sorted(get_args(Code))


# The example for an engine -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_pair(tmp_path_factory.mktemp("pair"))


def run(folder: Path) -> subprocess.CompletedProcess[str]:
    """With no package to be imported but the standard library."""
    command = [sys.executable, "-I", "-S", "-c", example()]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=60)


def engine(folder: Path, out: Path, lora: Path) -> Path:
    """A working folder with what the example names."""
    shutil.copytree(out, folder / "wan-fused")
    (folder / "fuselora-demo").mkdir()
    shutil.copy(lora, folder / "fuselora-demo" / "low_noise_model.safetensors")
    return folder


def test_it_is_short_and_imports_the_standard_library_alone() -> None:
    lines = [line for line in example().splitlines() if line.strip()]
    assert len(lines) <= 24
    assert [line for line in lines if "import" in line] == ["import hashlib, json, pathlib"]


def test_it_refuses_a_lora_that_is_in_the_weights(pair: Pair, tmp_path: Path) -> None:
    for name, lora in (("high", pair.high), ("low", pair.low)):
        folder = tmp_path / name
        folder.mkdir()
        done = run(engine(folder, pair.out, lora))
        assert (done.returncode, done.stderr) == (
            1,
            "this LoRA is in the weights already: serve without it\n",
        )


def test_a_folder_that_is_not_fused_goes_on(pair: Pair, tmp_path: Path) -> None:
    folder = engine(tmp_path, pair.out, pair.low)
    (folder / "wan-fused" / FILE_NAME).unlink()
    done = run(folder)
    assert (done.returncode, done.stderr) == (0, "")


def test_it_lets_another_lora_pass(pair: Pair, tmp_path: Path) -> None:
    other = write_high(tmp_path / "other.safetensors", seed=9)
    done = run(engine(tmp_path, pair.out, other))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("edit", ["loras", "schema"])
def test_it_refuses_a_marker_that_it_cannot_trust(pair: Pair, tmp_path: Path, edit: str) -> None:
    folder = engine(tmp_path, pair.out, pair.low)
    path = folder / "wan-fused" / FILE_NAME
    document = json.loads(path.read_bytes())
    if edit == "loras":
        document["loras"].pop()
    else:
        document["schema"] = "fuselora.fused/2.0"
    path.write_text(json.dumps(document))
    assert "edited, or is newer than this engine" in run(folder).stderr


def test_it_needs_no_marker_in_one_spelling(pair: Pair, tmp_path: Path) -> None:
    folder = engine(tmp_path, pair.out, pair.low)
    path = folder / "wan-fused" / FILE_NAME
    path.write_text(json.dumps(json.loads(path.read_bytes())))
    assert "already" in run(folder).stderr


def test_it_takes_numbers_as_other_tools_write_them(pair: Pair, tmp_path: Path) -> None:
    folder = engine(tmp_path, pair.out, pair.low)
    path = folder / "wan-fused" / FILE_NAME
    text = path.read_text(encoding="utf-8")
    assert '"strength": 1.0' in text
    path.write_text(re.sub(r"(: |\s)(\d+)\.0\b", r"\1\2", text), encoding="utf-8")
    assert '"strength": 1\n' in path.read_text(encoding="utf-8")
    assert "already" in run(folder).stderr
