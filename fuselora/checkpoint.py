"""Base layouts: a folder or file on disk -> components, each a set of tensors in shards.

The index of a component is authoritative. Only headers and small JSON files are read.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Literal, NoReturn

from fuselora.errors import CheckpointError, InputError
from fuselora.families import FAMILIES, Family, Layout
from fuselora.fields import NOT_IN_PATHS
from fuselora.filenames import is_loadable, is_model_file
from fuselora.header import Header, TensorInfo, read_header
from fuselora.jsonfile import read_json
from fuselora.marker import FINGERPRINT_KEY, Marker, read_marker
from fuselora.reading import reading
from fuselora.specs import PIPELINE_COMPONENTS

Container = Literal["pipeline", "experts", "component", "file"]
INDEX_SUFFIX = ".safetensors.index.json"
KEY_PREFIXES = ("model.diffusion_model.", "diffusion_model.", "transformer.", "")
NATIVE_EXPERTS = {"transformer": "high_noise_model", "transformer_2": "low_noise_model"}
SHARD_NUMBER = re.compile(r"-(\d+)-of-(\d+)(?=[.-])")


@dataclass(frozen=True, slots=True)
class Component:
    """One model of a base: ``shards`` in name order, ``index`` and ``folder`` relative to the base.

    ``prefix`` is what stands before the model's own names in every key (``model.diffusion_model.``
    in single files that hold more than the model). ``strays`` are weight files that the index does
    not name; they are neither read nor copied.
    """

    name: str
    role: str
    folder: PurePosixPath
    shards: tuple[Header, ...]
    index: PurePosixPath | None
    index_metadata: Mapping[str, object]
    config: Mapping[str, object]
    prefix: str
    strays: tuple[str, ...] = ()

    def tensors(self) -> dict[str, TensorInfo]:
        return {tensor.name: tensor for shard in self.shards for tensor in shard.tensors}

    def model_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by the model's own names, the prefix off; tensors outside the prefix are left out."""
        start = len(self.prefix)
        return {
            tensor.name[start:]: tensor.shape
            for shard in self.shards
            for tensor in shard.tensors
            if tensor.name.startswith(self.prefix)
        }

    def weight_path(self, shard: Header) -> PurePosixPath:
        return self.folder / shard.path.name

    @property
    def is_fused(self) -> bool:
        return any(FINGERPRINT_KEY in shard.metadata for shard in self.shards)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A base. ``root`` is its folder, or the file itself when ``container`` is ``"file"``."""

    root: Path
    source: str
    revision: str | None
    container: Container
    components: tuple[Component, ...]
    family: Family | None
    layout: Layout | None
    pipeline_class: str | None
    marker: Marker | None = None

    def component(self, name: str) -> Component | None:
        return next((c for c in self.components if c.name == name), None)

    def takes_along(self, path: str) -> bool:
        """Whether the file at ``path`` comes along as it is: all but weights and indexes of components."""
        folder, _, name = path.rpartition("/")
        return (folder or ".") not in {str(c.folder) for c in self.components} or not is_loadable(name)

    @property
    def is_fused(self) -> bool:
        return self.marker is not None or any(c.is_fused for c in self.components)


def open_checkpoint(root: Path, *, source: str, revision: str | None, variant: str | None) -> Checkpoint:
    """Read the headers of a base.

    Raises ``CheckpointError`` for a folder that holds no model, an index at odds with its shards, or
    a choice that only the user can make; ``FormatError`` for a broken file; ``ReadError`` for one
    that the system does not let us read.
    """
    with reading(root):
        container, components, pipeline_class = _components(root, variant)
    for component in components:
        _refuse_unrecordable(root, component)
    family = _family(components)
    names = [name for component in components for name in component.model_shapes()]
    return Checkpoint(
        root=root,
        source=source,
        revision=revision,
        container=container,
        components=tuple(_with_role(component, len(components), family) for component in components),
        family=family,
        layout=family.layout_of(names) if family else None,
        pipeline_class=pipeline_class,
        marker=_marker_of(root),
    )


def _components(root: Path, variant: str | None) -> tuple[Container, list[Component], str | None]:
    if root.is_file():
        return "file", [_file_component(root)], None
    container, folders = _component_folders(root)
    pipeline_class = _pipeline_class(root, folders) if container == "pipeline" else None
    components = [_folder_component(root, name, folder, variant) for name, folder in folders.items()]
    return container, components, pipeline_class


def _refuse_unrecordable(root: Path, component: Component) -> None:
    """The marker lists the output's files, which are called as the base's are."""
    paths = [component.weight_path(shard) for shard in component.shards]
    for path in [*paths, component.index] if component.index else paths:
        if NOT_IN_PATHS.search(str(path)):
            where = root if root.is_file() else root / path
            _fault(where, "has a name that fused.json cannot record", hint="Rename it.")


def _marker_of(root: Path) -> Marker | None:
    """A folder's own marker; for a file the one beside it, if that lists the file."""
    if root.is_dir():
        return read_marker(root)
    beside = read_marker(root.parent)
    listed = beside is not None and any(record.path == root.name for record in beside.weight_files)
    return beside if listed else None


