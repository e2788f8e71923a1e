"""Bases that hold a layer twice: fused beside its parts, or by the names of two layouts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from fuselora.errors import Fault

if TYPE_CHECKING:
    from fuselora.checkpoint import Checkpoint

# What a layer's last name can be when it is fused, and the first of its parts beside it, whatever the family.
# diffusers' ``fuse_qkv_projections`` leaves both in a model.
FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv": ("q", "to_q", "q_proj"),
    "qkv_proj": ("q_proj", "to_q"),
    "to_qkv": ("to_q",),
    "to_kv": ("to_k",),
    "to_added_qkv": ("add_q_proj",),
}


def twin_faults(checkpoint: Checkpoint) -> Iterator[Fault]:
    """A delta would go to one of the two, and which one an engine uses nobody can tell."""
    family, layout = checkpoint.family, checkpoint.layout
    for component in checkpoint.components:
        names = component.model_shapes()
        known = family.twins(names, layout) if family and not component.is_text_encoder else ()
        for one, two in dict.fromkeys((*fused_beside_parts(names), *known)):
            one, two = component.prefix + one, component.prefix + two
            text = f"{one} and {two} are the same layer: the base holds it twice"
            hint = "Leave the tensors of one of the two out of the base."
            yield Fault("twice", text, path=component.name, key=two, hint=hint)


def fused_beside_parts(names: Collection[str]) -> Iterator[tuple[str, str]]:
    """Tensors of fused layers, each with one of a part of it."""
    for name in names:
        module, _, leaf = name.rpartition(".")
        owner, dot, last = module.rpartition(".")
        beside = (f"{owner}{dot}{part}.{leaf}" for part in FUSED.get(last, ()))
        yield from ((name, part) for part in beside if part in names)
