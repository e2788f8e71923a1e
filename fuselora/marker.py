"""``fused.json``, the marker of a fused folder: what it says, read and written. Standard library only.

Serving engines import this module. ``python -m fuselora.marker OUT`` is the preflight that needs no
other package. ``schema/fused-1.0.schema.json`` documents the fields one by one.
"""

from __future__ import annotations

import json
import re
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from fuselora.errors import FuseloraError, InputError, MarkerError
from fuselora.fields import HEX, TAGGED, Fields, broken, parse, short

if TYPE_CHECKING:
    import argparse

    from fuselora.integrity import CheckReport, Finding, LoraOutcome, check

__all__ = [
    "FILE_NAME", "FINGERPRINT_KEY", "JOURNAL_NAME", "MAX_BYTES", "SCHEMA",
    "CheckReport", "ComponentRecord", "FileRecord", "Finding", "LoraOutcome", "LoraRecord", "Marker",
    "check", "decode", "encode", "read_marker",
]  # fmt: skip

FILE_NAME = "fused.json"
JOURNAL_NAME = "fuselora.journal"
SCHEMA = "fuselora.fused/1.0"
FINGERPRINT_KEY = "fuselora.fingerprint"  # in the __metadata__ of shards that hold a fused tensor
MAX_BYTES = 64 << 20
SCHEMA_FORM = re.compile(r"fuselora\.fused/([0-9]+)\.[0-9]+")
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
UNFINISHED = "unfinished"
UNFINISHED_HINT = "Run the same merge again to finish it; until then nothing should serve it."


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of the folder: ``path`` is relative, with ``/``; digests are hex, None if not taken.

    ``fused`` counts the tensors fused in it (0 for side files); ``header_sha256`` covers everything
    before a safetensors file's data; ``link`` is how a side file was put there if not as a copy.
    """

    path: str
    n_bytes: int
    sha256: str | None
    base_sha256: str | None
    fused: int = 0
    header_sha256: str | None = None
    link: str | None = None


@dataclass(frozen=True, slots=True)
class ComponentRecord:
    """One component that LoRAs could target: its weight files, and how many of its tensors were fused."""

    name: str
    role: str | None
    dtype: str
    index: str | None
    n_tensors: int
    fused: int
    files: tuple[FileRecord, ...]


@dataclass(frozen=True, slots=True)
class LoraRecord:
    """One LoRA on one component; ``content_sha256`` is ``digest.content_sha256``, ``raw`` the whole entry."""

    name: str
    sha256: str | None
    content_sha256: str
    component: str
    strength: float
    raw: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Marker:
    """A ``fused.json``. ``loras`` stand in the order they were added; ``raw`` is the whole document."""

    schema: str
    fingerprint: str
    artifact: str | None
    components: Mapping[str, ComponentRecord]
    side_files: tuple[FileRecord, ...]
    loras: tuple[LoraRecord, ...]
    raw: Mapping[str, object]

    @property
    def stacked_on(self) -> str | None:
        """The fingerprint of the fused base that this one was added to."""
        earlier = self.raw.get("stacked_on")
        return earlier if isinstance(earlier, str) else None

    @property
    def weight_files(self) -> tuple[FileRecord, ...]:
        return tuple(record for part in self.components.values() for record in part.files)

    @property
    def files(self) -> tuple[FileRecord, ...]:
        """Every file that the marker lists."""
        return self.weight_files + self.side_files


def read_marker(folder: Path | str) -> Marker | None:
    """The marker of ``folder``, or None where there is neither a marker nor a journal.

    Raises ``MarkerError`` if it is broken or of an unknown major version, or if there is only a
    journal (``facts["reason"] == "unfinished"``), and ``InputError`` if ``folder`` is not a folder.
    """
    folder = Path(folder)
    path = folder / FILE_NAME
    try:
        if not folder.is_dir():
            raise InputError(f"{folder}: is not a folder", path=str(folder))
        if _exists(path):
            return decode(_bounded_bytes(path), str(path))
        if _exists(folder / JOURNAL_NAME):
            what = f"is unfinished: it has a {JOURNAL_NAME} and no {FILE_NAME}"
            facts = {"path": str(folder), "reason": UNFINISHED}
            raise MarkerError(f"{folder}: {what}", hint=UNFINISHED_HINT, **facts)
    except OSError as error:
        broken(str(path), f"cannot be read: {error.strerror}")
    return None


def decode(text: bytes, source: str = FILE_NAME) -> Marker:
    """The marker in ``text``; ``source`` names it in errors. Raises ``MarkerError``."""
    root = parse(text, source)
    _check_schema(root)
    marker = Marker(
        schema=root.text("schema"),
        fingerprint=root.text("fingerprint", TAGGED),
        artifact=root.text_or_none("artifact", TAGGED),
        components={name: _component(name, entry) for name, entry in root.named("components").items()},
        side_files=tuple(_side_file(entry) for entry in root.items("side_files")),
        loras=tuple(_lora(entry) for entry in root.items("loras", at_least=1)),
        raw=root.values,
    )
    root.text_or_none("stacked_on", TAGGED)
    _check_paths(root, marker)
    return marker


def encode(document: Mapping[str, object]) -> bytes:
    """The bytes of a marker: UTF-8 JSON, one spelling per content, with a final newline.

    Names and lists whose order means nothing are sorted, ``schema`` first. Bytes of a file name that
    are not UTF-8 (surrogates in Python) become JSON escapes.
    """
    text = json.dumps(_settled(document), indent=2, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "backslashreplace") + b"\n"


_UNORDERED = {"files": "path", "side_files": "path", "skipped": "module"}


def _settled(value: object, name: str = "") -> object:
    if isinstance(value, Mapping):
        return {key: _settled(value[key], key) for key in sorted(value, key=lambda n: (n != "schema", n))}
    if not isinstance(value, (list, tuple)):
        return value
    items = [_settled(item) for item in value]
    if name in _UNORDERED:
        items.sort(key=lambda item: str(item[_UNORDERED[name]]) if isinstance(item, dict) else "")
    return items


def _exists(path: Path) -> bool:
    """True for a dangling link too: something is there, and it is not right."""
    return path.is_symlink() or path.exists()


def _bounded_bytes(path: Path) -> bytes:
    info = path.stat()
    if not stat.S_ISREG(info.st_mode):
        broken(str(path), "is not a regular file")
    if info.st_size > MAX_BYTES:
        broken(str(path), f"is {info.st_size} bytes long, over the cap of {MAX_BYTES}")
    with path.open("rb") as stream:
        return stream.read(info.st_size)


def _check_schema(root: Fields) -> None:
    found = SCHEMA_FORM.fullmatch(root.text("schema"))
    if found is None:
        root.refuse("schema", f"like {SCHEMA!r}")
    if found[1] != "1":
        what = f"is {short(found[0])}; this fuselora reads {SCHEMA} and newer minors of it"
        root.fail("schema", what, "A newer fuselora wrote it: update fuselora.")
    if root.values.get("lora_is_fused") is not True:
        root.refuse("lora_is_fused", "true")


def _component(name: str, entry: Fields) -> ComponentRecord:
    return ComponentRecord(
        name=name,
        role=entry.text_or_none("role"),
        dtype=entry.text("dtype"),
        index=None if entry.values.get("index") is None else entry.path("index"),
        n_tensors=entry.count("tensors"),
        fused=entry.count("fused"),
        files=tuple(_weight_file(item) for item in entry.items("files", at_least=1)),
    )


def _weight_file(entry: Fields) -> FileRecord:
    return FileRecord(
        path=entry.path("path"),
        n_bytes=entry.count("bytes"),
        sha256=entry.text_or_none("sha256", HEX),
        base_sha256=entry.text_or_none("base_sha256", HEX),
        fused=entry.count("fused"),
        header_sha256=entry.text_or_none("header_sha256", HEX),
    )


def _side_file(entry: Fields) -> FileRecord:
    sha256, link = entry.text_or_none("sha256", HEX), entry.text_or_none("link")
    return FileRecord(entry.path("path"), entry.count("bytes"), sha256, None, link=link)


def _lora(entry: Fields) -> LoraRecord:
    return LoraRecord(
        name=entry.text("name"),
        sha256=entry.text_or_none("sha256", HEX),
        content_sha256=entry.text("content_sha256", HEX),
        component=entry.text("component"),
        strength=entry.number("strength"),
        raw=entry.values,
    )


def _check_paths(root: Fields, marker: Marker) -> None:
    """Each file once, and each index among them."""
    listed: set[str] = set()
    for record in marker.files:
        if record.path in listed:
            broken(root.source, f"lists {short(record.path)} twice", file=record.path)
        listed.add(record.path)
    for part in marker.components.values():
        if part.index is not None and part.index not in listed:
            what = f"{short(part.name)} has the index {short(part.index)}, which no list of files has"
            broken(root.source, what, file=part.index)


def __getattr__(name: str) -> object:
    if name in ("CheckReport", "Finding", "LoraOutcome", "check"):
        return getattr(import_module("fuselora.integrity"), name)
    raise AttributeError(f"module 'fuselora.marker' has no attribute {name!r}")


def main(argv: Sequence[str] | None = None) -> int:
    """The preflight: 0 fused, whole and with none of the LoRAs, 1 if that does not hold, 2 usage."""
    from fuselora.integrity import check

    options = _parser().parse_args(argv)
    try:
        report = check(options.out, loras=options.lora, digest=options.digest)
    except FuseloraError as error:
        _write(sys.stderr, f"error: {error.message}")
        if options.json:
            _write_json({"ok": False, "error": error.code, "message": error.message})
        return error.exit_code
    if options.json:
        _write_json(report.document())
    else:
        _write(sys.stdout, *report.lines(options.out))
    return 0 if report.ok else 1


def _parser() -> argparse.ArgumentParser:
    import argparse

    parser = argparse.ArgumentParser(
        prog="python -m fuselora.marker",
        description="Is OUT fused and whole? Exit 0: yes, and none of the LoRAs is in it; 1: no; 2: usage.",
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="a fused folder")
    parser.add_argument(
        "--lora", metavar="FILE", type=Path, nargs="+", action="extend", default=[],
        help="LoRA files that must not be fused in it already",
    )  # fmt: skip
    parser.add_argument("--digest", action="store_true", help="read every file and compare its sha256")
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    return parser


def _write_json(document: Mapping[str, object]) -> None:
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


def _write(stream: TextIO, *lines: str) -> None:
    """Names come from files: control characters, and what the terminal cannot spell, are escaped."""
    encoding = stream.encoding or "utf-8"
    for line in lines:
        shown = CONTROL.sub(lambda found: ascii(found[0])[1:-1], line)
        stream.write(shown.encode(encoding, "backslashreplace").decode(encoding) + "\n")


if __name__ == "__main__":
    sys.exit(main())
