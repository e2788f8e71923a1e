"""Every name of every layout, and the base's rows that it means."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from fuselora.name_table import Home, NameTable, name_table
from tests import small
from tests.families.toy import TOY, canonical, spelled
from tests.inputs import open_base

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from fuselora.families import Layout


def table_of(path: Path, tensors: Mapping[str, torch.Tensor], layout: Layout, prefix: str = "") -> NameTable:
    (component,) = open_base(small.write(path, tensors)).components
    return name_table(replace(component, prefix=prefix), TOY, layout)


def rows_of(home: Home, name: torch.Tensor, base: Mapping[str, torch.Tensor]) -> None:
    """Every row of the named tensor is where the home says."""
    seen = torch.zeros(len(name), dtype=torch.int)
    for place in home.places:
        held = base[place.base_key]
        for first, other, n in place.rows or ((0, 0, len(name)),):
            assert torch.equal(held[first : first + n], name[other : other + n]), place
            seen[other : other + n] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize("base_layout", ["diffusers", "native", "raw"])
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_every_name_means_the_rows_that_it_has(tmp_path: Path, base_layout: Layout, prefix: str) -> None:
    base = {prefix + name: t for name, t in spelled(base_layout, canonical()).items()}
    table = table_of(tmp_path / "base.safetensors", base, base_layout, prefix)
    assert table.dotted.keys() == {"diffusers", "native", "raw"}
    for layout, homes in table.dotted.items():
        wanted = spelled(layout, canonical())
        assert homes.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert homes[name].shape == tuple(tensor.shape)
            rows_of(homes[name], tensor, base)
    assert not any(place.rows for home in table.dotted[base_layout].values() for place in home.places)


def test_one_place_without_runs_where_only_the_name_differs(tmp_path: Path) -> None:
    table = table_of(tmp_path / "base.safetensors", spelled("native", canonical()), "native")
    (place,) = table.dotted["diffusers"]["x_embed.weight"].places
    assert (place.base_key, place.rows) == ("x_in.weight", ())


def test_a_shape_that_the_layout_does_not_have_is_known_by_its_own_name_alone(tmp_path: Path) -> None:
    base = {"blocks.0.qkv.weight": torch.zeros(7, 4), "x_in.weight": torch.zeros(4, 3)}
    table = table_of(tmp_path / "base.safetensors", base, "native")
    assert table.dotted["native"].keys() == base.keys()
    assert table.dotted["diffusers"].keys() == {"x_embed.weight"}


def test_what_the_family_knows_beside_the_model_is_known_by_its_whole_name(tmp_path: Path) -> None:
    names = ("model.diffusion_model.x_embed", "text_proj.embed", "first_stage_model.x_embed")
    path = small.write(tmp_path / "base.safetensors", {f"{name}.weight": torch.zeros(4, 3) for name in names})
    (component,) = open_base(path).components
    family = replace(TOY, beside=frozenset({"text_proj.embed"}))
    table = name_table(replace(component, prefix="model.diffusion_model."), family, "diffusers")
    assert table.dotted["diffusers"].keys() == {"x_embed.weight", "text_proj.embed.weight"}
    (place,) = table.dotted["diffusers"]["text_proj.embed.weight"].places
    assert place.base_key == "text_proj.embed.weight"
    assert "text_proj.embed.weight" not in table.dotted["native"]
