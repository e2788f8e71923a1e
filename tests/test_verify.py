"""verify: the digests alone, and the whole folder recomputed from its inputs."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from fuselora import synth
from fuselora.check.report import SHOWN_FINDINGS
from fuselora.compare import ComponentReport
from fuselora.errors import FormatError, InputError, UsageError
from fuselora.header import read_header
from fuselora.marker import FILE_NAME, read_marker
from fuselora.pipeline import merge
from fuselora.verify import verify
from fuselora.verify_report import BOUND, VerifyReport
from tests.fused_pair import (
    COPIED,
    FUSED,
    HIGH,
    LOW,
    SIZE,
    Pair,
    codes,
    edit_json,
    edit_marker,
    edit_tensor,
    flip_bit,
    found,
    read_tensor,
    shard_of,
    write_high,
    write_pair,
)

CONFIG = "transformer/config.json"
SIGN = 15  # of a bfloat16
Change = Callable[[Any], object]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_pair(tmp_path_factory.mktemp("pair"))


# What a good folder gives


def test_digests_alone(pair: Pair) -> None:
    report = verify(pair.out)
    marker = read_marker(pair.out)
    assert marker is not None
    assert report.ok
    assert report.digests_checked == len(marker.files)
    assert report.components == ()


def test_the_whole_folder_recomputed(pair: Pair) -> None:
    report = pair.verify(pair.out)
    assert report.findings == ()
    high, low = report.components
    assert (high.name, high.compared, high.identical, high.cast, high.fused) == ("transformer", 69, 0, 0, 69)
    assert (low.name, low.compared, low.identical, low.cast, low.fused) == ("transformer_2", 69, 49, 0, 20)
    assert low.elements == sum(
        tensor.n_elements
        for path in (pair.out / "transformer_2").glob("*.safetensors")
        for tensor in read_header(path).tensors
        if tensor.name.startswith("blocks") and tensor.name.endswith(".weight") and len(tensor.shape) == 2
    )
    assert low.share > 0.9999
    assert 0.4 < low.max_ulps < 10


def test_loras_in_another_order_under_other_names_and_one_twice(pair: Pair, tmp_path: Path) -> None:
    one, two = shutil.copy(pair.low, tmp_path / "a.safetensors"), shutil.copy(pair.high, tmp_path / "low.st")
    report = verify(pair.out, base=str(pair.base), loras=[str(one), two, pair.low])
    assert report.ok
    assert len(report.components) == 2


def test_a_folder_without_digests_can_only_be_recomputed(pair: Pair) -> None:
    alone = verify(pair.plain)
    (finding,) = alone.findings
    assert (finding.code, alone.ok, alone.verdict) == ("no-digests", False, "not verified")
    assert "there is nothing to compare: give --base and --lora" in finding.message
    report = pair.verify(pair.plain)
    assert report.ok
    assert report.digests_checked == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("uniform", [False, True])
def test_a_cast_component(pair: Pair, tmp_path: Path, dtype: str, uniform: bool) -> None:
    base = synth.write_pipeline(tmp_path / "base", SIZE, dtype="F32" if dtype != "float32" else "BF16")
    out = merge(base, [str(pair.low)], tmp_path / "out", dtype=dtype, uniform=uniform).out
    (report,) = verify(out, base=base, loras=[pair.low]).components
    assert report.compared == report.identical + report.cast + report.fused == 69
    assert (report.cast, report.fused) == (49 if uniform else 38, 20)
    assert verify(out, base=base, loras=[pair.low]).ok


def test_a_config_that_names_the_new_dtype(pair: Pair, tmp_path: Path) -> None:
    base = synth.write_pipeline(tmp_path / "base", SIZE)
    edit_json(base / CONFIG, lambda config: config.update(torch_dtype="float32"))
    out = merge(base, [str(pair.low)], tmp_path / "out", dtype="bfloat16", digest=False).out
    assert verify(out, base=base, loras=[pair.low]).ok
    edit_json(out / CONFIG, lambda config: config.update(torch_dtype="float64"))
    edit_marker(out, resized(out, CONFIG))
    assert codes(verify(out, base=base, loras=[pair.low])) == {"side-file"}


def test_one_file_in_one_folder(pair: Pair, tmp_path: Path) -> None:
    base = synth.write_file(tmp_path / "wan.fp16.safetensors", SIZE)
    out = merge(base, [str(pair.low)], tmp_path / "out").out
    report = verify(out, base=base, loras=[pair.low])
    assert report.ok
    assert [part.fused for part in report.components] == [20]


def test_a_native_pair(pair: Pair, tmp_path: Path) -> None:
    base = synth.write_native(tmp_path / "base", SIZE, experts=True, dtype="BF16", shard_bytes=60_000)
    out = merge(base, [f"{pair.high},{pair.low}"], tmp_path / "out").out
    report = verify(out, base=base, loras=pair.loras)
    assert report.ok
    assert [part.fused for part in report.components] == [69, 20]


def test_variant_files_are_found_by_their_names(pair: Pair, tmp_path: Path) -> None:
    base = synth.write_pipeline(tmp_path / "base", SIZE, dtype="F16", variant="fp16", shard_bytes=60_000)
    out = merge(base, [str(pair.low)], tmp_path / "out", variant="fp16").out
    assert verify(out, base=base, loras=[pair.low]).ok


@pytest.mark.parametrize("style", ["comfy-extractor", "kohya", "diffusers", "adapter", "peft", "default"])
def test_every_spelling_of_a_lora(tmp_path: Path, style: str) -> None:
    base = synth.write_pipeline(tmp_path / "base", SIZE, dtype="BF16")
    lora = synth.write_lora(tmp_path / "lora", SIZE, style=style, rank=4, alpha=2)
    out = merge(base, [f"{lora}:0.7"], tmp_path / "out").out
    report = verify(out, base=base, loras=[lora])
    assert report.findings == ()
    assert report.components[0].fused > 10


def test_two_loras_and_one_for_both_experts(pair: Pair, tmp_path: Path) -> None:
    out = merge(pair.base, [f"all={pair.low}", f"high={pair.high}:-0.3"], tmp_path / "out").out
    report = pair.verify(out)
    assert report.ok
    assert [part.fused for part in report.components] == [69, 20]


def test_a_lora_without_effect_leaves_the_base(pair: Pair, tmp_path: Path) -> None:
    out = merge(pair.base, [f"low={pair.low}:0"], tmp_path / "out").out
    report = verify(out, base=pair.base, loras=[pair.low])
    assert report.ok
    assert [part.max_ulps for part in report.components] == [0.0, 0.0]


def test_the_reference_kernel(pair: Pair, tmp_path: Path) -> None:
    out = merge(pair.base, [f"low={pair.low}"], tmp_path / "out", kernel="reference").out
    report = verify(out, base=pair.base, loras=[pair.low])
    assert report.ok
    assert report.components[1].share == 1.0


# Damage that the digests show


def test_one_flipped_bit(pair: Pair, tmp_path: Path) -> None:
    out = pair.copy(tmp_path / "out", digests=True)
    shard = shard_of(out, "transformer_2", FUSED)
    flip_bit(shard, FUSED, 0)
    report = verify(out)
    assert [(f.code, f.file) for f in report.findings] == [("content", shard.relative_to(out).as_posix())]


@pytest.mark.parametrize("path", [CONFIG, "vae/config.json", "vae/diffusion_pytorch_model.safetensors"])
def test_an_edited_side_file(pair: Pair, tmp_path: Path, path: str) -> None:
    out = pair.copy(tmp_path / "out", digests=True)
    content = bytearray((out / path).read_bytes())
    content[-5] ^= 1
    (out / path).write_bytes(content)
    report = verify(out)
    assert [(f.code, f.file) for f in report.findings] == [("content", path)]


def test_a_shard_of_another_run(pair: Pair, tmp_path: Path) -> None:
    other = merge(pair.base, [f"low={pair.low}:0.4"], tmp_path / "other").out
    out = pair.copy(tmp_path / "out", digests=True)
    shard = shard_of(out, "transformer_2", FUSED)
    shutil.copy(other / shard.relative_to(out), shard)
    assert codes(verify(out)) == {"header", "fingerprint"}
    assert ("bound", FUSED) in found(pair.verify(out))


def test_a_folder_that_was_never_fused(pair: Pair) -> None:
    report = pair.verify(pair.base, load=True)
    assert codes(report) == {"no-marker"}
    assert not report.ok


# Damage that only a recomputation shows: these folders have no digests


def test_a_flipped_bit_of_a_copied_tensor(pair: Pair, tmp_path: Path) -> None:
    out = pair.copy(tmp_path / "out")
    flip_bit(shard_of(out, "transformer_2", COPIED), COPIED, 0)
    report = pair.verify(out)
    assert found(report) == {("copied", COPIED)}
    assert report.components[1].identical == 48


def test_a_flipped_bit_of_a_fused_tensor(pair: Pair, tmp_path: Path) -> None:
    out = pair.copy(tmp_path / "out")
    shard = shard_of(out, "transformer_2", FUSED)
    flip_bit(shard, FUSED, SIGN)
    report = pair.verify(out)
    (finding,) = report.findings
    assert (finding.code, finding.tensor) == ("bound", FUSED)
    assert finding.file == shard.relative_to(out).as_posix()
    assert finding.message.startswith("1 of 2304 elements")
    assert report.components[1].fused == 19
    assert report.components[1].max_ulps > 50


@pytest.mark.parametrize("times", [0, 2], ids=["missing", "doubled"])
@pytest.mark.parametrize(
    "key",
    [
        FUSED,
        "blocks.1.attn2.norm_q.weight",  # a difference
        "blocks.0.ffn.net.2.bias",
        "blocks.1.scale_shift_table",
        "patch_embedding.weight",  # a convolution
        "scale_shift_table",
    ],
)
def test_a_delta_that_is_missing_or_doubled(pair: Pair, tmp_path: Path, key: str, times: int) -> None:
    out = pair.copy(tmp_path / "out")
    base = read_tensor(shard_of(pair.base, "transformer", key), key)
    edit_tensor(shard_of(out, "transformer", key), key, lambda held: base + times * (held - base))
    assert found(pair.verify(out)) == {("bound", key)}


def test_a_small_delta_that_is_missing_hides_in_the_bound_but_is_found(pair: Pair, tmp_path: Path) -> None:
    out = merge(pair.base, [f"low={pair.low}:0.04"], tmp_path / "out", digest=False).out
    assert verify(out, base=pair.base, loras=[pair.low]).ok
    base = read_tensor(shard_of(pair.base, "transformer_2", FUSED), FUSED)
    large = base.abs() > 0.25  # where a unit is larger than the delta
    edit_tensor(shard_of(out, "transformer_2", FUSED), FUSED, lambda held: torch.where(large, base, held))
    (finding,) = verify(out, base=pair.base, loras=[pair.low]).findings
    assert (finding.code, finding.tensor) == ("rounding", FUSED)


def test_a_sum_that_was_rounded_twice(pair: Pair, tmp_path: Path) -> None:
    """base + bfloat16(delta), as serving engines fuse."""
    out = pair.copy(tmp_path / "out")
    module = "diffusion_model.blocks.0.self_attn.q"
    up, down = (read_tensor(pair.low, f"{module}.{part}.weight") for part in ("lora_up", "lora_down"))
    base = read_tensor(shard_of(pair.base, "transformer_2", FUSED), FUSED)
    twice = base + (0.25 * up.float() @ down.float()).bfloat16()
    edit_tensor(shard_of(out, "transformer_2", FUSED), FUSED, lambda held: twice)
    (finding,) = pair.verify(out).findings
    assert (finding.code in ("bound", "rounding"), finding.tensor) == (True, FUSED)


def swap_experts(out: Path) -> None:
    (out / "transformer").rename(out / "aside")
    (out / "transformer_2").rename(out / "transformer")
    (out / "aside").rename(out / "transformer_2")


def agree_with_swap(marker: Any) -> None:
    """Everything that the marker says of one expert's files, said of the other's."""
    first, second = marker["components"]["transformer"], marker["components"]["transformer_2"]
    for one, two in zip(first["files"], second["files"], strict=True):
        for key in one.keys() - {"path"}:
            one[key], two[key] = two[key], one[key]
    for key in ("fused", "copied"):
        first[key], second[key] = second[key], first[key]
    for entry in marker["loras"]:
        entry["component"] = "transformer" if entry["component"] == "transformer_2" else "transformer_2"


def test_swapped_experts(pair: Pair, tmp_path: Path) -> None:
    out = pair.copy(tmp_path / "out", digests=True)
    swap_experts(out)
    assert "component" in codes(verify(out))


@pytest.mark.parametrize("digests", [False, True])
def test_swapped_experts_with_a_marker_that_agrees(pair: Pair, tmp_path: Path, digests: bool) -> None:
    out = pair.copy(tmp_path / "out", digests=digests)
    swap_experts(out)
    edit_marker(out, agree_with_swap)
    report = pair.verify(out)
    assert {"bound", "copied"} <= codes(report)
    assert {f.file.split("/")[0] for f in report.findings if f.tensor} == {"transformer", "transformer_2"}


def resized(out: Path, path: str) -> Change:
    """Has the marker say a side file's true size."""

    def change(marker: Any) -> None:
        entry = next(side for side in marker["side_files"] if side["path"] == path)
        entry["bytes"] = (out / path).stat().st_size

    return change


