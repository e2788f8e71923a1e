"""From what was typed to files on this machine: local paths, short names and the Hugging Face Hub.

A local file or folder comes first, then a short name, then a Hub id; a text that can only be meant as
a path never reaches the network.
"""

from __future__ import annotations

import difflib
import errno
import itertools
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fuselora.errors import InputError, UsageError
from fuselora.filenames import is_weight_file
from fuselora.hub import fetch_base, fetch_lora, fetch_skeleton
from fuselora.reading import named_path
from fuselora.selection import ADAPTER_CONFIG, CONFIGURED, adapter_weights
from fuselora.specs import (
    COMPONENTS,
    EMPTY_PATH,
    HUB,
    SHORT_NAMES,
    HubAddress,
    LoraSpec,
    hub_legal,
    local_path,
    parse_hub,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class BaseLocation:
    """A base on this machine.

    ``source`` names it in the marker: its Hub id, or its own name without the folders above it.
    ``revision`` is the Hub's commit, None for a base that did not come from there.
    """

    path: Path
    source: str
    revision: str | None


@dataclass(frozen=True, slots=True)
class LoraLocation:
    """A LoRA file on this machine, or the index of its shards; ``name`` is that one's, for the marker.

    The name is valid UTF-8. ``config`` is the ``adapter_config.json`` that belongs to it, if there is one.
    """

    spec: LoraSpec
    path: Path
    name: str
    config: Path | None


def resolve_base(
    base: str,
    *,
    revision: str | None = None,
    variant: str | None = None,
    headers_only: bool = False,
    model_only: bool = False,
) -> BaseLocation:
    """The folder or file that ``base`` names: local, else a short name, ``owner/name`` or ``hf://``.

    Of a Hub base only the needed files are fetched, into the Hub's cache. With ``headers_only`` (for a
    plan) the cache is used if it holds them all; otherwise the base is a temporary folder, removed at
    exit, with every small file whole and every large one at its true size but sparse: a safetensors
    file begins with its true header and reads as zeros after it. With ``model_only`` only the models
    themselves are fetched: not a native repository's text encoder, which is no safetensors.

    Raises ``InputError`` for a local path that does not exist, ``UsageError`` for a revision of a
    local base, and ``HubError`` for all that can go wrong with the Hub.
    """
    local = _local(base)
    if local is None:
        address = _base_address(base, revision)
        path, commit = fetch_base(
            address, asked=base, variant=variant, headers_only=headers_only, model_only=model_only
        )
        return BaseLocation(path, address.source, commit)
    if revision is not None:
        hint = "A revision is for a base on the Hub; leave it out."
        raise UsageError(f"--revision {revision!r} is given and the base is local, {local}", hint=hint)
    return _snapshot(local) or BaseLocation(local, _utf8_name(local), None)


def resolve_skeleton(skeleton: str, *, headers_only: bool = False) -> BaseLocation:
    """The diffusers pipeline that ``skeleton`` names: local, else a short name, ``owner/name`` or ``hf://``.

    Of a Hub repository all but the transformers' weights is fetched. Raises as ``resolve_base`` does.
    """
    local = _local(skeleton)
    if local is not None:
        return _snapshot(local) or BaseLocation(local, _utf8_name(local), None)
    address = _base_address(skeleton, None)
    path, commit = fetch_skeleton(address, asked=skeleton, headers_only=headers_only)
    return BaseLocation(path, address.source, commit)


def resolve_lora(spec: LoraSpec) -> LoraLocation:
    """The safetensors file of ``spec``, or its index: a local file or adapter folder, or
    ``hf://owner/name[/path][@rev]``, with all of its shards.

    A local file is only located: one that is not safetensors is refused where its header is read.
    Raises ``InputError`` if it does not exist, ``FormatError`` for an adapter folder with pickled
    weights only, and ``HubError``.
    """
    local = _local(spec.source)
    if local is not None:
        path, config = _local_lora(local)
    elif spec.source.startswith(HUB):
        path, config = fetch_lora(parse_hub(spec.source), asked=spec.source)
    else:
        raise _missing(spec.source, _lora_hints(spec))
    return LoraLocation(spec, path, _utf8_name(path), config)


def _local(text: str) -> Path | None:
    if not text:
        raise UsageError(EMPTY_PATH)
    path = local_path(text)
    if path is not None and not path.is_file() and not path.is_dir():
        raise InputError(f"{path}: is neither a file nor a folder", path=str(path))
    return path


def _local_lora(path: Path) -> tuple[Path, Path | None]:
    """Weights and configuration; PEFT's own file name is half of an adapter folder even if given alone."""
    is_adapter = path.is_dir()
    if is_adapter:
        path /= adapter_weights(_names(path), str(path))
    config = path.with_name(ADAPTER_CONFIG)
    belongs = is_adapter or path.name in CONFIGURED
    if belongs and os.path.lexists(config) and not config.is_file():
        hint = "It says how the adapter is scaled: restore it, or remove it if there is none."
        raise InputError(f"{config}: is no file that can be read", hint=hint, path=str(config))
    return path, config if belongs and config.is_file() else None


def _names(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in folder.iterdir()]
    except OSError as error:
        raise InputError(f"{folder}: cannot be read: {error.strerror}", path=str(folder)) from error


def _snapshot(path: Path) -> BaseLocation | None:
    """``path`` as what it is a copy of, if it is a snapshot in a Hub cache: its own name is a bare hash."""
    snapshots = path.absolute().parent
    kind, *repo = snapshots.parent.name.split("--")
    if snapshots.name != "snapshots" or kind != "models" or len(repo) != 2:
        return None
    return BaseLocation(path, "/".join(repo), path.name)


def _utf8_name(path: Path) -> str:
    return named_path(path).name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _missing(text: str, hints: Sequence[str]) -> InputError:
    close = _close_names(text)
    meant = [f"Did you mean {' or '.join(close)}?"] if close else []
    return InputError(f"{text}: {_why_missing(text)}", hint=" ".join([*meant, *hints]) or None, path=text)


def _why_missing(text: str) -> str:
    try:
        Path(text).lstat()
    except OSError as error:
        absent = error.errno in (errno.ENOENT, errno.ENOTDIR)
        return "no such file or folder" if absent else f"cannot be read: {error.strerror}"
    except ValueError:
        return "no such file or folder"
    return "a link to something that does not exist"


def _close_names(text: str) -> list[str]:
    """Names like the first part of the path that does not exist, in the folder where it should be."""
    try:
        missing = Path(text).expanduser()
        while not missing.parent.is_dir():
            missing = missing.parent
        names = [entry.name for entry in itertools.islice(missing.parent.iterdir(), 2000)]
    except (OSError, ValueError, RuntimeError):
        return []
    return [str(missing.parent / name) for name in difflib.get_close_matches(missing.name, names)]


def _lora_hints(spec: LoraSpec) -> list[str]:
    """What in the text may have been meant otherwise than it was read."""
    hints = []
    if spec.listed > 1 or "," in spec.source:
        hints.append(
            "A comma separates one file per expert, unless the text around it names an existing file; "
            "to add several LoRAs, repeat --lora."
        )
    if ":" in spec.source:
        hints.append("A strength is a plain number after the last colon, as in FILE:0.8.")
    if "=" in spec.source:
        hints.append(f"What stands before '=' must be one of {', '.join(COMPONENTS)}.")
    if hub_legal("/".join(spec.source.split("/")[:2])):
        hints.append("A file on the Hub is written hf://owner/name/path/to/file.safetensors.")
    return hints


def _base_address(base: str, revision: str | None) -> HubAddress:
    if base.startswith(HUB):
        address = parse_hub(base)
        if revision is not None and address.revision not in (None, revision):
            raise UsageError(f"{base!r} names another revision than --revision {revision!r}")
        return replace(address, revision=revision or address.revision)
    if base in SHORT_NAMES:
        return HubAddress(SHORT_NAMES[base], revision=revision)
    if hub_legal(base) and not is_weight_file(base) and not Path(base).parent.is_dir():
        return HubAddress(base, revision=revision)
    hints = [f"Short names are {', '.join(SHORT_NAMES)}."] if "/" not in base else []
    if hub_legal(base) and not is_weight_file(base):
        hints.append(
            f"There is a folder {Path(base).parent}: the repository on the Hub is written {HUB}{base}."
        )
    raise _missing(base, hints)
