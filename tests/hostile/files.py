"""Files that are no safetensors, or lie about what they are. Each is written by a function of its path."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

Write = Callable[[Path], object]
F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def with_header(header: object, data: bytes = bytes(8), length: int | None = None) -> Write:
    """A file with this header, as JSON or as it is; ``length`` is what it claims of itself."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    stated = len(raw) if length is None else length
    return lambda path: path.write_bytes(struct.pack("<Q", stated) + raw + data)


def with_bytes(content: bytes) -> Write:
    return lambda path: path.write_bytes(content)


def entry(**changes: object) -> Write:
    """One tensor, with one of its claims changed."""
    return with_header({"a.lora_A.weight": {**F32, **changes}})


def named(name: str) -> Write:
    return with_header({name: F32})


def _zip() -> bytes:
    found = io.BytesIO()
    with zipfile.ZipFile(found, "w") as archive:
        archive.writestr("data.pkl", pickle.dumps({"a": 1}))
    return found.getvalue()


def _long_header(path: Path) -> None:
    """Really over safetensors' cap, as a hole."""
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", 100_000_001) + b"{")
        stream.truncate(100_000_100)


def _many(n: int) -> dict[str, object]:
    return {f"t{i}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(n)}


# name: (how it is written, words of the error)
FILES: Mapping[str, tuple[Write, str]] = {
    "empty": (with_bytes(b""), "too short|empty|0 bytes"),
    "seven bytes": (with_bytes(b"1234567"), "too short|7 bytes"),
    "a claim of nothing": (with_header(b"", length=0), "header"),
    "a claim of 2^63": (with_header({"a": F32}, length=2**63), "header"),
    "a claim past the end": (with_header({"a": F32}, length=5000), "header|cut short"),
    "a claim of the cap": (with_header({"a": F32}, length=99_999_999), "header|cut short"),
    "longer than the cap": (_long_header, "header"),
    "overlapping": (with_header({"a": F32, "b": F32}), "overlap|range|hole|bytes"),
    "a hole": (with_header({"a": F32, "b": {**F32, "data_offsets": [16, 24]}}, bytes(24)), "hole|range"),
    "reversed": (entry(data_offsets=[8, 0]), "impossible range"),
    "negative": (entry(data_offsets=[-8, 0]), "impossible range"),
    "fractions": (entry(data_offsets=[0.0, 8.0]), "impossible range"),
    "truths": (entry(data_offsets=[False, 8]), "impossible range"),
    "three offsets": (entry(data_offsets=[0, 4, 8]), "impossible range"),
    "no offsets": (with_header({"a": {"dtype": "F32", "shape": [2]}}), "malformed"),
    "one key more": (entry(extra=1), "malformed"),
    "a huge offset": (entry(data_offsets=[0, 10**400]), "JSON|range|bytes|digits"),
    "a shape that overflows": (entry(shape=[2**40, 2**40]), "overflow|bytes"),
    "a negative shape": (entry(shape=[-1, -2]), "impossible shape"),
    "a true shape": (entry(shape=[True, 2]), "impossible shape"),
    "a million dimensions": (entry(shape=[1] * 1_000_000), "dimensions"),
    "an unknown dtype": (entry(dtype="F31"), "unknown dtype"),
    "a dtype that is a list": (entry(dtype=["F32"]), "unknown dtype"),
    "cut short": (with_header({"a": F32}, bytes(4)), "cut short|bytes"),
    "too long": (with_header({"a": F32}, bytes(12)), "over|bytes"),
    "no object": (with_header([1, 2]), "object|header"),
    "a name twice": (with_header(b'{"a": 1, "a": 2}'), "twice"),
    "not a number": (with_header(b'{"a": NaN}'), "JSON|NaN"),
    "100,000 brackets": (with_header(b"[" * 100_000), "JSON|nested|header"),
    "100,000 objects": (with_header(b'{"a":' * 100_000), "JSON|nested|header"),
    "5,000 digits": (with_header(b'{"a": ' + b"9" * 5000 + b"}"), "JSON|digits|malformed"),
    "metadata of numbers": (with_header({"__metadata__": {"a": 1}, "a": F32}), "metadata"),
    "metadata that is a list": (with_header({"__metadata__": ["a"], "a": F32}), "metadata"),
    "no UTF-8": (with_header(b'{"\xff\xfe": 1}'), "utf-8"),
    "a byte order mark": (with_header(b"\xef\xbb\xbf{}"), "JSON|header|object"),
    "a name of a megabyte": (named("x" * 1_000_000), "characters"),
    "LFS": (with_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"), "LFS"),
    "HTML": (with_bytes(b"<!DOCTYPE html><html><body>404 Not Found</body></html>"), "HTML|header"),
    "a zip": (with_bytes(_zip()), "zip|pickle|torch"),
    "a pickle": (with_bytes(pickle.dumps({"a": list(range(100))})), "pickle|header"),
    "GGUF": (with_bytes(b"GGUF\x03\0\0\0" + bytes(64)), "GGUF|header"),
    "gzip": (with_bytes(gzip.compress(b"x" * 100)), "header|gzip"),
    "text": (with_bytes(b"# LoRA\n\nThis is a README.\n" * 9), "header|text"),
    "zeros": (with_bytes(bytes(4096)), "header"),
    "100,000 names that are no LoRA's": (with_header(_many(100_000), b""), "LoRA|match|key"),
}  # fmt: skip
