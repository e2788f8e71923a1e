"""Base layouts: a folder or file on disk -> components, each a set of tensors in shards.

The index of a component is authoritative. Only headers and small JSON files are read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Literal, NoReturn

from fuselora.errors import CheckpointError, InputError
from fuselora.families import Family, Layout, RowOrder
from fuselora.families.recognition import families_of, family_of
from fuselora.fields import NOT_IN_PATHS
from fuselora.filenames import is_loadable, is_model_file
from fuselora.header import Header, TensorInfo, read_header
from fuselora.inner_encoders import InnerEncoder, inner_encoders
from fuselora.jsonfile import read_json
from fuselora.marker import FINGERPRINT_KEY, Marker, read_marker
from fuselora.reading import reading
from fuselora.selection import variant_of, variants
from fuselora.shards import INDEX_SUFFIX, SHARD_NUMBER, indexed_shards
from fuselora.specs import PIPELINE_COMPONENTS
from fuselora.text_encoders import MEANINGS, TEXT_ENCODERS, Config, encoders_meant

Container = Literal["pipeline", "experts", "component", "file"]
# "model.model." is before names in files that ComfyUI saved
KEY_PREFIXES = (
    "model.diffusion_model.",
    "model.model.",
    "diffusion_model.",
    "transformer.",
    "model.",
    "net.",
    "",
)
NATIVE_EXPERTS = {"transformer": "high_noise_model", "transformer_2": "low_noise_model"}


@dataclass(frozen=True, slots=True)
class Component:
    """One model of a base: ``shards`` in name order, ``index`` and ``folder`` relative to the base.

    ``prefix`` is what stands before the model's own names in every key (``model.diffusion_model.``
    in single files that hold more than the model). ``strays`` are weight files that the index does
    not name; they are neither read nor copied. ``inner`` are the text encoders that lie in the same file.
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
    inner: tuple[InnerEncoder, ...] = ()

    def tensors(self) -> dict[str, TensorInfo]:
        return {tensor.name: tensor for shard in self.shards for tensor in shard.tensors}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.tensors().items()}

    def model_tensors(self) -> Iterator[TensorInfo]:
        """Those under the prefix: what else a single file holds is not the model's."""
        found = (tensor for shard in self.shards for tensor in shard.tensors)
        return (tensor for tensor in found if tensor.name.startswith(self.prefix))

    def model_shapes(self) -> dict[str, tuple[int, ...]]:
        """The model's shapes by its own names, the prefix off."""
        start = len(self.prefix)
        return {tensor.name[start:]: tensor.shape for tensor in self.model_tensors()}

    def weight_path(self, shard: Header) -> PurePosixPath:
        return self.folder / shard.path.name

    def weight_paths(self) -> dict[str, PurePosixPath]:
        """The file of each tensor, relative to the base."""
        return {tensor.name: self.weight_path(shard) for shard in self.shards for tensor in shard.tensors}

    @property
    def is_fused(self) -> bool:
        return any(FINGERPRINT_KEY in shard.metadata for shard in self.shards)

    def encoders_inside(self, name: str | None) -> tuple[InnerEncoder, ...]:
        """The text encoders in its own files that a name in keys can mean."""
        meant = encoders_meant(name, {one.name: one.config for one in self.inner}) if name else ()
        return tuple(one for one in self.inner if one.name in meant)

    @property
    def is_text_encoder(self) -> bool:
        """Whether it is one of the pipeline's text encoders, and no transformer."""
        return self.name in TEXT_ENCODERS


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A base. ``root`` is its folder, or the file itself when ``container`` is ``"file"``.

    ``components`` are the transformers, then the text encoders that were asked for; ``encoders`` has the
    config.json of every text encoder there, by component, if any was asked for. ``models`` are the published
    models that it can be, by names, shapes and the pipeline's class. ``row_order``: what told the layout
    where its names did not.
    """

    root: Path
    source: str
    revision: str | None
    container: Container
    components: tuple[Component, ...]
    family: Family | None
    layout: Layout | None
    pipeline_class: str | None
    models: tuple[str, ...] = ()
    marker: Marker | None = None
    encoders: Mapping[str, Config] = field(default_factory=dict)
    row_order: RowOrder | None = None

    @property
    def transformers(self) -> tuple[Component, ...]:
        """The models that a family speaks of: one, or two experts."""
        return tuple(component for component in self.components if not component.is_text_encoder)

    def encoders_meant(self, name: str | None) -> tuple[str, ...]:
        """The text encoders of this base that a name in keys can mean."""
        return encoders_meant(name, self.encoders) if name else ()

    def component(self, name: str) -> Component | None:
        return next((c for c in self.components if c.name == name), None)

    def takes_along(self, path: str) -> bool:
        """Whether the file at ``path`` comes along as it is: all but weights and indexes of components."""
        folder, _, name = path.rpartition("/")
        return (folder or ".") not in {str(c.folder) for c in self.components} or not is_loadable(name)

    @property
    def is_fused(self) -> bool:
        return self.marker is not None or any(c.is_fused for c in self.components)


def open_checkpoint(
    root: Path,
    *,
    source: str,
    revision: str | None,
    variant: str | None,
    text_encoders: Collection[str] = (),
    layout: Layout | None = None,
) -> Checkpoint:
    """Read the headers of a base.

    ``text_encoders`` are names of such, as keys or a marker have them: what they mean becomes components
    of the checkpoint, and what is fused already stays one. ``layout`` is told from the names where it is not
    given.

    Raises ``CheckpointError`` for a folder that holds no model, an index at odds with its shards, or
    a choice that only the user can make; ``FormatError`` for a broken file; ``ReadError`` for one
    that the system does not let us read.
    """
    with reading(root):
        container, components, pipeline_class = _components(root, variant)
    marker = _marker_of(root)
    with reading(root):
        configs, encoders = _encoders(root, (*text_encoders, *(marker.components if marker else ())), variant)
    for component in (*components, *encoders):
        _refuse_unrecordable(root, component)
    family = _family(components)
    names = [name for component in components for name in component.model_shapes()]
    known = _said(layout, family, root) or (family.layout_of(names) if family else None)
    return Checkpoint(
        root=root,
        source=source,
        revision=revision,
        container=container,
        components=(*(_with_role(component, len(components), family) for component in components), *encoders),
        family=family,
        layout=known,
        pipeline_class=pipeline_class,
        models=_models(components, family, known, pipeline_class),
        marker=marker,
        encoders=configs,
        row_order=_row_order(family, known, names, said=layout is not None),
    )


def _encoders(
    root: Path, asked: Collection[str], variant: str | None
) -> tuple[dict[str, Config], list[Component]]:
    """The configurations of all text encoders, if any is asked for, and those that the names asked mean."""
    names = MEANINGS.keys() & set(asked)
    configs = _encoder_configs(root) if names else {}
    meant = {encoders_meant(name, configs) for name in names}
    return configs, [_encoder(root, name, configs[name], variant) for name in configs if (name,) in meant]


def _row_order(
    family: Family | None, layout: Layout | None, names: Sequence[str], *, said: bool
) -> RowOrder | None:
    """Of a base in one of the layouts that share their names."""
    if family is None or layout is None or layout == family.canonical or not family.signs:
        return None
    return RowOrder(layout, "--base-layout") if said else family.order_of_base(names)


def _said(layout: Layout | None, family: Family | None, root: Path) -> Layout | None:
    """The layout that the user says. Raises ``InputError`` for one that the family does not have."""
    known = family.all_layouts if family else ()
    if layout is not None and layout not in known:
        what = f"the layouts of {family.name} are {', '.join(known)}" if family else "its family is not known"
        raise InputError(f"{root}: {layout} is no layout of this base: {what}", path=str(root))
    return layout


def encoder_folders(root: Path) -> tuple[str, ...]:
    """The text encoders that have a folder of their own in ``root``, by name; nothing in them is read."""
    return tuple(name for name in TEXT_ENCODERS if (root / name).is_dir())


def _encoder_configs(root: Path) -> dict[str, Config]:
    """The config.json of each text encoder of a pipeline, by component; empty where there is none."""
    paths = {name: root / name / "config.json" for name in encoder_folders(root)}
    return {name: read_json(path) if path.is_file() else {} for name, path in paths.items()}


def _encoder(root: Path, name: str, config: Config, variant: str | None) -> Component:
    """A text encoder's folder: its names have no prefix, and a variant counts where it has it."""
    found = variants(path.name for path in (root / name).iterdir())
    component = _folder_component(root, name, root / name, variant if variant in found else None)
    return replace(component, prefix="", config=config)


