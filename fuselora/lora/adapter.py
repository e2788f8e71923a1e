"""A LoRA file -> its modules. Header, alphas and configuration only; no weights, no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from fuselora.errors import Fault
from fuselora.header import Header, TensorInfo
from fuselora.jsonfile import read_json
from fuselora.kinds import KIND_OF, Kind, Part, Shape, kinds_in, meant
from fuselora.kinds.kind import ALPHAS, MAGNITUDES
from fuselora.kinds.replacement import FULL_PARTS
from fuselora.kinds.settings import UNSAID, Settings, settings_of
from fuselora.lora.config import (
    METADATA_KEYS,
    AdapterConfig,
    Document,
    config_of,
    divides_by_root,
    document_for,
    peft_configs,
)
from fuselora.lora.config_faults import Stated, config_faults, network_faults, type_fault
from fuselora.lora.grammar import MODIFIERS, ParsedKey, is_lora_key, parse_key, spellings, unfused_kind
from fuselora.lora.scale import BadNumber, StoredAlpha, read_number, read_sizes
from fuselora.lora.training import trained_on
from fuselora.reading import reading
from fuselora.shards import SHARD_NUMBER, open_files
from fuselora.text_encoders import MEANINGS, TEXT_ENCODERS

if TYPE_CHECKING:
    from fuselora.resolve import LoraLocation

# Parts of a few numbers, which are read along with the header.
NUMBERS: Mapping[Part, Callable[[BinaryIO, Header, TensorInfo, str], tuple[float, ...]]] = {
    **dict.fromkeys(("alpha", "alpha_scale", "on_input"), lambda *at: (read_number(*at),)),
    "reshape_weight": read_sizes,
}
ONE_ADAPTER = "Save one adapter per file; fuselora never picks one of several."
# Metadata that has to be the same in all files of one LoRA.
SAID_BY_ALL = ("lora_adapter_metadata", *METADATA_KEYS, "ss_network_module", "ss_network_args")


@dataclass(frozen=True, slots=True)
class Module:
    """One module of a LoRA as its keys spell it: its parts, of one kind of delta or of several.

    ``alpha_scale``: what its delta is multiplied by, in place of alpha / rank. ``reshape``: the shape that
    ComfyUI widens the weight to before it adds.
    """

    name: str
    dialect: str
    parts: Mapping[Part, TensorInfo]
    alpha: float | None
    settings: Settings = UNSAID
    reshape: Shape | None = None
    alpha_scale: float | None = None

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return tuple(meant(kind, self.settings, self.shapes) for kind in kinds_in(self.parts))

    @property
    def rank(self) -> int | None:
        """What alpha is divided by; None where none counts, a factor is missing, or the base has to tell."""
        if self.settings.parameters:
            return None
        whole = (kind for kind in self.kinds if kind.scaled and not kind.lacks(self.parts))
        return next((kind.rank(self.shapes) for kind in whole), None)

    @property
    def shapes(self) -> dict[Part, Shape]:
        return {part: tensor.shape for part, tensor in self.parts.items()}


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA: every tensor is in exactly one module, or named by one of ``faults``.

    ``files``: one, or the shards of an index by name; ``homes``: the file of each tensor, by its name.
    ``trained_on``: where it says on which model -> what it says.
    """

    location: LoraLocation
    files: tuple[Header, ...]
    homes: Mapping[str, Header]
    metadata: Mapping[str, str]
    modules: tuple[Module, ...]
    config: AdapterConfig | None
    faults: tuple[Fault, ...]
    trained_on: Mapping[str, str]

    @property
    def name(self) -> str:
        return self.location.name

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        return tuple(tensor for header in self.files for tensor in header.tensors)

    @property
    def n_bytes(self) -> int:
        """Of all files."""
        return sum(header.n_bytes for header in self.files)

    @property
    def paths(self) -> tuple[Path, ...]:
        """All that is read of it."""
        read = (self.location.path, *(header.path for header in self.files))
        return (*dict.fromkeys(read), *([self.location.config] if self.location.config else []))

    def stored_alpha(self, module: Module, rank: int, *, conv: bool) -> StoredAlpha | None:
        """What the module's own tensor says; ``conv``: it is of a convolution with a kernel."""
        if module.alpha_scale is not None:
            return StoredAlpha(module.alpha_scale, finished=True)
        if module.alpha is None:
            return None
        by_root = divides_by_root(self.metadata, module.alpha, rank, conv=conv)
        return StoredAlpha(module.alpha, by_root=by_root)


