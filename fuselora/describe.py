"""What a file or folder is, for ``fuselora inspect``. Headers and small reads only; no torch."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from fuselora.check.folder import check
from fuselora.checkpoint import NATIVE_EXPERTS, open_checkpoint
from fuselora.description import (
    CheckpointDescription,
    ComponentDescription,
    Description,
    Fused,
    FusedDescription,
    LoraDescription,
    Scale,
    Undescribed,
)
from fuselora.errors import CheckpointError, Fault, FuseloraError, InputError
from fuselora.families.recognition import families_of
from fuselora.header import bytes_by_dtype, dtype_name, read_header
from fuselora.kinds import KINDS
from fuselora.kinds.kind import ALPHAS, has_kernel
from fuselora.lora.adapter import component_of, open_adapter
from fuselora.lora.config import config_of_metadata
from fuselora.lora.grammar import UNFUSED, is_lora_key, parse_key, spellings, unfused_kind
from fuselora.lora.sampling import sampling_of
from fuselora.lora.scale import BadAlpha, resolve_alpha
from fuselora.made_for import Names, delta_shape, names_for, target_of, unread_keys
from fuselora.marker import COMPONENT_KEY, FILE_NAME, FINGERPRINT_KEY, read_marker
from fuselora.match import plain_name
from fuselora.reading import real_path
from fuselora.resolve import resolve_base, resolve_lora
from fuselora.selection import ADAPTER_CONFIG, ADAPTER_INDEXES, ADAPTER_WEIGHTS, variants
from fuselora.serving_notes import notes_of
from fuselora.shards import SHARD_NUMBER, is_index, open_files
from fuselora.specs import PIPELINE_COMPONENTS, LoraSpec
from fuselora.targets import expert_in_name, key_owners

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from fuselora.checkpoint import Checkpoint, Component
    from fuselora.header import Header, TensorInfo
    from fuselora.lora.adapter import Adapter, Module
    from fuselora.lora.scale import Alpha
    from fuselora.marker import LoraRecord, Marker

__all__ = [
    "CheckpointDescription",
    "Description",
    "FusedDescription",
    "LoraDescription",
    "describe",
    "describe_each",
    "is_lora",
]

UNFUSED_ENDING = re.compile(f"(?:{'|'.join(suffix for _, suffix in UNFUSED)})$")
BLOCK_NUMBER = re.compile(r"(?<![^._])[0-9]+(?=[._])")
COMPONENT_FOLDERS = (*PIPELINE_COMPONENTS, *NATIVE_EXPERTS.values())


def describe(path: Path) -> Description:
    """What ``path`` is: a LoRA, a checkpoint, or a fused folder.

    Raises ``InputError`` (``FormatError``, ``CheckpointError``, ``MarkerError``) that says what it looks
    like when it is none of these.
    """
    try:
        if path.is_dir():
            return _folder(path)
        if path.is_file():
            return _file(path)
        text = "is neither a file nor a folder" if path.exists() else "no such file or folder"
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}", path=str(path)) from error
    raise InputError(f"{path}: {text}", path=str(path))


def describe_each(paths: Iterable[Path]) -> tuple[Description | Undescribed, ...]:
    """What every path is, in their order; one that ``describe`` refuses hides none of the others."""
    return tuple(map(_described, paths))


def _described(path: Path) -> Description | Undescribed:
    try:
        return describe(path)
    except FuseloraError as error:
        return Undescribed(path, error)


def is_lora(header: Header) -> bool:
    """Whether most keys of a file are a LoRA's. Full weights and alphas alone do not make it one."""
    n_keys = n_deltas = 0
    for tensor in header.tensors:
        parsed = parse_key(tensor.name)
        delta = is_lora_key(tensor.name)
        n_deltas += delta
        n_keys += delta or (parsed is not None and parsed.part in ALPHAS)
    return n_deltas > 0 and 2 * n_keys > len(header.tensors)


# What a path is ------------------------------------------------------------------------------------


