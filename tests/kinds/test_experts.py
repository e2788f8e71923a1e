from __future__ import annotations

import pytest

from fuselora.kinds import BadParts, Shape, Shapes, meant
from fuselora.kinds.experts import EXPERTS, fits_parameter, layouts, of_parameter
from fuselora.kinds.low_rank import PAIR
from fuselora.kinds.settings import Settings, settings_of

# four experts of rank 2, 6 inputs and 8 outputs
PAIRED: Shapes = {"down": (8, 6), "up": (8, 8)}


@pytest.mark.parametrize(
    ("base", "found"),
    [
        ((4, 8, 6), ("out, in",)),
        ((4, 6, 8), ("in, out",)),
        ((4, 6, 6), ()),
        ((3, 8, 6), ()),
        ((0, 8, 6), ()),
        ((8, 6), ()),
        ((4, 8, 6, 1), ()),
    ],
)
def test_layouts(base: Shape, found: tuple[str, ...]) -> None:
    assert layouts(PAIRED, base) == found
    if found:
        assert EXPERTS.shape(PAIRED, base) == base


def test_shapes_that_fit_neither_way() -> None:
    with pytest.raises(BadParts, match="neither"):
        EXPERTS.shape(PAIRED, (4, 6, 6))


def test_shapes_that_fit_both_ways() -> None:
    with pytest.raises(BadParts, match="both"):
        EXPERTS.shape({"down": (8, 6), "up": (6, 8)}, (4, 6, 6))


@pytest.mark.parametrize("wrong", [{"up": (8, 6)}, {"up": (8, 8, 1)}, {"down": (8,)}])
def test_parts_that_make_no_delta(wrong: Shapes) -> None:
    assert layouts({**PAIRED, **wrong}, (4, 8, 6)) == ()


def test_a_parameter_may_be_a_matrix() -> None:
    assert fits_parameter({"up": (8, 2), "down": (2, 6)}, (8, 6))
    assert not fits_parameter({"up": (8, 2), "down": (2, 6)}, (6, 8))
    assert not fits_parameter({"up": (8, 3), "down": (2, 6)}, (8, 6))
    settings = of_parameter(Settings(parameters=(".w",)), {"up": (8, 2), "down": (2, 6)}, (8, 6))
    assert settings == Settings(of_parameter=True)
    assert meant(PAIR, settings, {"up": (8, 2), "down": (2, 6)}) is PAIR


@pytest.mark.parametrize(("base", "swapped"), [((4, 8, 6), False), ((4, 6, 8), True)])
def test_the_parameter_says_how_many_experts_there_are(base: Shape, swapped: bool) -> None:
    settings = of_parameter(Settings(parameters=(".w",)), PAIRED, base)
    assert settings == Settings(of_parameter=True, experts=4, transposed=swapped)
    assert meant(PAIR, settings, PAIRED) is EXPERTS


@pytest.mark.parametrize(
    ("targets", "module", "found"),
    [
        (["experts.down_proj"], "base_model.model.experts", (".down_proj",)),
        (["mlp.experts.down_proj"], "base_model.model.layers.0.mlp.experts", (".down_proj",)),
        (["mlp.experts.down_proj"], "base_model.model.other.experts", ()),
        (["experts.down_proj"], "base_model.model.my_experts", ()),
        (["down_proj"], "base_model.model.experts", (".down_proj",)),
        (["experts.up", "experts.down"], "base_model.model.experts.base_layer", (".up", ".down")),
        (["experts.up", "experts.up"], "base_model.model.experts.base_layer.base_layer", (".up",)),
        ([1], "x", ()),
        (None, "x", ()),
        ("experts.up", "experts", ()),
    ],
)
def test_targets_are_whole_names_or_dotted_tails(
    targets: object, module: str, found: tuple[str, ...]
) -> None:
    assert settings_of({"target_parameters": targets}, module).parameters == found