Keys = Mapping[str, Mapping[Part, list[tuple[ParsedKey, TensorInfo]]]]


def open_adapter(location: LoraLocation) -> Adapter:
    """Read a LoRA's headers, alphas and config.

    Raises ``InputError`` or ``FormatError`` for a broken file, ``CheckpointError`` for an index at odds with
    its shards.
    """
    files = open_files(location.path)
    homes = {tensor.name: header for header in files for tensor in header.tensors}
    keys, faults = _parsed(location, files)
    unread = bool(faults)
    faults += [fault for module, parts in keys.items() for fault in _key_faults(location, module, parts)]
    if not any(fault.kind == "ambiguous" for fault in faults):
        faults += _name_faults(location, keys)
    if not homes:
        faults.append(_fault(location, "empty", None, "holds no tensors"))
    faults += _shard_faults(location)
    metadata, metadata_faults = _metadata(location, files)
    where, documents, document_faults = _documents(location, metadata)
    full = _full_weight_faults(location, keys, documents, unread=unread)
    faults += [*metadata_faults, *document_faults, *full]
    modules, alpha_faults = _modules(location, homes, keys, documents)
    faults += alpha_faults
    for document in documents.values():
        own = [module for module in modules if _document_of(module.name, documents) is document]
        stated = Stated(where, document, own, whole=location.config is not None)
        faults += config_faults(stated, location.name)
    faults += network_faults(metadata, modules, location.name)
    config, config_fault = _config(location, documents, where)
    faults += [config_fault] if config_fault else []
    types = (type_fault(where, document, location.name) for document in documents.values())
    faults = [fault for fault in types if fault] or faults
    said = trained_on(metadata, where, documents)
    return Adapter(location, files, homes, metadata, modules, config, tuple(faults), said)


def is_lora(header: Header) -> bool:
    """Whether most keys of a file are a LoRA's. Full weights and alphas alone do not make it one."""
    n_keys = n_deltas = 0
    for tensor in header.tensors:
        parsed = parse_key(tensor.name)
        delta = is_lora_key(tensor.name)
        n_deltas += delta
        n_keys += delta or (parsed is not None and parsed.part in ALPHAS)
    return n_deltas > 0 and 2 * n_keys > len(header.tensors)


def component_of(module: str) -> str:
    """The component that a module's prefix means, a text encoder by its place in the pipeline."""
    named = spellings(module)[-1].component or "transformer"
    return (MEANINGS[named].component or TEXT_ENCODERS[0]) if named in MEANINGS else named


def _parsed(
    location: LoraLocation, files: Sequence[Header]
) -> tuple[dict[str, dict[Part, list[tuple[ParsedKey, TensorInfo]]]], list[Fault]]:
    """Tensors by module and part, and a fault for every key that says neither."""
    keys: dict[str, dict[Part, list[tuple[ParsedKey, TensorInfo]]]] = {}
    faults: list[Fault] = []
    for tensor in (tensor for header in files for tensor in header.tensors):
        parsed = parse_key(tensor.name)
        if parsed is None:
            faults.append(_unread_key(location, tensor.name))
        else:
            keys.setdefault(parsed.module, {}).setdefault(parsed.part, []).append((parsed, tensor))
    return keys, faults


def _shard_faults(location: LoraLocation) -> Iterator[Fault]:
    found = SHARD_NUMBER.search(location.path.name)
    if found and int(found[2]) > 1:
        text = f"is one of {int(found[2])} files of a LoRA, and the others hold the rest of it"
        yield _fault(location, "shard", None, text, "Give its folder, or its index.")


def _metadata(location: LoraLocation, files: Sequence[Header]) -> tuple[Mapping[str, str], list[Fault]]:
    """Of all files, the first one's word first; they may not say different things about the scale."""
    metadata = {key: text for header in reversed(files) for key, text in header.metadata.items()}
    differing = [
        key
        for key in SAID_BY_ALL
        if len({header.metadata[key] for header in files if key in header.metadata}) > 1
    ]
    text = "its files have different texts of it in their metadata"
    return metadata, [_fault(location, "alpha", key, f"{key}: {text}") for key in differing]