def _file(path: Path) -> Description:
    if is_index(path):
        return _of_index(path)
    if path.suffix == ".json":
        hint = f"Name the folder that it lies in: {path.parent}"
        raise InputError(
            f"{path}: is a JSON file, neither a LoRA nor a checkpoint", hint=hint, path=str(path)
        )
    return _lora(path) if is_lora(read_header(path)) else _checkpoint(path)


def _of_index(path: Path) -> Description:
    """A LoRA in shards; a base is named by its folder."""
    if all(is_lora(header) for header in open_files(path)):
        return _lora(path)
    hint = f"Name the folder that it lies in: {path.parent}"
    raise InputError(f"{path}: is the index of a checkpoint", hint=hint, path=str(path))


def _folder(path: Path) -> Description:
    marker = read_marker(path)
    if marker is not None:
        return FusedDescription(path, marker, check(path))
    if _is_adapter(path):
        return _lora(path)
    try:
        return _checkpoint(path)
    except CheckpointError as error:
        _refuse_several_loras(path, error)
        raise


def _is_adapter(folder: Path) -> bool:
    """Whether a folder holds one LoRA and no model."""
    names = {entry.name for entry in folder.iterdir()}
    if not names.isdisjoint(COMPONENT_FOLDERS):
        return False
    if not names.isdisjoint((ADAPTER_CONFIG, *ADAPTER_WEIGHTS, *ADAPTER_INDEXES)):
        return True
    weights = [name for name in names if name.endswith(".safetensors")]
    return len(weights) == 1 and is_lora(read_header(folder / weights[0]))


def _refuse_several_loras(folder: Path, cause: CheckpointError) -> None:
    """A folder that is no checkpoint because it holds LoRAs, one for each expert perhaps."""
    weights = sorted(path for path in folder.iterdir() if path.name.endswith(".safetensors"))
    if weights and all(is_lora(read_header(path)) for path in weights):
        listed = ", ".join(path.name for path in weights[:6])
        text = f"{folder}: holds {len(weights)} LoRA files: {listed}"
        raise InputError(text, hint="Name the files one by one.", path=str(folder)) from cause


# LoRAs ---------------------------------------------------------------------------------------------


def _lora(path: Path) -> LoraDescription:
    adapter = open_adapter(resolve_lora(LoraSpec(str(path))))
    location, tensors = adapter.location, adapter.tensors
    names = names_for(adapter)[0]
    scales, alpha_faults = _scales(adapter)
    parsed = [key for tensor in tensors if (key := parse_key(tensor.name))]
    unfused = Counter(kind for key in unread_keys(adapter) if (kind := unfused_kind(key)))
    said = (expert_in_name(name) for name in (adapter.name, _real(path).name))
    sampling = sampling_of(adapter, names.family)
    return LoraDescription(
        path=path,
        file=adapter.name,
        config=location.config.name if location.config else None,
        target=target_of(adapter),
        dialects=Counter(module.dialect for module in adapter.modules),
        adapter_names=tuple(sorted({key.name for key in parsed if key.name})),
        prefixes=Counter(_prefix(module) for module in adapter.modules),
        flattened=any(spellings(module.name)[-1].flat for module in adapter.modules),
        kinds=_kinds(adapter),
        places=Counter(_place(module, names) for module in adapter.modules),
        ranks=Counter(rank for _, rank in _ranked(adapter)),
        scales=scales,
        dtypes=_dtypes(tensors),
        n_tensors=len(tensors),
        n_bytes=adapter.n_bytes,
        named_experts=tuple(sorted({name for name in said if name})),
        named_components=tuple(sorted(key_owners(adapter))),
        metadata=adapter.metadata,
        unfused=unfused,
        faults=(*adapter.faults, *alpha_faults),
        serving=notes_of(sampling),
        published_alpha=sampling.alpha,
    )


def _ranked(adapter: Adapter) -> Iterator[tuple[Module, int]]:
    """Modules that alpha / rank scales; those without a rank are among the faults."""
    for module in adapter.modules:
        if module.rank and all(delta_shape(kind, module) for kind in module.kinds if kind.scaled):
            yield module, module.rank


