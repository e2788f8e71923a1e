"""The marker's document, from a plan and what was written. ``marker`` reads what this builds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from fuselora import __version__
from fuselora.block_strengths import blocks_for
from fuselora.digest import artifact_digest, tagged
from fuselora.header import dtype_name
from fuselora.marker import POLICY, SCHEMA
from fuselora.match import recorded_name

if TYPE_CHECKING:
    from fuselora.content import LoraContent
    from fuselora.errors import Notice
    from fuselora.match import Hit, Matching
    from fuselora.planning import ComponentPlan, FusePlan, OutputFile
    from fuselora.skeleton import Skeleton
    from fuselora.specs import BlockSpec


COUNTED = ("pairs", "diff", "diff_b", "diff_m", "replace")  # said even where there are none


@dataclass(frozen=True, slots=True)
class WeightRecord:
    """A shard as it was written; digests are hex, None without ``--digest``."""

    path: str
    n_bytes: int
    sha256: str | None
    base_sha256: str | None


@dataclass(frozen=True, slots=True)
class SideRecord:
    """A side file as it was placed; ``link`` is None for a copy."""

    path: str
    n_bytes: int
    sha256: str | None
    link: str | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """What the bits depend on beside the inputs: kernel, device, CPU type and torch's version."""

    kernel: str
    accumulate: str
    device: str
    cpu: str
    torch: str


