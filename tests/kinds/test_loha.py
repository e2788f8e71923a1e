from __future__ import annotations

import pytest

from fuselora.kinds import BadParts, Shape, Shapes
from fuselora.kinds.loha import LOHA
from fuselora.lora.grammar import parse_key

LINEAR: Shapes = {"hada_w1_a": (8, 2), "hada_w1_b": (2, 6), "hada_w2_a": (8, 2), "hada_w2_b": (2, 6)}
CORED: Shapes = {
    "hada_w1_a": (2, 8), "hada_w1_b": (2, 6), "hada_w2_a": (2, 8), "hada_w2_b": (2, 6),
    "hada_t1": (2, 2, 3, 3), "hada_t2": (2, 2, 3, 3),
}  # fmt: skip
FLAT: Shapes = {**LINEAR, "hada_w1_b": (2, 54), "hada_w2_b": (2, 54)}


@pytest.mark.parametrize(
    ("shapes", "base", "shape"),
    [
        (LINEAR, (8, 6), (8, 6)),
        (FLAT, (8, 6, 3, 3), (8, 6, 3, 3)),
        (FLAT, (8, 6, 9), (8, 6, 9)),
        (FLAT, (8, 5, 3, 3), (8, 54)),
        (CORED, (8, 6, 3, 3), (8, 6, 3, 3)),
    ],
)
def test_shape_and_rank(shapes: Shapes, base: Shape, shape: Shape) -> None:
    assert LOHA.shape(shapes, base) == shape
    assert LOHA.rank(shapes) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"hada_w1_a": (8, 3)},
        {"hada_w2_a": (7, 2)},
        {"hada_w2_a": (8, 3), "hada_w2_b": (3, 6)},
        {"hada_w1_b": (2,)},
        {"hada_w1_a": (8, 2, 2), "hada_w2_a": (8, 2, 2)},
        {"hada_t1": (2, 2, 3, 3)},
        {"hada_t2": (2, 2, 3, 3)},
    ],
)
def test_parts_that_make_no_delta(wrong: Shapes) -> None:
    with pytest.raises(BadParts):
        LOHA.shape({**LINEAR, **wrong}, (8, 6))


@pytest.mark.parametrize("wrong", [{"hada_t1": (2, 3, 3, 3)}, {"hada_t1": (2,)}, {"hada_w1_a": (2, 8, 1)}])
def test_cores_that_do_not_fit(wrong: Shapes) -> None:
    with pytest.raises(BadParts):
        LOHA.shape({**CORED, **wrong}, (8, 6, 3, 3))


def test_what_a_core_makes_is_held_too() -> None:
    assert LOHA.held(LINEAR) == 2 * (16 + 12)
    assert LOHA.held(CORED) == 2 * (16 + 12 + 36) + 2 * 2 * 6 * 9


def test_a_number_has_no_rank() -> None:
    assert LOHA.rank({**LINEAR, "hada_w1_b": ()}) is None


@pytest.mark.parametrize("part", [*LINEAR, "hada_t1", "hada_t2"])
@pytest.mark.parametrize("name", ["", "default", "my.style"])
def test_keys(part: str, name: str) -> None:
    parsed = parse_key(f"base_model.model.x.{part}" + (f".{name}" if name else ""))
    assert parsed
    assert (parsed.module, parsed.part, parsed.name) == ("base_model.model.x", part, name)


def test_any_part_of_zeros_makes_all_of_it_zero() -> None:
    assert LOHA.is_nothing(frozenset({"hada_t2"}))
    assert not LOHA.is_nothing(frozenset())
