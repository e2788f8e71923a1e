"""What a family's data is asked, on a family of a few names."""

from __future__ import annotations

import pytest

from fuselora.families import FAMILIES, Branch, Family, Kin, Layout, Measure, SkipRule
from fuselora.families.renames import Renames

BLOCK = "layers.{n}"
TOY = Family(
    name="toy",
    canonical="native",
    layouts={
        "diffusers": Renames(
            (("layers.{n}.to_q", "layers.{n}.q"), ("{n}.{n}.c", "a.{n}.b.{n}"), ("embed.in", "in"))
        )
    },
    names=frozenset(("layers.{n}.q", "a.{n}.b.{n}", "in", "tail", "layers.{n}.extra")),
    block="layers.{n}.",
    keep_float32=frozenset({"embed"}),
    experts={"transformer": "high_noise", "transformer_2": "low_noise"},
    skips=(SkipRule("extra", ("layers.{n}.extra", "tail"), "in.weight", 1, (3, 7)),),
    kin=(
        Kin(("Toy-1", "Toy-1b"), ("Toy-2",), 2, {"in.weight": (8, -1), "tail.weight": ()}),
        Kin((), ("Toy-3",), 1, {"in.weight": (8, 3)}),
    ),
    measures=(
        Measure("width", ("in.weight", 0), {0: ("in.weight", "layers.{n}.q.weight"), 1: ("out.weight",)}),
    ),
    branches=(Branch("tail", ("tail", "layers.{n}.tail"), "tail.weight"),),
)


@pytest.mark.parametrize(
    ("native", "diffusers"),
    [
        ("layers.0.q", "layers.0.to_q"),
        ("layers.12.q.weight", "layers.12.to_q.weight"),
        ("layers.3.q.bias", "layers.3.to_q.bias"),
        ("a.1.b.20.weight", "1.20.c.weight"),
        ("in", "embed.in"),
    ],
)
def test_names_translate_both_ways(native: str, diffusers: str) -> None:
    assert TOY.translate(native, "native", "diffusers") == diffusers
    assert TOY.translate(diffusers, "diffusers", "native") == native


@pytest.mark.parametrize(
    "name",
    ["", "x", "layers.0.qq", "xlayers.0.q", "layers.x.q", "layers.0.q.weight.x", "layers.0.q.scale", "input"],
)
@pytest.mark.parametrize(("layout", "to"), [("diffusers", "native"), ("native", "diffusers")])
def test_a_name_of_which_no_row_speaks_stays(name: str, layout: Layout, to: Layout) -> None:
    assert TOY.translate(name, layout, to) == name


@pytest.mark.parametrize(
    ("flat", "dotted"),
    [
        ("layers_12_q", "layers.12.q"),
        ("layers_0_to_q", "layers.0.to_q"),
        ("a_1_b_20", "a.1.b.20"),
        ("x_0_q", None),
        ("embed_in", "embed.in"),
        ("layers_4_x", None),
        ("layers.4.q", None),
    ],
)
def test_flattened_names_are_read_by_the_rows(flat: str, dotted: str | None) -> None:
    assert TOY.dotted(flat) == dotted


@pytest.mark.parametrize(
    ("names", "layout"),
    [
        ([], None),
        (["x", "y.weight"], None),
        (["layers.0.q.weight", "x"], "native"),
        (["layers.0.to_q.weight", "layers.0.to_q.bias", "layers.1.q.weight"], "diffusers"),
        (["layers.0.q.weight", "layers.0.to_q.weight"], None),
    ],
)
def test_the_layout_is_that_of_most_names(names: list[str], layout: Layout | None) -> None:
    assert TOY.layout_of(names) == layout


@pytest.mark.parametrize(
    ("names", "share"),
    [
        ([], 0.0),
        (["layers.7.to_q.weight", "layers.7.q", "tail.bias", "embed.in"], 1.0),
        (["layers.7.to_q.weight", "x"], 0.5),
        (["xlayers.7.q.weight", "layers.7.q.weight.x", "layers.x.q.weight"], 0.0),
    ],
)
def test_the_share_of_names_that_a_family_has(names: list[str], share: float) -> None:
    assert TOY.share(names) == share