def _component_folders(root: Path) -> tuple[Container, dict[str, Path]]:
    if not root.is_dir():
        raise InputError(f"{root}: no such file or folder", path=str(root))
    pipeline = {name: root / name for name in PIPELINE_COMPONENTS if (root / name).is_dir()}
    if pipeline:
        return "pipeline", pipeline
    native = {name: root / folder for name, folder in NATIVE_EXPERTS.items() if (root / folder).is_dir()}
    if native:
        return "experts", native
    return "component", {"transformer": root}


def _pipeline_class(root: Path, folders: Mapping[str, Path]) -> str | None:
    """``_class_name`` of model_index.json, which must not name a component that is not there."""
    path = root / "model_index.json"
    if not path.is_file():
        return None
    document = read_json(path)
    for name in PIPELINE_COMPONENTS:
        entry = document.get(name)
        if isinstance(entry, list) and any(entry) and name not in folders:
            raise CheckpointError(
                f"{path}: names the component {name!r}, but there is no folder {root / name}",
                hint="Fetch the whole repository, or fuse the component folder by itself.",
                path=str(path),
            )
    class_name = document.get("_class_name")
    return class_name if isinstance(class_name, str) else None


def _file_component(path: Path) -> Component:
    header = read_header(path)
    return Component("transformer", "single", PurePosixPath(), (header,), None, {}, {}, _prefix_of((header,)))


def _folder_component(root: Path, name: str, folder: Path, variant: str | None) -> Component:
    index = _index_file(folder, variant)
    metadata: Mapping[str, object] = {}
    if index is not None:
        shards, metadata = _indexed_shards(index)
    else:
        shards = _unindexed_shards(folder, variant)
    relative = PurePosixPath(folder.relative_to(root).as_posix())
    config = folder / "config.json"
    used = {shard.path.name for shard in shards}
    strays = [p.name for p in sorted(folder.iterdir()) if is_model_file(p.name) and p.name not in used]
    return Component(
        name=name,
        role="single",
        folder=relative,
        shards=shards,
        index=relative / index.name if index else None,
        index_metadata=metadata,
        config=read_json(config) if config.is_file() else {},
        prefix=_prefix_of(shards),
        strays=tuple(strays),
    )


def _index_file(folder: Path, variant: str | None) -> Path | None:
    suffix = f".safetensors.index.{variant}.json" if variant else INDEX_SUFFIX
    found = sorted(path for path in folder.iterdir() if path.name.endswith(suffix))
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        _fault(folder, f"has several indexes ({names}) and no way to tell which one counts")
    return found[0] if found else None


def _indexed_shards(index: Path) -> tuple[tuple[Header, ...], Mapping[str, object]]:
    """The shards that an index names, each tensor where the index says it is."""
    document = read_json(index)
    weight_map = _weight_map(index, document)
    shards = tuple(_shard(index, name) for name in sorted(set(weight_map.values())))
    held = {(tensor.name, shard.path.name) for shard in shards for tensor in shard.tensors}
    for name, file in weight_map.items():
        if (name, file) not in held:
            _fault(index, f"says that {file} holds the tensor {name!r}, but it does not", tensor=name)
    for shard in shards:
        for tensor in shard.tensors:
            if weight_map.get(tensor.name) != shard.path.name:
                _fault(
                    shard.path, f"holds the tensor {tensor.name!r}, which {index.name} does not place there"
                )
    metadata = document.get("metadata")
    return shards, metadata if isinstance(metadata, dict) else {}


