"""What says how a LoRA is scaled beside its tensors: an adapter's configuration, and a file's metadata.

PEFT's patterns and rsLoRA (alpha / sqrt(rank)) follow its ``LoraConfig``, the ``ss_`` keys kohya's trainers
(sd-scripts' ``networks/lora.py``) and LyCORIS' ``kohya.py``. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fuselora.bounded_regex import BadPattern, tail_of
from fuselora.escape import short
from fuselora.jsonfile import object_in
from fuselora.lora.scale import BadNumber, finite
from fuselora.text_encoders import TEXT_ENCODERS

METADATA_KEYS = ("transformer.lora_alpha", "lora_alpha", "alpha", "ss_network_alpha")
# PEFT's configurations whose alpha is called that
LYCORIS_TYPES = ("LOHA", "LOKR")
# those whose r is the rank of the factors
RANKED_TYPES = ("LORA", *LYCORIS_TYPES)
# the alpha of those three where their configuration does not say it (peft 0.21)
PEFT_ALPHA = 8.0
# what shows that a header holds a ``LoraConfig``
CONFIG_KEYS = ("lora_alpha", "r")
CONFIG_PREFIXES = ("transformer.", "transformer_2.", "unet.", *(f"{name}." for name in TEXT_ENCODERS), "")
# an alpha kept in bf16 is no further off
SAME_ALPHA = 2.0**-7

Document = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The rules of scale that a configuration or a file's metadata gives.

    ``conv_alpha`` is for convolutions with a kernel, where they have one of their own. ``stated_rank`` and
    ``rank_pattern`` count where the factors have none: PEFT's LoKr with both full. ``by_default``:
    ``lora_alpha`` is not said but PEFT's own.
    """

    lora_alpha: float
    use_rslora: bool = False
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    stated_rank: int | None = None
    rank_pattern: Mapping[str, float] = field(default_factory=dict)
    conv_alpha: float | None = None
    by_default: bool = False

    def alpha_of(self, module: str, *, conv: bool = False) -> float:
        general = self.lora_alpha if self.conv_alpha is None or not conv else self.conv_alpha
        return _by_pattern(self.alpha_pattern, module, general)

    def rank_of(self, module: str) -> int | None:
        """What the configuration says, whatever the factors are."""
        if self.stated_rank is None:
            return None
        return int(_by_pattern(self.rank_pattern, module, self.stated_rank))

    def divisor(self, rank: int) -> float:
        return math.sqrt(rank) if self.use_rslora else rank


def config_of(document: Document) -> AdapterConfig | None:
    """The scale rules of an ``adapter_config.json``; None where it is not PEFT's, or without alpha.

    One that is not said is PEFT's default; ``null`` is no number to PEFT either. Raises ``BadNumber``.
    """
    kind = peft_type(document)
    if kind not in RANKED_TYPES:
        return None
    key = "alpha" if kind in LYCORIS_TYPES else "lora_alpha"
    if not document.keys() & {key, "peft_type", "r"}:
        return None
    # PEFT divides by r whatever a LoKr's factors are, so that one has to say it
    ranked = kind == "LOKR" or document.get("r") is not None
    return AdapterConfig(
        lora_alpha=finite(document.get(key, PEFT_ALPHA), key),
        use_rslora=kind == "LORA" and document.get("use_rslora") is True,
        alpha_pattern=_pattern(document, "alpha_pattern"),
        stated_rank=_rank(document.get("r"), "r") if ranked else None,
        rank_pattern=_pattern(document, "rank_pattern", _rank) if ranked else {},
        by_default=key not in document,
    )


def peft_type(document: Document) -> str:
    """As PEFT spells it; without one it is a LoRA."""
    found = document.get("peft_type")
    return "LORA" if found is None else found.upper() if isinstance(found, str) else short(found)


def peft_configs(metadata: Mapping[str, str]) -> Mapping[str, Document]:
    """Each ``LoraConfig`` that diffusers keeps in a file's metadata, by component, "" for one of none.

    Raises ``BadNumber`` when it is there but is no JSON object.
    """
    text = metadata.get("lora_adapter_metadata")
    if text is None:
        return {}
    document = object_in(text)
    if document is None:
        raise BadNumber("lora_adapter_metadata is not a JSON object", "lora_adapter_metadata")
    return {
        prefix.removesuffix("."): {k[len(prefix) :]: v for k, v in document.items() if k.startswith(prefix)}
        for prefix in CONFIG_PREFIXES
        if any(prefix + key in document for key in CONFIG_KEYS)
    }


def document_for(component: str, documents: Mapping[str, Document]) -> Document | None:
    """Its own; else for a transformer that of another one, and for a text encoder one of no component."""
    if component in documents:
        return documents[component]
    if component in TEXT_ENCODERS:
        return documents.get("")
    return next((document for name, document in documents.items() if name not in TEXT_ENCODERS), None)


