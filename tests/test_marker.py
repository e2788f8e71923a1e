"""The marker: read, written, described by its schema, and compared with the folder it stands in."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

import fuselora
from fuselora import marker as marker_module
from fuselora.digest import artifact_digest, content_sha256, sha256_file, tagged
from fuselora.errors import FormatError, InputError, MarkerError
from fuselora.header import TensorInfo, encode_header, read_header
from fuselora.integrity import SMALL_BYTES
from fuselora.marker import (
    FILE_NAME,
    FINGERPRINT_KEY,
    JOURNAL_NAME,
    MAX_BYTES,
    SCHEMA,
    CheckReport,
    check,
    decode,
    encode,
    main,
    read_marker,
)

FINGERPRINT = tagged("f" * 64)
EARLIER = tagged("e" * 64)
FUSED_SHARD = "transformer/diffusion_pytorch_model-00001-of-00002.safetensors"
COPIED_SHARD = "transformer/diffusion_pytorch_model-00002-of-00002.safetensors"
INDEX = "transformer/diffusion_pytorch_model.safetensors.index.json"
CONFIG = "transformer/config.json"
PACKAGE = Path(fuselora.__file__).parent
Document = dict[str, Any]


def write_safetensors(path: Path, tensors: dict[str, bytes], metadata: dict[str, str]) -> None:
    """One-row F32 tensors, in the order given."""
    infos, at = [], 0
    for name, data in tensors.items():
        infos.append(TensorInfo(name, "F32", (1, len(data) // 4), at, at + len(data)))
        at += len(data)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode_header(infos, metadata) + b"".join(tensors.values()))


def write_lora(path: Path, *, reverse: bool = False, first: bytes = b"abcd") -> Path:
    tensors = {"to_q.lora_A.weight": first, "to_q.lora_B.weight": b"efgh"}
    order = dict(reversed(tensors.items())) if reverse else tensors
    write_safetensors(path, order, {"note": "re-saved"} if reverse else {})
    return path


def write_fused(folder: Path) -> Path:
    """A fused folder: one component of two shards, the second one copied, and two side files."""
    write_safetensors(folder / FUSED_SHARD, {"to_q.weight": b"aaaabbbb"}, {FINGERPRINT_KEY: FINGERPRINT})
    write_safetensors(folder / COPIED_SHARD, {"to_k.weight": b"ccccdddd"}, {})
    names = {"to_q.weight": Path(FUSED_SHARD).name, "to_k.weight": Path(COPIED_SHARD).name}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 16}, "weight_map": names}))
    (folder / CONFIG).write_text('{"dim": 4}')
    (folder / FILE_NAME).write_bytes(encode(describe(folder)))
    return folder


def describe(folder: Path) -> Document:
    """The marker of what ``write_fused`` wrote."""
    document: Document = {
        "schema": SCHEMA,
        "tool": {"name": "fuselora", "version": "0.1.0", "torch": "2.13.0"},
        "created": "2026-12-01T12:00:00Z",
        "lora_is_fused": True,
        "fingerprint": FINGERPRINT,
        "base": {"source": "tiny", "revision": None, "family": "wan", "layout": "diffusers"},
        "components": {
            "transformer": {
                "role": None,
                "dtype": "float32",
                "index": INDEX,
                "tensors": 2,
                "fused": 1,
                "copied": 1,
                "files": [weight_entry(folder, FUSED_SHARD, 1), weight_entry(folder, COPIED_SHARD, 0)],
            }
        },
        "side_files": [entry(folder, CONFIG), entry(folder, INDEX)],
        "loras": [lora_entry(write_lora(folder.parent / "lora.safetensors"))],
        "warnings": [],
        "math": {"accumulate": "float32", "rounding": "once, nearest even", "device": "cpu", "kernel": "x"},
        "serving": {"num_inference_steps": 4, "guidance_scale": 1.0, "note": "from the LoRA's name"},
        "policy": {"distill_lora": "refuse", "dynamic_lora": "allow"},
    }
    document["artifact"] = artifact_of(document)
    return document


def entry(folder: Path, path: str) -> Document:
    return {"path": path, "bytes": (folder / path).stat().st_size, "sha256": sha256_file(folder / path)}


def weight_entry(folder: Path, path: str, fused: int) -> Document:
    header = read_header(folder / path).sha256
    return entry(folder, path) | {"base_sha256": "b" * 64, "header_sha256": header, "fused": fused}


def lora_entry(path: Path) -> Document:
    scales = {"scale": 0.125, "alpha": 8.0, "rank": 64, "source": "tensor", "modules": ["to_q"]}
    return {
        "name": path.name,
        "sha256": sha256_file(path),
        "content_sha256": content_sha256(path),
        "component": "transformer",
        "strength": 1.0,
        "dialect": "lora_A/B",
        "ranks": [64],
        "alpha": {"source": "tensor", "values": [8.0]},
        "scales": [scales],
        "applied": {"pairs": 1, "diff": 0, "diff_b": 0, "replace": 0},
        "skipped": [],
    }


def listed(document: Document) -> list[Document]:
    weights = [record for part in document["components"].values() for record in part["files"]]
    return [*weights, *document["side_files"]]


def artifact_of(document: Document) -> str:
    return tagged(artifact_digest((record["path"], record["sha256"]) for record in listed(document)))


def load(folder: Path) -> Document:
    document: Document = json.loads((folder / FILE_NAME).read_bytes())
    return document


def store(folder: Path, document: Document) -> None:
    """As given, in whatever state: a broken marker does not go through ``encode``."""
    (folder / FILE_NAME).write_text(json.dumps(document))


def codes(report: CheckReport) -> set[tuple[str, str]]:
    return {(finding.code, finding.path) for finding in report.findings}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return write_fused(tmp_path / "out")


@pytest.fixture
def lora(out: Path) -> Path:
    return out.parent / "lora.safetensors"


# --- reading ---------------------------------------------------------------------------------------


def test_reads_what_was_written(out: Path, lora: Path) -> None:
    marker = read_marker(str(out))
    assert marker is not None
    assert (marker.schema, marker.fingerprint, marker.stacked_on) == (SCHEMA, FINGERPRINT, None)
    assert marker.raw == load(out)
    part = marker.components["transformer"]
    assert (part.name, part.role, part.dtype, part.index) == ("transformer", None, "float32", INDEX)
    assert (part.n_tensors, part.fused) == (2, 1)
    assert [record.path for record in marker.files] == [FUSED_SHARD, COPIED_SHARD, CONFIG, INDEX]
    assert marker.files[0].n_bytes == (out / FUSED_SHARD).stat().st_size
    assert marker.files[0].base_sha256 == "b" * 64
    assert marker.loras[0].content_sha256 == content_sha256(lora)
    assert (marker.loras[0].strength, marker.loras[0].raw["ranks"]) == (1.0, [64])


def test_no_marker_and_no_journal_is_none(tmp_path: Path) -> None:
    assert read_marker(tmp_path) is None


def test_what_is_not_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "absent", tmp_path / "file"):
        with pytest.raises(InputError, match="is not a folder"):
            read_marker(path)


def test_a_journal_alone_is_unfinished(tmp_path: Path) -> None:
    (tmp_path / JOURNAL_NAME).write_text("")
    with pytest.raises(MarkerError, match="unfinished") as caught:
        read_marker(tmp_path)
    assert caught.value.facts["reason"] == "unfinished"
    assert caught.value.hint is not None
    assert "merge again" in caught.value.hint


def test_a_marker_beside_a_journal_counts(out: Path) -> None:
    (out / JOURNAL_NAME).write_text("")
    assert read_marker(out) is not None


def test_a_newer_minor_is_read_with_its_unknown_fields(out: Path) -> None:
    document = load(out) | {"schema": "fuselora.fused/1.7", "new": {"field": [1]}}
    document["loras"][0]["also_new"] = True
    store(out, document)
    marker = read_marker(out)
    assert marker is not None
    assert marker.raw["new"] == {"field": [1]}
    assert marker.loras[0].raw["also_new"] is True
    assert check(out).ok


def test_a_newer_major_is_refused(out: Path) -> None:
    store(out, load(out) | {"schema": "fuselora.fused/2.0"})
    with pytest.raises(MarkerError, match=r"fused/2\.0") as caught:
        read_marker(out)
    assert caught.value.hint == "A newer fuselora wrote it: update fuselora."


@pytest.mark.parametrize("n_bytes", [MAX_BYTES + 1, 1 << 40])
def test_a_marker_over_64_MiB_is_never_parsed(  # noqa: N802
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_bytes: int
) -> None:
    def unwanted(*_: object, **__: object) -> None:
        pytest.fail("it was handed to the parser")

    with (tmp_path / FILE_NAME).open("wb") as stream:
        stream.truncate(n_bytes)  # sparse: takes no space
    monkeypatch.setattr(json, "loads", unwanted)
    with pytest.raises(MarkerError, match="over the cap"):
        read_marker(tmp_path)


def test_only_a_regular_file_is_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FILE_NAME)  # opening it would wait for ever
    with pytest.raises(MarkerError, match="not a regular file"):
        read_marker(tmp_path)


def test_a_dangling_link_is_not_an_absent_marker(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).symlink_to(tmp_path / "gone")
    with pytest.raises(MarkerError, match="cannot be read"):
        read_marker(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"a": ' * 200_000,
        b'{"bytes": ' + b"9" * 5000 + b"}",
    ],
)
def test_broken_json_is_a_marker_error(text: bytes) -> None:
    with pytest.raises(MarkerError, match=r"^x/fused\.json: ") as caught:
        decode(text, "x/fused.json")
    assert caught.value.facts["path"] == "x/fused.json"


@pytest.mark.parametrize("kind", ["name twice", "NaN", "Latin-1", "UTF-16", "UTF-8 with a mark"])
def test_a_marker_is_json_to_the_letter(out: Path, kind: str) -> None:
    text = (out / FILE_NAME).read_bytes()
    assert decode(text).fingerprint == FINGERPRINT
    broken = {
        "name twice": text.replace(b"{", b'{"schema": "fuselora.fused/1.0",', 1),
        "NaN": text.replace(b'"guidance_scale": 1.0', b'"guidance_scale": NaN'),
        "Latin-1": text.replace(b'"tiny"', b'"t\xefny"'),
        "UTF-16": text.decode().encode("utf-16"),
        "UTF-8 with a mark": b"\xef\xbb\xbf" + text,
    }[kind]
    assert broken != text
    with pytest.raises(MarkerError, match="not valid JSON in UTF-8"):
        decode(broken)


BAD_PATHS = [
    "",
    "/etc/passwd",
    "../x.safetensors",
    "transformer/../../x",
    "transformer/..",
    ".",
    "./x",
    "a//b",
    "a/",
    "a\\b",
    "C:\\x",
    "c:x",
    "a\nb",
    "a\x00b",
    "a\x7f",
    "a\x9b",
]
GOOD_PATHS = ["x", "a/b c/ü.json", "..x/y..", ".hidden/模型", "a/#1,2:3", "b\udcffd"]


@pytest.mark.parametrize("path", [*BAD_PATHS, "lone\ud800surrogate"])
@pytest.mark.parametrize("place", ["weights", "side_files", "index"])
def test_paths_that_leave_the_folder_are_refused(out: Path, path: str, place: str) -> None:
    document = load(out)
    part = document["components"]["transformer"]
    if place == "index":
        part["index"] = path
    else:
        (part["files"] if place == "weights" else document["side_files"])[0]["path"] = path
    with pytest.raises(MarkerError, match=r"plain relative path|must be a text"):
        decode(json.dumps(document).encode())


@pytest.mark.parametrize("path", GOOD_PATHS)
def test_odd_names_are_paths_like_any_other(out: Path, path: str) -> None:
    document = load(out)
    document["side_files"][0]["path"] = path
    assert path in [record.path for record in decode(encode(document)).side_files]


def changed(document: Document, place: str, value: object) -> Document:
    """A copy with the field at ``a.0.b`` replaced, or dropped where ``value`` is ``...``."""
    copied = copy.deepcopy(document)
    at: Any = copied
    *parents, last = [int(name) if name.isdigit() else name for name in place.split(".")]
    for name in parents:
        at = at[name]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return copied


# Each breaks a field that the reader uses: reader and schema both refuse.
BROKEN: list[tuple[str, object]] = [
    ("schema", ...),
    ("schema", 1),
    ("schema", "1.0"),
    ("schema", "other.tool/1.0"),
    ("schema", "fuselora.fused/1.0-rc"),
    ("schema", "fuselora.fused/2.0"),
    ("lora_is_fused", ...),
    ("lora_is_fused", False),
    ("lora_is_fused", 1),
    ("fingerprint", ...),
    ("fingerprint", "f" * 64),
    ("artifact", "sha256:short"),
    ("stacked_on", "earlier"),
    ("components", ...),
    ("components", {}),
    ("components", []),
    ("components.transformer", "x"),
    ("components.transformer.dtype", ...),
    ("components.transformer.role", 1),
    ("components.transformer.index", 1),
    ("components.transformer.tensors", -1),
    ("components.transformer.fused", True),
    ("components.transformer.files", []),
    ("components.transformer.files", {}),
    ("components.transformer.files.0.path", ...),
    ("components.transformer.files.0.bytes", 1.5),
    ("components.transformer.files.0.bytes", 1 << 63),
    ("components.transformer.files.0.bytes", ...),
    ("components.transformer.files.0.sha256", "F" * 64),
    ("components.transformer.files.0.base_sha256", "x"),
    ("components.transformer.files.0.header_sha256", "x"),
    ("components.transformer.files.0.fused", ...),
    ("side_files", ...),
    ("side_files", [1]),
    ("side_files.0.bytes", "1"),
    ("side_files.0.link", 1),
    ("loras", ...),
    ("loras", []),
    ("loras.0.name", ""),
    ("loras.0.sha256", "x"),
    ("loras.0.content_sha256", ...),
    ("loras.0.content_sha256", "x"),
    ("loras.0.component", ...),
    ("loras.0.strength", "1"),
    ("loras.0.strength", True),
    ("loras.0.strength", ...),
]
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


@pytest.mark.parametrize(("place", "value"), BROKEN)
def test_a_broken_field_is_named(out: Path, place: str, value: object) -> None:
    broken = changed(load(out), place, value)
    assert not validator().is_valid(broken)
    with pytest.raises(MarkerError) as caught:
        decode(json.dumps(broken).encode())
    field = str(caught.value.facts["field"])
    assert place.startswith(field.replace("[", ".").replace("]", "")) or value == [1]
    assert field in caught.value.message
    assert caught.value.hint


def places(value: object, place: str = "") -> list[str]:
    """Every field and list item of a document, as ``changed`` takes them."""
    if isinstance(value, dict):
        children = list(value.items())
    else:
        children = list(enumerate(value)) if isinstance(value, list) else []
    found = []
    for name, child in children:
        at = f"{place}.{name}".lstrip(".")
        found += [at, *places(child, at)]
    return found


def refusal(document: Document) -> str | None:
    try:
        decode(json.dumps(document).encode())
    except MarkerError as error:
        return error.message
    return None


ODD_VALUES: list[object] = [None, True, -1, 0.5, 10**400, "", "x", "\ud800", [], [None], {}, {"x": {}}]


@pytest.mark.parametrize("value", ODD_VALUES, ids=lambda value: ascii(value)[:20])
def test_whatever_a_field_holds_the_marker_is_read_or_refused(out: Path, value: object) -> None:
    document = load(out)
    messages = [refusal(changed(document, place, value)) for place in places(document)]
    refused = [message for message in messages if message is not None]
    assert len(refused) > 10
    assert all(message.startswith(FILE_NAME) for message in refused)


@pytest.mark.parametrize("strength", ["1e999", "-1e999", "9" * 400])
def test_a_strength_must_be_finite(out: Path, strength: str) -> None:
    text = json.dumps(load(out)).replace('"strength": 1.0', f'"strength": {strength}')
    with pytest.raises(MarkerError, match=r"loras\[0\]\.strength"):
        decode(text.encode())


def test_a_file_is_listed_once(out: Path) -> None:
    document = load(out)
    document["side_files"].append(document["components"]["transformer"]["files"][0])
    with pytest.raises(MarkerError, match="twice"):
        decode(json.dumps(document).encode())


def test_an_index_must_be_listed(out: Path) -> None:
    document = load(out)
    document["side_files"] = [one for one in document["side_files"] if one["path"] != INDEX]
    with pytest.raises(MarkerError, match=r"has the index .* which no list of files has"):
        decode(json.dumps(document).encode())


@pytest.mark.parametrize(("field", "value"), [("dtype", ["\x9b" * 500]), ("index", "not listed")])
def test_errors_show_no_control_characters(out: Path, field: str, value: object) -> None:
    document = load(out)
    part = document["components"].pop("transformer")
    document["components"]["\x1b[31m\n"] = part | {field: value}
    with pytest.raises(MarkerError) as caught:
        decode(json.dumps(document).encode())
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 200


# --- writing ---------------------------------------------------------------------------------------


def test_encoding_is_one_spelling_per_content(out: Path) -> None:
    document = load(out)
    text = encode(document)
    assert text == (out / FILE_NAME).read_bytes()
    assert text.startswith(b'{\n  "schema": "fuselora.fused/1.0",\n')
    assert text.endswith(b"}\n")
    shuffled = dict(reversed(document.items()))
    shuffled["side_files"] = tuple(reversed(document["side_files"]))
    shuffled["components"]["transformer"]["files"].reverse()
    assert encode(shuffled) == text
    skips = [{"module": name, "reason": "zero"} for name in ("b", "a")]
    document["loras"][0]["skipped"] = skips
    assert decode(encode(document)).loras[0].raw["skipped"] == skips[::-1]


def test_encoding_keeps_the_order_of_loras(out: Path, lora: Path) -> None:
    document = load(out)
    document["loras"] = [lora_entry(lora) | {"name": name} for name in ("z", "a", "m")]
    assert [one.name for one in decode(encode(document)).loras] == ["z", "a", "m"]


def test_encoding_is_utf8_whatever_the_names(out: Path) -> None:
    name = "模型 ü \udcff\n"
    document = load(out)
    document["loras"][0]["name"] = name
    text = encode(document)
    assert "模型 ü \\udcff\\n" in text.decode("utf-8")
    assert decode(text).loras[0].name == name


def test_encoding_refuses_what_json_cannot_say(out: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        encode(load(out) | {"strength": float("nan")})


# --- the schema ------------------------------------------------------------------------------------


def validator() -> Draft202012Validator:
    text = files("fuselora").joinpath("schema", "fused-1.0.schema.json").read_text("utf-8")
    return Draft202012Validator(json.loads(text))


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


def test_reader_and_schema_agree_on_paths(out: Path) -> None:
    document = load(out)
    for path in (*BAD_PATHS, *GOOD_PATHS):
        document["side_files"][0]["path"] = path
        assert validator().is_valid(document) == (path in GOOD_PATHS), path


# --- checking --------------------------------------------------------------------------------------


def without_digests(document: Document) -> Document:
    document.pop("artifact")
    for record in listed(document):
        for name in ("sha256", "base_sha256"):
            record.pop(name, None)
    return document


@pytest.mark.parametrize("digest", [False, True])
def test_a_whole_folder_is_ok(out: Path, digest: bool) -> None:
    report = check(out, digest=digest)
    assert report.findings == ()
    assert (report.fused, report.whole, report.ok, report.already_fused) == (True, True, True, ())
    assert report.artifact == (load(out)["artifact"] if digest else None)


def test_a_plain_folder_is_not_fused(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "transformer" / "model.safetensors", {"x": b"abcd"}, {})
    report = check(tmp_path)
    assert (report.fused, report.whole, report.ok, report.marker) == (False, False, False, None)
    assert codes(report) == {("no-marker", FILE_NAME)}


def test_a_removed_marker_is_seen_in_the_shards(out: Path) -> None:
    (out / FILE_NAME).unlink()
    report = check(out)
    assert (report.fused, report.whole, report.ok) == (True, False, False)
    assert codes(report) == {("no-marker", FILE_NAME)}
    assert "was removed" in report.findings[0].message
    assert FUSED_SHARD in report.findings[0].message


def test_a_broken_shard_does_not_hide_a_removed_marker(out: Path) -> None:
    (out / FILE_NAME).unlink()
    (out / "a.safetensors").write_bytes(b"junk")
    assert check(out).fused


def test_a_broken_marker_is_a_finding(out: Path) -> None:
    (out / FILE_NAME).write_text("{")
    report = check(out)
    assert codes(report) == {("marker", FILE_NAME)}
    assert not report.ok


def test_an_unfinished_folder_is_a_finding(out: Path) -> None:
    (out / FILE_NAME).rename(out / JOURNAL_NAME)
    report = check(out)
    assert codes(report) == {("unfinished", JOURNAL_NAME)}
    assert not report.ok


@pytest.mark.parametrize("digest", [False, True])
def test_an_edited_digest_in_the_marker_is_found(out: Path, digest: bool) -> None:
    document = load(out)
    (out / FUSED_SHARD).write_bytes((out / FUSED_SHARD).read_bytes().replace(b"aaaa", b"zzzz"))
    document["components"]["transformer"]["files"][0]["sha256"] = sha256_file(out / FUSED_SHARD)
    store(out, document)
    assert codes(check(out, digest=digest)) == {("artifact", FILE_NAME)}


@pytest.mark.parametrize("dropped", ["artifact", "one digest"])
def test_an_identity_is_there_with_every_digest_or_not_at_all(out: Path, dropped: str) -> None:
    document = load(out)
    if dropped == "artifact":
        del document["artifact"]
    else:
        config = document["side_files"].pop(0)
        document["artifact"] = artifact_of(document)
        document["side_files"].append({"path": config["path"], "bytes": config["bytes"]})
    store(out, document)
    assert codes(check(out)) == {("artifact", FILE_NAME)}


def test_counts_that_disagree_are_found(out: Path) -> None:
    store(out, changed(load(out), "components.transformer.fused", 2))
    report = check(out)
    assert codes(report) == {("marker", FILE_NAME)}
    assert "counts 2 fused tensors" in report.findings[0].message


def test_a_removed_entry_makes_its_file_a_stray(out: Path) -> None:
    document = load(out)
    del document["components"]["transformer"]["files"][1]
    document["artifact"] = artifact_of(document)
    store(out, document)
    assert codes(check(out)) == {("stray", COPIED_SHARD)}


@pytest.mark.parametrize("path", [FUSED_SHARD, COPIED_SHARD, INDEX, CONFIG])
def test_a_missing_file_is_found(out: Path, path: str) -> None:
    (out / path).unlink()
    assert codes(check(out)) == {("missing", path)}


def test_a_missing_component_folder_is_found(out: Path) -> None:
    shutil.rmtree(out / "transformer")
    assert codes(check(out)) == {("missing", path) for path in (FUSED_SHARD, COPIED_SHARD, INDEX, CONFIG)}


@pytest.mark.parametrize("change", [-1, 1])
def test_a_shard_of_another_size_is_found(out: Path, change: int) -> None:
    with (out / FUSED_SHARD).open("r+b") as stream:
        stream.truncate((out / FUSED_SHARD).stat().st_size + change)
    assert codes(check(out)) == {("size", FUSED_SHARD)}


def test_the_shard_of_the_base_in_place_of_ours_is_found(out: Path) -> None:
    filler = {"fuselora.other": "x" * len(FINGERPRINT + FINGERPRINT_KEY)}
    write_safetensors(out / FUSED_SHARD, {"to_q.weight": b"aaaabbbb"}, filler)
    found = codes(check(out))
    assert ("header", FUSED_SHARD) in found
    assert ("fingerprint", FUSED_SHARD) in found
    assert ("size", FUSED_SHARD) not in found


def test_the_shard_of_another_fusion_is_found(out: Path) -> None:
    document = changed(load(out), "components.transformer.files.0.header_sha256", ...)
    store(out, document)
    write_safetensors(out / FUSED_SHARD, {"to_q.weight": b"aaaabbbb"}, {FINGERPRINT_KEY: EARLIER})
    assert codes(check(out)) == {("fingerprint", FUSED_SHARD)}


def test_two_shards_swapped_are_found(out: Path) -> None:
    """Of one size and one fusion: the headers tell them apart."""
    metadata = {FINGERPRINT_KEY: FINGERPRINT}
    write_safetensors(out / COPIED_SHARD, {"to_k.weight": b"ccccdddd"}, metadata)
    store(out, describe(out))
    assert check(out).ok
    (out / FUSED_SHARD).rename(out / "x")
    (out / COPIED_SHARD).rename(out / FUSED_SHARD)
    (out / "x").rename(out / COPIED_SHARD)
    assert codes(check(out)) == {("header", FUSED_SHARD), ("header", COPIED_SHARD)}


def test_a_shard_that_is_not_safetensors_is_found(out: Path) -> None:
    size = (out / FUSED_SHARD).stat().st_size
    (out / FUSED_SHARD).write_bytes(b"\xff" * size)
    assert codes(check(out)) == {("header", FUSED_SHARD)}


def test_a_shard_without_fused_tensors_may_not_carry_another_fingerprint(out: Path) -> None:
    write_safetensors(out / COPIED_SHARD, {"to_k.weight": b"ccccdddd"}, {FINGERPRINT_KEY: EARLIER})
    document = describe(out)
    store(out, document)
    assert codes(check(out)) == {("fingerprint", COPIED_SHARD)}
    store(out, document | {"stacked_on": EARLIER})
    assert check(out).ok


def test_changed_weights_are_found_by_digest_only(out: Path) -> None:
    (out / FUSED_SHARD).write_bytes((out / FUSED_SHARD).read_bytes().replace(b"aaaa", b"zzzz"))
    assert check(out).ok
    report = check(out, digest=True)
    assert codes(report) == {("content", FUSED_SHARD)}
    assert report.artifact not in (None, load(out)["artifact"])


@pytest.mark.parametrize("text", ['{"dim": 8}', '{"dim": 16}'])
def test_an_edited_config_is_found_without_digest(out: Path, text: str) -> None:
    (out / CONFIG).write_text(text)
    same_size = len(text) == len('{"dim": 4}')
    assert codes(check(out)) == {("content" if same_size else "size", CONFIG)}


def test_a_large_side_file_is_read_with_digest_only(out: Path) -> None:
    large = out / "vae" / "model.safetensors"
    large.parent.mkdir()
    with large.open("wb") as stream:
        stream.truncate(SMALL_BYTES)
    document = load(out)
    document["side_files"].append(entry(out, "vae/model.safetensors"))
    store(out, document | {"artifact": artifact_of(document)})
    with large.open("r+b") as stream:
        stream.write(b"x")
    assert check(out).ok
    assert codes(check(out, digest=True)) == {("content", "vae/model.safetensors")}


def test_without_digests_sizes_and_headers_are_all_there_is(out: Path) -> None:
    store(out, without_digests(load(out)))
    assert check(out).ok
    report = check(out, digest=True)
    assert codes(report) == {("no-digests", FILE_NAME)}
    assert report.artifact is None


@pytest.mark.parametrize(
    "name", ["other.safetensors", "pytorch_model.bin", "x.pt", "model.safetensors.index.json"]
)
def test_a_stray_weight_file_is_found(out: Path, name: str) -> None:
    (out / "transformer" / name).write_bytes(b"")
    assert codes(check(out)) == {("stray", f"transformer/{name}")}


def test_other_strays_are_nobodys_business(out: Path) -> None:
    (out / "transformer" / "README.md").write_text("")
    (out / "vae").mkdir()
    (out / "vae" / "model.safetensors").write_bytes(b"")
    assert check(out).ok


def test_a_one_file_checkpoint_has_its_component_in_the_root(out: Path) -> None:
    document = load(out)
    (out / FUSED_SHARD).rename(out / "model.safetensors")
    shutil.rmtree(out / "transformer")
    part = document["components"]["transformer"]
    del part["index"]
    part["files"] = [part["files"][0] | {"path": "model.safetensors"}]
    document["side_files"] = []
    store(out, document | {"artifact": artifact_of(document)})
    assert check(out, digest=True).ok
    (out / "lora.safetensors").write_bytes(b"")
    assert codes(check(out)) == {("stray", "lora.safetensors")}


@pytest.mark.parametrize("path", [FUSED_SHARD, CONFIG, FILE_NAME])
def test_a_link_that_leaves_the_folder_is_found(out: Path, tmp_path: Path, path: str) -> None:
    target = tmp_path / "elsewhere"
    (out / path).rename(target)
    (out / path).symlink_to(target)
    assert codes(check(out)) == {("outside", path)}


def test_a_linked_component_folder_is_found(out: Path, tmp_path: Path) -> None:
    (out / "transformer").rename(tmp_path / "elsewhere")
    (out / "transformer").symlink_to(tmp_path / "elsewhere")
    assert ("outside", FUSED_SHARD) in codes(check(out))


def test_a_link_inside_the_folder_is_a_file_like_any_other(out: Path) -> None:
    (out / CONFIG).rename(out / "shared.json")
    (out / CONFIG).symlink_to("../shared.json")
    assert check(out).ok


def test_a_recorded_link_may_leave_the_folder(out: Path, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    (out / CONFIG).rename(target)
    (out / CONFIG).symlink_to(target)
    store(out, changed(load(out), "side_files.0.link", "hardlink"))
    assert codes(check(out)) == {("outside", CONFIG)}
    store(out, changed(load(out), "side_files.0.link", "symlink"))
    assert check(out).ok
    target.write_text('{"dim": 5}')
    assert codes(check(out)) == {("content", CONFIG)}
    target.unlink()
    assert codes(check(out)) == {("missing", CONFIG)}


def test_a_folder_in_the_hub_cache_may_link_to_its_blobs(out: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--me--fused"
    blobs = repository / "blobs"
    snapshot = repository / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    for n, path in enumerate([FILE_NAME, FUSED_SHARD, COPIED_SHARD, INDEX, CONFIG]):
        shutil.copy(out / path, blobs / str(n))
        (snapshot / path).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / path).symlink_to(os.path.relpath(blobs / str(n), (snapshot / path).parent))
    assert check(snapshot, digest=True).ok
    for other in (repository / "other", tmp_path / "blobs"):
        (snapshot / CONFIG).unlink()
        shutil.copy(blobs / "4", other)
        (snapshot / CONFIG).symlink_to(other)
        assert codes(check(snapshot)) == {("outside", CONFIG)}


def test_what_is_not_a_file_is_found_and_not_opened(out: Path) -> None:
    (out / CONFIG).unlink()
    os.mkfifo(out / CONFIG)
    (out / FUSED_SHARD).unlink()
    (out / FUSED_SHARD).mkdir()
    assert codes(check(out)) == {("unreadable", CONFIG), ("unreadable", FUSED_SHARD)}


def test_a_name_too_long_for_the_file_system_is_found(out: Path) -> None:
    store(out, changed(without_digests(load(out)), "side_files.0.path", "x" * 5000))
    assert codes(check(out)) == {("unreadable", "x" * 5000)}


# --- LoRAs that are in it already ------------------------------------------------------------------


def test_the_lora_that_was_fused_is_recognised(out: Path, lora: Path) -> None:
    report = check(out, loras=[lora])
    assert (report.whole, report.ok) == (True, False)
    assert [record.name for record in report.already_fused] == ["lora.safetensors"]


@pytest.mark.parametrize("kind", ["renamed", "re-saved"])
def test_a_copy_of_it_is_recognised_under_any_name(out: Path, lora: Path, tmp_path: Path, kind: str) -> None:
    other = tmp_path / "another name.safetensors"
    if kind == "renamed":
        shutil.copy(lora, other)
    else:
        write_lora(other, reverse=True)
        assert sha256_file(other) != sha256_file(lora)
    assert not check(out, loras=[other]).ok


def test_another_lora_is_not(out: Path, lora: Path, tmp_path: Path) -> None:
    other = write_lora(tmp_path / "lora-2.safetensors", first=b"zzzz")
    report = check(out, loras=[other])
    assert report.ok
    both = check(out, loras=[other, lora])
    assert [bool(outcome.records) for outcome in both.loras] == [False, True]
    assert [outcome.path for outcome in both.loras] == [other, lora]


def test_a_lora_is_recognised_without_digests(out: Path, lora: Path) -> None:
    store(out, without_digests(load(out)))
    assert not check(out, loras=[lora]).ok


def test_a_lora_that_cannot_be_read_is_an_error(out: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.safetensors").write_bytes(b"junk")
    with pytest.raises(FormatError, match=r"bad\.safetensors"):
        check(out, loras=[tmp_path / "bad.safetensors"])
    with pytest.raises(InputError, match=r"absent\.safetensors"):
        check(out, loras=[tmp_path / "absent.safetensors"])


# --- python -m fuselora.marker ---------------------------------------------------------------------


def test_exit_status(out: Path, lora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = write_lora(tmp_path / "lora-2.safetensors", first=b"zzzz")
    assert main([str(out)]) == 0
    assert main([str(out), "--digest", "--lora", str(other)]) == 0
    assert "fused and whole" in capsys.readouterr().out
    assert main([str(out), "--lora", str(other), "--lora", str(lora)]) == 1
    assert f"{lora}: fused already" in capsys.readouterr().out
    (out / CONFIG).unlink()
    assert main([str(out)]) == 1
    assert f"fused, but not whole\n  {CONFIG}: is missing\n" in capsys.readouterr().out
    assert main([str(tmp_path)]) == 1
    assert "not fused" in capsys.readouterr().out


def test_usage_is_exit_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--nonsense", "x"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
    assert capsys.readouterr().out == ""


def test_an_error_goes_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "absent"), "--json"]) == 1
    captured = capsys.readouterr()
    assert captured.err == f"error: {tmp_path / 'absent'}: is not a folder\n"
    assert json.loads(captured.out)["ok"] is False


def test_json(out: Path, lora: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (out / CONFIG).write_text('{"dim": 8}')
    assert main([str(out), "--lora", str(lora), "--json", "--digest"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["fused"], report["whole"]) == (False, True, False)
    assert report["fingerprint"] == FINGERPRINT
    assert report["artifact"] != report["artifact_on_disk"]
    assert [(one["code"], one["path"]) for one in report["findings"]] == [("content", CONFIG)]
    already = {"name": "lora.safetensors", "component": "transformer", "strength": 1.0}
    assert report["loras"][0]["already_fused"] == [already]


def test_names_from_files_reach_the_terminal_escaped(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store(out, changed(load(out), "loras.0.name", "\x1b[31mü\udcff\n"))
    assert main([str(out)]) == 0
    assert "holds \\x1b[31mü\\udcff\\n on transformer" in capsys.readouterr().out


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=60
    )


LIST_MODULES = """
import runpy, sys
sys.argv = ["fuselora.marker", *sys.argv[1:]]
try:
    runpy.run_module("fuselora.marker", run_name="__main__", alter_sys=True)
