"""Kinds that need the base's values: what their keys, shapes and settings say, and what is refused."""

from __future__ import annotations

import pytest

from fuselora.kinds import KINDS, BadParts, Shape, Shapes, kinds_in, meant
from fuselora.kinds.boft import BOFT, PEFT_BOFT
from fuselora.kinds.dora import axis_of, check_magnitude
from fuselora.kinds.ia3 import IA3, PEFT_IA3, PEFT_IA3_B, ask_axis, ask_inputs, of_inputs, scales_bias
from fuselora.kinds.loha import LOHA
from fuselora.kinds.low_rank import PAIR
from fuselora.kinds.oft import OFT, PEFT_OFT, block_size
from fuselora.kinds.replacement import FULL_PARTS, REPLACE, REPLACE_B
from fuselora.kinds.settings import Rotation, Settings, settings_of
from fuselora.lora.grammar import is_lora_key, parse_key, unfused_kind

CONV = (8, 4, 3, 3)
SQUARE = (4, 4, 3, 3)


@pytest.mark.parametrize(
    ("suffix", "part", "name"),
    [
        ("weight", "weight", ""),
        ("bias", "bias", ""),
        ("scale", "scale", ""),
        ("set_weight", "set_weight", ""),
        ("reshape_weight", "reshape_weight", ""),
        ("base_layer.bias", "bias", ""),
        ("modules_to_save.weight", "weight", ""),
        ("modules_to_save.style.bias", "bias", "style"),
        ("lora_magnitude_vector", "magnitude", ""),
        ("lora_magnitude_vector.weight", "magnitude", ""),
        ("lora_magnitude_vector.style", "magnitude", "style"),
        ("lora_magnitude_vector.style.weight", "magnitude", "style"),
        ("dora_scale", "dora_scale", ""),
        ("ia3_l", "ia3_l", ""),
        ("ia3_l.style", "ia3_l", "style"),
        ("on_input", "on_input", ""),
        ("oft_R.weight", "oft_r", ""),
        ("oft_R.style.weight", "oft_r", "style"),
        ("oft_embedding_R.weight", "oft_embedding_r", ""),
        ("oft_blocks", "oft_blocks", ""),
        ("rescale", "rescale", ""),
        ("boft_R", "boft_r", ""),
        ("boft_s.style", "boft_s", "style"),
    ],
)
def test_keys(suffix: str, part: str, name: str) -> None:
    found = parse_key(f"blocks.0.to_q.{suffix}")
    assert found is not None
    assert (found.module, found.part, found.name) == ("blocks.0.to_q", part, name)
    assert is_lora_key(f"x.{suffix}") is (part not in FULL_PARTS)


@pytest.mark.parametrize("key", ["x.oft_diag", "x.oft_r", "x.oft_r.default"])
def test_what_was_saved_before_is_named(key: str) -> None:
    assert parse_key(key) is None
    assert unfused_kind(key)


def test_what_only_ends_like_a_tensor_is_no_whole_weight() -> None:
    for key in ("x.bm.weight", "x.lora_A.weight"):
        found = parse_key(key)
        assert found is None or found.part not in FULL_PARTS


# DoRA


@pytest.mark.parametrize(
    ("part", "shape", "base", "axis"),
    [
        ("magnitude", (8,), (8, 4), "rows"),
        ("magnitude", (1, 8, 1, 1), CONV, "rows"),
        ("dora_scale", (8, 1), (8, 4), "rows"),
        ("dora_scale", (1, 4), (8, 4), "columns"),
        ("dora_scale", (4, 1), (4, 4), "rows"),
        ("dora_scale", (1, 4), (4, 4), "columns"),
        ("dora_scale", (8, 1, 1, 1), CONV, "rows"),
        ("dora_scale", (1, 4, 1, 1), CONV, "columns"),
        ("dora_scale", (8,), (8, 4), "rows"),
        ("dora_scale", (4,), (8, 4), "columns"),
        ("dora_scale", (1, 1), (1, 4), "rows"),
        ("dora_scale", (1, 1), (8, 1), "columns"),
    ],
)
def test_a_magnitude_says_by_its_shape_what_it_is_of(part: str, shape: Shape, base: Shape, axis: str) -> None:
    check_magnitude(PAIR, {part: shape}, base)
    assert axis_of(part, shape, base[0], outputs_last=False) == axis


