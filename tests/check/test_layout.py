"""What check and merge say of a folder that no engine loads as a pipeline."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuselora.check.folder import check
from fuselora.check.layout import NATIVE, SKIPPED
from fuselora.pipeline import merge
from fuselora.report import Reporter
from fuselora.synth import (
    base_tensors,
    tiny,
    write_lora,
    write_native,
    write_pipeline,
    write_safetensors,
    write_skeleton,
)

T2V = tiny("wan2.2-t2v-a14b", blocks=1)


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lora(tmp_path_factory.mktemp("lora") / "x.safetensors", T2V, style="lightning", rank=2)


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_native(tmp_path_factory.mktemp("native") / "Wan2.2", T2V, experts=True)


def test_a_native_folder_is_not_loaded(
    native: Path, lora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = merge(native, [f"high={lora}"], tmp_path / "out")
    Reporter().merged(report)
    assert "Native layout: vLLM-Omni and diffusers do not load it" in capsys.readouterr().out
    checked = check(report.out)
    assert checked.ok and checked.note == checked.document()["note"] == NATIVE
    assert list(checked.lines(report.out))[:2] == [f"{report.out}: fused and whole", f"  {NATIVE}"]


def test_a_converted_one_is(native: Path, lora: Path, tmp_path: Path) -> None:
    skeleton = write_skeleton(tmp_path / "skeleton", T2V, experts=True)
    out = merge(native, [f"high={lora}"], tmp_path / "out", layout="diffusers", skeleton=str(skeleton)).out
    assert check(out).note is None


def test_a_converted_one_without_the_rest_is_not(native: Path, lora: Path, tmp_path: Path) -> None:
    skeleton = write_skeleton(tmp_path / "skeleton", T2V, experts=True)
    out = tmp_path / "out"
    merge(native, [f"high={lora}"], out, layout="diffusers", skeleton=str(skeleton), assets="skip")
    assert check(out).note == SKIPPED


def test_a_pipeline_without_the_rest_is_loaded_once_that_is_there(lora: Path, tmp_path: Path) -> None:
    base = write_pipeline(tmp_path / "base", T2V, experts=True)
    assert check(merge(base, [f"high={lora}"], tmp_path / "whole").out).note is None
    out = merge(base, [f"high={lora}"], tmp_path / "out", assets="skip").out
    assert check(out).note == SKIPPED
    (out / "model_index.json").write_bytes((base / "model_index.json").read_bytes())
    assert check(out).ok and check(out).note is None


def test_a_single_file_is_for_others(lora: Path, tmp_path: Path) -> None:
    base = write_safetensors(tmp_path / "wan.safetensors", base_tensors(T2V))
    assert check(merge(base, [str(lora)], tmp_path / "out").out).note is None
