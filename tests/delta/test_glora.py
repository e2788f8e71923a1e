"""GLoRA by its published definition, written out in float64."""

from __future__ import annotations

import pytest
import torch

from fuselora.delta.sums import FLOAT32, FLOAT64
from fuselora.kinds.glora import GLORA
from tests.delta.given import Tensors, as_matrix, random, rows_of

OUT, IN, RANK = 150, 12, 3
KERNELS: list[tuple[int, ...]] = [(), (3,), (3, 2), (2, 3, 2)]


def layer(kernel: tuple[int, ...], *, old: bool = False, out: int = OUT) -> tuple[Tensors, torch.Tensor]:
    """A layer's parts and its base tensor; ``old`` are the names of LyCORIS' first releases."""
    one = (1,) * len(kernel)
    names = ("a2", "a1", "b2", "b1") if old else ("a1", "a2", "b1", "b2")
    shapes = ((IN, RANK, *one), (RANK, IN, *one), (out, RANK, *one), (RANK, IN, *kernel))
    parts = random(4, **dict(zip(names, shapes, strict=True)))
    return parts, random(5, base=(out, IN, *kernel))["base"]


def defined(base: torch.Tensor, *factors: torch.Tensor) -> torch.Tensor:
    """W @ left @ right over the input channels, and up @ down."""
    left, right, up, down = (as_matrix(factor.double()) for factor in factors)
    turned = torch.einsum("oi...,ij->oj...", base.double(), left @ right)
    return as_matrix(turned) + up @ down


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_pair_and_what_it_makes_of_the_base(kernel: tuple[int, ...]) -> None:
    parts, base = layer(kernel)
    wanted = defined(base, *(parts[name] for name in ("a1", "a2", "b1", "b2")))
    exact = rows_of(GLORA, parts, base, FLOAT64)
    torch.testing.assert_close(exact, wanted, rtol=1e-12, atol=1e-12)
    assert torch.equal(exact, rows_of(GLORA, parts, base, FLOAT64, cuts=(1, 64, 70)))
    torch.testing.assert_close(rows_of(GLORA, parts, base, FLOAT32).double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("out", [OUT, IN], ids=["oblong", "square"])
def test_old_files_have_the_names_the_other_way_round(out: int) -> None:
    (old, base), (new, _) = layer((), old=True, out=out), layer((), out=out)
    assert torch.equal(rows_of(GLORA, old, base, FLOAT64), rows_of(GLORA, new, base, FLOAT64))