def config_of_metadata(metadata: Mapping[str, str], component: str = "") -> AdapterConfig | None:
    """The scale rules for ``component`` in a file's ``__metadata__``; None when it gives no alpha.

    Raises ``BadNumber``.
    """
    document = document_for(component, peft_configs(metadata))
    if document is not None:
        return config_of(document)
    key = next((key for key in _alpha_keys(component) if said(metadata.get(key))), None)
    if key is None:
        return None
    alpha = finite(metadata[key], key)
    if key != "ss_network_alpha":
        return AdapterConfig(alpha)
    network = network_of(metadata)
    conv_alpha = network.conv_alpha(alpha)
    return AdapterConfig(alpha, network.use_rslora, conv_alpha=conv_alpha if conv_alpha != alpha else None)


def _alpha_keys(component: str) -> tuple[str, ...]:
    """The component's own first; a transformer may use the other one's, a text encoder none."""
    own = f"{component}.lora_alpha"
    rest = METADATA_KEYS[1:] if component in TEXT_ENCODERS else METADATA_KEYS
    return (own, *rest) if component else rest


def said(text: str | None) -> bool:
    """kohya's trainers write the text "None" for what was not set."""
    return text not in (None, "None")


@dataclass(frozen=True, slots=True)
class Network:
    """``ss_network_module`` and ``ss_network_args``: what trained the file, and its arguments as texts."""

    module: str
    args: Mapping[str, str]

    @property
    def is_lycoris(self) -> bool:
        return self.module.startswith("lycoris")

    @property
    def use_rslora(self) -> bool:
        return self.is_lycoris and self.has("rs_lora")

    def has(self, switch: str) -> bool:
        """Whether an argument that is on or off is on."""
        return self.args.get(switch, "").lower() in ("true", "1", "yes", "on")

    def conv_alpha(self, alpha: float) -> float:
        """Of convolutions with a kernel, where all else has ``alpha``. Raises ``BadNumber``."""
        own = self.args.get("conv_alpha")
        if said(own) and own is not None:
            found = finite(own, "conv_alpha")
            return alpha if self.is_lycoris and not found else found
        return 1.0 if said(self.args.get("conv_dim")) and not self.is_lycoris else alpha


def network_of(metadata: Mapping[str, str]) -> Network:
    """Of a file's ``__metadata__``. Raises ``BadNumber`` for arguments that are no JSON object."""
    text = metadata.get("ss_network_args")
    args = object_in(text) if text is not None and said(text) and text != "null" else {}
    if args is None:
        raise BadNumber("ss_network_args is not a JSON object", "ss_network_args")
    texts = {name: str(value) for name, value in args.items() if value is not None}
    return Network(metadata.get("ss_network_module", ""), texts)


def divides_by_root(metadata: Mapping[str, str], alpha: float, rank: int, *, conv: bool) -> bool:
    """Whether a stored ``alpha`` is still to be divided by sqrt(rank), as LyCORIS' ``rs_lora`` trains.

    LyCORIS stores alpha * sqrt(rank), so that all who divide by the rank are right; its GLoRA and its first
    releases store alpha itself, which is seen from ``ss_network_alpha``. Metadata that cannot be read is no
    reason: nobody needs it beside a stored alpha.
    """
    try:
        network = network_of(metadata)
        given = metadata.get("ss_network_alpha")
        if rank < 2 or not network.use_rslora or given is None or not said(given):
            return False
        trained = finite(given)
        trained = network.conv_alpha(trained) if conv else trained
    except BadNumber:
        return False
    # 0 means the rank to LyCORIS
    return math.isclose(alpha, trained or rank, rel_tol=SAME_ALPHA)


def _rank(value: object, name: str) -> int:
    rank = finite(value, name)
    if rank < 1 or rank != int(rank):
        raise BadNumber(f"{name} {short(value)} is no whole number above 0", name)
    return int(rank)


def _by_pattern(patterns: Mapping[str, float], module: str, default: float) -> float:
    """The first pattern that is the module's whole name, or a dotted tail of it."""
    return next((v for pattern, v in patterns.items() if tail_of(pattern)(module)), default)


def _pattern(
    document: Document, name: str, read: Callable[[object, str], float] = finite
) -> Mapping[str, float]:
    """PEFT reads each key as a regular expression."""
    value = document.get(name)
    found = {}
    for pattern, number in value.items() if isinstance(value, dict) else ():
        try:
            tail_of(pattern)
        except BadPattern as error:
            raise BadNumber(f"{name} has the key {short(pattern)}, {error}", name) from None
        found[pattern] = read(number, name)
    return found
