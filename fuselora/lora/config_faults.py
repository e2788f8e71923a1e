"""A PEFT configuration held against the tensors beside it: what either says has to be in the other.

Facts from PEFT's ``LoraConfig`` and its kin (peft 0.21).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fuselora.bounded_regex import BadPattern, whole
from fuselora.errors import Fault
from fuselora.escape import short
from fuselora.kinds.kind import MAGNITUDES
from fuselora.kinds.replacement import FULL_PARTS
from fuselora.kinds.settings import owner
from fuselora.lora.config import Document, config_of, network_of, peft_type
from fuselora.lora.grammar import spellings
from fuselora.lora.scale import BadNumber
from fuselora.plural import many

if TYPE_CHECKING:
    from fuselora.lora.adapter import Module

# What each peft_type makes of its modules; every other peft_type is refused by its name.
KINDS_OF: Mapping[str, frozenset[str]] = {
    "LORA": frozenset({"pair", "transposed", "split_pair", "experts", "embedding", "pair_bias"}),
    "LOHA": frozenset({"loha"}),
    "LOKR": frozenset({"lokr"}),
    "IA3": frozenset({"peft_ia3", "peft_ia3_b"}),
    "OFT": frozenset({"peft_oft", "peft_oft_embedding"}),
    "BOFT": frozenset({"peft_boft"}),
}
# What a configuration can ask for that would silently change the result if it were ignored.
UNFUSED_CONFIG = (
    "use_qalora", "layer_replication", "trainable_token_indices", "use_bdlora", "alora_invocation_tokens",
    "arrow_config", "kasa_config", "monteclora_config",
)  # fmt: skip
# The same, but for LoRAs, which are fused so.
STORAGE_CONFIG = ("fan_in_fan_out", "target_parameters")
# Ways to start a training that take the adapter's first value out of the base's weights. The others
# ("eva", "orthogonal", "gaussian", "mica") start with a product of zero.
CHANGED_BASE_INITS = ("pissa", "olora", "loftq", "corda", "lora_ga")
# Whose biases are trained as well.
TRAINED_BIASES = ("all", "lora_only", "boft_only", "oft_only")


@dataclass(frozen=True, slots=True)
class Stated:
    """A configuration, where it stands, and the modules that it speaks of.

    ``whole``: of the whole adapter, all that PEFT saved; what diffusers keeps in a header is of the layers
    alone.
    """

    where: str
    document: Document
    modules: Sequence[Module]
    whole: bool

    def lists(self, name: str) -> tuple[str, ...]:
        """A setting that is a list of names; PEFT also takes one name alone."""
        value = self.document.get(name)
        listed = [value] if isinstance(value, str) else value if isinstance(value, list) else []
        return tuple(item for item in listed if isinstance(item, str))


def type_fault(where: str, document: Document, path: str) -> Fault | None:
    """A method that is not fused. Of its tensors nothing else can be said: their names are that method's."""
    kind = peft_type(document)
    if kind in KINDS_OF:
        return None
    text = f"is an adapter of type {kind}, which fuselora does not fuse (by its {where})"
    hint = f"It fuses {', '.join(list(KINDS_OF)[:-1])} and {list(KINDS_OF)[-1]}."
    return Fault("unsupported", text, path=path, key="peft_type", hint=hint)


def config_faults(stated: Stated, path: str) -> Iterator[Fault]:
    """Every disagreement; ``path`` is the LoRA's name."""
    if peft_type(stated.document) not in KINDS_OF:
        return  # ``type_fault``
    for check in (
        _types, _patterns, _unfused, _changed_base, _other_kinds, _ranks, _magnitudes, _pair_biases,
        _saved_modules, _parameters,
    ):  # fmt: skip
        for code, key, text, hint in check(stated):
            yield _fault(stated, path, code, key, text, hint)


Row = tuple[str, str, str, str | None]
REPAIR = "Restore the file or its adapter_config.json: the two were not saved together."


# settings that are read, by the type that each must have
SWITCHES = (
    "use_rslora", "use_dora", "lora_bias", "fan_in_fan_out", "block_share", "coft", "use_cayley_neumann",
)  # fmt: skip
PATTERNS = ("rank_pattern", "alpha_pattern")
LISTS = ("modules_to_save", "target_parameters", "feedforward_modules")


def _types(stated: Stated) -> Iterator[Row]:
    """A setting of another type would count as if it were not there."""
    wanted: dict[str, tuple[tuple[type, ...], str]] = {
        **dict.fromkeys(SWITCHES, ((bool,), "true or false")),
        **dict.fromkeys(PATTERNS, ((dict,), "an object")),
        **dict.fromkeys(LISTS, ((list, str), "a list")),
    }
    unread = () if peft_type(stated.document) == "LORA" else STORAGE_CONFIG
    for key, (types, words) in wanted.items():
        value = stated.document.get(key)
        if value is not None and type(value) not in types and key not in unread:
            yield "config", key, f"says {key} {short(value)}, which is not {words}", None
    if isinstance(stated.document.get("lora_alpha"), bool):
        yield "config", "lora_alpha", "says a lora_alpha that is no number", None


def _patterns(stated: Stated) -> Iterator[Row]:
    """The one list that may be a regular expression; those of ranks and alphas are looked at with them."""
    value = stated.document.get("feedforward_modules")
    if isinstance(value, str) and peft_type(stated.document) == "IA3":
        try:
            whole(value)
        except BadPattern as error:
            yield "config", "feedforward_modules", f"says feedforward_modules {short(value)}, {error}", None


def _unfused(stated: Stated) -> Iterator[Row]:
    document = stated.document
    lora = peft_type(document) == "LORA"
    for key in (*UNFUSED_CONFIG, *(() if lora else STORAGE_CONFIG)):
        if document.get(key):
            yield "unsupported", key, f"sets {key}, which fuselora does not fuse yet", None


