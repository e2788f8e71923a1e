"""The float64 definitions by hand; `tests/oracle` has them against other people's code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from fuselora import definitions, exact
from fuselora.definitions import CHANGES, SUMS, changed, difference, moves
from fuselora.delta.adders import TERMS
from fuselora.kinds import KINDS
from fuselora.kinds.settings import Settings

F64 = torch.float64


def matrix(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=F64)


BASE = matrix([3, 4], [6, 8])


# What there is


def test_every_kind_has_one_definition() -> None:
    assert SUMS.keys().isdisjoint(CHANGES)
    assert TERMS.keys() == {*SUMS, *CHANGES}
    assert {kind.name for kind in KINDS} <= TERMS.keys()


def test_what_moves_is_what_the_kinds_say_moves() -> None:
    for kind in KINDS:
        assert moves(kind.name, kind.own_parts) == kind.moves, kind.name


@pytest.mark.parametrize("module", [definitions, exact])
def test_nothing_is_shared_with_the_engine(module: object) -> None:
    source = Path(str(getattr(module, "__file__", ""))).read_text("utf-8")
    imported = {
        name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
    }
    assert not [name for name in imported if name.startswith(("fuselora.delta", "fuselora.engine"))]


# Sums


def test_a_pair() -> None:
    parts = {"up": matrix([1], [-2]), "down": matrix([3, -4])}
    found = difference("pair", parts, BASE)
    assert found.value.tolist() == [[3, -4], [-6, 8]]
    assert found.size.tolist() == [[3, 4], [6, 8]]


def test_sizes_add_up_what_cancels() -> None:
    parts = {"up": matrix([1, -1], [0, 0]), "down": matrix([5, 5], [5, 5])}
    found = difference("pair", parts, BASE)
    assert not found.value.any()
    assert found.size.tolist() == [[10, 10], [0, 0]]


def test_a_pair_with_a_core_is_three_convolutions_after_one_another() -> None:
    """With a kernel of one place the core is a matrix between the two others."""
    up, core, down = matrix([1, 2], [3, 4]), matrix([0, 1], [2, 0]), matrix([1, 1], [0, 5])
    parts = {"up": up[..., None], "mid": core[..., None], "down": down[..., None]}
    assert torch.equal(difference("pair", parts, BASE[..., None]).value[..., 0], up @ core @ down)


def test_a_loha() -> None:
    parts = {
        "hada_w1_a": matrix([1], [2]), "hada_w1_b": matrix([1, 1]),
        "hada_w2_a": matrix([3], [1]), "hada_w2_b": matrix([1, -2]),
    }  # fmt: skip
    found = difference("loha", parts, BASE)
    assert found.value.tolist() == [[3, -6], [2, -4]]
    assert found.size.tolist() == [[3, 6], [2, 4]]


def test_a_lokr_has_the_second_factor_at_each_place_of_the_first() -> None:
    parts = {"lokr_w1": matrix([0, 2]), "lokr_w2": matrix([1], [3])}
    assert difference("lokr", parts, BASE).value.tolist() == [[0, 2], [0, 6]]


def test_the_size_of_a_glora_counts_the_base() -> None:
    parts = {"a1": matrix([1], [-1]), "a2": matrix([1, 0]), "b1": matrix([1], [0]), "b2": matrix([0, 7])}
    found = difference("glora", parts, BASE)
    assert found.value.tolist() == [[-1, 7], [-2, 0]]
    assert found.size.tolist() == [[7, 7], [14, 0]]


def test_a_convolution_with_a_flat_kernel_takes_the_shape_of_the_base() -> None:
    base = torch.zeros(2, 2, 3, dtype=F64)
    parts = {"up": matrix([1], [2]), "down": matrix([1, 2, 3, 4, 5, 6])}
    assert difference("pair", parts, base).value.tolist() == [
        [[1, 2, 3], [4, 5, 6]],
        [[2, 4, 6], [8, 10, 12]],
    ]


# Changes


def test_a_replacement_is_itself() -> None:
    found = changed("replace", {"weight": -BASE}, BASE, 1.0, Settings())
    assert torch.equal(found.value, -BASE)
    assert torch.equal(found.size, BASE)


@pytest.mark.parametrize(
    ("part", "magnitude", "right"),
    [
        ("magnitude", [10.0, 20.0], [[6, 8], [12, 16]]),
        ("dora_scale", [[10.0], [20.0]], [[6, 8], [12, 16]]),
        ("dora_scale", [[3.0, 4.0]], [[3 / 5**0.5, 4 / 5**0.5], [6 / 5**0.5, 8 / 5**0.5]]),
    ],
)
def test_dora_brings_rows_or_columns_to_a_magnitude(part: str, magnitude: list[float], right: object) -> None:
    parts = {"up": matrix([0], [0]), "down": matrix([1, 1]), part: torch.tensor(magnitude, dtype=F64)}
    found = changed("pair", parts, BASE, 1.0, Settings())
    torch.testing.assert_close(found.value, torch.tensor(right, dtype=F64), rtol=1e-6, atol=0)


def test_the_size_of_dora_grows_where_the_base_and_the_pair_cancel() -> None:
    parts = {"up": matrix([-1], [0]), "down": matrix([3, 3.9]), "magnitude": torch.ones(2, dtype=F64)}
    found = changed("pair", parts, BASE, 1.0, Settings())
    assert found.value[0].tolist() == pytest.approx([0, 1])
    assert float(found.size[0, 1]) > 70
    assert float(found.size[1].sum()) < 3


def test_alpha_is_within_the_norm() -> None:
    parts = {"up": matrix([1], [0]), "down": matrix([1, 0]), "magnitude": torch.ones(2, dtype=F64)}
    found = changed("pair", parts, BASE, 9.0, Settings())
    assert found.value[0].tolist() == pytest.approx([12 / 160**0.5, 4 / 160**0.5])


def test_a_kind_that_only_adds_has_no_changed_tensor_without_a_magnitude() -> None:
    assert not moves("pair", {"up", "down"})
    assert moves("pair", {"up", "down", "magnitude"})
    with pytest.raises(KeyError):
        difference("replace", {"weight": BASE}, BASE)
