"""Key grammar as data: which suffix means which part, and which prefixes carry no meaning.

A new dialect is a row of ``SUFFIXES``; a kind that is known but not yet fused is a row of ``UNFUSED``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Part = Literal["down", "up", "alpha", "diff", "diff_b", "diff_m"]

# (dialect, part, suffix); <name> catches the adapter name that PEFT puts into keys
SUFFIXES: tuple[tuple[str, Part, str], ...] = (
    ("lora_down/up", "down", r"\.lora_down\.weight"),
    ("lora_down/up", "up", r"\.lora_up\.weight"),
    ("lora_A/B", "down", r"\.lora_A(?:\.(?P<name>.+))?\.weight"),
    ("lora_A/B", "up", r"\.lora_B(?:\.(?P<name>.+))?\.weight"),
    ("alpha", "alpha", r"\.alpha"),
    ("diff", "diff", r"\.diff"),
    ("diff", "diff_b", r"\.diff_b"),
    ("diff", "diff_m", r"\.diff_m"),
)
# what the module of a part means in the base: the tensor's name is the module's plus one of these
LEAVES: dict[Part, tuple[str, ...]] = {
    "down": (".weight",),
    "up": (".weight",),
    "alpha": (".weight",),
    "diff": (".weight", ""),
    "diff_b": (".bias",),
    "diff_m": (".modulation",),
}
FULL_WEIGHT = "a full weight (modules_to_save)"
UNFUSED: tuple[tuple[str, str], ...] = (
    ("DoRA", r"\.(dora_scale|lora_magnitude_vector(\..+)?)"),
    ("a bias of the pair (lora_bias)", r"\.lora_B(\..+)?\.bias"),
    ("a Tucker core (lora_mid)", r"\.lora_mid(\.weight)?"),
    ("LoHa", r"\.hada_[wt][12](_[ab])?"),
    ("LoKr", r"\.lokr_(w[12](_[ab])?|t2)"),
    ("GLoRA", r"\.(a1|a2|b1|b2)\.weight"),
    ("OFT or BOFT", r"\.(oft_blocks|oft_diag|oft_r(\..+)?)"),
    ("IA3", r"\.ia3_l(\..+)?"),
    ("an embedding pair", r"\.lora_embedding_[AB](\..+)?"),
    ("a full replacement (set_weight)", r"\.(set_weight|reshape_weight)"),
    ("a norm delta (w_norm, b_norm)", r"\.[wb]_norm"),
    ("a finished factor (alpha_scale)", r"\.alpha_scale"),
    ("a split pair (lora_up.blocks)", r"\.lora_up\.blocks\.\d+\.weight"),
    ("a diffusers processor pair", r"[._]lora\d?\.(down|up)\.weight"),
    (FULL_WEIGHT, r"\.(weight|bias|scale)"),
)
# Prefixes that say nothing about the module, tried longest first, repeatedly.
PREFIXES: tuple[str, ...] = (
    "base_model.model.",
    "model.diffusion_model.",
    "diffusion_model.",
    "transformer.",
    "unet.",
)
FLAT_PREFIXES: tuple[str, ...] = ("lora_unet_", "lora_transformer_")
# A prefix that names the component its keys are for.
COMPONENT_PREFIXES: dict[str, str] = {"transformer_2.": "transformer_2"}


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


_SUFFIXES = tuple(
    (dialect, part, re.compile(rf"(?P<module>.+?){suffix}")) for dialect, part, suffix in SUFFIXES
)
_UNFUSED = tuple((kind, re.compile(rf".+?{suffix}")) for kind, suffix in UNFUSED)


def parse_key(key: str) -> ParsedKey | None:
    """The first row that fits the whole key, or None."""
    for dialect, part, pattern in _SUFFIXES:
        if found := pattern.fullmatch(key):
            return ParsedKey(found["module"], part, dialect, found.groupdict().get("name") or "")
    return None


def unfused_kind(key: str) -> str | None:
    """The name of a kind of delta that is known but cannot be fused yet, or None."""
    return next((kind for kind, pattern in _UNFUSED if pattern.fullmatch(key)), None)


def is_lora_key(key: str) -> bool:
    """Whether a tensor of this name shows its file to be a LoRA; other models have alphas and weights too."""
    parsed = parse_key(key)
    return parsed.part != "alpha" if parsed else unfused_kind(key) not in (None, FULL_WEIGHT)


def spellings(module: str) -> tuple[Spelling, ...]:
    """Every reading of a module's name, from all prefixes kept to all off."""
    readings = [Spelling(module, False, None)]
    readings += [Spelling(module[len(p) :], True, None) for p in FLAT_PREFIXES if module.startswith(p)]
    rest, component = module, None
    while step := _strip(rest):
        rest, named = step
        component = named or component
        readings.append(Spelling(rest, False, component))
    return tuple(readings)


def _strip(module: str) -> tuple[str, str | None] | None:
    for prefix, component in COMPONENT_PREFIXES.items():
        if module.startswith(prefix):
            return module[len(prefix) :], component
    for prefix in PREFIXES:
        if module.startswith(prefix):
            return module[len(prefix) :], None
    return None
