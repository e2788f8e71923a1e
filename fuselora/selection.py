"""Which files of a repository or an adapter folder are needed, told from their names."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from fuselora.errors import FormatError, InputError
from fuselora.header import CONVERT, PICKLED_SUFFIXES
from fuselora.jsonfile import read_json
from fuselora.specs import PIPELINE_COMPONENTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

ADAPTER_WEIGHTS = ("adapter_model.safetensors", "pytorch_lora_weights.safetensors")
ADAPTER_INDEXES = tuple(f"{name}.index.json" for name in ADAPTER_WEIGHTS)
ADAPTER_CONFIG = "adapter_config.json"
# PEFT's own names, which are half of an adapter folder even when given alone
CONFIGURED = (ADAPTER_WEIGHTS[0], ADAPTER_INDEXES[0])
PICKLES = (".bin", ".pt", ".ckpt")  # beside safetensors in a base; a native Wan keeps whole models in .pth
OTHER_RUNTIMES = (".msgpack", ".onnx", ".onnx_data", ".h5", ".gguf", ".tflite")
# diffusers and transformers put any variant's name into these file names, others only such as are usual.
_STEM = r"(?:diffusion_pytorch_model|pytorch_model|model)"
_SHARD = r"(?:-\d+-of-\d+)?"
_WEIGHTS = re.compile(rf"{_STEM}{_SHARD}(?:\.(?P<variant>[^.]+?){_SHARD})?\.(?:safetensors|bin)")
_TAGGED = re.compile(rf".+?{_SHARD}\.(?P<variant>fp16|bf16|fp32|non_ema|ema){_SHARD}\.safetensors")
_INDEX = re.compile(rf"{_STEM}\.(?:safetensors|bin)\.index(?:\.(?P<variant>[^.]+))?\.json")


def needed_files(names: Iterable[str], variant: str | None) -> tuple[str, ...]:
    """The files of a base repository that make a whole checkpoint, sorted.

    Left out: weights of other runtimes; pickles beside safetensors (``.pth`` stays: native Wan keeps
    its VAE and text encoder so); one-file copies at the root of a pipeline; variants that were not
    asked for, and plain weights where the variant asked for exists. ``names`` are relative to the
    base's root.
    """
    kept = [name for name in names if not name.endswith(OTHER_RUNTIMES)]
    safe_folders = {_folder(name) for name in kept if name.endswith(".safetensors")}
    pipeline = "model_index.json" in kept
    kept = [name for name in kept if not (_pickled(name) and _folder(name) in safe_folders)]
    kept = [name for name in kept if not (pipeline and _folder(name) == "." and _weights(name))]
    return tuple(sorted(_one_variant(kept, variant)))


def model_files(names: Iterable[str]) -> tuple[str, ...]:
    """Of the needed files those of the models themselves: their safetensors, indexes and configs."""
    return tuple(n for n in names if n.endswith((".safetensors", "config.json")) or ".index." in n)


def skeleton_files(names: Iterable[str]) -> tuple[str, ...]:
    """The needed files of a pipeline less its transformers' weights and indexes, sorted."""
    needed = needed_files(names, None)
    return tuple(
        name
        for name in needed
        if name.partition("/")[0] not in PIPELINE_COMPONENTS or name.endswith("/config.json")
    )


def variants(names: Iterable[str]) -> tuple[str, ...]:
    """The variants that safetensors files of ``names`` come in, sorted."""
    found = {variant_of(name) for name in names if name.endswith(".safetensors")}
    return tuple(sorted(variant for variant in found if variant))


def adapter_weights(names: Sequence[str], where: str) -> str:
    """The weights of the adapter folder ``where`` that holds the files ``names``, or their index.

    Raises ``InputError`` if there are none, or several with nothing to tell which is meant, and
    ``FormatError`` if they are pickled.
    """
    for name, index in zip(ADAPTER_WEIGHTS, ADAPTER_INDEXES, strict=True):
        if name in names and index in names:
            message = f"{where}: holds both {name} and {index}"
            raise InputError(message, hint="Name the one to fuse, or remove the other.", path=where)
        if name in names or index in names:
            return name if name in names else index
    found = sorted(name for name in names if name.endswith(".safetensors"))
    if len(found) == 1:
        return found[0]
    if found:
        listed = ", ".join(found[:8]) + (", ..." if len(found) > 8 else "")
        message = f"{where}: holds {len(found)} safetensors files, {listed}"
        raise InputError(message, hint="Name the file to fuse.", path=where)
    pickled = sorted(name for name in names if name.endswith(PICKLED_SUFFIXES))
    if pickled:
        raise FormatError(f"{where}: holds {pickled[0]} and no safetensors", hint=CONVERT, path=where)
    raise InputError(f"{where}: holds no LoRA, as there is no .safetensors file in it", path=where)


def absent_files(root: Path, names: Iterable[str]) -> tuple[str, ...]:
    """What ``root`` lacks of the shards and component folders that index files among ``names`` list.

    A broken index lists nothing here: it is refused where it is read for its own sake.
    """
    listed: list[PurePosixPath] = []
    for name in map(PurePosixPath, names):
        if name.name == "model_index.json":
            listed += [name.with_name(part) for part, kind in _json(root / name).items() if _component(kind)]
        elif _INDEX.fullmatch(name.name):
            shards = _json(root / name).get("weight_map")
            listed += [name.with_name(shard) for shard in sorted(set(_values(shards)))]
    return tuple(str(path) for path in listed if not _has(root / path))


def _has(path: Path) -> bool:
    return path.is_file() or (path.is_dir() and any(path.iterdir()))


def _json(path: Path) -> dict[str, object]:
    try:
        return read_json(path)
    except FormatError:
        return {}


def _component(kind: object) -> bool:
    """Whether an entry of ``model_index.json`` is a component that is there: a library and a class."""
    return isinstance(kind, list) and len(kind) == 2 and all(isinstance(part, str) for part in kind)


def _values(weight_map: object) -> list[str]:
    return (
        [name for name in weight_map.values() if isinstance(name, str)]
        if isinstance(weight_map, dict)
        else []
    )


def _folder(name: str) -> str:
    return str(PurePosixPath(name).parent)


def _weights(name: str) -> bool:
    return name.endswith((".safetensors", *PICKLES))


def _pickled(name: str) -> bool:
    return name.endswith((*PICKLES, ".bin.index.json"))


def _one_variant(names: Sequence[str], variant: str | None) -> list[str]:
    """``names`` with one kind of weights in each folder: the variant's where it has them, else plain ones."""
    present = {_folder(name) for name in names if variant and variant_of(name) == variant}
    return [
        name
        for name in names
        if variant_of(name) == (variant if _folder(name) in present else "") or variant_of(name) is None
    ]


def variant_of(name: str) -> str | None:
    """The variant in a weight or index file's name, "" in a plain one's; None for any other file."""
    base = PurePosixPath(name).name
    found = _WEIGHTS.fullmatch(base) or _INDEX.fullmatch(base) or _TAGGED.fullmatch(base)
    return (found["variant"] or "") if found else None