@pytest.mark.parametrize(
    ("part", "shape", "base"),
    [
        ("magnitude", (4,), (8, 4)),
        ("magnitude", (1, 4, 1, 1), CONV),
        ("dora_scale", (4,), (4, 4)),
        ("dora_scale", (4, 1), (8, 4)),
        ("dora_scale", (), (8, 4)),
        ("dora_scale", (8, 4), (8, 4)),
    ],
)
def test_a_magnitude_that_fits_in_no_way_or_in_two_is_refused(part: str, shape: Shape, base: Shape) -> None:
    with pytest.raises(BadParts):
        check_magnitude(LOHA, {part: shape}, base)


def test_a_magnitude_makes_a_kind_move_and_never_nothing() -> None:
    assert PAIR.moves_with({"up": 0, "down": 0, "dora_scale": 0})
    assert not PAIR.moves_with({"up": 0, "down": 0})


# Whole weights and LyCORIS' IA3 have a key in common


def test_on_input_shows_what_a_weight_is() -> None:
    assert kinds_in({"weight": 0}) == (REPLACE,)
    assert kinds_in({"weight": 0, "on_input": 0}) == (IA3,)
    assert set(kinds_in({"up": 0, "down": 0, "bias": 0})) == {PAIR, REPLACE_B}
    assert IA3.lacks({"on_input": 0}) == "weight"


def test_replacements_are_counted_as_one_and_are_never_nothing() -> None:
    kinds = [kind for kind in KINDS if kind.counted == "replace"]
    assert len(kinds) == 4
    assert all(kind.moves and not kind.is_nothing(frozenset(kind.parts)) for kind in kinds)


# IA3


@pytest.mark.parametrize(
    ("shape", "base", "feedforward", "inputs"),
    [
        ((8, 1), (8, 4), None, False),
        ((1, 4), (8, 4), None, True),
        ((4, 1), (4, 4), None, False),
        ((1, 4), (4, 4), None, True),
        ((1, 8, 1, 1), CONV, None, False),
        ((1, 4, 1, 1), CONV, None, True),
        ((1, 4, 1, 1), SQUARE, True, True),
        ((1, 4, 1, 1), SQUARE, False, False),
    ],
)
def test_ia3_says_by_shape_or_configuration_what_it_scales(
    shape: Shape, base: Shape, feedforward: bool | None, inputs: bool
) -> None:
    settings, shapes = Settings(feedforward=feedforward), {"ia3_l": shape}
    assert PEFT_IA3.shape(shapes, base) == base
    ask_axis(settings, shapes, base)
    assert of_inputs(settings, shape, base[0]) is inputs
    assert scales_bias(settings, shapes, base[:1]) is not inputs


@pytest.mark.parametrize(
    ("shape", "base", "feedforward"),
    [
        ((8,), (8, 4), None),
        ((4, 1), (8, 4), None),
        ((8, 4), (8, 4), None),
        ((1, 8), (8, 4, 1, 1), None),
        ((8, 1, 1, 1), CONV, None),
        ((1, 5, 1, 1), CONV, None),
        ((1, 4, 1, 1), SQUARE, None),
        ((1, 4, 1, 1), CONV, False),
    ],
)
def test_ia3_that_fits_in_no_way_or_in_two_is_refused(
    shape: Shape, base: Shape, feedforward: bool | None
) -> None:
    with pytest.raises(BadParts):
        PEFT_IA3.shape({"ia3_l": shape}, base)
        ask_axis(Settings(feedforward=feedforward), {"ia3_l": shape}, base)


def test_lycoris_says_with_a_number_what_it_scales() -> None:
    for on_input, shapes in ((True, {"weight": (4,)}), (False, {"weight": (8,)})):
        assert IA3.shape(shapes, (8, 4)) == (8, 4)
        ask_inputs(Settings(on_input=on_input), shapes, (8, 4))
        with pytest.raises(BadParts):
            ask_inputs(Settings(on_input=not on_input), shapes, (8, 4))


def test_a_bias_is_scaled_where_there_is_one() -> None:
    assert PEFT_IA3_B.if_there
    assert kinds_in({"ia3_l": 0}) == (PEFT_IA3, PEFT_IA3_B)


