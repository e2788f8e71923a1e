"""``verify`` recomputes every kind: what was merged holds, and what any part or bit changes does not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import fuselora
from fuselora.delta.adders import TERMS
from fuselora.verify import verify
from fuselora.verify_report import VerifyReport
from tests.adapters import MODULE, SAMPLES, Sample, say_content
from tests.fused_pair import codes, edit_marker, edit_tensor, found

Once = Callable[[Sample], "Merged"]
EACH = pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
CONSTRAINED = pytest.mark.parametrize(
    "sample", [sample for sample in SAMPLES if sample.name.endswith("-constrained")], ids=lambda s: s.name
)
SCALED = pytest.mark.parametrize(
    "sample",
    [s for s in SAMPLES if s.numbers and s.kind not in ("oft", "boft", "ia3")],
    ids=lambda sample: sample.name,
)
OTHER = "blocks.1.ffn.weight"


@dataclass(frozen=True)
class Merged:
    """What a merge was given and made."""

    base: Path
    lora: Path
    out: Path

    @property
    def weights(self) -> Path:
        return self.out / self.base.name

    def copy(self, to: Path) -> Path:
        return Path(shutil.copytree(self.out, to))


def merged(
    folder: Path, sample: Sample, *, strength: float = 1.0, dtype: torch.dtype = torch.bfloat16
) -> Merged:
    """A base of two tensors, the LoRA, and the result, whose digests were left out."""
    folder.mkdir(parents=True, exist_ok=True)
    base = folder / "base.safetensors"
    save_file({**sample.bases(dtype), OTHER: torch.ones(4, 4, dtype=dtype)}, base)
    lora = sample.write(folder / "lora", sample.tensors())
    out = folder / "out"
    fuselora.merge(base=base, loras=[f"{lora}:{strength}"], out=out, digest=False)
    return Merged(base, lora, out)


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Sample], Merged]:
    """A merge of each sample at strength 1, for all tests that copy it."""
    done: dict[str, Merged] = {}

    def result(sample: Sample) -> Merged:
        if sample.name not in done:
            done[sample.name] = merged(tmp_path_factory.mktemp(sample.name), sample)
        return done[sample.name]

    return result


def with_parts(
    done: Merged, folder: Path, sample: Sample, change: Callable[[dict[str, torch.Tensor]], None]
) -> VerifyReport:
    """The report on a result that another LoRA made, by the marker's word from this one."""
    tensors = sample.tensors()
    change(tensors)
    other, out = sample.write(folder / "other", tensors), done.copy(folder / "out")
    say_content(out, other)
    return verify(out, base=done.base, loras=[other])


def is_off(report: VerifyReport, sample: Sample) -> bool:
    """Whether tensors of the sample's, and no others, are off the float64 sum."""
    return set() < found(report) <= {("bound", target) for target in sample.targets}


def test_there_is_a_sample_of_every_kind() -> None:
    assert {sample.kind for sample in SAMPLES} == TERMS.keys()


@EACH
@pytest.mark.parametrize("strength", [1.0, -0.75])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_was_merged_holds(sample: Sample, strength: float, dtype: torch.dtype, tmp_path: Path) -> None:
    done = merged(tmp_path, sample, strength=strength, dtype=dtype)
    report = verify(done.out, base=done.base, loras=[done.lora])
    assert report.findings == ()
    (component,) = report.components
    assert (component.fused, component.identical) == (len(sample.targets), 1)
    assert component.share > (0.9 if dtype == torch.bfloat16 else 0.1)


PARTS = [
    pytest.param(sample, part, id=f"{sample.name}-{part}") for sample in SAMPLES for part in sample.parts
]


@pytest.mark.parametrize(("sample", "part"), PARTS)
def test_a_part_of_other_values_is_found(sample: Sample, part: str, once: Once, tmp_path: Path) -> None:
    report = with_parts(once(sample), tmp_path, sample, lambda tensors: _change(tensors, part))
    assert is_off(report, sample)


@pytest.mark.parametrize(("sample", "part"), PARTS)
def test_other_signs_in_a_part_are_found(sample: Sample, part: str, once: Once, tmp_path: Path) -> None:
    report = with_parts(once(sample), tmp_path, sample, lambda tensors: _flip(tensors, part))
    assert is_off(report, sample)


@SCALED
def test_another_alpha_is_found(sample: Sample, once: Once, tmp_path: Path) -> None:
    (part,) = sample.numbers
    report = with_parts(once(sample), tmp_path, sample, lambda tensors: _scale(tensors, part, 0.5))
    assert codes(report) == {"alpha"}


