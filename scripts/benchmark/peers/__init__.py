"""Other ways to the same file, each a small program: load, fuse, save, fsync.

They are given the base's folder, the folder to write and ``--lora PATH:STRENGTH``, and sum in the base's
dtype; a float32 base is cast to bfloat16 at the end, as ``fuselora merge --dtype bfloat16`` does.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmark.commands import fsync_files

if TYPE_CHECKING:
    from collections.abc import Iterator

OUT_DTYPE = torch.bfloat16
PREFIX = "base_model.model"  # of the adapter's keys
WEIGHTS = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class Task:
    """``loras``: (path, strength); a PEFT adapter's folder, or a file. ``dtype``: the base's.

    ``float32``: sum in float32, whatever the base's dtype.
    """

    base: Path
    out: Path
    loras: tuple[tuple[Path, float], ...]
    dtype: torch.dtype
    float32: bool

    def adapters(self) -> Iterator[tuple[str, Path, float]]:
        """(name, folder, strength)."""
        for number, (path, strength) in enumerate(self.loras):
            yield f"lora{number}", path, strength

    def finish(self) -> None:
        """What was written is on disk, as after a merge."""
        fsync_files(self.out)


def task() -> Task:
    """What the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("base", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--lora", action="append", default=[], type=_lora, metavar="PATH:STRENGTH")
    parser.add_argument("--base-dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--float32", action="store_true")
    found = parser.parse_args()
    found.out.mkdir(exist_ok=True)
    dtype = getattr(torch, found.base_dtype)
    return Task(found.base, found.out, tuple(found.lora), dtype, found.float32)


def _lora(text: str) -> tuple[Path, float]:
    path, _, strength = text.rpartition(":")
    return Path(path), float(strength)
