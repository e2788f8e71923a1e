"""The identity of a plan, known before anything is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fuselora.digest import sha256_json, tagged
from fuselora.marker import SCHEMA

if TYPE_CHECKING:
    from fuselora.checkpoint import Checkpoint
    from fuselora.content import LoraContent
    from fuselora.match import Matching
    from fuselora.naming import Naming
    from fuselora.specs import Request


def fingerprint_of(
    checkpoint: Checkpoint,
    matchings: Sequence[Matching],
    contents: Sequence[LoraContent],
    request: Request,
    changed: Mapping[str, Naming] | None,
) -> str:
    """The plan's identity: base headers and sizes, LoRA contents, components and scales, dtype, schema.

    ``changed`` are the output's names by component, where they are not the base's.
    """
    base = [
        [str(component.weight_path(shard)), shard.sha256, shard.n_bytes]
        for component in checkpoint.components
        for shard in component.shards
    ]
    document = {
        "schema": SCHEMA,
        "dtype": request.dtype,
        "uniform": request.uniform,
        "reference": request.kernel == "reference",
        "base": base,
        "stacked_on": checkpoint.marker.fingerprint if checkpoint.marker else None,
        "loras": [_fingerprint_row(matching, contents) for matching in matchings],
    }
    if changed is not None:
        document["names"] = {name: _names_row(naming) for name, naming in changed.items()}
    return tagged(sha256_json(document))


def _names_row(naming: Naming) -> list[object]:
    return [sorted(naming.tensors.items()), [str(path) for path in naming.shards]]


def _fingerprint_row(matching: Matching, contents: Sequence[LoraContent]) -> list[object]:
    assignment = matching.assignment
    scales = [
        [
            hit.base_key, hit.kind.name, assignment.strength * hit.block, hit.ratio,
            *hit.module.settings.of(hit.kind.name), *([list(map(list, hit.rows))] if hit.rows else ()),
        ]
        for hit in matching.hits
    ]  # fmt: skip
    return [contents[assignment.order].content_sha256, assignment.component.name, sorted(scales, key=repr)]
