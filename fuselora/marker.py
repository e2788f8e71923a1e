"""``fused.json``, the marker of a fused folder: what it says, read and written. Standard library only.

Serving engines import this module. ``python -m fuselora.marker OUT`` is the preflight that needs no
other package (``check.command``). ``schema/fused-1.0.schema.json`` documents the fields one by one.
"""

from __future__ import annotations

import json
import re
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from fuselora.digest import sha256_json, tagged, whole_numbers
from fuselora.errors import InputError, MarkerError
from fuselora.escape import short
from fuselora.fields import HEX, HINT, TAGGED, Fields, broken, parse
from fuselora.reading import reading, real_path

if TYPE_CHECKING:
    from fuselora.check.folder import check

__all__ = [
    "COMPONENT_KEY", "FILE_NAME", "FINGERPRINT_KEY", "JOURNAL_NAME", "MAX_BYTES", "NEW_JOURNAL_NAME",
    "SCHEMA", "ComponentRecord", "FileRecord", "LoraRecord", "Marker", "check", "decode", "encode",
    "read_marker",
]  # fmt: skip

FILE_NAME = "fused.json"
JOURNAL_NAME = "fuselora.journal"
NEW_JOURNAL_NAME = f"{JOURNAL_NAME}.new"  # while it is replaced
SCHEMA = "fuselora.fused/1.0"
# In the __metadata__ of shards that hold a fused tensor; the experts' shards are else alike.
FINGERPRINT_KEY = "fuselora.fingerprint"
COMPONENT_KEY = "fuselora.component"
MAX_BYTES = 64 << 20
# What a server does about a LoRA that is not listed, where the marker does not say.
POLICY: Mapping[str, str] = {"distill_lora": "refuse", "dynamic_lora": "allow"}
POLICY_VALUES = ("refuse", "warn", "allow")
SCHEMA_FORM = re.compile(r"fuselora\.fused/([0-9]{1,6})\.([0-9]{1,6})")
# Not under the seal: itself, the one field that follows the clock, and what whoever serves may choose.
UNSEALED = frozenset({"seal", "created", "policy"})
UNFINISHED_HINT = "Run the same merge again to finish it; until then nothing should serve it."
UPDATE_HINT = "A newer fuselora wrote it: update fuselora."
NAME_HINT = "Name the folder that fuselora merge wrote."


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
    """One component that LoRAs could target: its weight files, and how many of its tensors were fused.

    ``widths`` are the fields of config.json that grew with a tensor.
    """

    name: str
    role: str | None
    dtype: str
    index: str | None
    n_tensors: int
    fused: int
    files: tuple[FileRecord, ...]
    widths: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LoraRecord:
    """One LoRA on one component; ``content_sha256`` is ``digest.content_sha256``, ``raw`` the whole entry."""

    name: str
    sha256: str | None
    content_sha256: str
    component: str
    strength: float
    raw: Mapping[str, object]

    @property
    def blocks(self) -> tuple[tuple[str, float], ...]:
        """The globs and factors of ``--blocks``, in their order."""
        entries = self.raw.get("blocks")
        rows = [row for row in entries if isinstance(row, Mapping)] if isinstance(entries, list) else []
        pairs = ((row.get("glob"), row.get("strength")) for row in rows)
        return tuple((g, s) for g, s in pairs if isinstance(g, str) and isinstance(s, (int, float)))

    @property
    def adds(self) -> bool:
        """Whether anything of it is in the weights: not at scale 0, nor where all was left out."""
        applied = self.raw.get("applied")
        counts = [n for n in applied.values() if isinstance(n, int)] if isinstance(applied, Mapping) else []
        nothing = bool(counts) and sum(counts) == len(self._at_zero)
        return self.strength != 0 and not nothing

    @property
    def _at_zero(self) -> frozenset[str]:
        """The modules whose alpha is 0, where no module has another scale."""
        entries = self.raw.get("scales")
        groups = (
            [group for group in entries if isinstance(group, Mapping)] if isinstance(entries, list) else []
        )
        if any(group.get("scale") != 0 for group in groups):
            return frozenset()
        modules = (group.get("modules") for group in groups)
        return frozenset(str(name) for names in modules if isinstance(names, list) for name in names)

    @property
    def text(self) -> str:
        """What was put where, in words."""
        listed = ", ".join(f"{glob}={factor:g}" for glob, factor in self.blocks)
        blocks = f", --blocks {listed}" if listed else ""
        nothing = "" if self.adds else ", nothing of it added"
        return f"{self.name} on {self.component}, strength {self.strength:g}{blocks}{nothing}"


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
    def is_newer(self) -> bool:
        """A newer minor version than ours wrote it: it may have fields that nobody here looks at."""
        return _minor(self.schema) > _minor(SCHEMA)

    @property
    def stacked_on(self) -> str | None:
        """The fingerprint of the fused base that this one was added to."""
        earlier = self.raw.get("stacked_on")
        return earlier if isinstance(earlier, str) else None

    @property
    def layout(self) -> str | None:
        """The layout that the base was converted to; None where names are the base's."""
        converted = self.raw.get("layout")
        return converted if isinstance(converted, str) else None

    @property
    def base_layout(self) -> str | None:
        """The layout of the base's names; None where its family has none or it is not known."""
        base = self.raw.get("base")
        layout = base.get("layout") if isinstance(base, Mapping) else None
        return layout if isinstance(layout, str) else None

    @property
    def serving(self) -> Mapping[str, int | float | str]:
        """How to sample, as far as it is noted: ``num_inference_steps``, ``guidance_scale`` ..., ``note``."""
        noted = self.raw.get("serving")
        entries = noted.items() if isinstance(noted, Mapping) else ()
        return {n: v for n, v in entries if isinstance(v, (int, float, str)) and not isinstance(v, bool)}

    @property
    def policy(self) -> Mapping[str, object]:
        """What a server does about a LoRA that is not listed, as it stands there: it may be misspelled."""
        values = self.raw.get("policy", {})
        return {**POLICY, **values} if isinstance(values, Mapping) else dict.fromkeys(POLICY, values)

    @property
    def weight_files(self) -> tuple[FileRecord, ...]:
        return tuple(record for part in self.components.values() for record in part.files)

    @property
    def files(self) -> tuple[FileRecord, ...]:
        """Every file that the marker lists."""
        return self.weight_files + self.side_files


