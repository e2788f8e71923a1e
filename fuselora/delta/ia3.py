"""Rows of a weight times one number for each output or input."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuselora.kinds.ia3 import of_inputs

if TYPE_CHECKING:
    import torch

    from fuselora.delta.adders import Factors, Term
    from fuselora.delta.sums import Sums
    from fuselora.steps import Delta


def peft(delta: Delta, factors: Factors, sums: Sums) -> Term:
    """W * l."""
    on_input = of_inputs(delta.settings, delta.factors["ia3_l"].shape, factors.shape[0])
    return _scaled(factors.whole("ia3_l"), on_input, factors, sums)


def peft_bias(delta: Delta, factors: Factors, sums: Sums) -> Term:
    """bias * l."""
    del delta
    return _scaled(factors.whole("ia3_l"), False, factors, sums)


def lycoris(delta: Delta, factors: Factors, sums: Sums) -> Term:
    """W * (1 + w)."""
    return _scaled(factors.whole("weight").add_(1), bool(delta.settings.on_input), factors, sums)


def _scaled(gain: torch.Tensor, on_input: bool, factors: Factors, sums: Sums) -> Term:
    if on_input:
        n_places = factors.shape[1] // gain.numel()
        columns = gain.flatten().repeat_interleave(n_places).view(1, -1)
        return lambda base, first, last: base.to(sums.dtype) * columns
    rows = gain.reshape(-1, 1)
    return lambda base, first, last: base.to(sums.dtype) * rows[first:last]