def _changed_base(stated: Stated) -> Iterator[Row]:
    init = stated.document.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(CHANGED_BASE_INITS):
        text = f"the adapter was trained against a base changed by {short(init)}"
        hint = (
            "Convert it to a plain LoRA where it was trained: PEFT's "
            "save_pretrained(..., path_initial_model_for_weight_conversion=...)."
        )
        yield "changed_base", "init_lora_weights", text, hint


def _other_kinds(stated: Stated) -> Iterator[Row]:
    """Tensors of another method than the one that the configuration is of."""
    own = peft_type(stated.document)
    for other, kinds in KINDS_OF.items():
        found = [m for m in stated.modules if any(kind.name in kinds for kind in m.kinds)]
        if other != own and found:
            text = f"says {own}, and {many(len(found), 'module')} of {other}, such as {found[0].name}"
            yield "config", "peft_type", text, REPAIR


def _ranks(stated: Stated) -> Iterator[Row]:
    """Each module's rank is r, or that of the first pattern that fits it."""
    try:
        config = config_of(stated.document)
    except BadNumber:
        return  # a fault of its own
    for module in stated.modules if config else ():
        rank, said = module.rank, config.rank_of(_plain(module)) if config else None
        if rank and said and rank != said:
            text = f"says rank {said} for {module.name}, and its factors have {rank}"
            yield "config", module.name, text, REPAIR


def _magnitudes(stated: Stated) -> Iterator[Row]:
    said = stated.document.get("use_dora")
    for module in _layers(stated, "pair", "transposed", "embedding"):
        has = not MAGNITUDES.isdisjoint(module.parts)
        if said is True and not has:
            text = f"says use_dora, and {module.name} has no lora_magnitude_vector"
            yield "config", module.name, text, REPAIR
        if said is False and has:
            text = f"says that use_dora is off, and {module.name} has a magnitude"
            yield "config", module.name, text, REPAIR


def _pair_biases(stated: Stated) -> Iterator[Row]:
    said = stated.document.get("lora_bias")
    for module in _layers(stated, "pair", "transposed", "pair_bias"):
        has = "pair_bias" in module.parts
        if said is True and not has:
            yield "config", module.name, f"says lora_bias, and {module.name} has no lora_B.bias", REPAIR
        if said is False and has:
            text = f"says that lora_bias is off, and {module.name} has a lora_B.bias"
            yield "config", module.name, text, REPAIR


def _saved_modules(stated: Stated) -> Iterator[Row]:
    """Whole weights are those of ``modules_to_save``, or trained biases."""
    listed = stated.lists("modules_to_save")
    full = [m for m in stated.modules if not FULL_PARTS.isdisjoint(m.parts) and "on_input" not in m.parts]
    for name in listed:
        if not any(_is_inside(module, name) for module in full):
            text = f"names {name} in modules_to_save, and there is no whole weight of it"
            yield "config", name, text, REPAIR
    if not stated.whole or "modules_to_save" not in stated.document:
        return
    trained = stated.document.get("bias") in TRAINED_BIASES
    for module in full:
        parts = FULL_PARTS & module.parts.keys() - ({"bias"} if trained else set())
        if parts and not any(_is_inside(module, name) for name in listed):
            key = module.parts[min(parts)].name
            text = f"names nothing in modules_to_save that {key} is part of"
            yield "config", key, text, REPAIR


def _parameters(stated: Stated) -> Iterator[Row]:
    """Every target has a pair, whose key names the module that owns it."""
    owners = [f".{owner(module.name)}" for module in stated.modules if "down" in module.parts]
    for target in stated.lists("target_parameters"):
        parent = target.rpartition(".")[0]
        if not any(name.endswith(f".{parent}" if parent else "") for name in owners):
            text = f"names {target} in target_parameters, and there is no pair of it"
            yield "config", target, text, REPAIR


def network_faults(metadata: Mapping[str, str], modules: Sequence[Module], path: str) -> Iterator[Fault]:
    """What kohya's trainers say of a network that LyCORIS made, against its tensors."""
    try:
        network = network_of(metadata)
    except BadNumber:
        return  # who needs the arguments says so
    decomposed = [m for m in modules if any(k.name in ("pair", "loha", "lokr") for k in m.kinds)]
    plain = all(MAGNITUDES.isdisjoint(module.parts) for module in decomposed)
    if network.is_lycoris and network.has("dora_wd") and decomposed and plain:
        text = "ss_network_args: says dora_wd, and no module has a dora_scale"
        hint = "The file is not whole; save it again."
        yield Fault("config", text, path=path, key="dora_wd", hint=hint)
    full = [m for m in decomposed if m.rank is None and any(k.name == "lokr" for k in m.kinds)]
    if network.use_rslora and full:
        text = f"{full[0].name} is a LoKr with both factors full that was trained with rs_lora"
        why = "LyCORIS trains it at sqrt(network_dim) times the scale that it merges it at"
        yield Fault("unsupported", f"{text}: {why}", path=path, key=full[0].name)


def _layers(stated: Stated, *kinds: str) -> Iterator[Module]:
    """Modules with one of these kinds; of targeted parameters PEFT trains pairs alone."""
    return (m for m in stated.modules if not m.settings.parameters and any(k.name in kinds for k in m.kinds))


def _is_inside(module: Module, name: str) -> bool:
    return f".{name}." in f".{_plain(module)}."


def _plain(module: Module) -> str:
    return spellings(module.name)[-1].name


def _fault(stated: Stated, path: str, code: str, key: str, text: str, hint: str | None = None) -> Fault:
    return Fault(code, f"{stated.where}: {text}", path=path, key=key, hint=hint)
