"""Whatever keeps a base from being written as the pipeline that a skeleton is, before anything is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from fuselora.errors import Fault, FormatError, InputError
from fuselora.families import FAMILIES
from fuselora.families.model_class import BadFieldError, Difference, ModelClass
from fuselora.filenames import is_index, is_weight_file
from fuselora.header import read_header
from fuselora.jsonfile import read_json
from fuselora.naming import as_diffusers
from fuselora.reading import reading
from fuselora.selection import absent_files, skeleton_files
from fuselora.skeleton import CONFIG, INDEX

if TYPE_CHECKING:
    from fuselora.checkpoint import Checkpoint, Component
    from fuselora.families import Family
    from fuselora.side_files import SideFile
    from fuselora.skeleton import Skeleton

# Components of these classes have no weights.
WEIGHTLESS = ("Scheduler", "Tokenizer", "TokenizerFast", "Processor", "ProcessorFast", "Extractor")
# Nor do others that have one of these and no config.json.
WEIGHTLESS_CONFIGS = frozenset(
    ("scheduler_config.json", "tokenizer_config.json", "preprocessor_config.json", "processor_config.json")
)
LFS_START, LFS_HINT = b"version https://git-lfs", "Fetch the real file with 'git lfs pull'."
PLAIN_CONFIG = "Take the config.json of the unquantised model."
TWO_FILES = (
    "Experts in two files go into one folder, as high_noise_model/ and low_noise_model/; "
    "that folder is the base."
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


def _part_faults(skeleton: Skeleton) -> Iterator[Fault]:
    """Components that are absent, cut short, or pointers to files that were never fetched."""
    files = skeleton.files()
    hint = "Fetch the whole pipeline; only its transformers' weights are not needed."

    def fault(text: str, **facts: object) -> Fault:
        return Fault("skeleton", text, path=str(skeleton.root), hint=hint, facts=facts)

    for name in skeleton.parts:
        inside = [file.path for file in files if file.path.startswith(f"{name}/")]
        kind = skeleton.classes[name]
        if not inside:
            yield fault(f"has no files in {name}/, which {INDEX} names", component=name)
        elif not _is_weightless(kind, inside) and not any(map(is_weight_file, inside)):
            yield fault(f"has no weights in {name}/, whose class is {kind}", component=name)
    for path in absent_files(skeleton.root, _indexes([file.path for file in files])):
        yield fault(f"has no {path}, which an index names", component=path.partition("/")[0])
    for file in files:
        yield from _file_faults(file)


def _is_weightless(kind: str, paths: Sequence[str]) -> bool:
    names = {PurePosixPath(path).name for path in paths}
    return kind.endswith(WEIGHTLESS) or (CONFIG not in names and not WEIGHTLESS_CONFIGS.isdisjoint(names))


def _indexes(paths: Sequence[str]) -> list[str]:
    """The indexes that loaders go by: none of pickles or a variant where the weights that they take lie."""
    needed = set(skeleton_files(paths))
    homes = {PurePosixPath(path).parent for path in needed if is_weight_file(path)}
    inside = [path for path in paths if path.endswith(".json") and "/" in path]
    return [path for path in inside if path in needed or PurePosixPath(path).parent not in homes]


def _file_faults(file: SideFile) -> Iterator[Fault]:
    """Broken safetensors and indexes, and files of any kind that were never fetched."""
    try:
        if file.path.endswith(".safetensors"):
            read_header(file.source)
        elif _is_pointer(file):
            raise FormatError("is a Git LFS pointer, not the file itself", hint=LFS_HINT)
        elif is_index(PurePosixPath(file.path).name):
            read_json(file.source)
    except InputError as error:
        text = error.message.removeprefix(f"{file.source}: ")
        yield Fault("skeleton", text, path=str(file.source), hint=error.hint)


def _is_pointer(file: SideFile) -> bool:
    with reading(file.source), file.source.open("rb") as stream:
        return stream.read(len(LFS_START)) == LFS_START


# The skeleton beside the base -----------------------------------------------------------------------


def _layout_fault(checkpoint: Checkpoint) -> Fault | None:
    """Whether there is anything to convert, and a way to do it."""
    family, layout, hint = checkpoint.family, checkpoint.layout, None
    as_it_is = "Leave out --layout and --skeleton; the output is then as the base."
    if family is None:
        sample = next(iter(checkpoint.components[0].tensors()), "nothing")
        text = f"is of no family whose diffusers names are known; it has names like {sample}"
    elif layout == "diffusers":
        text, hint = "has diffusers names already: there is nothing to convert", as_it_is
    elif layout is None:
        text = "has too few tensors to tell whose names they have"
    elif not family.classes:
        able = " and ".join(other.name for other in FAMILIES if other.classes)
        text = f"is a {family.name} base, and only those of {able} can be written as a pipeline"
        hint = f"{as_it_is} diffusers can convert that, or this base beforehand."
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
    models = checkpoint.models
    base = f"The base is {' or '.join(models)}" if models else "The skeleton may be another model's"
    hint = f"{base}: take that model's skeleton." if models else f"{base}: take that of the base's model."
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
