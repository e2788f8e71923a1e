"""Side files to be found and placed."""

from __future__ import annotations

import os
from pathlib import Path

CONTENT = b"content of a side file"


def put(path: Path, content: bytes = CONTENT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def hub_snapshot(cache: Path) -> Path:
    """A repository as huggingface_hub lays it out: every file a link to a blob."""
    blob = put(cache / "models--a--b" / "blobs" / "0123abcd")
    snapshot = cache / "models--a--b" / "snapshots" / "deadbeef"
    (snapshot / "vae").mkdir(parents=True)
    (snapshot / "vae" / "config.json").symlink_to(os.path.relpath(blob, snapshot / "vae"))
    return snapshot