def _kinds(adapter: Adapter) -> dict[str, int]:
    """How many modules have what; one with a pair and a bias difference counts twice."""
    modules = adapter.modules
    with_alpha = [m for m in modules if not ALPHAS.isdisjoint(m.parts)]
    whole = [kind for m in modules for kind in m.kinds if not kind.lacks(m.parts)]
    counts = Counter(kind.counted for kind in whole)
    return {
        **{name: counts[name] for name in dict.fromkeys(kind.counted for kind in KINDS)},
        "alpha": len(with_alpha),
        "orphan_alpha": sum(not any(k.uses_alpha for k in m.kinds) for m in with_alpha),
        "half_pairs": sum(any(k.lacks(m.parts) for k in m.kinds) for m in modules),
    }


def _place(module: Module, names: Names) -> str:
    """A diff_m's module is the whole block, so its place is named after the tensor."""
    leaf = ".modulation" if set(module.parts) == {"diff_m"} else ""
    return BLOCK_NUMBER.sub("*", names.plain(module.name) + leaf, count=1)


def _prefix(module: Module) -> str:
    return module.name.removesuffix(plain_name(module.name))


def _scales(adapter: Adapter) -> tuple[tuple[Scale, ...], tuple[Fault, ...]]:
    """Every pair's alpha by the order of sources, strength and ``--alpha`` aside; alike ones counted."""
    groups: Counter[tuple[Alpha, int]] = Counter()
    for module, rank in _ranked(adapter):
        if not ALPHAS.isdisjoint(module.parts) and module.alpha is None and module.alpha_scale is None:
            continue  # its fault says why
        try:
            groups[_alpha(adapter, module, rank), rank] += 1
        except BadAlpha as error:
            text = f"the file's metadata: {error}"
            return (), (Fault("alpha", text, path=adapter.name, key="__metadata__"),)
    found = [
        Scale(alpha.value, rank, alpha.ratio, alpha.source, count) for (alpha, rank), count in groups.items()
    ]
    return tuple(sorted(found, key=lambda scale: (scale.alpha, scale.rank, scale.source))), ()


def _alpha(adapter: Adapter, module: Module, rank: int) -> Alpha:
    conv = any(has_kernel(delta_shape(kind, module)) for kind in module.kinds)
    return resolve_alpha(
        plain_name(module.name),
        rank,
        stored=adapter.stored_alpha(module, rank, conv=conv),
        option=None,
        config=adapter.config,
        metadata=lambda: config_of_metadata(adapter.metadata, component_of(module.name)),
        conv=conv,
    )


# Checkpoints ---------------------------------------------------------------------------------------


def _checkpoint(path: Path) -> CheckpointDescription:
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
        named_expert=expert_in_name(_real(path).name) if len(components) == 1 else None,
        components=tuple(_component(component) for component in components),
        shard=(int(found.group(1)), int(found.group(2))) if found else None,
        fused=_fused(path, checkpoint),
        families=_families(checkpoint),
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
        dtypes=_dtypes(tensors.values()),
        shards=tuple(shard.path.name for shard in component.shards),
        index=component.index.name if component.index else None,
        strays=component.strays,
        config_class=class_name if isinstance(class_name, str) else None,
        sample=next(iter(tensors), None),
    )


def _dtypes(tensors: Iterable[TensorInfo]) -> Mapping[str, int]:
    """Bytes by dtype, the most first."""
    return bytes_by_dtype((dtype_name(tensor.dtype), tensor.n_bytes) for tensor in tensors)


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
    real = _real(path)
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
    inside = _real(path).relative_to(home).as_posix()
    own = {
        part.name
        for part in marker.components.values()
        if any(record.path == inside or record.path.startswith(f"{inside}/") for record in part.files)
    }
    return tuple(lora for lora in marker.loras if lora.component in own) or marker.loras


def _real(path: Path) -> Path:
    """Absolute, and without ``..``; a file that is a link stays where it lies."""
    return real_path(path.parent) / path.name if path.name not in ("", "..") else real_path(path)