def _components(root: Path, variant: str | None) -> tuple[Container, list[Component], str | None]:
    if root.is_file():
        return "file", [_file_component(root)], None
    container, folders = _component_folders(root)
    pipeline_class = _pipeline_class(root, folders) if container == "pipeline" else None
    components = [_folder_component(root, name, folder, variant) for name, folder in folders.items()]
    if container == "component":
        components = [replace(one, inner=inner_encoders(one.shapes())) for one in components]
    return container, components, pipeline_class


def _refuse_unrecordable(root: Path, component: Component) -> None:
    """The marker lists the output's files, which are called as the base's are."""
    paths = [component.weight_path(shard) for shard in component.shards]
    for path in [*paths, component.index] if component.index else paths:
        if NOT_IN_PATHS.search(str(path)):
            where = root if root.is_file() else root / path
            raise CheckpointError.about(where, "has a name that fused.json cannot record", hint="Rename it.")


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
    component = Component(
        name="transformer",
        role="single",
        folder=PurePosixPath(),
        shards=(header,),
        index=None,
        index_metadata={},
        config={},
        prefix=_prefix_of((header,)),
    )
    return replace(component, inner=inner_encoders(component.shapes()))


def _folder_component(root: Path, name: str, folder: Path, variant: str | None) -> Component:
    index = _index_file(folder, variant)
    metadata: Mapping[str, object] = {}
    if index is not None:
        shards, metadata = indexed_shards(index)
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
        raise CheckpointError.about(
            folder, f"has several indexes ({names}) and no way to tell which one counts"
        )
    return found[0] if found else None


