"""A family with everything that layouts do to rows, small enough to see."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fuselora.families import Family, Kin, Sign
from fuselora.families.renames import Renames, heads, split, square_then_rest, swap

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fuselora.families import Layout

D, HEADS, MLP = 4, 2, 6
QKV = ("blocks.{n}.to_q", "blocks.{n}.to_k", "blocks.{n}.to_v")
SAME = (
    split("blocks.{n}.linear1", *(f"blocks.{{n}}.single.{p}" for p in "qkvm"), sizes=square_then_rest),
    swap("final.mod", "norm_out.linear"),
    ("x_in", "x_embed"),
    ("blocks.{n}.norm.scale", "blocks.{n}.norm_q.weight"),
)
TOY = Family(
    name="toy",
    canonical="diffusers",
    layouts={
        "native": Renames((split("blocks.{n}.qkv", *QKV), *SAME)),
        "raw": Renames((heads("blocks.{n}.qkv", *QKV, head=2), *SAME)),
    },
    names=frozenset(
        (
            *QKV,
            *(f"blocks.{{n}}.single.{p}" for p in "qkvm"),
            "norm_out.linear",
            "x_embed",
            "blocks.{n}.norm_q",
        )
    ),
    block="blocks.{n}.",
    kin=(Kin(("Toy",), (), 1, {"x_embed.weight": (4, 3)}),),
    signs=(Sign("raw", says="of shards", base_has="rope.inv_freq", lora_key=r"\.default\."),),
)
CANONICAL = {
    **{f"blocks.0.to_{p}.weight": (D, D) for p in "qkv"},
    **{f"blocks.0.to_{p}.bias": (D,) for p in "qkv"},
    **{f"blocks.0.single.{p}.weight": (D, D) for p in "qkv"},
    "blocks.0.single.m.weight": (MLP, D),
    "norm_out.linear.weight": (2 * D, D),
    "x_embed.weight": (D, 3),
    "blocks.0.norm_q.weight": (D,),
}


def canonical(seed: int = 7) -> dict[str, torch.Tensor]:
    """A model's tensors, between 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.rand(shape, generator=generator) for name, shape in CANONICAL.items()}


def spelled(layout: Layout, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Canonical tensors as a layout has them, by hand."""
    if layout == "diffusers":
        return dict(tensors)
    found = {}
    for leaf in ("weight", "bias"):
        q, k, v = (tensors[f"blocks.0.to_{p}.{leaf}"] for p in "qkv")
        found[f"blocks.0.qkv.{leaf}"] = torch.cat((q, k, v))
        if layout == "raw":
            by_head = torch.stack([part.reshape(HEADS, 2, -1) for part in (q, k, v)], 1)
            found[f"blocks.0.qkv.{leaf}"] = by_head.reshape(3 * D, *q.shape[1:])
    found["blocks.0.linear1.weight"] = torch.cat([tensors[f"blocks.0.single.{p}.weight"] for p in "qkvm"])
    scale, shift = tensors["norm_out.linear.weight"].chunk(2)
    found["final.mod.weight"] = torch.cat((shift, scale))
    found["x_in.weight"] = tensors["x_embed.weight"]
    found["blocks.0.norm.scale"] = tensors["blocks.0.norm_q.weight"]
    return found
