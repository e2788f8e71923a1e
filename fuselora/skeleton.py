"""A skeleton: the diffusers pipeline that gives a converted base its configs and all else but the weights.

Its transformers' own weights and indexes are never read or taken, so they need not be there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NoReturn

from fuselora.errors import CheckpointError
from fuselora.filenames import is_weight_or_index
from fuselora.jsonfile import read_json
from fuselora.marker import read_marker
from fuselora.reading import reading
from fuselora.selection import ADAPTER_WEIGHTS
from fuselora.side_files import SideFile, survey
from fuselora.specs import PIPELINE_COMPONENTS

if TYPE_CHECKING:
    from fuselora.resolve import BaseLocation

INDEX, CONFIG = "model_index.json", "config.json"


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
            return not is_weight_or_index(name)
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
            raise CheckpointError.about(root, "is not a folder; a skeleton is a diffusers pipeline's folder")
        if not (root / INDEX).is_file():
            _no_pipeline(root)
        read_marker(root)
        document = read_json(root / INDEX)
        classes = _classes(root / INDEX, document)
        models = [name for name in PIPELINE_COMPONENTS if name in classes]
        for name in PIPELINE_COMPONENTS:
            if name not in classes and (root / name).is_dir():
                hint = "Engines go by the one or the other: remove the folder or restore the entry."
                raise CheckpointError.about(
                    root / INDEX, f"does not name {name}, and there is a folder {name}", hint=hint
                )
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


def _no_pipeline(root: Path) -> NoReturn:
    above = root.absolute().parent
    if (above / INDEX).is_file():
        raise CheckpointError.about(
            root, f"is a component, not a pipeline: it has no {INDEX}", hint=f"Name {above}."
        )
    hint = "A skeleton is a diffusers pipeline; its transformers may lack their weights, not their configs."
    raise CheckpointError.about(root, f"is no diffusers pipeline: it has no {INDEX}", hint=hint)


def _classes(path: Path, document: Mapping[str, object]) -> dict[str, str]:
    """The class of every component that is there: an entry of two texts, library and class."""
    found: dict[str, str] = {}
    for name, entry in document.items():
        if isinstance(entry, list) and len(entry) == 2 and all(isinstance(part, str) for part in entry):
            if name != PurePosixPath(name).name or name in ("", "..", "."):
                raise CheckpointError.about(
                    path, f"names the component {name!r}, which can be no folder's name"
                )
            found[name] = entry[1]
    return found


def _config(path: Path) -> dict[str, object]:
    if not path.is_file():
        what = "is not there; a skeleton has the config.json of each transformer"
        raise CheckpointError.about(
            path, what, hint="Fetch the pipeline again; its transformers' weights are not needed."
        )
    return read_json(path)
