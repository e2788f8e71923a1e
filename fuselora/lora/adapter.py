"""A LoRA file -> its modules. Header, alphas and configuration only; no weights, no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fuselora.errors import Fault
from fuselora.header import Header, TensorInfo, read_header
from fuselora.jsonfile import read_json
from fuselora.lora.grammar import ParsedKey, Part, parse_key, unfused_kind
from fuselora.lora.scale import AdapterConfig, BadAlpha, config_of, peft_configs, read_alpha
from fuselora.reading import reading

if TYPE_CHECKING:
    from fuselora.resolve import LoraLocation

# What a PEFT config can ask for that would silently change the result if it were ignored.
UNFUSED_CONFIG = (
    "use_dora", "use_qalora", "lora_bias", "fan_in_fan_out", "modules_to_save",
    "target_parameters", "layer_replication", "trainable_token_indices", "use_bdlora",
    "alora_invocation_tokens", "arrow_config", "kasa_config", "monteclora_config",
)  # fmt: skip
# The parts that name a module's dialect, the most telling first.
TELLING: tuple[Part, ...] = ("down", "up", "diff", "diff_b", "diff_m", "alpha")
# Ways to start a training that take the adapter's first value out of the base's weights.
CHANGED_BASE_INITS = ("pissa", "olora", "loftq", "corda", "lora_ga")


@dataclass(frozen=True, slots=True)
class Module:
    """One module of a LoRA as its keys spell it. A pair has ``down`` (rank, in) and ``up`` (out, rank)."""

    name: str
    dialect: str
    parts: Mapping[Part, TensorInfo]
    alpha: float | None

    @property
    def is_pair(self) -> bool:
        return "down" in self.parts and "up" in self.parts

    @property
    def rank(self) -> int:
        return self.parts["down"].shape[0]


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA file: every tensor is in exactly one module, or named by one of ``faults``."""

    location: LoraLocation
    header: Header
    modules: tuple[Module, ...]
    config: AdapterConfig | None
    faults: tuple[Fault, ...]

    @property
    def name(self) -> str:
        return self.location.name


def open_adapter(location: LoraLocation) -> Adapter:
    """Read a LoRA's header, alphas and config. Raises ``InputError`` or ``FormatError`` for a broken file."""
    header = read_header(location.path)
    faults: list[Fault] = []
    keys: dict[str, dict[Part, list[tuple[ParsedKey, TensorInfo]]]] = {}
    for tensor in header.tensors:
        parsed = parse_key(tensor.name)
        if parsed is None:
            faults.append(_unread_key(location, tensor.name))
        else:
            keys.setdefault(parsed.module, {}).setdefault(parsed.part, []).append((parsed, tensor))
    faults += [fault for module, parts in keys.items() for fault in _key_faults(location, module, parts)]
    if not header.tensors:
        faults.append(_fault(location, "empty", None, "holds no tensors"))
    config, config_faults = _config(location, header)
    modules, alpha_faults = _modules(location, header, keys)
    return Adapter(location, header, modules, config, (*faults, *config_faults, *alpha_faults))


def _unread_key(location: LoraLocation, key: str) -> Fault:
    if kind := unfused_kind(key):
        return _fault(location, "unsupported", key, f"{key} is {kind}, which fuselora does not fuse yet")
    return _fault(location, "unknown_key", key, f"{key} is no LoRA key that fuselora knows")


def _key_faults(
    location: LoraLocation, module: str, parts: Mapping[Part, list[tuple[ParsedKey, TensorInfo]]]
) -> Iterator[Fault]:
    """Ambiguous adapter names, the same part twice, half a pair, and parts with nothing in them."""
    names = {parsed.name for part in ("down", "up") for parsed, _ in parts.get(part, ())}
    if len(names) > 1:
        which = ", ".join(sorted(names))
        yield _fault(location, "ambiguous", module, f"{module} has several adapters ({which})",
                     "Save one adapter per file; fuselora never picks one of several.")  # fmt: skip
    for part, found in parts.items():
        if len(found) > 1 and len(names) == 1:
            keys = ", ".join(tensor.name for _, tensor in found)
            yield _fault(location, "twice", module, f"{module} has its {part} twice: {keys}")
    if ("down" in parts) != ("up" in parts):
        missing = "up" if "down" in parts else "down"
        yield _fault(location, "half_pair", module, f"{module} has no {missing} factor")
    for part, found in parts.items():
        if part != "alpha":
            yield from (_empty(location, tensor) for _, tensor in found if tensor.n_elements == 0)
        if part in ("down", "up"):
            yield from (_no_matrix(location, tensor) for _, tensor in found if len(tensor.shape) < 2)


def _no_matrix(location: LoraLocation, tensor: TensorInfo) -> Fault:
    text = f"{tensor.name} is no matrix, its shape is {list(tensor.shape)}"
    return _fault(location, "shape", tensor.name, text)


def _empty(location: LoraLocation, tensor: TensorInfo) -> Fault:
    text = f"{tensor.name} is empty, its shape is {list(tensor.shape)}"
    hint = "A sharded training run saved a part that it did not hold; save the LoRA again."
    return _fault(location, "empty", tensor.name, text, hint)


def _modules(
    location: LoraLocation,
    header: Header,
    keys: Mapping[str, Mapping[Part, list[tuple[ParsedKey, TensorInfo]]]],
) -> tuple[tuple[Module, ...], list[Fault]]:
    modules, faults = [], []
    with reading(location.path), location.path.open("rb") as stream:
        for name, parts in keys.items():
            tensors = {part: found[0][1] for part, found in parts.items()}
            dialect = next(parts[part][0][0].dialect for part in TELLING if part in parts)
            alpha = None
            if "alpha" in tensors:
                try:
                    alpha = read_alpha(stream, header, tensors["alpha"])
                except BadAlpha as error:
                    key = tensors["alpha"].name
                    faults.append(_fault(location, "alpha", key, f"{key}: {error}"))
            modules.append(Module(name, dialect, tensors, alpha))
    return tuple(modules), faults


def _config(location: LoraLocation, header: Header) -> tuple[AdapterConfig | None, list[Fault]]:
    """An adapter folder's config, and a fault for each setting that would be ignored, the header's too."""
    faults: list[Fault] = []
    try:
        if location.config is not None:
            document = read_json(location.config)
            faults += _ignored_settings(location, location.config.name, document)
            return config_of(document), faults
        for nested in peft_configs(header.metadata).values():
            faults += _ignored_settings(location, "lora_adapter_metadata", nested)
    except BadAlpha as error:
        faults.append(_fault(location, "alpha", "lora_alpha", str(error)))
    return None, faults


def _ignored_settings(location: LoraLocation, where: str, document: Mapping[str, object]) -> Iterator[Fault]:
    for key in UNFUSED_CONFIG:
        if document.get(key):
            yield _fault(
                location, "unsupported", key, f"{where}: sets {key}, which fuselora does not fuse yet"
            )
    init = document.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(CHANGED_BASE_INITS):
        text = f"{where}: the adapter was trained against a base changed by {init!r}"
        yield _fault(location, "changed_base", "init_lora_weights", text,
                     "Convert it to a plain LoRA with PEFT before fusing.")  # fmt: skip


def _fault(
    location: LoraLocation, kind: str, key: str | None, message: str, hint: str | None = None
) -> Fault:
    return Fault(kind, message, path=location.name, key=key, hint=hint)
