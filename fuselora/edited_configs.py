"""config.json of a component whose dtype or width changes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from fuselora.header import DTYPE_NAMES
from fuselora.reading import reading

if TYPE_CHECKING:
    from fuselora.checkpoint import Checkpoint
    from fuselora.planning import ComponentPlan
    from fuselora.skeleton import Skeleton
    from fuselora.specs import Request


def edited_configs(
    checkpoint: Checkpoint,
    skeleton: Skeleton | None,
    components: Sequence[ComponentPlan],
    request: Request,
) -> dict[PurePosixPath, bytes]:
    """config.json of components whose dtype or width changes, where it names them; otherwise untouched.

    A skeleton's names the dtype of other weights, so it follows that of the weights written.
    """
    edited: dict[PurePosixPath, bytes] = {}
    for component, planned in zip(checkpoint.components, components, strict=True):
        if component.is_text_encoder:
            continue
        config = skeleton.configs[component.name] if skeleton else component.config
        path = (PurePosixPath(component.name) if skeleton else component.folder) / "config.json"
        dtype = DTYPE_NAMES.get(planned.dtype) if skeleton else request.dtype
        wanted: dict[str, object] = {**_dtypes(dtype, config)}
        for grown in planned.grown:
            wanted |= grown.config
        changes = {name: value for name, value in wanted.items() if config.get(name) != value}
        if changes:
            source = (skeleton or checkpoint).root / path
            with reading(source):
                content = source.read_bytes()
            edited[path] = _with_values(content, config, changes)
    return edited


def _dtypes(dtype: str | None, config: Mapping[str, object]) -> dict[str, object]:
    named = sorted({"torch_dtype", "dtype"} & config.keys())
    return dict.fromkeys(named, dtype) if dtype and dtype != "keep" else {}


def _with_values(content: bytes, config: Mapping[str, object], changes: Mapping[str, object]) -> bytes:
    """A config with some top-level values changed; spelled as before where that is safe."""
    edited, count = content, 0
    for name, value in changes.items():
        pattern = rb'("' + re.escape(name).encode() + rb'"\s*:\s*)("[^"]*"|-?[0-9]+|null)'
        edited, n = re.subn(pattern, rb"\g<1>" + json.dumps(value).encode(), edited)
        count += n
    wanted = {**config, **changes}
    if count == len(changes) and json.loads(edited) == wanted:
        return edited
    # A nested entry has the same name, or the text is UTF-16.
    return (json.dumps(wanted, indent=2) + "\n").encode("utf-8")