except SystemExit as ended:
    print("status", ended.code)
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""
FOREIGN = {"torch", "typer", "rich", "safetensors", "huggingface_hub", "numpy", "diffusers", "jsonschema"}


def test_the_command_imports_nothing_but_the_standard_library(out: Path, lora: Path) -> None:
    arguments = [str(out), "--digest", "--lora", str(lora), "--json"]
    done = run([sys.executable, "-c", LIST_MODULES, *arguments], PACKAGE.parent)
    assert "status 1" in done.stdout, done.stderr
    modules = set(done.stdout.splitlines()[-1].split())
    assert "fuselora" in modules
    assert not modules & FOREIGN


def test_a_bare_copy_of_the_package_is_enough(out: Path, tmp_path: Path) -> None:
    """Under -S there are no installed packages at all."""
    shutil.copytree(PACKAGE, tmp_path / "bare" / "fuselora", ignore=shutil.ignore_patterns("__pycache__"))
    done = run([sys.executable, "-S", "-m", "fuselora.marker", str(out), "--digest"], tmp_path / "bare")
    assert (done.returncode, done.stderr) == (0, "")
    assert "fused and whole" in done.stdout
    listed_modules = run([sys.executable, "-S", "-c", LIST_MODULES, str(out)], tmp_path / "bare").stdout
    modules = set(listed_modules.splitlines()[-1].split())
    assert modules - sys.stdlib_module_names - {"fuselora", "__main__"} == set()


def test_reading_a_marker_does_not_load_the_checks() -> None:
    text = "import sys; from fuselora.marker import read_marker; print('fuselora.integrity' in sys.modules)"
    assert run([sys.executable, "-c", text], PACKAGE.parent).stdout == "False\n"


def test_everything_promised_is_there() -> None:
    for name in marker_module.__all__:
        assert getattr(marker_module, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        _ = marker_module.nonsense
