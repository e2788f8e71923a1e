"""Writing files: safetensors, header first and then block by block, and JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Literal

from fuselora.header import DTYPE_BITS, TensorInfo, encode_header
from fuselora.synth.values import value_blocks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from fuselora.synth.values import Spec

# noise: fresh values throughout; repeat: the first block of a tensor again and again, for big files;
# hole: no data at all, a sparse file of zeros of the true size
Fill = Literal["noise", "repeat", "hole"]
FORMAT = {"format": "pt"}


def write_safetensors(
    path: Path,
    specs: Iterable[Spec],
    *,
    seed: int = 0,
    metadata: Mapping[str, str] | None = None,
    fill: Fill = "noise",
) -> Path:
    """One file, its tensors in the order of the safetensors library: wide dtypes first, then by name."""
    ordered = sorted(specs, key=lambda spec: (-DTYPE_BITS[spec.dtype], spec.name))
    start = _header(ordered, metadata or {})
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as stream:
        stream.write(start)
        if fill == "hole":
            stream.truncate(len(start) + sum(spec.n_bytes for spec in ordered))
            return path
        for spec in ordered:
            stream.writelines(value_blocks(spec, seed, repeat=fill == "repeat"))
    return path


def _header(ordered: Sequence[Spec], metadata: Mapping[str, str]) -> bytes:
    """The header padded to 8 bytes, as the safetensors library does, so that data starts anywhere."""
    infos, at = [], 0
    for spec in ordered:
        infos.append(TensorInfo(spec.name, spec.dtype, spec.shape, at, at + spec.n_bytes))
        at += spec.n_bytes
    text = encode_header(infos, metadata)[8:].rstrip(b" ")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_json(path: Path, content: object) -> None:
    """JSON with an indent of two and a final newline; folders above it are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
