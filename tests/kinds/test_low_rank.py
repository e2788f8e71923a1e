from __future__ import annotations

import pytest

from fuselora.kinds import BadParts, Shape, Shapes, kinds_in, meant
from fuselora.kinds.low_rank import PAIR, SPLIT_PAIR, TRANSPOSED
from fuselora.kinds.pair_bias import PAIR_BIAS
from fuselora.kinds.settings import Settings, settings_of
from fuselora.lora.grammar import parse_key, unfused_kind

CORED: Shapes = {"up": (8, 2, 1, 1), "down": (2, 6, 1, 1), "mid": (2, 2, 3, 3)}
SPLIT: Shapes = {"up_0": (8, 2), "up_1": (4, 2), "up_2": (4, 2), "down": (6, 5)}


@pytest.mark.parametrize(
    ("up", "down", "shape"),
    [
        ((8, 2), (2, 6), (8, 6)),
        ((8, 2, 1, 1), (2, 6, 1, 1), (8, 6, 1, 1)),
        ((8, 2, 1), (2, 6, 3), (8, 6, 3)),
        ((8, 2), (2, 6, 3, 3), (8, 6, 3, 3)),
        ((8, 2, 1, 1, 1), (2, 6, 1, 2, 2), (8, 6, 1, 2, 2)),
    ],
)
def test_shape_and_rank(up: Shape, down: Shape, shape: Shape) -> None:
    assert PAIR.shape({"up": up, "down": down}, ()) == shape
    assert PAIR.rank({"up": up, "down": down}) == 2


@pytest.mark.parametrize("up", [(8, 2), (8, 2, 1), (8, 2, 1, 1)])
def test_the_kernel_is_the_cores(up: Shape) -> None:
    assert PAIR.shape({**CORED, "up": up}, ()) == (8, 6, 3, 3)
    assert PAIR.rank(CORED) == 2


def test_what_a_core_makes_is_held_too() -> None:
    assert PAIR.held(CORED) == 16 + 12 + 36 + 2 * 6 * 9
    assert PAIR.held({"up": (8, 2), "down": (2, 6)}) == 16 + 12


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"up": (8, 3, 1, 1)}, "shape"),
        ({"up": (8,)}, "shape"),
        ({"up": (8, 2, 3, 3)}, "unsupported"),
        ({"down": (2, 6, 3, 3)}, "unsupported"),
        ({"down": (2,)}, "shape"),
        ({"mid": (2, 3, 3, 3)}, "shape"),
        ({"mid": (3, 2, 3, 3)}, "shape"),
        ({"mid": (2,)}, "shape"),
        ({"mid": ()}, "shape"),
    ],
)
def test_parts_that_make_no_delta(wrong: Shapes, code: str) -> None:
    with pytest.raises(BadParts) as raised:
        PAIR.shape({**CORED, **wrong}, ())
    assert raised.value.code == code


def test_split_outputs() -> None:
    assert SPLIT_PAIR.shape(SPLIT, ()) == (16, 5)
    assert SPLIT_PAIR.rank(SPLIT) == 2
    assert kinds_in(SPLIT) == (SPLIT_PAIR,)
    assert kinds_in({"up": 0, "down": 0, "mid": 0}) == (PAIR,)


@pytest.mark.parametrize(
    "wrong",
    [
        {"up_1": (4, 3)},
        {"down": (5, 5)},
        {"down": (2, 5)},
        {"up_0": (8, 2, 1, 1)},
        {"up_0": (8,)},
        {"down": (6, 5, 3)},
        {"up_4": (4, 2)},
    ],
)
def test_split_outputs_that_disagree(wrong: Shapes) -> None:
    with pytest.raises(BadParts):
        SPLIT_PAIR.shape({**SPLIT, **wrong}, ())


def test_a_block_of_zeros_is_not_all_of_it() -> None:
    assert not SPLIT_PAIR.is_nothing(frozenset({"up_0"}))
    assert SPLIT_PAIR.is_nothing(frozenset({"down"}))


@pytest.mark.parametrize(
    ("key", "part"),
    [
        ("lora_mid.weight", "mid"),
        ("lora_mid", "mid"),
        ("lora_up.blocks.0.weight", "up_0"),
        ("lora_up.blocks.7.weight", "up_7"),
        ("lora_B.bias", "pair_bias"),
        ("lora_B.default.bias", "pair_bias"),
    ],
)
def test_keys(key: str, part: str) -> None:
    parsed = parse_key(f"x.y.{key}")
    assert parsed
    assert (parsed.module, parsed.part) == ("x.y", part)


@pytest.mark.parametrize("block", [8, 12])
def test_a_ninth_block_is_refused_by_name(block: int) -> None:
    key = f"x.lora_up.blocks.{block}.weight"
    assert parse_key(key) is None
    assert "more than 8 blocks" in (unfused_kind(key) or "")


def test_a_bias_is_scaled_by_its_pairs_rank() -> None:
    assert PAIR_BIAS.shape({"pair_bias": (8,), "down": (2, 6)}, (8,)) == (8,)
    assert PAIR_BIAS.rank({"pair_bias": (8,), "down": (2, 6)}) == 2


def test_a_bias_without_its_pair() -> None:
    assert PAIR_BIAS.rank({"pair_bias": (8,)}) is None
    with pytest.raises(BadParts, match="without its pair"):
        PAIR_BIAS.shape({"pair_bias": (8,)}, (8,))


def test_a_bias_beside_a_magnitude_has_no_definition() -> None:
    with pytest.raises(BadParts, match="magnitude"):
        PAIR_BIAS.shape({"pair_bias": (8,), "down": (2, 6), "magnitude": (8,)}, (8,))


def test_fan_in_fan_out_is_for_matrices() -> None:
    settings = settings_of({"peft_type": "LORA", "fan_in_fan_out": True}, "x")
    pair: Shapes = {"up": (8, 2), "down": (2, 6)}
    assert meant(PAIR, settings, pair) is TRANSPOSED
    assert TRANSPOSED.shape(pair, (6, 8)) == (6, 8)
    assert meant(PAIR, settings, {"up": (8, 2, 1, 1), "down": (2, 6, 3, 3)}) is PAIR
    assert meant(PAIR_BIAS, settings, {**pair, "pair_bias": (8,)}) is PAIR_BIAS
    assert meant(PAIR, Settings(), pair) is PAIR


@pytest.mark.parametrize("document", [{"peft_type": "LORA"}, {"fan_in_fan_out": False}, None])
def test_weights_are_out_and_in_unless_the_configuration_says_so(document: dict[str, object] | None) -> None:
    assert not settings_of(document, "x").transposed
