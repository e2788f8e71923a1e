"""What a checkpoint is that is no whole fused folder, for ``fuselora inspect``. Headers only; no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuselora.checkpoint import NATIVE_EXPERTS, encoder_folders, open_checkpoint
from fuselora.description import (
    CheckpointDescription,
    ComponentDescription,
    Fused,
)
from fuselora.errors import InputError
from fuselora.families.recognition import families_of
from fuselora.header import dtypes_of
from fuselora.marker import COMPONENT_KEY, FILE_NAME, FINGERPRINT_KEY, read_marker
from fuselora.reading import named_path
from fuselora.resolve import resolve_base
from fuselora.selection import variants
from fuselora.shards import SHARD_NUMBER
from fuselora.specs import PIPELINE_COMPONENTS
from fuselora.targets import expert_in_name

if TYPE_CHECKING:
    from pathlib import Path

    from fuselora.checkpoint import Checkpoint, Component
    from fuselora.marker import LoraRecord, Marker

COMPONENT_FOLDERS = (*PIPELINE_COMPONENTS, *NATIVE_EXPERTS.values())


def describe_checkpoint(path: Path) -> CheckpointDescription:
    """Of a pipeline, a component, a native folder, or a file of one. Raises ``InputError``."""
    location = resolve_base(str(path))
    variant = _only_variant(path) if path.is_dir() else None
    checkpoint = open_checkpoint(
        location.path, source=location.source, revision=location.revision, variant=variant
    )
    family, components = checkpoint.family, checkpoint.components
    found = SHARD_NUMBER.search(path.name) if path.is_file() else None
    return CheckpointDescription(
        path=path,
        source=location.source,
        revision=location.revision,
        container=checkpoint.container,
        family=family.name if family else None,
        layout=checkpoint.layout,
        models=checkpoint.models,
        pipeline_class=checkpoint.pipeline_class,
        variant=variant,
        named_expert=expert_in_name(named_path(path).name) if len(components) == 1 else None,
        components=tuple(_component(component) for component in components),
        shard=(int(found.group(1)), int(found.group(2))) if found else None,
        fused=_fused(path, checkpoint),
        families=_families(checkpoint),
        layout_told_by=checkpoint.row_order.told_by if checkpoint.row_order else None,
        text_encoders=encoder_folders(checkpoint.root),
    )


def _families(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Its own, and those with as many of its names that have a published model of its shapes or, where none
    has one, just so many of its names: a shard or a model of another size."""
    own = checkpoint.family
    if own is None:
        return ()
    shapes = {name: shape for part in checkpoint.transformers for name, shape in part.model_shapes().items()}
    alike = [family for family in families_of(shapes) if family is not own]
    others = [family for family in alike if bool(checkpoint.models) == bool(family.models_of(shapes))]
    return (own.name, *(family.name for family in others))


def _only_variant(root: Path) -> str | None:
    """The one variant of a base without plain weights."""
    folders = [root / name for name in COMPONENT_FOLDERS if (root / name).is_dir()] or [root]
    names = [path.name for folder in folders for path in folder.iterdir()]
    weights = [name for name in names if name.endswith(".safetensors")]
    found = variants(weights)
    return found[0] if len(found) == 1 and all(f".{found[0]}" in name for name in weights) else None


def _component(component: Component) -> ComponentDescription:
    tensors = component.tensors()
    class_name = component.config.get("_class_name")
    n_own = len(component.model_shapes())
    return ComponentDescription(
        name=component.name,
        role=component.role,
        folder=str(component.folder),
        prefix=component.prefix,
        n_tensors=len(tensors),
        n_other=len(tensors) - n_own,
        n_bytes=sum(shard.n_bytes for shard in component.shards),
        dtypes=dtypes_of(tensors.values()),
        shards=tuple(shard.path.name for shard in component.shards),
        index=component.index.name if component.index else None,
        strays=component.strays,
        config_class=class_name if isinstance(class_name, str) else None,
        sample=next(iter(tensors), None),
        inner={one.name: one.prefix for one in component.inner},
    )


def _fused(path: Path, checkpoint: Checkpoint) -> Fused | None:
    """What shards carry, and the marker of the folder that they lie in or were written to."""
    shards = (shard for component in checkpoint.components for shard in component.shards)
    said = [shard.metadata for shard in shards if FINGERPRINT_KEY in shard.metadata]
    carried = {metadata[FINGERPRINT_KEY] for metadata in said}
    parts = tuple(sorted({metadata[COMPONENT_KEY] for metadata in said if COMPONENT_KEY in metadata}))
    if checkpoint.marker is not None:
        carried.add(checkpoint.marker.fingerprint)
    if not carried:
        return None
    found = _marker_above(path, carried)
    if found is None:
        return Fused(tuple(sorted(carried)), None, (), parts)
    home, marker = found
    return Fused(tuple(sorted(carried)), home / FILE_NAME, _loras_in(marker, home, path), parts)


def _marker_above(path: Path, fingerprints: set[str]) -> tuple[Path, Marker] | None:
    """The folder and marker of one of these fusions: a shard lies in a component's folder, that in OUT."""
    real = named_path(path)
    for folder in (real, *real.parents)[:3]:
        try:
            marker = read_marker(folder)
        except InputError:
            continue
        if marker is not None and marker.fingerprint in fingerprints:
            return folder, marker
    return None


def _loras_in(marker: Marker, home: Path, path: Path) -> tuple[LoraRecord, ...]:
    """The LoRAs of the components that ``path`` is, or is a part of."""
    inside = named_path(path).relative_to(home).as_posix()
    own = {
        part.name
        for part in marker.components.values()
        if any(record.path == inside or record.path.startswith(f"{inside}/") for record in part.files)
    }
    return tuple(lora for lora in marker.loras if lora.component in own) or marker.loras
