"""The schema of fused.json: it describes every field, and every marker that a merge writes keeps to it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from fuselora import record, synth
from fuselora.marker import FILE_NAME
from fuselora.pipeline import merge
from tests.fused_pair import SIZE, write_pair
from tests.marked import EARLIER, Document, changed, load, validator, without_digests, write_fused
from tests.output.fused_folder import expected
from tests.validated import assert_valid


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return write_fused(tmp_path / "out")


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real merge with pairs, differences and two experts."""
    return write_pair(tmp_path_factory.mktemp("pair")).out


# The reader has no use for these; the schema is stricter.
INCOMPLETE: list[tuple[str, object]] = [
    ("tool", ...),
    ("tool.version", ...),
    ("created", "yesterday"),
    ("created", "2026-12-01T12:00:00+01:00"),
    ("base", ...),
    ("base.source", ...),
    ("base.family", 3),
    ("components.transformer.copied", ...),
    ("components.transformer.files.0.sha256", ...),
    ("side_files.0.sha256", ...),
    ("side_files.0.link", "junction"),
    ("loras.0.dialect", ...),
    ("loras.0.ranks", [0.5]),
    ("loras.0.alpha.source", ...),
    ("loras.0.scales", ...),
    ("loras.0.scales.0.source", ...),
    ("loras.0.scales.0.modules", []),
    ("loras.0.applied.diff_b", ...),
    ("loras.0.applied.diff_m", -1),
    ("loras.0.skipped", [{"module": "x"}]),
    ("warnings", [{"code": "x"}]),
    ("math.kernel", ...),
    ("serving.num_inference_steps", 0),
    ("policy.distill_lora", "maybe"),
]


def test_the_schema_is_valid() -> None:
    schema = validator().schema
    assert schema["$schema"] == Draft202012Validator.META_SCHEMA["$id"]
    Draft202012Validator.check_schema(schema)


def fields(schema: Document, place: str = "") -> list[tuple[str, Document]]:
    """Every field of a schema that names one, the field's own schema resolved by one step."""
    found = []
    for name, value in schema.get("properties", {}).items():
        found += [(f"{place}.{name}", value), *fields(value, f"{place}.{name}")]
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            found += fields(schema[name], f"{place}[]")
    for name, value in schema.get("$defs", {}).items():
        found += fields(value, name)
    return found


def test_the_schema_describes_every_field() -> None:
    schema = validator().schema
    found = fields(schema)
    assert len(found) > 60
    for place, field in found:
        target = schema["$defs"][field["$ref"].removeprefix("#/$defs/")] if "$ref" in field else field
        assert field.get("description") or target.get("description"), f"{place} is not described"


def test_the_schema_forbids_no_unknown_field() -> None:
    text = json.dumps(validator().schema)
    assert '"additionalProperties": false' not in text
    assert "unevaluatedProperties" not in text


# What is valid and what is not ---------------------------------------------------------------------


def test_a_whole_marker_is_valid(out: Path) -> None:
    document = load(out)
    assert [error.message for error in validator().iter_errors(document)] == []
    document["stacked_on"] = EARLIER
    document["loras"][0]["new"] = document["new"] = 1
    assert validator().is_valid(document | {"schema": "fuselora.fused/1.7"})


def test_a_marker_without_digests_is_valid(out: Path) -> None:
    assert validator().is_valid(without_digests(load(out)))


@pytest.mark.parametrize(("place", "value"), INCOMPLETE)
def test_the_schema_refuses(out: Path, place: str, value: object) -> None:
    assert not validator().is_valid(changed(load(out), place, value))


# Strict on types -----------------------------------------------------------------------------------

NULLABLE = {"revision", "family", "layout", "pipeline_class", "role", "index"}
# What a plain merge does not write.
SELDOM: Document = {
    "stacked_on": EARLIER,
    "layout": "diffusers",
    "skeleton": {"source": "x", "revision": "0123", "pipeline_class": "WanPipeline"},
    "warnings": [{"code": "x", "message": "y"}],
    "serving": {
        "num_inference_steps": 4, "guidance_scale": 1.0, "guidance_scale_2": 1.0, "flow_shift": 5.0,
        "boundary_ratio": 0.875, "solver": "euler", "sources": {"solver": "name"}, "note": "x",
    },
}  # fmt: skip
OTHERS: list[Any] = ["text", 1.5, [1], {"x": 1}, True, None]


def places(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Every field of a document and the first item of every list."""
    if isinstance(value, dict):
        children = list(value.items())
    else:
        children = list(enumerate(value))[:1] if isinstance(value, list) else []
    for name, child in children:
        at = f"{place}.{name}".lstrip(".")
        yield at, child
        yield from places(child, at)


def other_types(place: str, value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [other for other in OTHERS if other is not True]
    same = (int, float) if isinstance(value, (int, float)) else type(value)
    nullable = place.rpartition(".")[2] in NULLABLE
    return [
        other
        for other in OTHERS
        if not (isinstance(other, same) and other is not True) and not (other is None and nullable)
    ]


def test_every_field_that_is_written_has_its_type(merged: Path) -> None:
    document = load(merged) | SELDOM
    document["base"]["revision"] = "0123"
    document["loras"][0]["skipped"] = [{"module": "x", "reason": "y"}]
    assert validator().is_valid(document)
    found = [(place, value) for place, value in places(document) if value is not None]
    assert len(found) > 80
    for place, value in found:
        for other in other_types(place, value):
            assert not validator().is_valid(changed(document, place, other)), (place, other)


# Every marker of a test run ------------------------------------------------------------------------


def test_what_a_merge_writes_is_valid(merged: Path) -> None:
    assert_valid(load(merged))


def test_a_merge_that_writes_anything_else_fails_the_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``conftest`` has it for each test, in each worker."""
    base = synth.write_pipeline(tmp_path / "base", SIZE)
    lora = synth.write_lora(tmp_path / "lora.safetensors", SIZE)
    monkeypatch.setattr(record, "applied_counts", lambda hits: {"pairs": "many"})
    with pytest.raises(AssertionError, match=r"loras\[0\]\.applied"):
        merge(base, [str(lora)], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_folders_that_stand_in_for_a_merge_have_valid_markers() -> None:
    assert_valid(json.loads(expected("x")[FILE_NAME]))
