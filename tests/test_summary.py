"""Plans, reports and refusals as the documents that --json prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fuselora.errors import CheckpointError, Fault, Notice, Refused
from fuselora.kinds.difference import DIFF
from fuselora.match import Hit
from fuselora.pipeline import merge, plan
from fuselora.summary import (
    PENDING,
    lora_document,
    main_dtype,
    plan_document,
    report_document,
    where,
)
from fuselora.synth import Spec, tiny, write_lora, write_pipeline, write_safetensors
from tests import listings
from tests.inputs import matched, one_component, open_lora, pair, tensor

if TYPE_CHECKING:
    from fuselora.planning import FusePlan

SIZE = tiny("wan2.2-i2v-a14b", blocks=2)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> FusePlan:
    """A pair with a LoRA of Wan2.1-I2V's names for one expert."""
    folder = tmp_path_factory.mktemp("summary")
    base = write_pipeline(folder / "base", SIZE, experts=True, shard_bytes=200_000)
    lora = write_lora(
        folder / "x.safetensors", tiny("wan2.1-i2v-14b"), style="extractor", alpha=2, dtype="F32"
    )
    return plan(base, [f"high={lora}:0.5"], dtype="bfloat16")


def as_json(document: dict[str, object]) -> dict[str, Any]:
    """The document as a reader gets it: it must survive JSON unchanged."""
    read: dict[str, Any] = json.loads(json.dumps(document, allow_nan=False))
    assert read == document
    return read


def test_a_plan(planned: FusePlan) -> None:
    document = as_json(plan_document(planned))
    assert document["base"] == {
        "source": "base",
        "revision": None,
        "container": "pipeline",
        "layout": "diffusers",
        "family": "wan",
        "models": [],
        "layout_told_by": None,
    }
    assert (document["fingerprint"], document["pending"]) == (None, list(PENDING))
    assert document["bytes_in"] == planned.bytes_in > document["bytes_out"] == planned.bytes_out
    assert document["peak_memory_bytes"] > 1 << 20
    assert [warning["code"] for warning in document["warnings"]] == ["skipped"]
    assert set(document) == {
        "base", "layout", "skeleton", "components", "loras", "serving", "bytes_in", "bytes_out",
        "peak_memory_bytes", "fingerprint", "pending", "warnings",
    }  # fmt: skip


def test_its_components(planned: FusePlan) -> None:
    first, second = as_json(plan_document(planned))["components"]
    assert (first["name"], first["role"]) == ("transformer", "high_noise")
    assert (first["base_dtype"], first["dtype"]) == ("float32", "bfloat16")
    assert first["tensors"] == first["fused"] + first["copied"] == second["tensors"] == second["copied"]
    assert (second["fused"], second["role"]) == (0, "low_noise")
    assert first["fused"] > 40
    assert first["files"] > 1
    for part in (first, second):
        assert part["bytes_out"] < part["bytes_in"]
    total = sum(part["bytes_out"] for part in (first, second))
    assert total == planned.bytes_out


def test_its_lora(planned: FusePlan) -> None:
    (lora,) = as_json(plan_document(planned))["loras"]
    assert (lora["name"], lora["component"], lora["strength"]) == ("x.safetensors", "transformer", 0.5)
    assert lora["applied"]["pairs"] == sum(group["modules"] for group in lora["scales"])
    assert {kind for kind, count in lora["applied"].items() if count} == {"pairs", "diff", "diff_b", "diff_m"}
    assert [(group["scale"], group["alpha"], group["rank"], group["source"]) for group in lora["scales"]] == [
        (0.25, 2.0, 4, "tensor")
    ]
    (skipped,) = lora["skipped"]
    assert "image branch" in skipped["reason"]
    assert len(skipped["modules"]) == 2 * 3 + 4
    assert sum(lora["where"].values()) == sum(lora["applied"].values())
    assert lora["where"]["blocks.*.attn1.to_q.weight"] == 2
    assert lora["where"]["scale_shift_table"] == 1


def test_a_module_counts_once_however_many_deltas_it_has(tmp_path: Path) -> None:
    base, _ = one_component(tmp_path / "b.safetensors", [tensor("q.weight", 4, 4), tensor("q.bias", 4)])
    lora = open_lora(tmp_path / "x.safetensors", [*pair("q"), tensor("q.diff_b", 4)])
    document = lora_document(matched(lora, base))
    assert document["modules"] == 1
    assert document["applied"] == {"pairs": 1, "diff": 0, "diff_b": 1, "diff_m": 0, "replace": 0}


