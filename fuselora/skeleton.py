"""A skeleton: the diffusers pipeline that gives a converted base its configs and all else but the weights.

Opened and held against the base before anything is written. Its transformers' own weights and indexes
are never read or taken, so they need not be there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NoReturn

from fuselora.checkpoint import PIPELINE_COMPONENTS, is_loadable, is_weight_file
from fuselora.errors import CheckpointError, Fault, InputError
from fuselora.families.model_class import BadFieldError, Difference, ModelClass
from fuselora.header import read_header
from fuselora.jsonfile import read_json
from fuselora.marker import read_marker
from fuselora.naming import as_diffusers
from fuselora.output.assets import SideFile, survey
from fuselora.reading import reading
from fuselora.selection import ADAPTER_WEIGHTS, absent_files

if TYPE_CHECKING:
    from fuselora.checkpoint import Checkpoint, Component
    from fuselora.families import Family
    from fuselora.resolve import BaseLocation

INDEX, CONFIG = "model_index.json", "config.json"
# Components of these classes have no weights.
WEIGHTLESS = ("Scheduler", "Tokenizer", "TokenizerFast", "Processor", "ProcessorFast", "Extractor")
PLAIN_CONFIG = "Take the config.json of the unquantised model."
TWO_FILES = (
    "Experts in two files go into one folder, as high_noise_model/ and low_noise_model/; "
    "that folder is the base."
)


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A pipeline's folder. ``classes`` are those that model_index.json names, by component.

    ``configs`` are those of the transformers, by component; ``source`` and ``revision`` name it in the
    marker as those of a base do.
    """

    root: Path
    source: str
    revision: str | None
    pipeline_class: str | None
    classes: Mapping[str, str]
    configs: Mapping[str, Mapping[str, object]]

    @property
    def parts(self) -> tuple[str, ...]:
        """The components that are taken as they are."""
        return tuple(name for name in self.classes if name not in PIPELINE_COMPONENTS)

    def takes_along(self, path: str) -> bool:
        """Whether the file at ``path`` comes along.

        From the root what is no weights, of a transformer its config alone, of every other component
        that model_index.json names all but a LoRA.
        """
        name = PurePosixPath(path).name
        if name == path:
            return not is_loadable(name) and not name.endswith(".pth")
        part = path.partition("/")[0]
        if part in self.configs:
            return path == f"{part}/{CONFIG}"
        return part in self.parts and name not in ADAPTER_WEIGHTS

    def files(self) -> tuple[SideFile, ...]:
        """What comes along. Raises ``CheckpointError`` as ``survey`` does."""
        return survey(self.root, exclude=lambda path: not self.takes_along(path))


def open_skeleton(location: BaseLocation) -> Skeleton:
    """Read model_index.json and the transformers' configs.

    Raises ``CheckpointError`` for a folder that is no diffusers pipeline, or lacks one of those configs,
    ``FormatError`` for broken JSON and ``MarkerError`` for the unfinished output of a fusion.
    """
    root = location.path
    with reading(root):
        if not root.is_dir():
            _fault(root, "is not a folder; a skeleton is a diffusers pipeline's folder")
        if not (root / INDEX).is_file():
            _no_pipeline(root)
        read_marker(root)
        document = read_json(root / INDEX)
        classes = _classes(root / INDEX, document)
        models = [name for name in PIPELINE_COMPONENTS if name in classes]
        for name in PIPELINE_COMPONENTS:
            if name not in classes and (root / name).is_dir():
                hint = "Engines go by the one or the other: remove the folder or restore the entry."
                _fault(root / INDEX, f"does not name {name}, and there is a folder {name}", hint=hint)
        configs = {name: _config(root / name / CONFIG) for name in models}
    class_name = document.get("_class_name")
    return Skeleton(
        root,
        location.source,
        location.revision,
        class_name if isinstance(class_name, str) else None,
        classes,
        configs,
    )