@pytest.mark.parametrize("path", [CONFIG, "scheduler/scheduler_config.json"])
def test_a_side_file_that_is_not_the_bases(pair: Pair, tmp_path: Path, path: str) -> None:
    out = pair.copy(tmp_path / "out")
    edit_json(out / path, lambda config: config.update(extra=1))
    edit_marker(out, resized(out, path))
    report = pair.verify(out)
    assert [(f.code, f.file) for f in report.findings] == [("side-file", path)]


def test_a_side_file_that_the_base_does_not_have(pair: Pair, tmp_path: Path) -> None:
    out = pair.copy(tmp_path / "out")
    (out / "notes.txt").write_text("x", encoding="utf-8")
    edit_marker(out, lambda marker: marker["side_files"].append({"path": "notes.txt", "bytes": 1}))
    assert [(f.code, f.file) for f in pair.verify(out).findings] == [("side-file", "notes.txt")]


# Inputs that are not those of the marker


def test_a_lora_that_the_marker_does_not_list(pair: Pair, tmp_path: Path) -> None:
    other = write_high(tmp_path / HIGH, seed=9)
    report = verify(pair.out, base=pair.base, loras=[*pair.loras, other])
    assert [(f.code, f.file) for f in report.findings] == [("lora-unlisted", str(other))]
    assert len(report.components) == 2


