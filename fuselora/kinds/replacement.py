"""Whole tensors in place of the base's: W + strength * (replacement - W).

What PEFT saves of ``modules_to_save`` and of trained biases, the norms' ``scale`` of FLUX, and ComfyUI's
``set_weight``. A file of nothing else is a checkpoint.
"""

from __future__ import annotations

from fuselora.kinds.kind import Kind, Suffix, need, never, no_elements, same

DIALECT = "full weights"
# what any model's tensors are called as well
FULL_PARTS = frozenset({"weight", "bias", "scale"})


def replacement(name: str, part: str, *leaves: str, patterns: tuple[str, ...]) -> Kind:
    """A part that takes its tensor's place."""
    return Kind(
        name=name,
        counted="replace",
        suffixes=tuple(Suffix(DIALECT, part, pattern) for pattern in patterns),
        needs=(need(part),),
        leaves=leaves,
        shape=same(part),
        held=no_elements,
        is_nothing=never,
        moves=True,
        not_with=frozenset({"on_input"}),
    )


def _spellings(leaf: str) -> tuple[str, ...]:
    """PEFT's copies of modules and its wrapped layers, then the plain name."""
    return (
        rf"\.modules_to_save(?:\.(?P<name>[^.]+))?\.{leaf}",
        rf"(?:\.base_layer)?\.{leaf}",
    )


SET_WEIGHT = replacement("set_weight", "set_weight", ".weight", "", patterns=(r"\.set_weight",))
REPLACE = replacement("replace", "weight", ".weight", patterns=_spellings("weight"))
REPLACE_B = replacement("replace_b", "bias", ".bias", patterns=_spellings("bias"))
REPLACE_SCALE = replacement("replace_scale", "scale", ".scale", ".weight", patterns=_spellings("scale"))
