"""Small JSON side files (an index, a config), read strictly. Standard library only."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from fuselora.errors import FormatError

if TYPE_CHECKING:
    from pathlib import Path

MAX_BYTES = 256 << 20  # an index of a million tensors is a third of this


def read_json(path: Path) -> dict[str, object]:
    """The JSON object in ``path``. Raises ``FormatError`` naming the file."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise FormatError(f"{path}: is too long for a JSON side file", path=str(path))
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(f"{path}: cannot be read as JSON: {error}", path=str(path)) from error
    if not isinstance(document, dict):
        raise FormatError(f"{path}: is not a JSON object", path=str(path))
    return document