def test_a_listed_lora_that_is_not_given(pair: Pair) -> None:
    report = verify(pair.out, base=pair.base, loras=[pair.low])
    assert [(f.code, f.file) for f in report.findings] == [("lora-absent", HIGH)]
    assert [part.name for part in report.components] == ["transformer_2"]


def test_a_base_without_loras(pair: Pair) -> None:
    report = verify(pair.out, base=pair.base)
    assert [(f.code, f.file) for f in report.findings] == [("lora-absent", HIGH), ("lora-absent", LOW)]
    assert report.components == ()


def test_loras_without_a_base(pair: Pair) -> None:
    with pytest.raises(UsageError, match="no base"):
        verify(pair.out, loras=pair.loras)


@pytest.mark.parametrize("spec", ["{}:0.9", "high={}", "all={}", "high={},low={}"])
def test_a_lora_with_a_component_or_strength(pair: Pair, spec: str) -> None:
    with pytest.raises(UsageError, match=r"^--lora .*: verify takes components and strengths from") as caught:
        verify(pair.out, base=pair.base, loras=[spec.format(pair.high, pair.low)])
    assert caught.value.hint == "Give FILE alone, without COMPONENT= before it and :STRENGTH after it."


def test_a_list_of_loras_and_one_whose_name_looks_like_a_spec(pair: Pair, tmp_path: Path) -> None:
    odd = shutil.copy(pair.high, tmp_path / "high=a,b:0.9")
    assert verify(pair.out, base=pair.base, loras=[f"{pair.high},{pair.low}"]).ok
    assert verify(pair.out, base=pair.base, loras=[odd, pair.low]).ok


