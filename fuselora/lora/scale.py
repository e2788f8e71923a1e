"""The scale of a pair: strength * alpha / rank, and where its alpha came from. Standard library only.

Order of sources: the file's own alpha tensor, ``--alpha``, adapter_config.json, the file's metadata,
and else the rank itself. PEFT's patterns and rsLoRA (alpha / sqrt(rank)) follow PEFT's ``LoraConfig``.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import BinaryIO, Literal

from fuselora.header import Header, TensorInfo

AlphaSource = Literal["tensor", "option", "adapter_config", "metadata", "rank"]
SCALAR_FORMATS: Mapping[str, str] = {
    "F64": "<d", "F32": "<f", "F16": "<e", "I64": "<q", "U64": "<Q", "I32": "<i", "U32": "<I",
    "I16": "<h", "U16": "<H", "I8": "<b", "U8": "<B",
}  # fmt: skip
METADATA_KEYS = ("transformer.lora_alpha", "lora_alpha", "alpha", "ss_network_alpha")
CONFIG_PREFIXES = ("transformer.", "transformer_2.", "unet.", "")


class BadAlpha(ValueError):
    """An alpha that is not one finite number; the text says why."""


@dataclass(frozen=True, slots=True)
class Alpha:
    """``value`` as stored; ``source`` says where it stood; ``divisor`` is rank or sqrt(rank)."""

    value: float
    source: AlphaSource
    divisor: float

    @property
    def ratio(self) -> float:
        return self.value / self.divisor


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The parts of a PEFT ``LoraConfig`` that decide the scale."""

    lora_alpha: float
    use_rslora: bool = False
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

    def alpha_of(self, module: str) -> float:
        for pattern, alpha in self.alpha_pattern.items():
            if re.fullmatch(rf"(.*\.)?({pattern})", module):
                return alpha
        return self.lora_alpha

    def divisor(self, rank: int) -> float:
        return math.sqrt(rank) if self.use_rslora else rank


def read_alpha(stream: BinaryIO, header: Header, tensor: TensorInfo) -> float:
    """The number in an alpha tensor of any numeric dtype and of one element. Raises ``BadAlpha``."""
    if tensor.n_elements != 1:
        raise BadAlpha(f"alpha is not one number but has shape {list(tensor.shape)}")
    stream.seek(header.data_start + tensor.start)
    return finite(_scalar(stream.read(tensor.n_bytes), tensor.dtype))


def finite(value: float | str) -> float:
    """``value`` as a finite float. Raises ``BadAlpha``."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise BadAlpha(f"alpha {value!r} is not a number") from None
    if not math.isfinite(number):
        raise BadAlpha(f"alpha is {number}, not a finite number")
    return number


def config_of(document: Mapping[str, object]) -> AdapterConfig | None:
    """The scale rules of an ``adapter_config.json``; None when it gives no alpha. Raises ``BadAlpha``."""
    if document.get("lora_alpha") is None:
        return None
    return AdapterConfig(
        lora_alpha=finite(document["lora_alpha"]),  # type: ignore[arg-type]
        use_rslora=document.get("use_rslora") is True,
        alpha_pattern=_alpha_pattern(document.get("alpha_pattern")),
    )


def _alpha_pattern(value: object) -> Mapping[str, float]:
    """PEFT reads each key as a regular expression."""
    found = {}
    for pattern, alpha in value.items() if isinstance(value, dict) else ():
        try:
            re.compile(pattern)
        except re.error as error:
            raise BadAlpha(f"alpha_pattern has the key {pattern!r}, no regular expression: {error}") from None
        found[pattern] = finite(alpha)
    return found


def peft_configs(metadata: Mapping[str, str]) -> Mapping[str, Mapping[str, object]]:
    """Each ``LoraConfig`` that diffusers keeps in a file's metadata, by component, "" for one of none.

    Raises ``BadAlpha`` when it is there but is no JSON object.
    """
    text = metadata.get("lora_adapter_metadata")
    if text is None:
        return {}
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise BadAlpha("lora_adapter_metadata is not a JSON object")
    return {
        prefix.removesuffix("."): {k[len(prefix) :]: v for k, v in document.items() if k.startswith(prefix)}
        for prefix in CONFIG_PREFIXES
        if prefix + "lora_alpha" in document
    }


def config_of_metadata(metadata: Mapping[str, str], component: str = "") -> AdapterConfig | None:
    """The scale rules for ``component`` in a file's ``__metadata__``; None when it gives no alpha.

    Raises ``BadAlpha``.
    """
    if documents := peft_configs(metadata):
        return config_of(documents.get(component) or next(iter(documents.values())))
    for key in METADATA_KEYS:
        # kohya's trainers write the text "None" when no alpha was set
        if metadata.get(key, "None") != "None":
            return AdapterConfig(finite(metadata[key]))
    return None


def resolve_alpha(
    module: str,
    rank: int,
    *,
    stored: float | None,
    option: float | None,
    config: AdapterConfig | None,
    metadata: Callable[[], AdapterConfig | None],
) -> Alpha:
    """The alpha of one module by the order of sources. Raises ``BadAlpha`` from ``metadata``."""
    if stored is not None:
        return Alpha(stored, "tensor", rank)
    if option is not None:
        return Alpha(option, "option", rank)
    if config is not None:
        return Alpha(config.alpha_of(module), "adapter_config", config.divisor(rank))
    if (found := metadata()) is not None:
        return Alpha(found.alpha_of(module), "metadata", found.divisor(rank))
    return Alpha(rank, "rank", rank)


def _scalar(raw: bytes, dtype: str) -> float:
    if dtype == "BF16":
        return float(struct.unpack("<f", b"\0\0" + raw)[0])
    if dtype not in SCALAR_FORMATS:
        raise BadAlpha(f"alpha has the dtype {dtype}, which holds no number")
    return float(struct.unpack(SCALAR_FORMATS[dtype], raw)[0])