def marker_home(folder: Path, shard: Path) -> Path | None:
    """The folder of a shard, or the one around it, that has a marker; links to that folder are followed."""
    part = shard.parent
    around = [part, part.parent, folder.absolute().parent, real_path(part), real_path(part).parent]
    return next((home for home in around if (home / FILE_NAME).is_file()), None)


def read_marker(folder: Path | str) -> Marker | None:
    """The marker of ``folder``, or None where there is neither a marker nor a journal.

    Raises ``InputError`` if ``folder`` is not a folder or cannot be looked into, and ``MarkerError`` for a
    marker that cannot be trusted, whose ``facts["reason"]`` is "unfinished" (a journal and no marker),
    "version" (an unknown major), "path" (one that leaves the folder) or "edited" (the seal does not fit),
    if it is there.
    """
    folder = Path(folder)
    path = folder / FILE_NAME
    is_there = _is_there(folder, path)
    try:
        if is_there:
            return decode(_bounded_bytes(path), str(path))
        if _exists(folder / JOURNAL_NAME):
            what = f"is unfinished: it has a {JOURNAL_NAME} and no {FILE_NAME}"
            facts = {"path": str(folder), "reason": "unfinished"}
            raise MarkerError(f"{folder}: {what}", hint=UNFINISHED_HINT, **facts)
    except OSError as error:
        broken(str(path), f"cannot be read: {error.strerror}")
    return None


def decode(text: bytes, source: str = FILE_NAME) -> Marker:
    """The marker in ``text``; ``source`` names it in errors. Raises ``MarkerError`` as ``read_marker``."""
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
    root.text_or_none("layout")
    _check_paths(root, marker)
    _check_seal(root)
    return marker


def encode(document: Mapping[str, object]) -> bytes:
    """The bytes of a marker: UTF-8 JSON, one spelling per content, with its seal and a final newline.

    Names and lists whose order means nothing are sorted, ``schema`` first. Bytes of a file name that
    are not UTF-8 (surrogates in Python) become JSON escapes.
    """
    settled = {name: _settled(value, name) for name, value in document.items()}
    sealed = _settled({**settled, "seal": seal_of(settled)})
    text = json.dumps(sealed, indent=2, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "backslashreplace") + b"\n"


def seal_of(document: Mapping[str, object]) -> str:
    """The digest over all of a marker but ``created`` and ``policy``.

    Of canonical JSON, lists as they are and whole numbers without a fraction, so that another tool may
    write the file anew.
    """
    sealed = {name: document[name] for name in document if name not in UNSEALED}
    return tagged(sha256_json(whole_numbers(sealed)))


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


def _refuse_no_folder(folder: Path) -> NoReturn:
    what = "is not a folder but a file" if folder.exists() else "is not a folder: nothing has that name"
    raise InputError(f"{folder}: {what}", hint=NAME_HINT, path=str(folder))


def _is_there(folder: Path, path: Path) -> bool:
    with reading(folder):
        if not folder.is_dir():
            _refuse_no_folder(folder)
        return _exists(path)


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
        root.fail("schema", what, UPDATE_HINT, reason="version")
    if root.values.get("lora_is_fused") is not True:
        root.refuse("lora_is_fused", "true")


def _minor(schema: str) -> int:
    found = SCHEMA_FORM.fullmatch(schema)
    return int(found[2]) if found else 0


def _component(name: str, entry: Fields) -> ComponentRecord:
    return ComponentRecord(
        name=name,
        role=entry.text_or_none("role"),
        dtype=entry.text("dtype"),
        index=None if entry.values.get("index") is None else entry.path("index"),
        n_tensors=entry.count("tensors"),
        fused=entry.count("fused"),
        files=tuple(_weight_file(item) for item in entry.items("files", at_least=1)),
        widths=_widths(entry) if "widened" in entry.values else {},
    )


def _widths(entry: Fields) -> dict[str, int]:
    """What config.json says otherwise for the tensors that grew."""
    found: dict[str, int] = {}
    for item in entry.items("widened"):
        config = item.values.get("config")
        if not isinstance(config, dict) or not all(type(n) is int for n in config.values()):
            item.refuse("config", "an object of whole numbers")
        found |= config
    return found


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


def _check_seal(root: Fields) -> None:
    seal = root.text("seal", TAGGED)
    try:
        fits = seal_of(root.values) == seal
    except (ValueError, RecursionError):  # nested deeper than can be written, or a number too long for it
        fits = False
    if not fits:
        broken(root.source, "was edited: its seal is not that of what it says", HINT, reason="edited")


def __getattr__(name: str) -> object:
    """``check`` is loaded when first used."""
    if name == "check":
        return getattr(import_module("fuselora.check.folder"), name)
    raise AttributeError(f"module 'fuselora.marker' has no attribute {name!r}")


if __name__ == "__main__":
    sys.exit(import_module("fuselora.check.command").main())