def test_inputs_that_are_not_there(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        verify(pair.out, base=pair.base, loras=[tmp_path / "none.safetensors"])
    with pytest.raises(InputError, match="no such file"):
        verify(pair.out, base=tmp_path / "none", loras=pair.loras)
    with pytest.raises(FormatError, match="not safetensors"):
        verify(pair.out, base=pair.base, loras=[pair.base / CONFIG])
    with pytest.raises(InputError, match="not a folder"):
        verify(tmp_path / "none")


def test_another_base_of_the_same_shapes(pair: Pair, tmp_path: Path) -> None:
    base = Path(shutil.copytree(pair.base, tmp_path / "base"))
    shard = shard_of(base, "transformer_2", FUSED)
    edit_tensor(shard, FUSED, lambda held: held)
    assert verify(pair.out, base=base, loras=pair.loras).ok
    flip_bit(shard, FUSED, 0)
    report = verify(pair.out, base=base, loras=pair.loras)
    assert ("another-base", str(shard)) in {(f.code, f.file) for f in report.findings}
    assert {f.code for f in report.findings} <= {"another-base", "bound", "rounding"}


def test_a_base_of_another_size_is_not_recomputed(pair: Pair, tmp_path: Path) -> None:
    base = synth.write_pipeline(tmp_path / "base", synth.tiny("wan2.1-t2v-1.3b"), experts=True)
    report = verify(pair.plain, base=base, loras=pair.loras)
    assert "another-base" in codes(report) or "lora" in codes(report)
    assert report.components == ()


def test_a_base_with_one_transformer(pair: Pair, tmp_path: Path) -> None:
    report = verify(pair.plain, base=pair.base / "transformer", loras=pair.loras)
    (finding,) = [f for f in report.findings if f.code == "another-base"]
    assert "transformer_2" in finding.message
    assert [part.name for part in report.components] == ["transformer"]


# Stacked


def test_a_stacked_output_against_the_fused_base(pair: Pair, tmp_path: Path) -> None:
    later = write_high(tmp_path / "later.safetensors", seed=11)
    out = merge(pair.out, [f"transformer={later}"], tmp_path / "out", stack=True).out
    report = verify(out, base=pair.out, loras=[later])
    assert report.findings == ()
    assert [(part.fused, part.identical) for part in report.components] == [(69, 0), (0, 69)]
    assert verify(out, base=pair.out, loras=[later, *pair.loras]).ok


def test_a_stacked_output_needs_its_fused_base(pair: Pair, tmp_path: Path) -> None:
    later = write_high(tmp_path / "later.safetensors", seed=11)
    out = merge(pair.out, [f"transformer={later}"], tmp_path / "out", stack=True).out
    report = verify(out, base=pair.base, loras=[later, *pair.loras])
    assert codes(report) == {"another-base"}
    assert report.components == ()
    edit_marker(out, lambda marker: marker["loras"].pop(0))
    assert "loras" in codes(verify(out, base=pair.out, loras=[later]))


def test_a_fused_base_for_an_output_that_was_not_stacked(pair: Pair) -> None:
    report = verify(pair.out, base=pair.plain, loras=pair.loras)
    assert codes(report) == {"another-base"}
    assert "a base that is not fused" in report.findings[0].message


# How it is told


def test_torch_is_imported_for_a_recomputation_only(pair: Pair) -> None:
    script = (
        "import sys; from fuselora.verify import verify\n"
        f"assert verify({str(pair.out)!r}).ok\n"
        "assert 'torch' not in sys.modules and 'safetensors' not in sys.modules\n"
        f"assert verify({str(pair.out)!r}, base={str(pair.base)!r}).components == ()\n"
        f"assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


class Heard:
    """Progress that keeps what it is told."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, int, int]] = []

    @contextmanager
    def phase(self, name: str, n_bytes: int) -> Iterator[Callable[[int], None]]:
        done: list[int] = []
        yield done.append
        self.phases.append((name, n_bytes, sum(done)))


def test_progress_ends_at_its_total(pair: Pair) -> None:
    heard = Heard()
    pair.verify(pair.out, progress=heard)
    assert [name for name, _, _ in heard.phases] == [
        "check digests", "recompute transformer", "recompute transformer_2",
    ]  # fmt: skip
    assert all(total == done > 0 for _, total, done in heard.phases)


def test_the_report_as_json_and_in_words(pair: Pair, tmp_path: Path) -> None:
    out = pair.copy(tmp_path / "out")
    edit_tensor(shard_of(out, "transformer_2", FUSED), FUSED, lambda held: held * float("nan"))
    report = pair.verify(out)
    document = json.loads(json.dumps(report.document(), allow_nan=False))
    assert document["ok"] is False
    assert document["components"][0] == {
        "name": "transformer", "compared": 69, "identical": 0, "cast": 0, "fused": 69,
        "share_equal": report.components[0].share, "max_ulps": report.components[0].max_ulps,
    }  # fmt: skip
    assert document["components"][1]["max_ulps"] is None
    (finding,) = document["findings"]
    assert finding["code"] == "bound"
    lines = list(report.lines())
    assert lines[0] == f"digests of 0 files compared with {FILE_NAME}"
    assert f"  {finding['file']}: {FUSED}: {finding['message']}" in lines


def component(max_ulps: float) -> ComponentReport:
    return ComponentReport("transformer", 1, 0, 0, 1, elements=8, equal=5, max_ulps=max_ulps)


@pytest.mark.parametrize(("max_ulps", "said"), [(0.5, False), (1.0, False), (569.0, True), (math.inf, False)])
def test_an_error_of_many_units_is_explained(max_ulps: float, said: bool) -> None:
    lines = list(VerifyReport((), (component(max_ulps), component(0.0)), 0).lines())
    assert (lines[-1] == BOUND) is said
    assert len([line for line in lines if "2^-20" in line]) == said


def test_long_lists_are_cut_in_words_only(pair: Pair, tmp_path: Path) -> None:
    out = pair.copy(tmp_path / "out")
    swap_experts(out)
    edit_marker(out, agree_with_swap)
    report = pair.verify(out)
    lines = list(report.lines())
    assert len(report.findings) > 60
    assert lines[-1] == f"  ... and {len(report.findings) - SHOWN_FINDINGS} more"
