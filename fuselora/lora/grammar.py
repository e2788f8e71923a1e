"""Key grammar as data: which suffix means which part, and which prefixes carry no meaning.

A new spelling is a row in its kind's ``suffixes``; a kind that is not fused is a row of ``UNFUSED``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from fuselora.kinds import KINDS, Part, Suffix
from fuselora.kinds.kind import ALPHAS
from fuselora.kinds.replacement import FULL_PARTS
from fuselora.text_encoders import COMFY_ENCODERS, CONNECTORS, KOHYA_ENCODERS, TEXT_ENCODERS

# what changes whatever else its module holds
MODIFIERS = (
    Suffix("alpha", "alpha", r"\.alpha"),
    Suffix("alpha", "alpha_scale", r"\.alpha_scale"),
    Suffix("DoRA", "magnitude", r"\.lora_magnitude_vector(?:\.(?P<name>.+?))??(?:\.weight)?"),
    Suffix("DoRA", "dora_scale", r"\.dora_scale"),
    Suffix("reshape_weight", "reshape_weight", r"\.reshape_weight"),
)
SUFFIXES: tuple[Suffix, ...] = (*MODIFIERS, *(suffix for kind in KINDS for suffix in kind.suffixes))
UNFUSED: tuple[tuple[str, str], ...] = (
    ("LoKr with a core of its first factor (lokr_t1)", r"\.lokr_t1(\..+)?"),
    ("GLoRA with a Tucker core (bm)", r"\.bm\.weight"),
    ("a trained scale of its module (use_scalar)", r"\.scalar"),
    ("OFT as it was saved before 2024 (oft_diag, oft_r)", r"\.(oft_diag|oft_r(\..+)?)"),
    ("a pair with more than 8 blocks of outputs (lora_up.blocks)", r"\.lora_up\.blocks\.\d+\.weight"),
)
# Prefixes that say nothing about the module, tried longest first, repeatedly.
PREFIXES: tuple[str, ...] = (
    "base_model.model.",
    "model.diffusion_model.",
    "diffusion_model.",
    "transformer.",
    "unet.",
    "model.",
    "net.",
)
# Prefixes before a name in which every dot became an underscore, with the component that they name.
FLAT_PREFIXES: dict[str, str | None] = {
    "lora_unet_": None,
    "lora_transformer_": None,
    "lycoris_": None,
    **{f"{encoder}_": encoder for encoder in KOHYA_ENCODERS},
}
# Prefixes before a name with dots that name the component; ComfyUI's say which encoder it is.
COMPONENT_PREFIXES: dict[str, str] = {
    "transformer_2.": "transformer_2",
    **{f"{encoder}.": encoder for encoder in TEXT_ENCODERS},
    **{f"text_encoders.{encoder}.": encoder for encoder in COMFY_ENCODERS},
    "text_embedding_projection.": CONNECTORS,
}
# A prefix and what stands for a dot after it.
DOT_PREFIXES: dict[str, str] = {"lora___lorahyphen___": "___lorahyphen___"}
# diffusers' attention processors: what the ends of their layers' names are called in the model.
PROCESSOR_NAMES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"to_(?P<which>[qkv])_lora", (r"to_\g<which>", r"\g<which>_proj")),
    (r"to_out_lora", ("to_out.0", "out_proj")),
    (r"(?P<which>add_[kv]_proj)_lora", (r"\g<which>",)),
)


@dataclass(frozen=True, slots=True)
class ParsedKey:
    """``module`` is the key without its suffix, prefix and all; ``name`` the PEFT adapter name, or ""."""

    module: str
    part: Part
    dialect: str
    name: str


@dataclass(frozen=True, slots=True)
class Spelling:
    """One reading of a module: its name, whether it is flattened (``_`` for ``.``), and for whom it is."""

    name: str
    flat: bool
    component: str | None


_PROCESSOR_NAMES = tuple(
    (re.compile(rf"(?P<stem>.+?\.)(?:processor\.)?{end}"), layers) for end, layers in PROCESSOR_NAMES
)
_SUFFIXES = tuple((suffix, re.compile(rf"(?P<module>.+?){suffix.pattern}")) for suffix in SUFFIXES)
_UNFUSED = tuple((kind, re.compile(rf".+?{suffix}")) for kind, suffix in UNFUSED)


@lru_cache(1 << 16)  # every reader of a file asks about each of its keys
def parse_key(key: str) -> ParsedKey | None:
    """The first row that fits the whole key, or None."""
    for suffix, pattern in _SUFFIXES:
        if found := pattern.fullmatch(key):
            if suffix.part in FULL_PARTS and unfused_kind(key):
                return None  # it only ends like any tensor
            name = found.groupdict().get("name") or ""
            return ParsedKey(found["module"], suffix.part, suffix.dialect, name)
    return None


def unfused_kind(key: str) -> str | None:
    """The name of a kind of delta that is known but cannot be fused yet, or None."""
    return next((kind for kind, pattern in _UNFUSED if pattern.fullmatch(key)), None)


def is_lora_key(key: str) -> bool:
    """Whether a tensor of this name shows its file to be a LoRA; other models have alphas and weights too."""
    parsed = parse_key(key)
    return parsed.part not in ALPHAS | FULL_PARTS if parsed else unfused_kind(key) is not None


@lru_cache(1 << 15)  # a large file's modules, each of which is looked up many times
def spellings(module: str) -> tuple[Spelling, ...]:
    """Every reading of a module's name, from all prefixes kept to all off."""
    readings = [Spelling(module, False, None)]
    readings += [
        Spelling(module[len(p) :], True, c) for p, c in FLAT_PREFIXES.items() if module.startswith(p)
    ]
    rest, component = module, None
    for prefix, dot in DOT_PREFIXES.items():
        if module.startswith(prefix):
            rest = module[len(prefix) :].replace(dot, ".")
            readings.append(Spelling(rest, False, None))
    while step := _strip(rest):
        rest, named = step
        component = named or component
        readings.append(Spelling(rest, False, component))
    layers = (Spelling(name, False, r.component) for r in readings for name in _of_processor(r.name))
    return (*layers, *readings)


def _of_processor(name: str) -> Iterator[str]:
    """What the layer behind an attention processor's can be called."""
    if not name.endswith("_lora"):
        return
    for pattern, ends in _PROCESSOR_NAMES:
        if found := pattern.fullmatch(name):
            yield from (found["stem"] + found.expand(end) for end in ends)


def _strip(module: str) -> tuple[str, str | None] | None:
    for prefix, component in COMPONENT_PREFIXES.items():
        if module.startswith(prefix):
            return module[len(prefix) :], component
    for prefix in PREFIXES:
        if module.startswith(prefix):
            return module[len(prefix) :], None
    return None