def skeleton_faults(skeleton: Skeleton, checkpoint: Checkpoint, *, whole: bool) -> tuple[Fault, ...]:
    """Why ``checkpoint`` cannot be written as the pipeline that ``skeleton`` is; nothing if it can.

    With ``whole`` the components that are taken as they are have to be there too.
    """
    if fault := _layout_fault(checkpoint):
        return (fault,)
    family = checkpoint.family
    assert family is not None  # _layout_fault
    faults = list(_component_faults(skeleton, checkpoint))
    for component in checkpoint.components:
        faults += _name_faults(component, family, checkpoint.root)
        if component.name in skeleton.configs:
            faults += _config_faults(skeleton, component, family, checkpoint)
    return (*faults, *(_part_faults(skeleton) if whole else ()))


# The skeleton by itself -----------------------------------------------------------------------------


def _no_pipeline(root: Path) -> NoReturn:
    above = root.absolute().parent
    if (above / INDEX).is_file():
        _fault(root, f"is a component, not a pipeline: it has no {INDEX}", hint=f"Name {above}.")
    hint = "A skeleton is a diffusers pipeline; its transformers may lack their weights, not their configs."
    _fault(root, f"is no diffusers pipeline: it has no {INDEX}", hint=hint)


def _classes(path: Path, document: Mapping[str, object]) -> dict[str, str]:
    """The class of every component that is there: an entry of two texts, library and class."""
    found: dict[str, str] = {}
    for name, entry in document.items():
        if isinstance(entry, list) and len(entry) == 2 and all(isinstance(part, str) for part in entry):
            if name != PurePosixPath(name).name or name in ("", "..", "."):
                _fault(path, f"names the component {name!r}, which can be no folder's name")
            found[name] = entry[1]
    return found


def _config(path: Path) -> dict[str, object]:
    if not path.is_file():
        what = "is not there; a skeleton has the config.json of each transformer"
        _fault(path, what, hint="Fetch the pipeline again; its transformers' weights are not needed.")
    return read_json(path)


def _part_faults(skeleton: Skeleton) -> Iterator[Fault]:
    """Components that are absent, cut short, or pointers to files that were never fetched."""
    files = skeleton.files()
    hint = "Fetch the whole pipeline; only its transformers' weights are not needed."

    def fault(text: str, **facts: object) -> Fault:
        return Fault("skeleton", text, path=str(skeleton.root), hint=hint, facts=facts)

    for name in skeleton.parts:
        inside = [file.path for file in files if file.path.startswith(f"{name}/")]
        weightless = skeleton.classes[name].endswith(WEIGHTLESS) or f"{name}/{CONFIG}" not in inside
        if not inside:
            yield fault(f"has no files in {name}/, which {INDEX} names", component=name)
        elif not weightless and not any(map(is_weight_file, inside)):
            yield fault(f"has no weights in {name}/, whose class is {skeleton.classes[name]}", component=name)
    indexes = [file.path for file in files if file.path.endswith(".json") and "/" in file.path]
    for path in absent_files(skeleton.root, indexes):
        yield fault(f"has no {path}, which an index names", component=path.partition("/")[0])
    for file in files:
        if file.path.endswith(".safetensors"):
            yield from _file_faults(file)


def _file_faults(file: SideFile) -> Iterator[Fault]:
    try:
        read_header(file.source)
    except InputError as error:
        text = error.message.removeprefix(f"{file.source}: ")
        yield Fault("skeleton", text, path=str(file.source), hint=error.hint)


# The skeleton beside the base -----------------------------------------------------------------------


def _layout_fault(checkpoint: Checkpoint) -> Fault | None:
    """Whether there is anything to convert, and a way to do it."""
    family, layout, hint = checkpoint.family, checkpoint.layout, None
    if family is None or not family.classes:
        sample = next(iter(checkpoint.components[0].tensors()), "nothing")
        text = f"is of no family whose diffusers names are known; it has names like {sample}"
    elif layout == "diffusers":
        text = "has diffusers names already: there is nothing to convert"
        hint = "Leave out --layout and --skeleton; the output is then as the base."
    elif layout is None:
        text = "has too few tensors to tell whose names they have"
    else:
        return None
    return Fault("layout", text, path=str(checkpoint.root), hint=hint)


