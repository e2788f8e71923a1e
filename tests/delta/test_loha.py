"""LoHa by its published definition, written out in float64."""

from __future__ import annotations

import pytest
import torch

from fuselora.delta.sums import FLOAT32, FLOAT64
from fuselora.kinds.loha import LOHA
from tests.delta.given import Tensors, as_matrix, random, rows_of

OUT, IN, RANK = 150, 12, 4
KERNELS: list[tuple[int, ...]] = [(3,), (3, 2), (2, 3, 2)]


def plain(columns: int = IN) -> dict[str, torch.Tensor]:
    return random(
        1, hada_w1_a=(OUT, RANK), hada_w1_b=(RANK, columns), hada_w2_a=(OUT, RANK), hada_w2_b=(RANK, columns)
    )


def cored(kernel: tuple[int, ...]) -> dict[str, torch.Tensor]:
    core = (RANK, RANK, *kernel)
    return random(
        2, hada_w1_a=(RANK, OUT), hada_w1_b=(RANK, IN), hada_w2_a=(RANK, OUT), hada_w2_b=(RANK, IN),
        hada_t1=core, hada_t2=core,
    )  # fmt: skip


def defined(parts: Tensors) -> torch.Tensor:
    """(out, in, kernel ...), the two halves multiplied element by element."""
    wide = {name: tensor.double() for name, tensor in parts.items()}
    if "hada_t1" not in wide:
        return (wide["hada_w1_a"] @ wide["hada_w1_b"]) * (wide["hada_w2_a"] @ wide["hada_w2_b"])
    first, second = (
        torch.einsum("ij...,io,jc->oc...", wide[f"hada_t{n}"], wide[f"hada_w{n}_a"], wide[f"hada_w{n}_b"])
        for n in "12"
    )
    return first * second


def test_two_products_are_multiplied() -> None:
    parts, base = plain(), torch.zeros(OUT, IN)
    torch.testing.assert_close(rows_of(LOHA, parts, base, FLOAT64), defined(parts), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(
        rows_of(LOHA, parts, base, FLOAT32).double(), defined(parts), rtol=1e-4, atol=1e-5
    )


def test_a_convolution_without_cores_has_its_kernel_in_the_columns() -> None:
    parts, base = plain(IN * 9), torch.zeros(OUT, IN, 3, 3)
    torch.testing.assert_close(rows_of(LOHA, parts, base, FLOAT64), defined(parts), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("kernel", KERNELS)
def test_cores_are_multiplied_in(kernel: tuple[int, ...]) -> None:
    parts, base = cored(kernel), torch.zeros(OUT, IN, *kernel)
    wanted = as_matrix(defined(parts))
    torch.testing.assert_close(rows_of(LOHA, parts, base, FLOAT64), wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(rows_of(LOHA, parts, base, FLOAT32).double(), wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("parts", [plain(), cored((3, 3))], ids=["plain", "cored"])
def test_a_row_has_the_same_bits_in_any_chunk(parts: Tensors) -> None:
    base = torch.zeros(OUT, IN, 3, 3) if "hada_t1" in parts else torch.zeros(OUT, IN)
    whole = rows_of(LOHA, parts, base, FLOAT64)
    assert torch.equal(whole, rows_of(LOHA, parts, base, FLOAT64, cuts=(1, 64, 70)))
