"""One tensor to write, and its seeded values."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fuselora.header import DTYPE_BITS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Shape = tuple[int, ...]
BLOCK_ELEMENTS = 1 << 20
TORCH_DTYPES: Mapping[str, str] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
}


@dataclass(frozen=True, slots=True)
class Spec:
    """One tensor to write: ``mean`` plus ``std`` times noise seeded by ``key`` (its name if empty)."""

    name: str
    dtype: str
    shape: Shape
    std: float = 0.0
    mean: float = 0.0
    key: str = ""

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def n_bytes(self) -> int:
        return self.n_elements * DTYPE_BITS[self.dtype] // 8


def value_blocks(spec: Spec, seed: int, *, repeat: bool = False) -> Iterator[memoryview]:
    """The bytes of one tensor in blocks of at most 2^20 elements, made as they are asked for."""
    import torch

    digest = hashlib.sha256(f"{seed}/{spec.key or spec.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    item = DTYPE_BITS[spec.dtype] // 8
    dtype: torch.dtype = getattr(torch, TORCH_DTYPES[spec.dtype])
    block = memoryview(b"")
    for at in range(0, spec.n_elements, BLOCK_ELEMENTS):
        n = min(BLOCK_ELEMENTS, spec.n_elements - at)
        if not (repeat and at):
            noise = torch.randn(n, generator=generator).mul_(spec.std).add_(spec.mean)
            block = noise.to(dtype).view(torch.uint8).numpy().data
        yield block[: n * item]
