"""Arithmetic of kinds that need the base's values: rotations, and rows in any chunks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fuselora.delta.adders import TERMS, moved
from fuselora.delta.cayley import cayley, norms, series
from fuselora.delta.dora import decomposed
from fuselora.delta.oft import constrained
from fuselora.delta.sums import FLOAT32, FLOAT64, Sums
from fuselora.kinds.boft import BOFT, PEFT_BOFT
from fuselora.kinds.low_rank import PAIR
from fuselora.kinds.oft import OFT
from tests.delta.given import Given, Tensors, delta_of, random, rows_of


def skew(seed: int, n: int, size: int, spread: float = 1.0) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    given = torch.randn((n, size, size), generator=source, dtype=torch.float64) * spread
    return given - given.mT


@pytest.mark.parametrize("sums", [FLOAT32, FLOAT64])
@pytest.mark.parametrize(
    ("size", "spread"), [(1, 1.0), (2, 1.0), (7, 0.01), (16, 1.0), (16, 30.0), (64, 1.0)]
)
def test_the_cayley_transform_is_a_rotation(sums: Sums, size: int, spread: float) -> None:
    given = skew(0, 3, size, spread)
    one = torch.eye(size, dtype=torch.float64)
    found = cayley(given, sums)
    wanted = torch.linalg.inv(one + given) @ (one - given)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11)
    torch.testing.assert_close(found @ found.mT, one.expand(3, -1, -1), rtol=0, atol=1e-11)


def test_a_rotation_does_not_depend_on_the_others_beside_it() -> None:
    given = skew(1, 5, 8)
    assert torch.equal(cayley(given, FLOAT64)[2:3], cayley(given[2:3], FLOAT64))
    stages = given[:4].view(2, 2, 8, 8)
    assert torch.equal(cayley(stages, FLOAT64).view(4, 8, 8), cayley(given[:4], FLOAT64))


@pytest.mark.parametrize("sums", [FLOAT32, FLOAT64])
def test_many_terms_of_the_series_are_the_inverse_rotation(sums: Sums) -> None:
    given = skew(2, 2, 4, 0.05)
    torch.testing.assert_close(series(given, 40, sums), cayley(-given, sums), rtol=0, atol=1e-12)


def test_norms_are_of_each_matrix() -> None:
    given = skew(3, 4, 5)
    torch.testing.assert_close(norms(given).flatten(), torch.linalg.matrix_norm(given))


def test_the_constraint_is_of_all_blocks_together() -> None:
    blocks = torch.randn((4, 6, 6), generator=torch.Generator().manual_seed(0))
    free = constrained(blocks, None, 24)
    assert torch.equal(free, constrained(blocks, 0.0, 24))
    assert torch.equal(free, constrained(blocks, 100.0, 24))
    assert float(constrained(blocks, 0.01, 24).norm()) == pytest.approx(0.24)


BASE = random(9, base=(48, 10))["base"]
CUT: dict[str, tuple[object, Tensors]] = {
    "oft": (OFT, random(1, oft_blocks=(8, 6, 6), rescale=(48, 1))),
    "oft-large": (OFT, random(1, oft_blocks=(2, 24, 24))),
    "boft": (BOFT, random(2, oft_blocks=(4, 8, 6, 6))),
    "peft_boft": (PEFT_BOFT, random(3, boft_r=(1, 5, 2, 2), boft_s=(48, 1))),
}


@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("cuts", [(1,), (5, 6, 7), (24,), (6, 17, 40)])
def test_rows_do_not_depend_on_how_they_are_cut(name: str, cuts: tuple[int, ...]) -> None:
    kind, parts = CUT[name]
    whole = rows_of(kind, parts, BASE, FLOAT64)  # type: ignore[arg-type]
    assert torch.equal(rows_of(kind, parts, BASE, FLOAT64, cuts), whole)  # type: ignore[arg-type]
    near = rows_of(kind, parts, BASE, FLOAT32, cuts)  # type: ignore[arg-type]
    torch.testing.assert_close(near.double(), whole, rtol=0, atol=2.0**-18)


@pytest.mark.parametrize("scale", [(48, 1), (1, 10)])
def test_dora_s_rows_do_not_depend_on_how_they_are_cut(scale: tuple[int, int]) -> None:
    parts = random(4, down=(3, 10), up=(48, 3), dora_scale=scale)
    delta = replace(delta_of(PAIR, parts), ratio=0.5)
    factors = Given(parts, BASE, torch.float64)
    term = decomposed(delta, TERMS["pair"](delta, factors, FLOAT64), factors, FLOAT64)
    whole = term(BASE, 0, 48)
    assert torch.equal(torch.cat([term(BASE[:7], 0, 7), term(BASE[7:], 7, 48)]), whole)
    sized = BASE.double() + 0.5 * parts["up"].double() @ parts["down"].double()
    norm = torch.linalg.vector_norm(sized, dim=1 if scale[1] == 1 else 0, keepdim=True)
    torch.testing.assert_close(whole, parts["dora_scale"] * sized / norm, rtol=1e-6, atol=0)


def test_a_base_is_not_changed_by_what_reads_it() -> None:
    for kind, parts in CUT.values():
        before = BASE.clone()
        rows_of(kind, parts, BASE, FLOAT32)  # type: ignore[arg-type]
        assert torch.equal(BASE, before)


@pytest.mark.parametrize("sums", [FLOAT32, FLOAT64])
def test_a_replacement_alone_is_exact_to_the_sign_of_a_zero(sums: Sums) -> None:
    base = torch.tensor([[1.0, -0.0, 1e30]])
    wanted = torch.tensor([[-0.0, 2.0, 1e-30]], dtype=sums.dtype)
    total = base.to(sums.dtype)
    moved(lambda base, first, last: wanted, 1.0, sums)(total, base, 0, 1)
    assert torch.equal(total, wanted)
    assert torch.equal(total.signbit(), wanted.signbit())
