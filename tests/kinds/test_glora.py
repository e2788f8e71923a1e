from __future__ import annotations

import pytest

from fuselora.kinds import BadParts, Shape, Shapes
from fuselora.kinds.glora import GLORA, OLD_ORDER, ORDER, Order, glora_order
from fuselora.lora.grammar import parse_key, unfused_kind


def shapes(order: Order, *found: Shape) -> Shapes:
    return dict(zip(order, found, strict=True))


def layer(order: Order, out: int, into: int, rank: int, *kernel: int) -> Shapes:
    one = (1,) * len(kernel)
    return shapes(order, (into, rank, *one), (rank, into, *one), (out, rank, *one), (rank, into, *kernel))


@pytest.mark.parametrize("order", [ORDER, OLD_ORDER])
@pytest.mark.parametrize(("out", "into"), [(8, 6), (6, 8), (8, 8)])
@pytest.mark.parametrize("kernel", [(), (3,), (3, 3), (2, 3, 3)])
def test_the_order_is_seen_from_the_shapes(
    order: Order, out: int, into: int, kernel: tuple[int, ...]
) -> None:
    found = layer(order, out, into, 2, *kernel)
    assert glora_order(found) == order
    assert GLORA.shape(found, (out, into, *kernel)) == (out, into, *kernel)
    assert GLORA.rank(found) == 2


@pytest.mark.parametrize(
    "found",
    [
        layer(ORDER, 4, 4, 4),
        shapes(ORDER, (6, 2), (2, 6), (8, 3), (3, 6)),
        shapes(ORDER, (6, 2), (2, 5), (8, 2), (2, 6)),
        shapes(ORDER, (6, 2), (2, 6), (8, 2), (2, 7)),
        shapes(ORDER, (), (2, 6), (8, 2), (2, 6)),
        shapes(ORDER, (6, 2), (2, 6, 3), (8, 2), (2, 6, 3)),
    ],
)
def test_shapes_that_say_nothing_or_two_things(found: Shapes) -> None:
    with pytest.raises(BadParts):
        GLORA.shape(found, (8, 6))
    assert GLORA.rank(found) is None


def test_both_products_have_to_be_nothing() -> None:
    assert GLORA.is_nothing(frozenset({"a2", "b2"}))
    assert GLORA.is_nothing(frozenset({"a1", "b2"}))
    assert not GLORA.is_nothing(frozenset({"b1", "b2"}))
    assert not GLORA.is_nothing(frozenset({"a1", "a2"}))


@pytest.mark.parametrize("part", ORDER)
def test_keys(part: str) -> None:
    parsed = parse_key(f"lora_unet_x.{part}.weight")
    assert parsed
    assert (parsed.module, parsed.part) == ("lora_unet_x", part)


@pytest.mark.parametrize("key", ["x.bm.weight", "x.scalar"])
def test_what_is_refused_by_name(key: str) -> None:
    assert parse_key(key) is None
    assert unfused_kind(key)