def test_float32_is_kept_by_whole_segments_of_the_diffusers_name() -> None:
    assert TOY.keeps_float32("embed.in.weight", "diffusers")
    assert TOY.keeps_float32("in.weight", "native")
    assert not TOY.keeps_float32("in.weight", "diffusers")
    assert not TOY.keeps_float32("embedder.weight", "diffusers")
    assert TOY.keeps_float32("embed.weight", None)


def test_models_are_told_by_blocks_and_shapes() -> None:
    shapes = {"layers.0.q.weight": (8, 8), "layers.1.q.weight": (8, 8), "in.weight": (8, 5)}
    assert TOY.models_of(shapes) == ("Toy-1", "Toy-1b", "Toy-2 (one expert)")
    assert TOY.models_of(shapes, n_experts=2) == ("Toy-2",)
    assert TOY.models_of({**shapes, "tail.weight": (8,)}) == ()
    assert TOY.models_of({**shapes, "in.weight": (9, 5)}) == ()
    assert TOY.models_of({**shapes, "in.weight": (8, 5, 1)}) == ()
    assert TOY.models_of({**shapes, "layers.2.q.weight": (8, 8)}) == ()
    one_block = {"layers.0.to_q.weight": (8, 8), "embed.in.weight": (8, 3)}
    assert TOY.models_of(one_block) == ("Toy-3 (one expert)",)
    assert TOY.models_of({}) == ()


def test_a_skip_rule_covers_dotted_and_flattened_names() -> None:
    (rule,) = TOY.skips
    assert rule.covers("layers.10.extra")
    assert rule.covers("tail")
    assert not rule.covers("layers.10.extra.x")
    assert not rule.covers("layers.ten.extra")
    assert not rule.covers("layers_10_extra")
    assert rule.covers_flat("layers_10_extra")
    assert not rule.covers_flat("layers.10.extra")


@pytest.mark.parametrize(
    ("shapes", "harmless"),
    [
        ({"in.weight": (8, 3)}, True),
        ({"in.weight": (8, 7, 1, 1)}, True),
        ({"in.weight": (8, 5)}, False),
        ({"in.weight": (3,)}, False),
        ({}, False),
    ],
)
def test_a_skip_is_harmless_by_one_length(shapes: dict[str, tuple[int, ...]], harmless: bool) -> None:
    assert TOY.skips[0].harmless(shapes) is harmless


# A LoRA's deltas


def models(deltas: dict[str, tuple[int, ...]]) -> list[str]:
    return [name for kin in TOY.kin_of_deltas(deltas) for name in (*kin.models, *kin.expert_of)]


@pytest.mark.parametrize(
    ("deltas", "fits"),
    [
        ({}, ["Toy-1", "Toy-1b", "Toy-2", "Toy-3"]),
        ({"layers.0.q.weight": (8, 8)}, ["Toy-1", "Toy-1b", "Toy-2", "Toy-3"]),
        ({"layers.0.q.weight": (9, 8)}, []),
        ({"layers.0.q.weight": (8, 8), "in.weight": (9, 3)}, []),
        ({"layers.1.q.weight": (8, 8)}, ["Toy-1", "Toy-1b", "Toy-2"]),
        ({"layers.2.q.weight": (8, 8)}, []),
        ({"tail.weight": (8,)}, ["Toy-3"]),
        ({"layers.1.q.weight": (8, 8), "tail.bias": (8,)}, []),
    ],
)
def test_models_with_room_for_all_deltas(deltas: dict[str, tuple[int, ...]], fits: list[str]) -> None:
    assert models(deltas) == fits


