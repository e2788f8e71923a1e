"""Low-rank products by their definitions, written out in float64."""

from __future__ import annotations

import pytest
import torch

from fuselora.delta.sums import FLOAT32, FLOAT64, Sums
from fuselora.kinds import Kind
from fuselora.kinds.embedding import EMBEDDING
from fuselora.kinds.experts import EXPERTS
from fuselora.kinds.low_rank import PAIR, SPLIT_PAIR, TRANSPOSED
from fuselora.kinds.pair_bias import PAIR_BIAS
from fuselora.kinds.settings import Settings
from tests.delta.given import Tensors, as_matrix, random, rows_of

OUT, IN, RANK, EXPERT = 130, 12, 4, 6
PAIRED = random(1, up=(OUT, RANK), down=(RANK, IN))
KERNELS: list[tuple[int, ...]] = [(3,), (3, 2), (2, 3, 2)]


def wide(parts: Tensors) -> dict[str, torch.Tensor]:
    return {name: tensor.double() for name, tensor in parts.items()}


def close(found: torch.Tensor, wanted: torch.Tensor, sums: Sums) -> None:
    tolerance = 1e-13 if sums is FLOAT64 else 1e-5
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance * 10)


def cored(kernel: tuple[int, ...]) -> dict[str, torch.Tensor]:
    ones = [1] * len(kernel)
    return random(2, up=(OUT, RANK, *ones), down=(RANK, IN, *ones), mid=(RANK, RANK, *kernel))


SPLIT = random(3, up_0=(70, RANK), up_1=(20, RANK), up_2=(40, RANK), down=(3 * RANK, IN))
EMBEDDED = random(4, embedding_down=(RANK, OUT), embedding_up=(IN, RANK))


@pytest.mark.parametrize("sums", [FLOAT32, FLOAT64], ids=["float32", "float64"])
class TestDefinitions:
    def test_a_pair(self, sums: Sums) -> None:
        parts = wide(PAIRED)
        close(rows_of(PAIR, PAIRED, torch.zeros(OUT, IN), sums), parts["up"] @ parts["down"], sums)

    @pytest.mark.parametrize("kernel", KERNELS)
    def test_a_convolution(self, kernel: tuple[int, ...], sums: Sums) -> None:
        made = random(5, up=(OUT, RANK, *[1] * len(kernel)), down=(RANK, IN, *kernel))
        parts = wide(made)
        wanted = torch.einsum("or,ri...->oi...", parts["up"].flatten(1), parts["down"])
        close(rows_of(PAIR, made, torch.zeros(OUT, IN, *kernel), sums), as_matrix(wanted), sums)

    @pytest.mark.parametrize("kernel", KERNELS)
    def test_a_core_is_a_convolution_between_two_of_one_place(
        self, kernel: tuple[int, ...], sums: Sums
    ) -> None:
        made = cored(kernel)
        parts = wide(made)
        up, down = parts["up"].flatten(1), parts["down"].flatten(1)
        wanted = torch.einsum("op,pq...,qi->oi...", up, parts["mid"], down)
        close(rows_of(PAIR, made, torch.zeros(OUT, IN, *kernel), sums), as_matrix(wanted), sums)

    def test_each_block_of_outputs_has_rows_of_down_of_its_own(self, sums: Sums) -> None:
        parts = wide(SPLIT)
        downs = parts["down"].chunk(3)
        wanted = torch.cat([parts[f"up_{k}"] @ down for k, down in enumerate(downs)])
        close(rows_of(SPLIT_PAIR, SPLIT, torch.zeros(OUT, IN), sums), wanted, sums)

    def test_a_weight_that_is_stored_as_in_and_out(self, sums: Sums) -> None:
        parts = wide(PAIRED)
        wanted = (parts["up"] @ parts["down"]).T
        close(rows_of(TRANSPOSED, PAIRED, torch.zeros(IN, OUT), sums), wanted, sums)

    def test_an_embedding(self, sums: Sums) -> None:
        parts = wide(EMBEDDED)
        wanted = (parts["embedding_up"] @ parts["embedding_down"]).T
        close(rows_of(EMBEDDING, EMBEDDED, torch.zeros(OUT, IN), sums), wanted, sums)

    def test_the_bias_of_a_pair(self, sums: Sums) -> None:
        parts = random(6, pair_bias=(OUT,))
        found = rows_of(PAIR_BIAS, parts, torch.zeros(OUT), sums)
        close(found, parts["pair_bias"].double().view(-1, 1), sums)

    @pytest.mark.parametrize("swapped", [False, True])
    @pytest.mark.parametrize("rows_are_experts", [False, True])
    def test_experts(self, rows_are_experts: bool, swapped: bool, sums: Sums) -> None:
        made = random(7, up=(OUT, RANK * EXPERT), down=(EXPERT * RANK, IN))
        parts = wide(made)
        wanted = torch.stack(
            [parts["up"][:, e::EXPERT] @ parts["down"][e * RANK : (e + 1) * RANK] for e in range(EXPERT)]
        )
        wanted = wanted.mT if swapped else wanted
        base = torch.zeros(wanted.shape)
        if not rows_are_experts:
            base = base.flatten(0, 1)
        found = rows_of(EXPERTS, made, base, sums, settings=Settings(experts=EXPERT, transposed=swapped))
        close(found, wanted.reshape(base.shape).flatten(1), sums)


@pytest.mark.parametrize(
    ("kind", "parts", "base"),
    [
        (PAIR, PAIRED, torch.zeros(OUT, IN)),
        (PAIR, cored((3, 3)), torch.zeros(OUT, IN, 3, 3)),
        (SPLIT_PAIR, SPLIT, torch.zeros(OUT, IN)),
        (TRANSPOSED, random(8, up=(IN, RANK), down=(RANK, OUT)), torch.zeros(OUT, IN)),
        (EMBEDDING, EMBEDDED, torch.zeros(OUT, IN)),
        (EXPERTS, random(9, up=(26, RANK * 5), down=(5 * RANK, IN)), torch.zeros(OUT, IN)),
    ],
    ids=["pair", "core", "split", "transposed", "embedding", "experts"],
)
def test_a_row_has_the_same_bits_in_any_chunk(kind: Kind, parts: Tensors, base: torch.Tensor) -> None:
    settings = Settings(experts=5) if kind is EXPERTS else None
    whole = rows_of(kind, parts, base, FLOAT64, settings=settings)
    cuts = (1, 25, 64, 69, 71, 90, 129)
    assert torch.equal(whole, rows_of(kind, parts, base, FLOAT64, cuts=cuts, settings=settings))