@CONSTRAINED
def test_another_constraint_is_found(sample: Sample, once: Once, tmp_path: Path) -> None:
    report = with_parts(once(sample), tmp_path, sample, lambda tensors: _scale(tensors, "alpha", 0.5))
    assert is_off(report, sample)


def test_a_rotation_cannot_be_verified_without_its_configuration(once: Once, tmp_path: Path) -> None:
    (sample,) = (sample for sample in SAMPLES if sample.name == "oft-series")
    done = once(sample)
    alone = Path(shutil.copy(done.lora / "adapter_model.safetensors", tmp_path / "alone.safetensors"))
    report = verify(done.out, base=done.base, loras=[alone])
    (finding,) = report.findings
    assert (finding.code, finding.tensor) == ("lora", f"base_model.model.{MODULE}")
    assert "adapter_config.json" in finding.message


def test_a_rotation_by_another_configuration_is_found(once: Once, tmp_path: Path) -> None:
    series, plain = (next(s for s in SAMPLES if s.name == name) for name in ("oft-series", "oft-peft"))
    done, lora = once(series), plain.write(tmp_path / "lora", series.tensors())
    assert found(verify(done.out, base=done.base, loras=[lora])) == {("bound", series.target)}


@EACH
def test_another_count_is_found(sample: Sample, once: Once, tmp_path: Path) -> None:
    done = once(sample)
    out = done.copy(tmp_path / "out")

    def more(marker: Any) -> None:
        applied = marker["loras"][0]["applied"]
        applied[next(name for name, n in applied.items() if n)] += 1

    edit_marker(out, more)
    assert codes(verify(out, base=done.base, loras=[done.lora])) == {"count"}


@SCALED
def test_another_scale_in_the_marker_is_found(sample: Sample, once: Once, tmp_path: Path) -> None:
    done = once(sample)
    out = done.copy(tmp_path / "out")
    edit_marker(out, lambda marker: [g.update(scale=0.4) for g in marker["loras"][0]["scales"]])
    report = verify(out, base=done.base, loras=[done.lora])
    assert found(report) == {("scale", None), *(("bound", target) for target in sample.targets)}


@EACH
def test_one_other_element_of_the_result_is_found(sample: Sample, once: Once, tmp_path: Path) -> None:
    done = once(sample)
    out = done.copy(tmp_path / "out")
    edit_tensor(out / done.base.name, sample.target, _nudged)
    assert found(verify(out, base=done.base, loras=[done.lora])) == {("bound", sample.target)}


@EACH
def test_a_result_with_another_strength_is_found(sample: Sample, once: Once, tmp_path: Path) -> None:
    done, half = once(sample), merged(tmp_path / "half", sample, strength=0.5)
    out = done.copy(tmp_path / "out")
    shutil.copy(half.weights, out / done.base.name)
    assert ("bound", sample.target) in found(verify(out, base=done.base, loras=[done.lora]))


@EACH
def test_a_base_tensor_left_as_it_was_is_found(sample: Sample, once: Once, tmp_path: Path) -> None:
    done = once(sample)
    old, out = load_file(done.base)[sample.target], done.copy(tmp_path / "out")
    edit_tensor(out / done.base.name, sample.target, lambda _: old)
    assert found(verify(out, base=done.base, loras=[done.lora])) == {("bound", sample.target)}


def _scale(tensors: dict[str, torch.Tensor], part: str, factor: float) -> None:
    key = f"{MODULE}.{part}"
    tensors[key] = tensors[key] * factor


def _change(tensors: dict[str, torch.Tensor], part: str) -> None:
    """Half as large again, and each value in another's place: a constraint takes a factor back."""
    _scale(tensors, part, 1.5)
    key = f"{MODULE}.{part}"
    tensors[key] = tensors[key].flatten().roll(1).view(tensors[key].shape)


def _flip(tensors: dict[str, torch.Tensor], part: str) -> None:
    values = tensors[f"{MODULE}.{part}"].view(-1)
    values[: len(values) // 2] *= -1


def _nudged(tensor: torch.Tensor) -> torch.Tensor:
    """The largest element, eight units in the last place up."""
    found = tensor.clone()
    values = found.view(-1)
    largest = values.float().abs().argmax()
    values[largest] = values[largest] * (1 + 8 * torch.finfo(tensor.dtype).eps)
    return found
