"""The marker: read, written and sealed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from fuselora import marker as marker_module
from fuselora.digest import content_sha256
from fuselora.errors import InputError, MarkerError
from fuselora.marker import (
    FILE_NAME,
    JOURNAL_NAME,
    MAX_BYTES,
    SCHEMA,
    LoraRecord,
    check,
    decode,
    encode,
    read_marker,
    seal_of,
)
from tests.marked import (
    CONFIG,
    COPIED_SHARD,
    EARLIER,
    FINGERPRINT,
    FUSED_SHARD,
    INDEX,
    Document,
    changed,
    load,
    lora_entry,
    sealed,
    store,
    validator,
    write_fused,
)


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
    assert not marker.is_newer
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
        with pytest.raises(InputError, match="is not a folder") as caught:
            read_marker(path)
        assert caught.value.hint == "Name the folder that fuselora merge wrote."


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
    assert marker.is_newer
    assert check(out).ok


def test_a_newer_major_is_refused(out: Path) -> None:
    store(out, load(out) | {"schema": "fuselora.fused/2.0"})
    with pytest.raises(MarkerError, match=r"fused/2\.0") as caught:
        read_marker(out)
    assert caught.value.hint == "A newer fuselora wrote it: update fuselora."
    assert caught.value.facts["reason"] == "version"


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
    with pytest.raises(MarkerError, match=r"plain relative path|must be a text") as caught:
        decode(sealed(document))
    assert caught.value.facts.get("reason") == ("path" if path else None)


@pytest.mark.parametrize("path", GOOD_PATHS)
def test_odd_names_are_paths_like_any_other(out: Path, path: str) -> None:
    document = load(out)
    document["side_files"][0]["path"] = path
    assert path in [record.path for record in decode(encode(document)).side_files]


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
    ("seal", ...),
    ("seal", "f" * 64),
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
        decode(sealed(document))
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
        decode(sealed(document))


def test_an_index_must_be_listed(out: Path) -> None:
    document = load(out)
    document["side_files"] = [one for one in document["side_files"] if one["path"] != INDEX]
    with pytest.raises(MarkerError, match=r"has the index .* which no list of files has"):
        decode(sealed(document))


@pytest.mark.parametrize(("field", "value"), [("dtype", ["\x9b" * 500]), ("index", "not listed")])
def test_errors_show_no_control_characters(out: Path, field: str, value: object) -> None:
    document = load(out)
    part = document["components"].pop("transformer")
    document["components"]["\x1b[31m\n"] = part | {field: value}
    with pytest.raises(MarkerError) as caught:
        decode(sealed(document))
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 200


# --- the seal --------------------------------------------------------------------------------------


def test_an_edit_breaks_the_seal(out: Path) -> None:
    (out / FILE_NAME).write_text(json.dumps({**load(out), "stacked_on": EARLIER}))
    with pytest.raises(MarkerError, match="was edited") as caught:
        read_marker(out)
    assert caught.value.facts["reason"] == "edited"
    assert caught.value.hint is not None and "fuse again" in caught.value.hint


def leaves(document: Document) -> list[str]:
    return [place for place in places(document) if not places(_at(document, place))]


def _at(document: Document, place: str) -> Any:
    value: Any = document
    for name in place.split("."):
        value = value[int(name) if isinstance(value, list) else name]
    return value


def test_every_field_but_the_time_and_the_policy_is_under_the_seal(out: Path) -> None:
    document = load(out)
    found = leaves(document)
    assert len(found) > 60
    for place in found:
        for value in (..., "x" if _at(document, place) != "x" else "y"):
            fits = seal_of(changed(document, place, value)) == document["seal"]
            assert fits == place.startswith(("seal", "created", "policy.")), place


def test_lists_are_under_the_seal_in_their_order(out: Path) -> None:
    document = load(out)
    document["side_files"].reverse()
    assert seal_of(document) != document["seal"]


def test_a_marker_without_a_seal_is_broken(out: Path) -> None:
    (out / FILE_NAME).write_text(json.dumps(changed(load(out), "seal", ...)))
    with pytest.raises(MarkerError, match="seal is missing"):
        read_marker(out)


def test_whoever_serves_it_may_change_the_policy(out: Path) -> None:
    (out / FILE_NAME).write_text(json.dumps(changed(load(out), "policy.distill_lora", "allow")))
    assert check(out).ok


def test_a_marker_written_anew_by_another_tool_holds(out: Path) -> None:
    text = json.dumps(dict(reversed(load(out).items())), indent=1, ensure_ascii=True)
    assert decode(text.replace("\n", "\r\n").encode()).fingerprint == FINGERPRINT


@pytest.mark.parametrize(("found", "written"), [("1.0", "1"), ("8.0", "8"), ("0.125", "1.25e-1")])
def test_a_number_may_be_spelled_otherwise(out: Path, found: str, written: str) -> None:
    """jq, node and perl write 1 for 1.0."""
    text = (out / FILE_NAME).read_text(encoding="utf-8")
    assert f" {found},\n" in text
    assert decode(text.replace(f" {found},\n", f" {written},\n").encode()).loras[0].strength == 1.0


def test_another_number_breaks_the_seal(out: Path) -> None:
    with pytest.raises(MarkerError, match="was edited"):
        decode((out / FILE_NAME).read_bytes().replace(b'"strength": 1.0', b'"strength": 1.5'))


def test_what_cannot_be_sealed_is_refused(out: Path) -> None:
    nested = "[" * 900 + "]" * 900
    text = json.dumps(load(out)).replace('"warnings": []', f'"warnings": {nested}')
    assert nested in text
    with pytest.raises(MarkerError, match=r"is nested deeper than 64"):
        decode(text.encode())


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


def test_encoding_seals_what_it_writes(out: Path) -> None:
    document = load(out)
    assert document["seal"] == seal_of(document)
    assert json.loads(encode({**document, "seal": "old"})) == document
    assert json.loads(encode({**document, "warnings": [{"code": "x"}]}))["seal"] != document["seal"]


def test_encoding_refuses_what_json_cannot_say(out: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        encode(load(out) | {"strength": float("nan")})


def test_reader_and_schema_agree_on_paths(out: Path) -> None:
    document = load(out)
    for path in (*BAD_PATHS, *GOOD_PATHS):
        document["side_files"][0]["path"] = path
        assert validator().is_valid(document) == (path in GOOD_PATHS), path


def test_everything_promised_is_there() -> None:
    for name in marker_module.__all__:
        assert getattr(marker_module, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        _ = marker_module.nonsense


def at(scale: float, *modules: str) -> dict[str, object]:
    return {"scale": scale, "alpha": scale, "rank": 1, "source": "tensor", "modules": list(modules)}


@pytest.mark.parametrize(
    ("applied", "scales", "adds"),
    [
        ({"pairs": 2, "diff": 0}, [at(1.0, "a", "b")], True),
        ({"pairs": 2, "diff": 0}, [at(0.0, "a", "b")], False),
        ({"pairs": 2, "diff": 1}, [at(0.0, "a", "b")], True),
        ({"pairs": 2, "diff": 0}, [at(0.0, "a"), at(1.0, "b")], True),
        ({"pairs": 1, "diff": 0}, [at(0.0, "a"), at(1.0, "a")], True),  # other rows of one module
        ({"pairs": 1, "diff": 1}, [at(0.0, "a"), at(-0.0, "a")], True),
        ({"pairs": 0, "diff": 0}, [], False),
        ({}, [], True),
        (None, [at(0.0, "a")], True),
    ],
)
def test_whether_anything_of_a_lora_is_in_the_weights(
    applied: object, scales: list[object], adds: bool
) -> None:
    raw = {"applied": applied, "scales": scales}
    assert LoraRecord("x", None, "0" * 64, "transformer", 1.0, raw).adds is adds
    assert LoraRecord("x", None, "0" * 64, "transformer", 0.0, raw).adds is False
