"""Differences of a tensor's own shape: W += strength * diff."""

from __future__ import annotations

from fuselora.kinds.kind import Kind, Suffix, need, no_elements, same


def difference(part: str, suffix: str, *leaves: str) -> Kind:
    """A part that is added as it is, under one suffix."""
    return Kind(
        name=part,
        counted=part,
        suffixes=(Suffix("diff", part, suffix),),
        needs=(need(part),),
        leaves=leaves,
        shape=same(part),
        held=no_elements,
    )


DIFF = difference("diff", r"\.diff", ".weight", "")
DIFF_B = difference("diff_b", r"\.diff_b", ".bias")
DIFF_M = difference("diff_m", r"\.diff_m", ".modulation")