def _unindexed_shards(folder: Path, variant: str | None) -> tuple[Header, ...]:
    """The one file, or the one complete numbered set, of a folder without an index."""
    files = [p for p in sorted(folder.iterdir()) if p.name.endswith(".safetensors")]
    files = [path for path in files if (variant_of(path.name) or None) == variant]
    if not files:
        _no_weights(folder, variant)
    if not _whole_set([path.name for path in files]):
        listed = ", ".join(path.name for path in files[:6])
        count = f"{len(files)} weight files that are" if len(files) > 1 else "a weight file that is"
        what = f"has no index and holds {count} not one whole set: {listed}"
        raise CheckpointError.about(folder, what, hint="Name the file to fuse into, or restore the index.")
    shards = tuple(read_header(path) for path in files)
    names = [tensor.name for shard in shards for tensor in shard.tensors]
    if twice := _first_repeated(names):
        raise CheckpointError.about(folder, f"holds the tensor {twice!r} in two files and has no index")
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
    offered = variants(path.name for path in folder.iterdir())
    others = sorted(p.name for p in folder.iterdir() if is_model_file(p.name) or p.name == "fuselora.journal")
    hint = f"It holds {', '.join(others[:4])}." if others else None
    if offered and not variant:
        hint = f"Say which variant with --variant: {', '.join(offered)}."
    raise CheckpointError.about(folder, f"holds no {what}", hint=hint)


def _first_repeated(names: Sequence[str]) -> str | None:
    return next((name for name, count in Counter(names).items() if count > 1), None)


def _prefix_of(shards: tuple[Header, ...]) -> str:
    """The prefix under which a known family is found, the longest first.

    Of an unknown family it is the one that all names have, or that a file of several models gives to
    the one that LoRAs are for.
    """
    names = [tensor.name for shard in shards for tensor in shard.tensors]
    for prefix in KEY_PREFIXES:
        if families_of(name[len(prefix) :] for name in names if name.startswith(prefix)):
            return prefix
    if any(name.startswith(KEY_PREFIXES[0]) for name in names):
        return KEY_PREFIXES[0]
    return next((prefix for prefix in KEY_PREFIXES if all(name.startswith(prefix) for name in names)), "")


def _family(components: Sequence[Component]) -> Family | None:
    return family_of({name: s for component in components for name, s in component.model_shapes().items()})


def _models(
    components: Sequence[Component], family: Family | None, layout: Layout | None, pipeline_class: str | None
) -> tuple[str, ...]:
    if family is None:
        return ()
    found = family.models_of(components[0].model_shapes(), len(components), layout)
    served = family.pipelines.get(pipeline_class or "", found)
    return tuple(model for model in found if model in served) or found


def _with_role(component: Component, n_components: int, family: Family | None) -> Component:
    roles = family.experts if family and n_components > 1 else {}
    return replace(component, role=roles.get(component.name, "single"))
