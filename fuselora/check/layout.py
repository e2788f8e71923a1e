"""Whether vLLM-Omni and diffusers load a fused folder as a pipeline. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from fuselora.marker import Marker

NATIVE = (
    "native layout: vLLM-Omni and diffusers do not load it; "
    "merge with --layout diffusers --skeleton DIR writes a pipeline"
)
SKIPPED = (
    "no model_index.json, as after --assets skip: vLLM-Omni and diffusers load it "
    "once the rest of the pipeline lies beside it"
)


def layout_note(folder: Path, marker: Marker) -> str | None:
    """Why they do not, in a line; None for a pipeline, and for what was never to be one: a single file."""
    base = marker.raw.get("base")
    converted = marker.layout is not None
    if not isinstance(base, Mapping) or (folder / "model_index.json").exists():
        return None
    if len(marker.files) == 1 and not converted:
        return None
    if base.get("layout") == "native" and not converted:
        return NATIVE
    return SKIPPED if converted or base.get("pipeline_class") else None
