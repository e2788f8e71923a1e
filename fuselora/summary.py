"""A plan and a finished run as plain data: what ``--json`` prints and the tables show.

The documents are described in the README; their keys are stable between versions.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from fuselora import header
from fuselora.header import dtype_name
from fuselora.match import Hit, Matching
from fuselora.memory import peak_memory
from fuselora.record import applied_counts, scale_groups

if TYPE_CHECKING:
    from fuselora.checkpoint import Component
    from fuselora.pipeline import FuseReport
    from fuselora.planning import ComponentPlan, FusePlan

PENDING = ("finite values", "all-zero modules", "the same LoRA twice", "fingerprint")


def plan_document(plan: FusePlan) -> dict[str, object]:
    """``fuselora plan --json``."""
    checkpoint = plan.checkpoint
    return {
        "base": {
            "source": checkpoint.source,
            "revision": checkpoint.revision,
            "container": checkpoint.container,
            "layout": checkpoint.layout,
            "layout_told_by": checkpoint.row_order.told_by if checkpoint.row_order else None,
            "family": checkpoint.family.name if checkpoint.family else None,
            "models": list(checkpoint.models),
        },
        "layout": plan.request.layout,
        "skeleton": _skeleton(plan),
        "components": [component_document(plan, component) for component in plan.components],
        "loras": [lora_document(matching) for matching in plan.matchings],
        "serving": plan.serving.document() or None,
        "bytes_in": plan.bytes_in,
        "bytes_out": plan.bytes_out,
        "peak_memory_bytes": peak_memory(plan),
        "fingerprint": plan.fingerprint,
        "pending": list(PENDING) if plan.contents is None else [],
        "warnings": [notice.document() for notice in plan.notices],
    }


def _skeleton(plan: FusePlan) -> dict[str, object] | None:
    if plan.skeleton is None:
        return None
    return {"source": plan.skeleton.source, "revision": plan.skeleton.revision}


def report_document(report: FuseReport) -> dict[str, object]:
    """``fuselora merge --json``."""
    return {
        **plan_document(report.plan),
        "out": str(report.out),
        "artifact": report.marker.artifact,
        "kept": list(report.kept),
        "seconds": round(report.seconds, 3),
        "warnings": [notice.document() for notice in report.notices],
    }


def component_document(plan: FusePlan, component: ComponentPlan) -> dict[str, object]:
    """One component: what is in it and what becomes of it."""
    return {
        "name": component.name,
        "role": component.role,
        "base_dtype": base_dtype(plan, component),
        "dtype": dtype_name(component.dtype),
        "tensors": component.n_tensors,
        "fused": component.n_fused,
        "copied": component.n_tensors - component.n_fused,
        "files": len(component.files),
        "bytes_in": component.bytes_in,
        "bytes_out": component.bytes_out,
    }


def base_dtype(plan: FusePlan, component: ComponentPlan) -> str | None:
    """The main dtype of the base component that a plan's component is made from."""
    base = plan.checkpoint.component(component.name)
    return main_dtype(base) if base else None


def main_dtype(component: Component) -> str:
    """The dtype that holds most of a model's bytes, as torch calls it."""
    return dtype_name(header.main_dtype(component.model_tensors()) or "none")


def lora_document(matching: Matching) -> dict[str, object]:
    """One LoRA on one component: what was matched and where, at which scales, and what stays unapplied."""
    assignment = matching.assignment
    skipped: dict[str, list[str]] = {}
    for skip in matching.skipped:
        skipped.setdefault(skip.reason, []).append(skip.module.name)
    return {
        "name": assignment.adapter.name,
        "component": assignment.component.name,
        "strength": assignment.strength,
        "layout": matching.row_order.layout if matching.row_order else None,
        "layout_told_by": matching.row_order.told_by if matching.row_order else None,
        "modules": len({hit.module.name for hit in matching.hits}),
        "applied": applied_counts(matching.hits),
        "where": where(matching.hits),
        "scales": [
            {**group, "modules": len(modules)}
            for group in scale_groups(matching.hits, assignment.strength)
            if isinstance(modules := group["modules"], list)
        ],
        "skipped": [{"reason": reason, "modules": modules} for reason, modules in skipped.items()],
    }


def where(hits: tuple[Hit, ...]) -> dict[str, int]:
    """Base tensors with numbers of blocks starred -> how many were hit."""
    return dict(Counter(re.sub(r"\.\d+\.", ".*.", hit.base_key, count=1) for hit in hits))