def _component_faults(skeleton: Skeleton, checkpoint: Checkpoint) -> Iterator[Fault]:
    path, ours = str(skeleton.root / INDEX), [component.name for component in checkpoint.components]
    for component in checkpoint.components:
        if component.name not in skeleton.configs:
            text = f"names no {component.name}, and the base has it ({_place(component, checkpoint.root)})"
            hint = f"Take the skeleton of a model with {_count(len(ours))}."
            yield Fault("components", text, path=path, key=component.name, hint=hint)
    for name in skeleton.configs:
        if name not in ours:
            text = f"names {name}, and the base has only {', '.join(ours)}"
            yield Fault("components", text, path=path, key=name, hint=TWO_FILES if len(ours) == 1 else None)


def _count(n_components: int) -> str:
    return "one transformer" if n_components == 1 else "two experts"


def _place(component: Component, root: Path) -> str:
    return root.name if str(component.folder) == "." else f"{component.folder}/"


def _name_faults(component: Component, family: Family, root: Path) -> Iterator[Fault]:
    """Tensors beside the model, and two that would have one name."""
    path = str(root / component.folder) if root.is_dir() else str(root)
    outside = [name for name in component.tensors() if not name.startswith(component.prefix)]
    for name in outside:
        text = f"{name} is no part of the model, whose names begin with {component.prefix}"
        hint = "Convert a file that holds the model alone."
        yield Fault("names", text, path=path, key=name, hint=hint)
    named = as_diffusers(component, family).tensors
    inside = {name: to for name, to in named.items() if name.startswith(component.prefix)}
    for to, count in Counter(inside.values()).items():
        if count > 1:
            names = " and ".join(name for name in inside if inside[name] == to)
            yield Fault("names", f"{names} would both be called {to}", path=path, key=to)


def _config_faults(
    skeleton: Skeleton, component: Component, family: Family, checkpoint: Checkpoint
) -> Iterator[Fault]:
    """What the skeleton's config says of a component, held against its tensors."""
    config, path = skeleton.configs[component.name], str(skeleton.root / component.name / CONFIG)
    if "quantization_config" in config:
        text = "has a quantization_config, and the weights that are written are plain"
        yield Fault("config", text, path=path, hint=PLAIN_CONFIG)
    kind = next((kind for kind in family.classes if kind.name == config.get("_class_name")), None)
    if kind is None:
        known = " or ".join(kind.name for kind in family.classes)
        text = f"is for the class {config.get('_class_name')}; a {family.name} base needs {known}"
        yield Fault("config", text, path=path)
        return
    named = skeleton.classes[component.name]
    if named != kind.name:
        text = f"names the class {named} for {component.name}, and its config.json {kind.name}"
        yield Fault("config", text, path=str(skeleton.root / INDEX), key=component.name)
    base_path = str(checkpoint.root / component.folder) if checkpoint.root.is_dir() else str(checkpoint.root)
    models = family.models_of(component.model_shapes(), len(checkpoint.components))
    hint = f"The base is {' or '.join(models)}: take that model's skeleton." if models else None
    for field, text in _differences(kind, config, component):
        fault, where = ("config", path) if field else ("names", base_path)
        yield Fault(fault, text, path=where, key=field, hint=hint)


def _differences(
    kind: ModelClass, config: Mapping[str, object], component: Component
) -> Iterable[Difference]:
    try:
        return list(kind.differences(config, component.model_shapes(), component.config))
    except BadFieldError as error:
        return [Difference("config", str(error))]


def _fault(where: Path, what: str, *, hint: str | None = None) -> NoReturn:
    raise CheckpointError(f"{where}: {what}", hint=hint, path=str(where))
