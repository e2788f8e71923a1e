"""What a file or folder is, for ``fuselora inspect``. Headers and small reads only; no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuselora.check.folder import check
from fuselora.describe_checkpoint import COMPONENT_FOLDERS, describe_checkpoint
from fuselora.describe_lora import describe_lora
from fuselora.description import (
    CheckpointDescription,
    Description,
    FusedDescription,
    LoraDescription,
    Undescribed,
)
from fuselora.errors import CheckpointError, FuseloraError, InputError
from fuselora.header import read_header
from fuselora.lora.adapter import is_lora
from fuselora.marker import read_marker
from fuselora.selection import ADAPTER_CONFIG, ADAPTER_INDEXES, ADAPTER_WEIGHTS
from fuselora.shards import is_index, open_files

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


__all__ = [
    "CheckpointDescription",
    "Description",
    "FusedDescription",
    "LoraDescription",
    "describe",
    "describe_each",
]


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


def _file(path: Path) -> Description:
    if is_index(path):
        return _of_index(path)
    if path.suffix == ".json":
        hint = f"Name the folder that it lies in: {path.parent}"
        raise InputError(
            f"{path}: is a JSON file, neither a LoRA nor a checkpoint", hint=hint, path=str(path)
        )
    return describe_lora(path) if is_lora(read_header(path)) else describe_checkpoint(path)


def _of_index(path: Path) -> Description:
    """A LoRA in shards; a base is named by its folder."""
    if all(is_lora(header) for header in open_files(path)):
        return describe_lora(path)
    hint = f"Name the folder that it lies in: {path.parent}"
    raise InputError(f"{path}: is the index of a checkpoint", hint=hint, path=str(path))


def _folder(path: Path) -> Description:
    marker = read_marker(path)
    if marker is not None:
        return FusedDescription(path, marker, check(path))
    if _is_adapter(path):
        return describe_lora(path)
    try:
        return describe_checkpoint(path)
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
