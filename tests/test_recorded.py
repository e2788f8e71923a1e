"""What a marker says of its LoRAs, held against the LoRA files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fuselora import synth
from fuselora.digest import content_sha256
from fuselora.pipeline import merge
from fuselora.verify import verify
from fuselora.verify_report import VerifyReport
from tests.fused_pair import HIGH, LOW, SIZE, Pair, codes, edit_json, edit_marker, found, write_pair

MODULE = "blocks.0.self_attn.q"
KEY = f"diffusion_model.{MODULE}"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_pair(tmp_path_factory.mktemp("pair"))


def with_entry(pair: Pair, folder: Path, name: str, **fields: object) -> VerifyReport:
    """The report after ``fields`` of the marker's entry for a LoRA were edited; callables get the value."""
    out = pair.copy(folder / "out")

    def change(marker: Any) -> None:
        entry = next(entry for entry in marker["loras"] if entry["name"] == name)
        for field, value in fields.items():
            entry[field] = value(entry[field]) if callable(value) else value

    edit_marker(out, change)
    return pair.verify(out)


def groups(**fields: object) -> Any:
    """An edit of every group of ``scales``."""
    return lambda held: [{**group, **fields} for group in held]


# Strength and scales


def test_a_wrong_strength(pair: Pair, tmp_path: Path) -> None:
    report = with_entry(pair, tmp_path, LOW, strength=0.8)
    (finding,) = report.findings
    assert (finding.code, finding.file) == ("scale", LOW)
    assert finding.message == ("the scale 0.25 of 20 modules is not strength 0.8 * alpha 4 / rank 8")


def test_a_wrong_strength_with_scales_that_agree(pair: Pair, tmp_path: Path) -> None:
    report = with_entry(pair, tmp_path, LOW, strength=0.8, scales=groups(scale=0.4))
    assert codes(report) == {"bound"}
    assert len(report.findings) == 20


def test_a_wrong_strength_of_differences(pair: Pair, tmp_path: Path) -> None:
    report = with_entry(pair, tmp_path, HIGH, strength=0.5, scales=groups(scale=0.25))
    assert ("bound", "blocks.0.attn1.norm_q.weight") in found(report)
    assert ("bound", "scale_shift_table") in found(report)


def test_an_alpha_that_is_not_the_files(pair: Pair, tmp_path: Path) -> None:
    """Twice the strength and half the alpha give the same scale."""
    report = with_entry(pair, tmp_path, LOW, strength=1.0, scales=groups(alpha=2.0))
    assert codes(report) == {"alpha"}
    assert len(report.findings) == 20
    assert ("alpha", KEY) in found(report)
    assert report.findings[0].message == "its alpha is 4; fused.json says 2, from tensor"


def test_an_alpha_of_another_source_than_the_file(pair: Pair, tmp_path: Path) -> None:
    assert codes(with_entry(pair, tmp_path, LOW, scales=groups(source="option"))) == {"alpha"}


def test_a_rank_that_is_not_the_files(pair: Pair, tmp_path: Path) -> None:
    report = with_entry(pair, tmp_path, LOW, strength=1.0, scales=groups(rank=16))
    assert codes(report) == {"scale"}
    assert ("scale", KEY) in found(report)


@pytest.mark.parametrize("rank", [0, 16])
def test_a_rank_that_makes_no_sense(pair: Pair, tmp_path: Path, rank: int) -> None:
    assert codes(with_entry(pair, tmp_path, LOW, scales=groups(rank=rank))) == {"scale"}


def merged(folder: Path, style: str, **options: Any) -> tuple[Path, Path, Path]:
    base = synth.write_pipeline(folder / "base", SIZE, dtype="BF16")
    lora = synth.write_lora(folder / "lora", SIZE, style=style, rank=4, **options)
    return base, lora, folder / "out"


def test_alpha_from_a_configuration_may_be_rank_stabilised(tmp_path: Path) -> None:
    base, lora, out = merged(tmp_path, "adapter", alpha=2)
    edit_json(lora / "adapter_config.json", lambda config: config.update(use_rslora=True))
    merge(base, [f"{lora}:0.5"], out, digest=False)
    assert verify(out, base=base, loras=[lora]).ok
    weights = lora / "adapter_model.safetensors"
    moved = weights.rename(tmp_path / "moved.safetensors")
    assert verify(out, base=base, loras=[moved]).ok, "the configuration is not asked again"
    edit_marker(out, lambda marker: [g.update(source="option") for g in marker["loras"][0]["scales"]])
    assert codes(verify(out, base=base, loras=[moved])) == {"scale"}


def test_no_alpha_means_the_rank(tmp_path: Path) -> None:
    base, lora, out = merged(tmp_path, "trainer")
    merge(base, [str(lora)], out, digest=False)
    assert verify(out, base=base, loras=[lora]).ok

    def half(marker: Any) -> None:
        entry = marker["loras"][0]
        entry["strength"] = 2.0
        entry["scales"] = groups(alpha=2.0)(entry["scales"])

    edit_marker(out, half)
    report = verify(out, base=base, loras=[lora])
    assert codes(report) == {"alpha"}
    assert "its alpha is not its rank" in report.findings[0].message