@pytest.mark.parametrize(
    ("modules", "said"),
    [(["to_q"], True), (["o_q"], True), ("blocks.*to_q", True), ("to_q", False), ([], False), (None, None)],
)
def test_which_modules_are_feed_forward_as_peft_reads_it(modules: object, said: bool | None) -> None:
    document = {"peft_type": "IA3", "feedforward_modules": modules}
    assert settings_of(document, "base_model.model.blocks.0.to_q").feedforward is said


# OFT and BOFT


def test_the_size_of_a_block_by_half_of_its_numbers() -> None:
    assert [block_size(n * (n - 1) // 2) for n in range(2, 40)] == list(range(2, 40))
    assert block_size(5) is None


@pytest.mark.parametrize(
    ("shapes", "base"),
    [
        ({"oft_r": (3, 6)}, (8, 16)),
        ({"oft_r": (4, 5)}, (8, 16)),
        ({"oft_r": (4, 6)}, (16, 8)),
        ({"oft_r": (24,)}, (8, 16)),
    ],
)
def test_rotations_that_do_not_cover_the_inputs_are_refused(shapes: Shapes, base: Shape) -> None:
    with pytest.raises(BadParts):
        PEFT_OFT.shape(shapes, base)
        PEFT_OFT.asks(Settings(rotation=Rotation(None, None, False)), shapes, base)


def test_one_block_stands_for_all_where_the_configuration_says_so() -> None:
    shapes, base = {"oft_r": (1, 6)}, (8, 16)
    PEFT_OFT.asks(Settings(rotation=Rotation(5, None, True)), shapes, base)
    with pytest.raises(BadParts):
        PEFT_OFT.asks(Settings(rotation=Rotation(5, None, False)), shapes, base)
    with pytest.raises(BadParts, match="adapter_config") as refused:
        PEFT_OFT.asks(Settings(), shapes, base)
    assert refused.value.code == "unsupported"


OFT_CONFIG = {"peft_type": "OFT", "oft_block_size": 4, "peft_version": "0.21.2"}


def test_what_a_configuration_says_of_rotations() -> None:
    plain = settings_of(OFT_CONFIG, "x").rotation
    assert plain == Rotation(None, None, False)
    series = {"use_cayley_neumann": True, "num_cayley_neumann_terms": 7, "coft": True, "eps": 0.5}
    assert settings_of({**OFT_CONFIG, **series, "block_share": True}, "x").rotation == Rotation(7, 0.5, True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"use_cayley_neumann": True, "peft_version": None},
        {"use_cayley_neumann": True, "peft_version": "0.17.0"},
        {"use_cayley_neumann": True, "num_cayley_neumann_terms": "many"},
        {"use_cayley_neumann": True, "num_cayley_neumann_terms": 0},
        {"coft": True, "eps": None},
    ],
)
def test_a_configuration_that_leaves_it_open_says_why(wrong: dict[str, object]) -> None:
    found = settings_of({**OFT_CONFIG, **wrong}, "x")
    assert found.rotation is None
    assert found.unread
    without = {key: value for key, value in OFT_CONFIG.items() if key != "oft_block_size"}
    assert "0.14" in settings_of(without, "x").unread


def test_four_dimensions_make_it_a_butterfly() -> None:
    assert meant(OFT, Settings(), {"oft_blocks": (6, 4, 4)}) is OFT
    assert meant(OFT, Settings(), {"oft_blocks": (3, 4, 6, 6)}) is BOFT
    assert BOFT.copies == 1


@pytest.mark.parametrize(
    ("shapes", "base"),
    [
        ({"boft_r": (1, 4, 4, 4), "boft_s": (8, 1)}, (8, 15)),
        ({"boft_r": (1, 4, 4, 4), "boft_s": (7, 1)}, (8, 16)),
        ({"boft_r": (1, 4, 4, 4), "boft_s": (2, 4)}, (8, 16)),
        ({"boft_r": (2, 3, 4, 4), "boft_s": (8, 1)}, (8, 12)),
        ({"boft_r": (2, 4, 3, 3), "boft_s": (8, 1)}, (8, 12)),
        ({"boft_r": (4, 4, 4), "boft_s": (8, 1)}, (8, 16)),
    ],
)
def test_butterflies_that_do_not_fit_are_refused(shapes: Shapes, base: Shape) -> None:
    with pytest.raises(BadParts):
        PEFT_BOFT.shape(shapes, base)
