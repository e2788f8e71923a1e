"""Whether diffusers loads every component of a fused folder, and finds all of its tensors there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from fuselora.errors import FormatError
from fuselora.jsonfile import read_json
from fuselora.recorded import Finding
from fuselora.selection import variants

if TYPE_CHECKING:
    from fuselora.marker import ComponentRecord, Marker

KEYS = {"missing_keys": "is missing", "unexpected_keys": "is not expected", "mismatched_keys": "does not fit"}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A component that ``library`` loaded as ``model_class``, with every tensor in its place."""

    component: str
    library: str
    model_class: str

    def document(self) -> dict[str, object]:
        return {"component": self.component, "library": self.library, "class": self.model_class}

    @property
    def text(self) -> str:
        return f"{self.component}: loaded with {self.library}, as {self.model_class}"


def load_components(out: Path, marker: Marker) -> tuple[list[Loaded], list[Finding]]:
    """Load each component on the CPU, one at a time, in its own dtype: that needs its size in memory."""
    loaded, findings = [], []
    for record in marker.components.values():
        folder = PurePosixPath(record.files[0].path).parent
        where = str(folder / "config.json")
        try:
            name = _class_name(read_json(out / where))
        except FormatError:
            text = f"{record.name} cannot be loaded: it has no config.json that can be read"
            findings.append(Finding("load", where, None, text))
            continue
        model_class = _model_class(name)
        if model_class is None:
            text = f"{record.name} cannot be loaded: diffusers has no model class {name!r}"
            findings.append(Finding("load", where, None, text))
            continue
        if found := list(_load(out / folder, record, model_class)):
            findings += found
        else:
            library = str(model_class.__module__).partition(".")[0]
            loaded.append(Loaded(record.name, library, str(model_class.__name__)))
    return loaded, findings


def _class_name(config: Mapping[str, object]) -> object:
    """diffusers' spelling of a model's class, or transformers' of a text encoder's."""
    architectures = config.get("architectures")
    if "_class_name" in config or not isinstance(architectures, list) or not architectures:
        return config.get("_class_name")
    return architectures[0]


def _model_class(name: object) -> Any | None:  # noqa: ANN401 - the libraries have no types
    for library, base in (("diffusers", "ModelMixin"), ("transformers", "PreTrainedModel")):
        if find_spec(library) and isinstance(name, str):
            module = import_module(library)
            found = getattr(module, name, None)
            if isinstance(found, type) and issubclass(found, getattr(module, base)):
                return found
    return None


def _load(folder: Path, record: ComponentRecord, model_class: Any) -> Iterator[Finding]:  # noqa: ANN401
    import torch

    variant = next(iter(variants(file.path for file in record.files)), None)
    dtype = getattr(torch, record.dtype, torch.float32)
    try:
        with _quiet():
            _, info = model_class.from_pretrained(
                folder, torch_dtype=dtype, variant=variant, use_safetensors=True, local_files_only=True,
                output_loading_info=True,
            )  # fmt: skip
    except Exception as error:  # diffusers promises no set of errors
        text = f"its library does not load it: {type(error).__name__}: {error}"
        yield Finding("load", record.name, None, text)
        return
    for kind, what in KEYS.items():
        for key in info.get(kind) or ():
            name = key if isinstance(key, str) else str(key[0])
            yield Finding("load", record.name, name, f"{what}, says {model_class.__name__}")
    for message in info.get("error_msgs") or ():
        yield Finding("load", record.name, None, str(message))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the libraries' own bars and warnings: what they say becomes findings."""
    from diffusers.utils import logging as own

    logs = [own, *([import_module("transformers.utils.logging")] if find_spec("transformers") else [])]
    before = [(log, log.get_verbosity(), log.is_progress_bar_enabled()) for log in logs]
    for log in logs:
        log.set_verbosity_error()
        log.disable_progress_bar()
    try:
        yield
    finally:
        for log, level, bars in before:
            log.set_verbosity(level)
            if bars:
                log.enable_progress_bar()
