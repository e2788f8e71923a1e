"""Skeletons opened and edited."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from fuselora.resolve import resolve_skeleton
from fuselora.skeleton import Skeleton, open_skeleton

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def opened(folder: Path) -> Skeleton:
    return open_skeleton(resolve_skeleton(str(folder)))


def edit(path: Path, change: Callable[[Any], object]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
