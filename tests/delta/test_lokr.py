"""LoKr against torch's own Kronecker product of whole matrices, in float64."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from fuselora.delta.sums import FLOAT32, FLOAT64
from fuselora.kinds.lokr import LOKR
from tests.delta.given import Tensors, as_matrix, random, rows_of

A, C, B, D, RANK = 5, 3, 32, 4, 2
OUTER: list[dict[str, tuple[int, ...]]] = [
    {"lokr_w1": (A, C)},
    {"lokr_w1_a": (A, RANK), "lokr_w1_b": (RANK, C)},
]
INNER: list[tuple[tuple[int, ...], dict[str, tuple[int, ...]]]] = [
    ((), {"lokr_w2": (B, D)}),
    ((), {"lokr_w2_a": (B, RANK), "lokr_w2_b": (RANK, D)}),
    ((3,), {"lokr_w2": (B, D, 3)}),
    ((3, 2), {"lokr_w2": (B, D, 3, 2)}),
    ((3, 2), {"lokr_w2_a": (B, RANK), "lokr_w2_b": (RANK, D * 6)}),
    ((3, 2), {"lokr_w2_a": (RANK, B), "lokr_w2_b": (RANK, D), "lokr_t2": (RANK, RANK, 3, 2)}),
    ((2, 3, 2), {"lokr_w2_a": (RANK, B), "lokr_w2_b": (RANK, D), "lokr_t2": (RANK, RANK, 2, 3, 2)}),
]


def defined(parts: Tensors, kernel: tuple[int, ...]) -> torch.Tensor:
    """kron(w1, w2) over output and input channels, for each place of the kernel."""
    wide = {name: tensor.double() for name, tensor in parts.items()}
    w1 = wide["lokr_w1"] if "lokr_w1" in wide else wide["lokr_w1_a"] @ wide["lokr_w1_b"]
    if "lokr_w2" in wide:
        w2 = wide["lokr_w2"]
    elif "lokr_t2" in wide:
        w2 = torch.einsum("ij...,ib,jd->bd...", wide["lokr_t2"], wide["lokr_w2_a"], wide["lokr_w2_b"])
    else:
        w2 = wide["lokr_w2_a"] @ wide["lokr_w2_b"]
    by_place = w2.reshape(B, D, -1)
    places = [torch.kron(w1, by_place[:, :, k].contiguous()) for k in range(by_place.shape[2])]
    return torch.stack(places, 2).reshape(A * B, C * D, *kernel)


@pytest.mark.parametrize(("outer", "inner"), list(product(OUTER, INNER)))
def test_any_mixture_of_full_and_decomposed_factors(
    outer: dict[str, tuple[int, ...]], inner: tuple[tuple[int, ...], dict[str, tuple[int, ...]]]
) -> None:
    kernel, shapes = inner
    parts, base = random(3, **outer, **shapes), torch.zeros(A * B, C * D, *kernel)
    wanted = as_matrix(defined(parts, kernel))
    exact = rows_of(LOKR, parts, base, FLOAT64)
    torch.testing.assert_close(exact, wanted, rtol=1e-12, atol=1e-12)
    assert torch.equal(exact, rows_of(LOKR, parts, base, FLOAT64, cuts=(1, 31, 33, 100)))
    torch.testing.assert_close(rows_of(LOKR, parts, base, FLOAT32).double(), wanted, rtol=1e-4, atol=1e-5)


def test_the_order_of_the_factors_counts() -> None:
    parts = {"lokr_w1": torch.tensor([[1.0, 2.0]]), "lokr_w2": torch.tensor([[1.0], [10.0]])}
    found = rows_of(LOKR, parts, torch.zeros(2, 2), FLOAT32)
    assert found.tolist() == [[1.0, 2.0], [10.0, 20.0]]
    parts = {"lokr_w1": torch.tensor([[1.0], [10.0]]), "lokr_w2": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
    found = rows_of(LOKR, parts, torch.zeros(4, 2), FLOAT32)
    assert found.tolist() == [[1.0, 2.0], [3.0, 4.0], [10.0, 20.0], [30.0, 40.0]]
