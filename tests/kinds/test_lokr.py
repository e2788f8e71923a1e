from __future__ import annotations

import pytest

from fuselora.kinds import BadParts, Shape, Shapes
from fuselora.kinds.lokr import LOKR, misread_by_peft
from fuselora.lora.grammar import parse_key, unfused_kind

W1: Shapes = {"lokr_w1": (4, 3)}
W1_AB: Shapes = {"lokr_w1_a": (4, 2), "lokr_w1_b": (2, 3)}
W2: Shapes = {"lokr_w2": (5, 7)}
W2_AB: Shapes = {"lokr_w2_a": (5, 2), "lokr_w2_b": (2, 7)}
W2_CONV: Shapes = {"lokr_w2": (5, 7, 3, 3)}
W2_FLAT: Shapes = {"lokr_w2_a": (5, 2), "lokr_w2_b": (2, 63)}
W2_CORED: Shapes = {"lokr_w2_a": (2, 5), "lokr_w2_b": (2, 7), "lokr_t2": (2, 2, 3, 3)}


@pytest.mark.parametrize("first", [W1, W1_AB])
@pytest.mark.parametrize(
    ("second", "shape"),
    [
        (W2, (20, 21)),
        (W2_AB, (20, 21)),
        (W2_CONV, (20, 21, 3, 3)),
        (W2_FLAT, (20, 21, 3, 3)),
        (W2_CORED, (20, 21, 3, 3)),
    ],
)
def test_shape_and_rank(first: Shapes, second: Shapes, shape: Shape) -> None:
    shapes = {**first, **second}
    assert LOKR.shape(shapes, shape) == shape
    assert LOKR.rank(shapes) == (None if "lokr_w1" in shapes and "lokr_w2" in shapes else 2)
    assert not LOKR.lacks(shapes)
    assert not LOKR.excess(shapes)


@pytest.mark.parametrize(
    "shapes",
    [
        {**W1, **W2, "lokr_w1_a": (4, 2)},
        {**W1, **W2, "lokr_w2_b": (2, 7)},
        {**W1, **W2, "lokr_t2": (2, 2, 3, 3)},
        {**W1_AB, "lokr_w2_a": (5, 3), "lokr_w2_b": (3, 7)},
        {**W1, "lokr_w2_a": (5, 3), "lokr_w2_b": (2, 7)},
        {**W2, "lokr_w1": (4, 3, 1)},
        {**W1, "lokr_w2": (5,)},
        {**W1, **W2_CORED, "lokr_t2": (3, 2, 3, 3)},
    ],
)
def test_parts_that_make_no_delta(shapes: Shapes) -> None:
    with pytest.raises(BadParts):
        LOKR.shape(shapes, (20, 21))


def test_what_a_core_makes_is_held_too() -> None:
    assert LOKR.held({**W1, **W2}) == 12 + 35
    assert LOKR.held({**W1, **W2_CORED}) == 12 + 10 + 14 + 36 + 2 * 7 * 9


def test_half_a_factor_is_missing() -> None:
    assert LOKR.lacks({**W1, "lokr_w2_a": (5, 2)}) == "lokr_w2_b"
    assert LOKR.excess({**W1, **W1_AB, **W2}) == ("lokr_w1", "lokr_w1_a", "lokr_w1_b")


@pytest.mark.parametrize("part", [*W1, *W1_AB, *W2, *W2_CORED])
@pytest.mark.parametrize("name", ["", "default"])
def test_keys(part: str, name: str) -> None:
    parsed = parse_key(f"lora_unet_x.{part}" + (f".{name}" if name else ""))
    assert parsed
    assert (parsed.module, parsed.part, parsed.name) == ("lora_unet_x", part, name)


def test_a_core_of_the_first_factor_is_refused_by_name() -> None:
    assert parse_key("x.lokr_t1") is None
    assert "lokr_t1" in str(unfused_kind("x.lokr_t1"))


def test_what_peft_takes_another_product_of() -> None:
    assert misread_by_peft({**W1, "lokr_w2": (5, 7, 3)})
    assert not misread_by_peft({**W1, **W2_CONV})
    assert not misread_by_peft({**W1, **W2_AB})
