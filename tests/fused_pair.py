"""A tiny Wan2.2 pair merged with a LoRA for each expert, and ways to damage the result."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from fuselora import synth
from fuselora.header import read_header
from fuselora.marker import FILE_NAME, encode
from fuselora.pipeline import merge
from fuselora.verify import verify
from fuselora.verify_report import VerifyReport

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SIZE = synth.tiny("wan2.2-t2v-a14b")
SHARD_BYTES = 60_000
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
FUSED = "blocks.0.attn1.to_q.weight"  # by both LoRAs
COPIED = "patch_embedding.weight"  # in transformer_2
HIGH, LOW = "high.safetensors", "low.safetensors"


@dataclass(frozen=True)
class Pair:
    """A bfloat16 base with its float32 tensors, LoRAs, and OUT: with digests, and ``plain`` without.

    The high one has pairs and differences of everything; the low one only pairs in blocks, at
    strength 0.5.
    """

    folder: Path
    base: Path
    high: Path
    low: Path
    out: Path
    plain: Path

    @property
    def loras(self) -> tuple[Path, Path]:
        return self.high, self.low

    def verify(self, out: Path, **options: Any) -> VerifyReport:
        return verify(out, base=self.base, loras=self.loras, **options)

    def copy(self, to: Path, *, digests: bool = False) -> Path:
        return Path(shutil.copytree(self.out if digests else self.plain, to))


def write_pair(folder: Path) -> Pair:
    base = synth.write_pipeline(
        folder / "base", SIZE, experts=True, dtype="BF16", mixed=True, shard_bytes=SHARD_BYTES
    )
    high = write_high(folder / HIGH)
    low = synth.write_lora(folder / LOW, SIZE, style="lightning", rank=8, alpha=4, seed=3)
    loras = [f"transformer={high}", f"transformer_2={low}:0.5"]
    out = merge(base, loras, folder / "out").out
    plain = merge(base, loras, folder / "plain", digest=False).out
    return Pair(folder, base, high, low, out, plain)


def write_high(path: Path, *, seed: int = 2) -> Path:
    return synth.write_lora(path, SIZE, style="extractor", rank=8, alpha=4, seed=seed)


def shard_of(folder: Path, component: str, key: str) -> Path:
    """The weight file of a component that holds a tensor."""
    files = sorted((folder / component).glob("*.safetensors"))
    return next(path for path in files if key in read_header(path).by_name())


def read_tensor(path: Path, key: str) -> torch.Tensor:
    header = read_header(path)
    info = header.by_name()[key]
    data = path.read_bytes()[header.data_start + info.start : header.data_start + info.end]
    return torch.frombuffer(bytearray(data), dtype=DTYPES[info.dtype]).view(info.shape)


def edit_tensor(path: Path, key: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Put other values in a tensor's place; the header stays."""
    header = read_header(path)
    value = read_tensor(path, key)
    data = change(value).to(value.dtype).contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    with path.open("r+b") as stream:
        stream.seek(header.data_start + header.by_name()[key].start)
        stream.write(data)


def flip_bit(path: Path, key: str, bit: int) -> None:
    """One bit of the first element of a tensor, counted from the least significant."""
    header = read_header(path)
    at = header.data_start + header.by_name()[key].start + bit // 8
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit % 8
    path.write_bytes(content)


def edit_json(path: Path, change: Callable[[Any], object]) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    change(document)
    if path.name == FILE_NAME:
        path.write_bytes(encode(document))
    else:
        path.write_text(json.dumps(document), encoding="utf-8")


def edit_marker(out: Path, change: Callable[[Any], object]) -> None:
    edit_json(out / FILE_NAME, change)


def found(report: VerifyReport) -> set[tuple[str, str | None]]:
    """Codes and tensors of what was found."""
    return {(finding.code, finding.tensor) for finding in report.findings}


def codes(report: VerifyReport) -> set[str]:
    return {finding.code for finding in report.findings}


def rewritten(path: Path, to: Path, metadata: Mapping[str, str]) -> Path:
    """The same tensors in another order, with other metadata."""
    with safe_open(path, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in reversed(list(opened.keys()))}
    save_file(tensors, to, dict(metadata))
    assert to.read_bytes() != path.read_bytes()
    return to