def test_alpha_by_option(tmp_path: Path) -> None:
    base, lora, out = merged(tmp_path, "trainer")
    merge(base, [str(lora)], out, digest=False, alphas=["1"])
    assert verify(out, base=base, loras=[lora]).ok
    edit_marker(out, lambda marker: [g.update(source="tensor") for g in marker["loras"][0]["scales"]])
    report = verify(out, base=base, loras=[lora])
    assert codes(report) == {"alpha"}
    assert "holds no alpha" in report.findings[0].message


# Every module accounted for


def without(name: str) -> Any:
    return lambda held: [
        {**group, "modules": [module for module in group["modules"] if module != name]} for group in held
    ]


def test_a_pair_without_a_scale(pair: Pair, tmp_path: Path) -> None:
    report = with_entry(pair, tmp_path, LOW, scales=without(MODULE))
    assert found(report) >= {("scale", KEY)}
    assert "copied" in codes(report), "what the marker does not claim should be the base's"


def test_a_scale_without_a_pair(pair: Pair, tmp_path: Path) -> None:
    def more(held: Any) -> Any:
        return [{**held[0], "modules": [*held[0]["modules"], "blocks.9.ffn.0"]}, *held[1:]]

    assert found(with_entry(pair, tmp_path, LOW, scales=more)) == {("lora", "blocks.9.ffn.0")}


def test_a_module_said_to_be_skipped_that_was_not(pair: Pair, tmp_path: Path) -> None:
    report = with_entry(pair, tmp_path, LOW, skipped=[{"module": KEY, "reason": "x"}])
    assert found(report) == {("lora", KEY)}


def test_a_module_that_was_skipped_without_a_word(tmp_path: Path) -> None:
    base = synth.write_pipeline(tmp_path / "base", SIZE, dtype="BF16")
    lora = synth.write_lora(tmp_path / "lora.safetensors", synth.tiny("wan2.2-t2v-a14b", blocks=3))
    out = merge(base, [str(lora)], tmp_path / "out", allow_unmatched=("blocks.2.*",), digest=False).out
    assert verify(out, base=base, loras=[lora]).ok
    edit_marker(out, lambda marker: marker["loras"][0].update(skipped=[]))
    report = verify(out, base=base, loras=[lora])
    assert codes(report) == {"lora"}
    assert len(report.findings) == 10


@pytest.mark.parametrize("applied", [None, {}, {"pairs": 19}])
def test_wrong_counts_of_deltas(pair: Pair, tmp_path: Path, applied: object) -> None:
    assert codes(with_entry(pair, tmp_path, LOW, applied=applied)) == {"count"}


def test_a_lora_on_no_component(pair: Pair, tmp_path: Path) -> None:
    report = with_entry(pair, tmp_path, LOW, component="transformer_3")
    assert ("loras", None) in found(report)


@pytest.mark.parametrize(
    "scales",
    [None, [{}], [{"scale": 1, "alpha": "x", "rank": 8, "source": "tensor", "modules": []}],
     [{"scale": 1, "alpha": 1, "rank": 8, "source": "tensor", "modules": "x"}]],
)  # fmt: skip
def test_scales_that_cannot_be_read(pair: Pair, tmp_path: Path, scales: object) -> None:
    report = with_entry(pair, tmp_path, LOW, scales=scales)
    assert codes(report) == {"marker"}
    assert [part.name for part in report.components] == ["transformer"]


def test_a_lora_that_does_not_fit_the_base(pair: Pair, tmp_path: Path) -> None:
    """The marker was made for another base, whose weights are wider."""
    base = synth.write_pipeline(tmp_path / "base", synth.tiny("wan2.2-t2v-a14b", blocks=2), experts=True)
    narrow = synth.write_pipeline(tmp_path / "narrow", synth.tiny("wan2.1-t2v-1.3b", blocks=2), experts=True)
    assert "lora" not in codes(verify(pair.plain, base=base, loras=pair.loras))
    report = verify(pair.plain, base=narrow, loras=pair.loras)
    assert "lora" in codes(report)
    assert report.components == ()


def test_a_component_is_not_compared_with_a_lora_that_does_not_fit(pair: Pair, tmp_path: Path) -> None:
    wide = synth.write_lora(tmp_path / "wide.safetensors", synth.tiny("wan2.1-t2v-1.3b"), style="lightning")
    out = pair.copy(tmp_path / "out")
    edit_marker(out, lambda marker: marker["loras"][1].update(content_sha256=content_sha256(wide)))
    report = verify(out, base=pair.base, loras=[pair.high, wide])
    assert codes(report) == {"lora"}
    assert [part.name for part in report.components] == ["transformer"]
