"""A base that holds a layer twice is refused: nobody can tell which of the two is used."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

import pytest

from fuselora.errors import Refused
from fuselora.families import FAMILIES
from fuselora.families.recognition import family_of
from fuselora.pipeline import plan
from fuselora.synth import SIZES, Spec, write_safetensors
from fuselora.twins import fused_beside_parts
from tests import listings
from tests.inputs import pair, tensor

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fuselora.families import Layout

BASES = (*listings.others(), *((name, layout) for name in SIZES for layout in listings.layouts(name)))
FLUX = [
    tensor("x_embedder.weight", 4, 4),
    tensor("context_embedder.weight", 4, 4),
    *(tensor(f"transformer_blocks.0.attn.to_{part}.weight", 4, 4) for part in "qkv"),
    tensor("transformer_blocks.0.attn.to_q.bias", 4),
]
NATIVE_FLUX = [
    tensor("img_in.weight", 4, 4),
    tensor("txt_in.weight", 4, 4),
    tensor("double_blocks.0.img_attn.qkv.weight", 12, 4),
]
UNKNOWN = [tensor("stem.weight", 4, 4), *(tensor(f"b.0.{part}.weight", 4, 4) for part in ("q", "k", "v"))]


def refusal(folder: Path, base: Sequence[Spec], *modules: str) -> str:
    write_safetensors(folder / "base.safetensors", base)
    write_safetensors(folder / "lora.safetensors", [spec for module in modules for spec in pair(module)])
    with pytest.raises(Refused) as refused:
        plan(folder / "base.safetensors", [folder / "lora.safetensors"])
    (fault,) = refused.value.faults
    assert fault.kind == "twice"
    return fault.message


@pytest.mark.parametrize(
    ("base", "extra", "both"),
    [
        (FLUX, tensor("double_blocks.0.img_attn.qkv.weight", 12, 4),
         ("transformer_blocks.0.attn.to_k.weight", "double_blocks.0.img_attn.qkv.weight")),
        (FLUX, tensor("double_blocks.0.img_attn.qkv.bias", 12),
         ("transformer_blocks.0.attn.to_q.bias", "double_blocks.0.img_attn.qkv.bias")),
        (FLUX, tensor("img_in.weight", 4, 4), ("x_embedder.weight", "img_in.weight")),
        (FLUX, tensor("transformer_blocks.0.attn.to_qkv.weight", 12, 4),
         ("transformer_blocks.0.attn.to_qkv.weight", "transformer_blocks.0.attn.to_q.weight")),
        (NATIVE_FLUX, tensor("transformer_blocks.0.attn.to_k.weight", 4, 4),
         ("double_blocks.0.img_attn.qkv.weight", "transformer_blocks.0.attn.to_k.weight")),
        (NATIVE_FLUX, tensor("x_embedder.weight", 4, 4), ("img_in.weight", "x_embedder.weight")),
        (UNKNOWN, tensor("b.0.qkv.weight", 12, 4), ("b.0.qkv.weight", "b.0.q.weight")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_both_tensors_are_named(
    tmp_path: Path, base: list[Spec], extra: Spec, both: tuple[str, str], prefix: str
) -> None:
    tensors = [Spec(prefix + spec.name, spec.dtype, spec.shape) for spec in (*base, extra)]
    said = refusal(tmp_path, tensors, base[0].name.removesuffix(".weight"))
    one, two = (prefix + name for name in both)
    assert said in {
        f"{a} and {b} are the same layer: the base holds it twice" for a, b in ((one, two), (two, one))
    }


@pytest.mark.parametrize(("name", "layout"), BASES)
def test_no_published_base_has_twins(name: str, layout: Layout) -> None:
    shapes = {spec.name: spec.shape for spec in listings.base(name, layout)}
    family = family_of(shapes)
    assert family is not None
    assert list(family.twins(shapes, family.layout_of(shapes))) == []
    assert list(fused_beside_parts(shapes)) == []


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.layouts], ids=lambda family: family.name)
def test_a_row_s_names_in_two_layouts_are_twins(family: object) -> None:
    """Each row of each family, whichever layout the base is mostly in."""
    assert isinstance(family, type(FAMILIES[0]))
    filled = partial(re.sub, r"\{n\}", "3")
    for layout, renames in family.layouts.items():
        every_theirs = {filled(row.theirs) for row in renames.rows}
        every_ours = {filled(name) for row in renames.rows for name in row.ours}
        for row in renames.rows:
            names = [name.replace("{n}", "3").replace("{rest}", "x.y") for name in (row.theirs, *row.ours)]
            theirs, *ours = names
            if set(ours) & every_theirs or theirs in every_ours:
                continue  # each layout calls another tensor so
            for own in (layout, family.canonical, None):
                found = list(family.twins([theirs, ours[-1]], own))
                assert found == [(theirs, ours[-1])], (own, theirs)
