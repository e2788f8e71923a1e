"""verify --load: what diffusers says of the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from diffusers.utils import logging

from fuselora import synth
from fuselora.pipeline import merge
from fuselora.verify import verify
from tests.fused_pair import SIZE, Pair, codes, edit_json, write_pair

CONFIG = "transformer/config.json"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_pair(tmp_path_factory.mktemp("pair"))


def with_config(pair: Pair, folder: Path, **fields: Any) -> set[tuple[str, str | None]]:
    """What loading finds after ``fields`` of a config were edited."""
    out = pair.copy(folder / "out")
    edit_json(out / CONFIG, lambda config: config.update(fields))
    return {(f.file, f.tensor) for f in verify(out, load=True).findings if f.code == "load"}


def test_a_good_folder_loads_without_a_word(pair: Pair, capfd: pytest.CaptureFixture[str]) -> None:
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    report = pair.verify(pair.out, load=True)
    assert report.ok
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
    assert capfd.readouterr() == ("", "")
    assert report.document()["loaded"] == [
        {"component": name, "library": "diffusers", "class": "WanTransformer3DModel"}
        for name in ("transformer", "transformer_2")
    ]
    as_words = "loaded with diffusers, as WanTransformer3DModel"
    assert list(report.lines())[-2:] == [f"transformer: {as_words}", f"transformer_2: {as_words}"]


def test_what_does_not_load_is_not_said_to_be_loaded(pair: Pair, tmp_path: Path) -> None:
    out = pair.copy(tmp_path / "out")
    edit_json(out / CONFIG, lambda config: config.update(num_layers=1))
    assert [one.component for one in verify(out, load=True).loaded] == ["transformer_2"]
    assert verify(out).document()["loaded"] == []


def test_a_folder_whose_dtype_was_changed_loads(pair: Pair, tmp_path: Path) -> None:
    out = merge(pair.base, [f"low={pair.low}"], tmp_path / "out", dtype="float16").out
    assert verify(out, load=True).ok


def test_variant_files_load(pair: Pair, tmp_path: Path) -> None:
    base = synth.write_pipeline(tmp_path / "base", SIZE, dtype="F16", variant="fp16", shard_bytes=60_000)
    out = merge(base, [str(pair.low)], tmp_path / "out", variant="fp16").out
    assert verify(out, load=True).ok


def test_tensors_that_the_model_misses(pair: Pair, tmp_path: Path) -> None:
    findings = with_config(pair, tmp_path, num_layers=3)
    assert ("transformer", "blocks.2.attn1.to_q.weight") in findings
    assert len(findings) == 27


def test_tensors_that_the_model_does_not_expect(pair: Pair, tmp_path: Path) -> None:
    findings = with_config(pair, tmp_path, num_layers=1)
    assert ("transformer", "blocks.1.attn1.to_q.weight") in findings
    assert len(findings) == 27


def test_tensors_that_do_not_fit(pair: Pair, tmp_path: Path) -> None:
    findings = with_config(pair, tmp_path, ffn_dim=64)
    assert {file for file, _ in findings} == {"transformer"}


@pytest.mark.parametrize("name", ["NoSuchModel", "WanPipeline", "utils", None, 3])
def test_a_class_that_is_no_model(pair: Pair, tmp_path: Path, name: object) -> None:
    assert with_config(pair, tmp_path, _class_name=name) == {(CONFIG, None)}


def test_a_native_folder_cannot_be_loaded(pair: Pair, tmp_path: Path) -> None:
    base = synth.write_native(tmp_path / "base", SIZE, dtype="BF16")
    out = merge(base, [str(pair.low)], tmp_path / "out").out
    (finding,) = verify(out, load=True).findings
    assert (finding.code, finding.file) == ("load", "config.json")
    assert "diffusers has no model class 'WanModel'" in finding.message


def test_one_file_cannot_be_loaded(pair: Pair, tmp_path: Path) -> None:
    base = synth.write_file(tmp_path / "wan.safetensors", SIZE)
    out = merge(base, [str(pair.low)], tmp_path / "out").out
    report = verify(out, load=True)
    assert codes(report) == {"load"}
    assert "no config.json" in report.findings[0].message