def test_where_stars_the_number_of_the_block_and_no_other(tmp_path: Path) -> None:
    keys = [
        "blocks.0.ffn.net.0.proj.weight",
        "blocks.10.ffn.net.0.proj.weight",
        "blocks.0.ffn.net.2.weight",
        "x.bias",
    ]
    lora = open_lora(tmp_path / "x.safetensors", pair("q"))
    assert where(tuple(Hit(key, lora.modules[0], DIFF, (4, 4)) for key in keys)) == {
        "blocks.*.ffn.net.0.proj.weight": 2,
        "blocks.*.ffn.net.2.weight": 1,
        "x.bias": 1,
    }


@pytest.mark.parametrize(
    ("specs", "dtype"),
    [
        ([Spec("a", "F32", (3,)), Spec("b", "BF16", (4,))], "float32"),
        ([Spec("a", "F32", (3,)), Spec("b", "BF16", (8,))], "bfloat16"),
        ([Spec("a", "F16", (3,))], "float16"),
        ([Spec("a", "F8_E4M3", (3,))], "F8_E4M3"),
        ([], "none"),
    ],
)
def test_the_main_dtype_holds_most_bytes(tmp_path: Path, specs: list[Spec], dtype: str) -> None:
    assert main_dtype(one_component(tmp_path / "b.safetensors", specs)[1]) == dtype


@pytest.mark.parametrize("experts", [False, True])
def test_models_by_names_and_shapes(tmp_path: Path, experts: bool) -> None:
    lora = listings.sparse(tmp_path / "x.safetensors", listings.lora("wan2.2-t2v-a14b.x2v-distill-1217.r64"))
    parts = ("transformer", "transformer_2")[: 1 + experts]
    for part in parts:
        path = tmp_path / "base" / part / "model.safetensors"
        listings.sparse(path, listings.base("wan2.2-t2v-a14b", "diffusers"))
    found = plan(tmp_path / "base", [f"all={lora}"]).checkpoint.models
    assert found == (("Wan2.2-T2V-A14B",) if experts else ("Wan2.1-T2V-14B", "Wan2.2-T2V-A14B (one expert)"))


def test_an_unknown_family_has_no_models(tmp_path: Path) -> None:
    base = write_safetensors(tmp_path / "b.safetensors", [tensor("layers.0.q.weight", 4, 4)])
    lora = write_safetensors(tmp_path / "x.safetensors", pair("layers.0.q"))
    document = plan_document(plan(base, [lora]))
    assert document["base"] == {
        "source": "b.safetensors", "revision": None, "container": "file", "layout": None, "family": None,
        "models": [], "layout_told_by": None,
    }  # fmt: skip


def test_a_finished_run(tmp_path: Path) -> None:
    base = write_safetensors(tmp_path / "b.safetensors", [tensor("layers.0.q.weight", 64, 64)])
    lora = write_safetensors(tmp_path / "x.safetensors", pair("layers.0.q", 64, 64))
    report = merge(base, [lora], tmp_path / "out")
    document = as_json(report_document(report))
    of_plan = plan_document(report.plan)
    assert set(document) == {*of_plan, "out", "artifact", "kept", "seconds"}
    assert document["out"] == str(tmp_path / "out")
    assert document["artifact"] == report.marker.artifact
    assert (document["kept"], document["pending"]) == ([], [])
    assert document["fingerprint"] == report.marker.fingerprint
    assert document["seconds"] >= 0


# Refusals


def test_a_failure_with_its_facts() -> None:
    error = CheckpointError("base: is odd", hint="Fix it.", path="base", tensor="q", code="x")
    assert as_json(error.document()) == {
        "error": {
            "code": "checkpoint",
            "message": "base: is odd",
            "hint": "Fix it.",
            "path": "base",
            "tensor": "q",
        }
    }


def test_a_refusal_with_every_fault() -> None:
    faults = (Fault("shape", "q is odd", path="x", key="q", hint="h", facts={"n": 1}), Fault("list", "two"))
    document = as_json(Refused(faults).document())
    assert document["error"]["code"] == "refused"
    assert document["error"]["message"] == "x: q is odd\ntwo"
    assert document["error"]["hint"] == "h"
    assert document["error"]["faults"] == [
        {"kind": "shape", "message": "q is odd", "path": "x", "key": "q", "n": 1},
        {"kind": "list", "message": "two", "path": None, "key": None},
    ]


def test_a_notice() -> None:
    assert Notice("zero_delta", "all zero", {"of": 3}).document() == {
        "code": "zero_delta",
        "message": "all zero",
        "of": 3,
    }
    assert Notice("x", "y").document() == {"code": "x", "message": "y"}