def marker_document(
    plan: FusePlan,
    weights: Mapping[str, WeightRecord],
    side_files: Sequence[SideRecord],
    machine: Machine,
    notices: Sequence[Notice],
    created: datetime,
) -> dict[str, object]:
    """The whole ``fused.json`` of a finished run."""
    document: dict[str, object] = {
        "schema": SCHEMA,
        "tool": {"name": "fuselora", "version": __version__, "torch": machine.torch},
        "created": created.astimezone(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lora_is_fused": True,
        "fingerprint": plan.fingerprint,
        "base": _base(plan),
        "components": {c.name: _component(c, weights) for c in plan.components},
        "side_files": [_side_file(side) for side in side_files],
        "loras": _loras(plan),
        "warnings": [notice.document() for notice in notices],
        "math": {
            "accumulate": machine.accumulate,
            "rounding": "once, nearest even",
            "device": machine.device,
            "kernel": machine.kernel,
            "cpu": machine.cpu,
        },
        "policy": dict(POLICY),
    }
    if plan.skeleton is not None:
        document["layout"] = "diffusers"
        document["skeleton"] = _skeleton(plan.skeleton)
    if serving := plan.serving.document():
        document["serving"] = serving
    if plan.request.digest:
        rows = [(w.path, w.sha256 or "") for w in weights.values()]
        rows += [(side.path, side.sha256 or "") for side in side_files]
        document["artifact"] = tagged(artifact_digest(rows))
    if plan.checkpoint.marker is not None:
        document["stacked_on"] = plan.checkpoint.marker.fingerprint
    return document


def _base(plan: FusePlan) -> dict[str, object]:
    checkpoint = plan.checkpoint
    return {
        "source": checkpoint.source,
        "revision": checkpoint.revision,
        "family": checkpoint.family.name if checkpoint.family else None,
        "layout": checkpoint.layout,
        **({"layout_told_by": checkpoint.row_order.told_by} if checkpoint.row_order else {}),
        "pipeline_class": checkpoint.pipeline_class,
    }


def _skeleton(skeleton: Skeleton) -> dict[str, object]:
    return {
        "source": skeleton.source,
        "revision": skeleton.revision,
        "pipeline_class": skeleton.pipeline_class,
    }


def _component(component: ComponentPlan, weights: Mapping[str, WeightRecord]) -> dict[str, object]:
    entry: dict[str, object] = {
        "dtype": dtype_name(component.dtype),
        "index": str(component.index) if component.index else None,
        "tensors": component.n_tensors,
        "fused": component.n_fused,
        "copied": component.n_tensors - component.n_fused,
        **({"widened": [grown.document() for grown in component.grown]} if component.grown else {}),
        "files": [_weight_file(file, weights[str(file.path)]) for file in component.files],
    }
    return entry if component.role == "single" else {"role": component.role, **entry}


def _weight_file(file: OutputFile, record: WeightRecord) -> dict[str, object]:
    entry = {
        "path": record.path,
        "bytes": record.n_bytes,
        "sha256": record.sha256,
        "base_sha256": record.base_sha256,
        "header_sha256": file.header_sha256,
        "fused": file.n_fused,
    }
    return {key: value for key, value in entry.items() if value is not None}


def _side_file(side: SideRecord) -> dict[str, object]:
    entry = {"path": side.path, "bytes": side.n_bytes, "sha256": side.sha256, "link": side.link}
    return {key: value for key, value in entry.items() if value is not None}


def _loras(plan: FusePlan) -> list[object]:
    """The base's own LoRAs first, when it was fused before."""
    earlier = [dict(lora.raw) for lora in plan.checkpoint.marker.loras] if plan.checkpoint.marker else []
    assert plan.contents is not None  # a plan without the data pass is never executed
    return [
        *earlier,
        *(_lora(m, plan.contents[m.assignment.order], plan.request.blocks) for m in plan.matchings),
    ]


def _blocks(blocks: Sequence[BlockSpec]) -> dict[str, object]:
    """Nothing where ``--blocks`` was not given."""
    rows = [{"glob": block.glob, "strength": block.strength} for block in blocks]
    return {"blocks": rows} if rows else {}


def _lora(matching: Matching, content: LoraContent, blocks: Sequence[BlockSpec]) -> dict[str, object]:
    assignment = matching.assignment
    pairs = [hit for hit in matching.hits if hit.alpha is not None]
    entry: dict[str, object] = {
        "name": assignment.adapter.name,
        "content_sha256": content.content_sha256,
        "component": assignment.component.name,
        "strength": assignment.strength,
        **_layout(matching),
        **_blocks(blocks_for(assignment.component.name, blocks)),
        "dialect": " + ".join(sorted({row.module.dialect for row in matching.hits or matching.skipped})),
        "ranks": sorted({hit.rank for hit in pairs if hit.rank is not None}),
        "alpha": _alpha(pairs),
        "scales": scale_groups(matching.hits, assignment.strength),
        "applied": applied_counts(matching.hits),
        "skipped": [{"module": skip.module.name, "reason": skip.reason} for skip in matching.skipped],
    }
    return {**entry, "sha256": content.sha256} if content.sha256 else entry


def _layout(matching: Matching) -> dict[str, object]:
    """As the user said, or as a sign told; nothing where the names alone do."""
    order, said = matching.row_order, matching.assignment.adapter.location.spec.layout
    if order is not None:
        return {"layout": order.layout, "layout_told_by": order.told_by}
    return {"layout": said} if said else {}


def _alpha(pairs: Sequence[Hit]) -> dict[str, object]:
    alphas = [hit.alpha for hit in pairs if hit.alpha]
    return {
        "source": " + ".join(sorted({alpha.source for alpha in alphas})) or "none",
        "values": sorted({alpha.value for alpha in alphas}),
    }


def scale_groups(hits: Sequence[Hit], strength: float) -> list[dict[str, object]]:
    """Hits that share scale, alpha, rank, source of alpha and block, as one entry with the modules' names."""
    groups: dict[tuple[float, float, int, str, float], list[str]] = {}
    for hit in hits:
        if hit.alpha is not None:
            row = (hit.scale(strength), hit.alpha.value, hit.rank or 0, hit.alpha.source, hit.block)
            groups.setdefault(row, []).append(recorded_name(hit.module.name))
    return [
        {
            **{"scale": scale, "alpha": alpha, "rank": rank, "source": source},
            **({} if block == 1 else {"block": block}),
            "modules": sorted(set(modules)),
        }
        for (scale, alpha, rank, source, block), modules in sorted(groups.items())
    ]


def applied_counts(hits: Sequence[Hit]) -> dict[str, int]:
    """How many deltas of each kind; one that is for rows of several base tensors counts once."""
    deltas = {(hit.module.name, hit.kind.name): hit.kind.counted for hit in hits}
    counts = Counter(deltas.values())
    return {name: counts[name] for name in dict.fromkeys([*COUNTED, *sorted(counts)])}
