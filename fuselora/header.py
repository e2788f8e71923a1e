"""The safetensors header: read with every claim checked, and written. Standard library only.

Format: https://huggingface.co/docs/safetensors/index#format - eight bytes of little-endian header
length, a JSON header, then the tensors' bytes back to back.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn, cast

from fuselora.errors import FormatError, InputError
from fuselora.escape import short
from fuselora.jsonfile import exact_json
from fuselora.reading import State, changed, is_regular, reading, state

DTYPE_BITS: Mapping[str, int] = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E5M2FNUZ": 8, "F8_E4M3FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
# What torch, a config.json and fused.json call those that weights can be fused in.
DTYPE_NAMES: Mapping[str, str] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
DTYPE_CODES: Mapping[str, str] = {name: code for code, name in DTYPE_NAMES.items()}
MAX_HEADER_BYTES = 100_000_000  # the safetensors library refuses longer headers
# Far over all that is published, and low enough for what looks at each name, and shows it.
MAX_NAME_CHARS = 1000
MAX_DIMENSIONS = 64  # torch's operators take no more
PAGE = 4096


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file: ``start`` and ``end`` are byte offsets in the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def n_bytes(self) -> int:
        return self.end - self.start

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Header:
    """A file's header: its tensors in file order, which is also data order, without gaps.

    ``n_bytes`` is the size of the whole file, ``data_start`` where the tensors' bytes begin, ``sha256``
    the hex digest of everything before them, and ``state`` what tells an edit of the file since.
    """

    path: Path
    n_bytes: int
    data_start: int
    tensors: tuple[TensorInfo, ...]
    metadata: Mapping[str, str]
    sha256: str
    state: State

    def by_name(self) -> dict[str, TensorInfo]:
        return {tensor.name: tensor for tensor in self.tensors}


def dtype_name(code: str) -> str:
    """A safetensors dtype as torch calls it; the code itself for one that weights are not fused in."""
    return DTYPE_NAMES.get(code, code)


def bytes_by_dtype(sizes: Iterable[tuple[str, int]]) -> dict[str, int]:
    """The sums of (dtype, bytes) pairs: the dtype with most bytes first, of equals the one met first."""
    totals: Counter[str] = Counter()
    for dtype, n_bytes in sizes:
        totals[dtype] += n_bytes
    return dict(totals.most_common())


def main_dtype(tensors: Iterable[TensorInfo]) -> str | None:
    """The dtype that holds most bytes; None without tensors."""
    return next(iter(bytes_by_dtype((tensor.dtype, tensor.n_bytes) for tensor in tensors)), None)


def dtypes_of(tensors: Iterable[TensorInfo]) -> dict[str, int]:
    """Bytes by dtype, as torch calls it, the most first."""
    return bytes_by_dtype((dtype_name(tensor.dtype), tensor.n_bytes) for tensor in tensors)


def read_header(path: Path) -> Header:
    """The checked header of ``path``.

    Raises ``InputError`` if the file cannot be opened and ``FormatError`` if it is not safetensors,
    is cut short or over-long, or its header lies about names, dtypes, shapes or offsets.
    """
    try:
        if not path.is_dir() and not is_regular(path):
            _broken(path, "is not a regular file")
        with path.open("rb") as stream:
            status = os.fstat(stream.fileno())
            n_bytes = status.st_size
            raw = _raw_header(path, stream, n_bytes)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}", path=str(path)) from error
    tensors, metadata = _parse(path, raw[8:])
    _check_layout(path, tensors, n_bytes - len(raw), n_bytes)
    return Header(path, n_bytes, len(raw), tensors, metadata, hashlib.sha256(raw).hexdigest(), state(status))


def check_unchanged(header: Header) -> None:
    """Raises ``ChangedError`` unless the path still holds the file whose header was read."""
    with reading(header.path):
        found = header.path.stat()
    if not header.state.is_same(state(found)):
        raise changed(header.path)


def encode_header(
    tensors: Iterable[TensorInfo], metadata: Mapping[str, str], *, congruent_to: int = 0
) -> bytes:
    """Header bytes, padded with spaces so that the data starts at ``congruent_to`` modulo 4096."""
    document: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    for tensor in tensors:
        document[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [tensor.start, tensor.end],
        }
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    padded = len(text) + (congruent_to - 8 - len(text)) % PAGE
    return padded.to_bytes(8, "little") + text.ljust(padded, b" ")


def _raw_header(path: Path, stream: BinaryIO, n_bytes: int) -> bytes:
    """Length and JSON text, as they stand in the file."""
    prefix = stream.read(8)
    _refuse_lookalike(path, prefix + stream.read(504), n_bytes)
    if len(prefix) < 8:
        _broken(path, f"is {n_bytes} bytes long, too short for a safetensors file")
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        stream.seek(8)
        if stream.read(1) != b"{":
            _broken(path, "is not safetensors: it begins with no header")
        _broken(path, f"claims a header of {length} bytes, over the cap of {MAX_HEADER_BYTES}")
    if 8 + length > n_bytes:
        _broken(path, f"is cut short: its header needs {8 + length} bytes and the file has {n_bytes}")
    stream.seek(8)
    text = stream.read(length)
    if not text.startswith(b"{"):
        _broken(path, "has a header that is not a JSON object")
    return prefix + text


CONVERT = (
    "Convert it to safetensors; fuselora never unpickles anything. With torch, where you trust it: "
    'python -c "import torch, safetensors.torch as s; '
    "t = torch.load('IN.bin', weights_only=True, map_location='cpu'); "
    "s.save_file({k: v.contiguous().clone() for k, v in t.items()}, 'OUT.safetensors')\""
)
PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
LOOKALIKES: tuple[tuple[bytes, str, str], ...] = (
    (b"version https://git-lfs", "a Git LFS pointer", "Fetch the real file with 'git lfs pull'."),
    (b"PK\x03\x04", "a zip archive, perhaps a torch checkpoint", CONVERT),
    *((bytes((0x80, protocol)), "a pickle", CONVERT) for protocol in (2, 3, 4, 5)),
    (b"GGUF", "a GGUF file, a quantised base", "Use the unquantised safetensors."),
    (b"\x1f\x8b", "a gzip archive", "Unpack it."),
    (b"<", "an HTML or XML page", "The download was answered with a web page; fetch it again."),
    (b"{", "a JSON text", "It may be an index, or what a download was answered with; name the weights."),
)


def _refuse_lookalike(path: Path, start: bytes, n_bytes: int) -> None:
    """Name what a file that is no safetensors file looks like."""
    if n_bytes == 0:
        _broken(path, "is empty")
    # A real header's ninth byte is '{', whatever its length says.
    if start[8:9] == b"{":
        return
    start = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    for magic, what, hint in LOOKALIKES:
        if start.startswith(magic):
            _broken(path, f"is not safetensors: it looks like {what}", hint)
    if path.suffix in PICKLED_SUFFIXES:
        _broken(path, f"is not safetensors but a {path.suffix} file", CONVERT)


def _parse(path: Path, text: bytes) -> tuple[tuple[TensorInfo, ...], Mapping[str, str]]:
    document = _json_object(path, text)
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        _broken(path, "has a __metadata__ that is not a map of strings")
    _check_text(path, (*document, *metadata, *metadata.values()))
    tensors = [_tensor(path, name, entry) for name, entry in document.items()]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.end))
    return tuple(tensors), cast(Mapping[str, str], metadata)


def _json_object(path: Path, text: bytes) -> dict[str, object]:
    try:
        document = exact_json(text)
    except (ValueError, RecursionError) as error:
        _broken(path, f"has a broken header: {error}")
    if not isinstance(document, dict):
        _broken(path, "has a header that is not a JSON object")
    return document


def _check_text(path: Path, texts: Iterable[str]) -> None:
    """An escape may spell half of a surrogate pair, which no other reader takes and nobody can write."""
    try:
        "".join(texts).encode("utf-8")
    except UnicodeEncodeError:
        _broken(path, "has a name or metadata that is not Unicode text: half of a surrogate pair")


def _tensor(path: Path, name: str, entry: object) -> TensorInfo:
    """One header entry, its own claims checked: dtype, shape, and a range that fits both."""
    if len(name) > MAX_NAME_CHARS:
        what = f"has a tensor name of {len(name)} characters, over the cap of {MAX_NAME_CHARS}"
        _broken(path, f"{what}: {short(name)}")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        _broken(path, f"has a malformed entry for tensor {name!r}", tensor=name)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        _broken(path, f"tensor {name!r} has the unknown dtype {short(dtype)}", tensor=name)
    if not _naturals(shape):
        _broken(path, f"tensor {name!r} has the impossible shape {short(shape)}", tensor=name)
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _broken(path, f"tensor {name!r} has the impossible range {short(offsets)}", tensor=name)
    n_elements = _product(shape)
    if n_elements is None:
        _broken(path, f"tensor {name!r} has a shape of {len(shape)} dimensions that overflows", tensor=name)
    if len(shape) > MAX_DIMENSIONS:
        what = f"has {len(shape)} dimensions, over the cap of {MAX_DIMENSIONS}"
        _broken(path, f"tensor {name!r} {what}", tensor=name)
    bits = n_elements * DTYPE_BITS[dtype]
    if bits != 8 * (offsets[1] - offsets[0]):
        have, needs = offsets[1] - offsets[0], bits / 8 if bits % 8 else bits // 8
        _broken(path, f"tensor {name!r} spans {have} bytes; {dtype} {shape} needs {needs}", tensor=name)
    return TensorInfo(name, dtype, tuple(shape), offsets[0], offsets[1])


def _naturals(value: object) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in value)


def _product(shape: list[int]) -> int | None:
    """The number of elements; None from 2^63 on, even where a later 0 would undo it."""
    product = 1
    for size in shape:
        product *= size
        if product >= 1 << 63:
            return None
    return product


def _check_layout(path: Path, tensors: tuple[TensorInfo, ...], data_bytes: int, n_bytes: int) -> None:
    """Tensors lie back to back and fill the file exactly."""
    at = 0
    for tensor in tensors:
        if tensor.start != at:
            what = "overlaps the one before it" if tensor.start < at else "leaves a hole before it"
            _broken(path, f"tensor {tensor.name!r} {what}", tensor=tensor.name)
        at = tensor.end
    if at != data_bytes:
        declared = n_bytes - data_bytes + at
        what = "is cut short" if at > data_bytes else "is over-long"
        _broken(path, f"{what}: its header declares {declared} bytes and the file has {n_bytes}")


def _broken(path: Path, what: str, hint: str | None = None, **facts: object) -> NoReturn:
    raise FormatError(f"{path}: {what}", hint=hint, path=str(path), **facts)
