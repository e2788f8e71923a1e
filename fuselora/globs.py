"""GLOB of ``--blocks`` and ``--allow-unmatched``: which modules of a LoRA it means."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from fuselora.lora.grammar import spellings
from fuselora.name_table import flatten


def means(glob: str, module: str, base_key: str | None = None) -> bool:
    """By the LoRA's name, with its prefix or without, or the base's.

    ``blocks.1`` is all of that block, and not of ``blocks.10``; the same of flattened names, as ``blocks_1``.
    """
    readings = spellings(module)
    names = [*([base_key] if base_key is not None else []), *(reading.name for reading in readings)]
    if any(fnmatchcase(name, glob + below) for name in names for below in ("", ".*")):
        return True
    flat = [reading.name for reading in readings if readings[-1].flat]
    return any(fnmatchcase(name, flatten(glob) + below) for name in flat for below in ("", "_*"))


def glob_of(modules: Sequence[str]) -> str:
    """One glob for all of them: what their names begin with, up to the end of a word. At least one name."""
    first, last = min(modules), max(modules)
    if first == last:
        return first
    same = next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return re.sub(r"(?<=[._])[^._]*$", "", first[:same]) + "*"