def _full_weight_faults(
    location: LoraLocation, keys: Keys, documents: Mapping[str, Document], *, unread: bool
) -> Iterator[Fault]:
    """Whole weights beside deltas, or those that a configuration names, take their tensors' place."""
    found = {part: tensor for parts in keys.values() for part, [(_, tensor), *_] in parts.items()}
    saved = any(document.get("modules_to_save") for document in documents.values())
    # a key that nobody knows may be the delta
    if not saved and not unread and found.keys() & FULL_PARTS and found.keys() <= {*FULL_PARTS, *ALPHAS}:
        key = next(tensor.name for part, tensor in found.items() if part in FULL_PARTS)
        text = f"{key} is a full weight, and the file holds no delta: it is a checkpoint, not a LoRA"
        yield _fault(location, "unsupported", key, text)


def _unread_key(location: LoraLocation, key: str) -> Fault:
    if kind := unfused_kind(key):
        return _fault(location, "unsupported", key, f"{key} is {kind}, which fuselora does not fuse yet")
    return _fault(location, "unknown_key", key, f"{key} is no LoRA key that fuselora knows")


def _key_faults(
    location: LoraLocation, module: str, parts: Mapping[Part, list[tuple[ParsedKey, TensorInfo]]]
) -> Iterator[Fault]:
    """Ambiguous adapter names, the same part twice, half a pair, and parts with nothing in them."""
    # PEFT writes no name into the trained biases of the layers that it wraps
    names = {
        parsed.name
        for part, found in parts.items()
        for parsed, _ in found
        if part in KIND_OF and (parsed.name or part not in FULL_PARTS)
    }
    if len(names) > 1:
        which = ", ".join(sorted(name or "unnamed" for name in names))
        listed = ", ".join(t.name for part, found in parts.items() if part in KIND_OF for _, t in found)
        text = f"{module} has several adapters ({which}): {listed}"
        yield _fault(location, "ambiguous", module, text, ONE_ADAPTER)
    if parts.keys() >= ALPHAS:
        both = " and ".join(parts[part][0][1].name for part in sorted(ALPHAS))
        yield _fault(location, "alpha", module, f"{module} has an alpha and a finished factor: {both}")
    for part, found in parts.items():
        if len(found) > 1 and len(names) <= 1:
            keys = ", ".join(tensor.name for _, tensor in found)
            yield _fault(location, "twice", module, f"{module} has its {part} twice: {keys}")
    for kind in kinds_in(parts):
        if missing := kind.lacks(parts):
            yield _fault(location, "half_pair", module, f"{module} has no {missing} factor")
        elif excess := kind.excess(parts):
            yield _fault(location, "twice", module, f"{module} gives one factor twice: {', '.join(excess)}")
    for part in _strays(parts):
        yield _fault(location, "half_pair", module, f"{module} has {part} without what it goes with")
    for part, found in parts.items():
        if part not in ALPHAS:
            yield from (_empty(location, tensor) for _, tensor in found if tensor.n_elements == 0)
        if part in ("down", "up"):
            yield from (_no_matrix(location, tensor) for _, tensor in found if len(tensor.shape) < 2)


def _strays(parts: Mapping[Part, object]) -> list[Part]:
    """Parts that no kind in the module takes, such as a core without factors, or a magnitude."""
    taken = {part for kind in kinds_in(parts) for part in kind.parts}
    modifiers = {suffix.part for suffix in MODIFIERS} - MAGNITUDES
    return sorted(parts.keys() - taken - modifiers)


def _name_faults(location: LoraLocation, keys: Keys) -> Iterator[Fault]:
    """Two adapters in one file, each with modules of its own."""
    parsed = [one for parts in keys.values() for found in parts.values() for one in found]
    names = {key.name: tensor.name for key, tensor in reversed(parsed) if key.name}
    if len(names) > 1:
        listed = ", ".join(f"{name} ({names[name]})" for name in sorted(names))
        text = f"holds several adapters, each with modules of its own: {listed}"
        yield _fault(location, "ambiguous", None, text, ONE_ADAPTER)