def _weight_map(index: Path, document: Mapping[str, object]) -> dict[str, str]:
    entries = document.get("weight_map")
    if not isinstance(entries, dict) or not entries:
        _fault(index, "has no weight_map")
    for name, file in entries.items():
        if not isinstance(file, str) or not file or file != PurePosixPath(file).name or file in (".", ".."):
            _fault(index, f"places the tensor {name!r} in {file!r}, which is no file name in this folder")
    return entries


def _shard(index: Path, name: str) -> Header:
    path = index.parent / name
    there = False
    with suppress(OSError):  # a name too long to be one
        there = path.is_file()
    if not there:
        _fault(index, f"names {name}, which is not in the folder", hint="Fetch the missing shard again.")
    return read_header(path)


def _unindexed_shards(folder: Path, variant: str | None) -> tuple[Header, ...]:
    """The one file, or the one complete numbered set, of a folder without an index."""
    files = [p for p in sorted(folder.iterdir()) if p.name.endswith(".safetensors")]
    files = [path for path in files if _is_variant(path.name, variant)]
    if not files:
        _no_weights(folder, variant)
    if not _whole_set([path.name for path in files]):
        listed = ", ".join(path.name for path in files[:6])
        count = f"{len(files)} weight files that are" if len(files) > 1 else "a weight file that is"
        what = f"has no index and holds {count} not one whole set: {listed}"
        _fault(folder, what, hint="Name the file to fuse into, or restore the index.")
    shards = tuple(read_header(path) for path in files)
    names = [tensor.name for shard in shards for tensor in shard.tensors]
    if twice := _first_repeated(names):
        _fault(folder, f"holds the tensor {twice!r} in two files and has no index")
    return shards


def _whole_set(names: Sequence[str]) -> bool:
    """One file without a number, or every number of one total."""
    found = [SHARD_NUMBER.search(name) for name in names]
    numbers = [(int(number[1]), int(number[2])) for number in found if number]
    if not numbers:
        return len(names) == 1
    return sorted(numbers) == [(n, len(names)) for n in range(1, len(names) + 1)]


def _no_weights(folder: Path, variant: str | None) -> NoReturn:
    what = f"{variant} weights" if variant else "safetensors weights"
    others = sorted(p.name for p in folder.iterdir() if is_model_file(p.name) or p.name == "fuselora.journal")
    hint = f"It holds {', '.join(others[:4])}." if others else None
    _fault(folder, f"holds no {what}", hint=hint)


def _is_variant(name: str, variant: str | None) -> bool:
    """``x.fp16.safetensors``, ``x.fp16-00001-of-00002...`` or ``x-00001-of-00002.fp16...`` for fp16."""
    stem = SHARD_NUMBER.sub("", name).removesuffix(".safetensors")
    tag = stem.rpartition(".")[2] if "." in stem else None
    if variant is None:
        return tag not in ("fp16", "bf16", "fp32", "non_ema", "ema")
    return tag == variant


def _first_repeated(names: Sequence[str]) -> str | None:
    return next((name for name, count in Counter(names).items() if count > 1), None)


def _prefix_of(shards: tuple[Header, ...]) -> str:
    """The prefix under which a known family is found, the longest first.

    Of an unknown family it is the one that all names have, or that a file of several models gives to
    the one that LoRAs are for.
    """
    names = [tensor.name for shard in shards for tensor in shard.tensors]
    for prefix in KEY_PREFIXES:
        under = [name[len(prefix) :] for name in names if name.startswith(prefix)]
        if any(family.recognises(under) for family in FAMILIES):
            return prefix
    if any(name.startswith(KEY_PREFIXES[0]) for name in names):
        return KEY_PREFIXES[0]
    return next((prefix for prefix in KEY_PREFIXES if all(name.startswith(prefix) for name in names)), "")


def _family(components: Sequence[Component]) -> Family | None:
    names = [name for component in components for name in component.model_shapes()]
    return next((family for family in FAMILIES if family.recognises(names)), None)


def _with_role(component: Component, n_components: int, family: Family | None) -> Component:
    roles = family.experts if family and n_components > 1 else {}
    return replace(component, role=roles.get(component.name, "single"))


def _fault(where: Path, what: str, *, hint: str | None = None, **facts: object) -> NoReturn:
    raise CheckpointError(f"{where}: {what}", hint=hint, path=str(where), **facts)