def test_models_with_room_for_all_but_a_skip() -> None:
    (rule,) = TOY.skips
    deltas = {"layers.0.q.weight": (8, 8), "tail.weight": (8,)}
    assert models(deltas) == ["Toy-3"]
    assert TOY.kin_but_for(rule, {"layers.0.q.weight": (8, 8)}) == ()
    # Toy-1 has room for the rest, but the rule is for models of 3 or 7 channels
    assert TOY.kin_but_for(rule, deltas) == ()


def test_sizes_that_deltas_show() -> None:
    (measure,) = TOY.measures
    assert measure.of({"in.weight": (8, 3), "layers.4.q.weight": (9, 1), "x": (5,)}) == {8, 9}
    assert measure.of({"layers.4.q.bias": (8,)}) == frozenset()


LAYOUTS = [(family, layout) for family in FAMILIES for layout in family.layouts]


@pytest.mark.parametrize(("family", "layout"), LAYOUTS, ids=lambda value: getattr(value, "name", value))
def test_every_layout_s_rows_are_complete_and_differ(family: Family, layout: Layout) -> None:
    every = family.layouts[layout].rows
    scales = {row.theirs.removesuffix("scale") + "weight" for row in every if row.theirs.endswith(".scale")}
    rows = [row for row in every if row.theirs not in scales]  # a norm's other spelling
    assert len(every) - len(rows) == len(scales)
    theirs, ours = [row.theirs for row in rows], [name for row in rows for name in row.ours]
    assert len(set(theirs)) == len(theirs)
    assert len(set(ours)) == len(ours)
    for row in rows:
        assert {name.count("{n}") for name in row.ours} == {row.theirs.count("{n}")}
        assert not row.is_plain or row.ours != (row.theirs,)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_says_what_tells_its_models(family: Family) -> None:
    assert family.kin
    assert family.names
    assert all(rule.witness and rule.reason and rule.modules for rule in family.skips)


def test_a_measure_sees_every_axis_that_shows_it() -> None:
    (width,) = TOY.measures
    assert width.of({"layers.3.q.weight": (8, 2), "out.weight": (5, 9), "x": (7,)}) == {8, 9}
    assert width.of({"layers.3.q.weight": (), "out.weight": (5,)}) == frozenset()


@pytest.mark.parametrize(
    ("deltas", "fit"),
    [
        ({}, [0, 1]),
        ({"layers.0.q.weight": (8, 8)}, [0, 1]),
        ({"layers.0.q.weight": (9, 8)}, []),
        ({"layers.0.q.weight": (8, 8), "out.weight": (3, 9)}, []),
        ({"layers.1.q.weight": (8, 8)}, [0]),
        ({"layers.2.q.weight": (8, 8)}, []),
        ({"tail.weight": (8, 8)}, [1]),
        ({"layers.0.tail.weight": ()}, [1]),
        ({"unheard.of": (1,)}, [0, 1]),
    ],
)
def test_deltas_fit_models_with_room_for_them(deltas: dict[str, tuple[int, ...]], fit: list[int]) -> None:
    assert TOY.kin_of_deltas(deltas) == tuple(TOY.kin[n] for n in fit)


def test_deltas_that_a_model_may_lack() -> None:
    rule = SkipRule("tail", ("tail",), "in.weight", 0, (8,))
    assert TOY.kin_but_for(rule, {"tail.weight": (8, 8)}) == (TOY.kin[0],)
    assert TOY.kin_but_for(rule, {"tail.weight": (8, 8), "layers.1.tail.weight": ()}) == ()
    assert TOY.kin_but_for(rule, {"layers.0.q.weight": (8, 8)}) == ()
    elsewhere = SkipRule("tail", ("tail",), "in.weight", 0, (9,))
    assert TOY.kin_but_for(elsewhere, {"tail.weight": (8, 8)}) == ()


def test_blocks_are_numbered() -> None:
    names = [
        "layers.0.q",
        "layers.12.q.weight",
        "layers.12.k",
        "layers.x.q",
        "xlayers.3.q",
        f"layers.{'9' * 99}.q",
    ]
    assert TOY.block_numbers(names) == {0, 12}