def _no_matrix(location: LoraLocation, tensor: TensorInfo) -> Fault:
    text = f"{tensor.name} is no matrix, its shape is {list(tensor.shape)}"
    return _fault(location, "shape", tensor.name, text)


def _empty(location: LoraLocation, tensor: TensorInfo) -> Fault:
    text = f"{tensor.name} is empty, its shape is {list(tensor.shape)}"
    hint = "A sharded training run saved a part that it did not hold; save the LoRA again."
    return _fault(location, "empty", tensor.name, text, hint)


def _modules(
    location: LoraLocation,
    homes: Mapping[str, Header],
    keys: Keys,
    documents: Mapping[str, Document],
) -> tuple[tuple[Module, ...], list[Fault]]:
    modules: list[Module] = []
    faults: list[Fault] = []
    with ExitStack() as opened:
        numbers = _Numbers(location, homes, opened, {})
        for name, parts in keys.items():
            tensors = {part: found[0][1] for part, found in parts.items()}
            said, wrong = numbers.of(tensors)
            faults += wrong
            dialect = next(parts[part][0][0].dialect for part in (*KIND_OF, *parts) if part in parts)
            modules.append(_module(name, dialect, tensors, said, _document_of(name, documents)))
    return tuple(modules), faults


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Reads the parts that are a few numbers; every file is opened once."""

    location: LoraLocation
    homes: Mapping[str, Header]
    opened: ExitStack
    streams: dict[Path, BinaryIO]

    def of(self, tensors: Mapping[Part, TensorInfo]) -> tuple[dict[Part, tuple[float, ...]], list[Fault]]:
        said: dict[Part, tuple[float, ...]] = {}
        faults = []
        for part in NUMBERS.keys() & tensors.keys():
            tensor = tensors[part]
            header = self.homes[tensor.name]
            try:
                with reading(header.path):
                    said[part] = NUMBERS[part](self._stream(header.path), header, tensor, part)
            except BadNumber as error:
                text = f"{tensor.name}: {error}"
                faults.append(_fault(self.location, "alpha", tensor.name, text))
        return said, faults

    def _stream(self, path: Path) -> BinaryIO:
        if path not in self.streams:
            self.streams[path] = self.opened.enter_context(path.open("rb"))
        return self.streams[path]


def _module(
    name: str,
    dialect: str,
    tensors: Mapping[Part, TensorInfo],
    said: Mapping[Part, tuple[float, ...]],
    document: Document | None,
) -> Module:
    first = {part: numbers[0] for part, numbers in said.items()}
    on_input = bool(first["on_input"]) if "on_input" in first else None
    return Module(
        name=name,
        dialect=dialect,
        parts=tensors,
        alpha=first.get("alpha"),
        settings=settings_of(document, name, first.get("alpha"), on_input),
        reshape=tuple(map(int, said["reshape_weight"])) if "reshape_weight" in said else None,
        alpha_scale=first.get("alpha_scale"),
    )


def _documents(
    location: LoraLocation, metadata: Mapping[str, str]
) -> tuple[str, Mapping[str, Document], list[Fault]]:
    """The configurations of a LoRA by component, "" for all of them, and where they stand."""
    if location.config is not None:
        return location.config.name, {"": read_json(location.config)}, []
    try:
        return "lora_adapter_metadata", peft_configs(metadata), []
    except BadNumber as error:
        return "", {}, [_fault(location, "alpha", error.name, str(error))]


def _document_of(module: str, documents: Mapping[str, Document]) -> Document | None:
    return document_for(component_of(module), documents) if documents else None


def _config(
    location: LoraLocation, documents: Mapping[str, Document], where: str
) -> tuple[AdapterConfig | None, Fault | None]:
    """An adapter folder's rules of scale. Those in a header count later, as metadata."""
    try:
        found = [config_of(document) for document in documents.values()]
    except BadNumber as error:
        return None, _fault(location, "alpha", error.name, f"{where}: {error}")
    return (found[0] if location.config is not None else None), None


def _fault(
    location: LoraLocation, kind: str, key: str | None, message: str, hint: str | None = None
) -> Fault:
    return Fault(kind, message, path=location.name, key=key, hint=hint)
