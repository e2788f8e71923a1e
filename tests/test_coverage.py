"""Every published LoRA list on every layout of its base: no tensor is left without an account."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from tests import listings

if TYPE_CHECKING:
    from collections.abc import Iterator

SCRIPT = Path(__file__).parents[1] / "scripts" / "coverage.py"
WAN21_ON_WAN22 = ("wan2.2-i2v-a14b.x2v-distill-1022.low.r64", "wan2.2-i2v-a14b")
# the image branch of Wan2.1; LTX-2's text connectors
SKIPPED = {WAN21_ON_WAN22: 290, ("ltx-2-19b.distilled-384", "ltx-2-19b"): 2}
ROWS = [
    (name, base, layout)
    for name, entry in sorted(listings.index().items())
    for base in (entry.base, *(b for n, b in [WAN21_ON_WAN22] if n == name))
    for layout in listings.layouts(base)
]


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("coverage_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_every_list_is_on_every_layout_of_its_bases(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "coverage", lambda name, base, layout, folder: (name, base, layout))
    assert sorted(script.all_rows(tmp_path)) == sorted(ROWS)
    assert len({name for name, _, _ in ROWS}) == 55
    assert len({base for _, base, _ in ROWS}) == 15


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keeps the bases, which are sparse."""
    return tmp_path_factory.mktemp("coverage")


@pytest.mark.parametrize(("name", "base", "layout"), ROWS)
def test_every_tensor_is_accounted_for(
    script: ModuleType, folder: Path, name: str, base: str, layout: str
) -> None:
    row, specs = script.coverage(name, base, layout, folder), listings.lora(name)
    n_alpha = sum(spec.name.endswith((".alpha", ".alpha_scale")) for spec in specs)
    n_skipped = SKIPPED.get((name, base), 0)
    assert (row.tensors, row.unexplained, row.faults) == (len(specs), 0, 0)
    assert (row.applied, row.alpha, row.skipped) == (len(specs) - n_alpha - n_skipped, n_alpha, n_skipped)


def test_the_skipped_tensors_are_the_image_branch() -> None:
    skipped = [s.name for s in listings.lora(WAN21_ON_WAN22[0]) if "_img" in s.name or "img_emb" in s.name]
    assert len(skipped) == 290


def test_the_table_as_json(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = script.Row("x", "b", "native", 3, 2, 1, 0, 0, 0)
    monkeypatch.setattr(script, "all_rows", lambda folder: [row])
    monkeypatch.setattr(sys, "argv", ["coverage.py", "--json"])
    script.main()
    assert '"unexplained": 0' in capsys.readouterr().out
