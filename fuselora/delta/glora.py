"""A pair, and another that multiplies the base."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuselora.kinds.glora import glora_order

if TYPE_CHECKING:
    import torch

    from fuselora.delta.adders import Factors, Term
    from fuselora.delta.sums import Sums
    from fuselora.steps import Delta


def term(delta: Delta, factors: Factors, sums: Sums) -> Term:
    """up @ down + W @ left @ right; a row of it needs that row of W alone."""
    order = glora_order({part: factor.shape for part, factor in delta.factors.items()})
    left, right, up, down = map(factors.matrix, order)

    def rows(base: torch.Tensor, first: int, last: int) -> torch.Tensor:
        turned = _over_inputs(base.to(sums.dtype), left, right, sums)
        return sums.product(up[first:last], down).add_(turned)

    return rows


def _over_inputs(base: torch.Tensor, left: torch.Tensor, right: torch.Tensor, sums: Sums) -> torch.Tensor:
    """Rows (n, in * kernel) times the (in, in) matrix left @ right, at each place of the kernel."""
    n_rows, n_in = base.shape[0], left.shape[0]
    by_place = base.reshape(n_rows, n_in, -1).transpose(1, 2).reshape(-1, n_in)
    turned = sums.product(sums.product(by_place, left), right)
    return turned.view(n_rows, -1, n_in).transpose(1, 2).reshape(n_rows, -1)
