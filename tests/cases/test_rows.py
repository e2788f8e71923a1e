"""Public faults of fused layers: parts of one that are trained alone, and a shared factor that gets cut."""
# ruff: noqa: N802 - cases keep their names

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tests.cases.builders import assert_filled, base_of, full, fuse, same_bytes, save, std_pair

if TYPE_CHECKING:
    from pathlib import Path


# B09


def test_B09_only_some_of_q_k_v_on_a_fused_base(tmp_path: Path) -> None:
    """Z-Image stacks q, k and v; scales of alpha / rank 1 and 2."""
    names = [f"layers.0.{name}.weight" for name in ("attention.qkv", "attention.out", "feed_forward.w1")]
    base = base_of(tmp_path / "base", {name: full(12 if "qkv" in name else 4, 4) for name in names})
    pairs = {
        **std_pair(4, "layers.0.attention.to_q", alpha=4.0),
        **std_pair(2, "layers.0.attention.to_v", alpha=4.0),
    }
    fused = fuse(base, save(tmp_path / "x.safetensors", pairs))
    qkv = fused.tensors()["layers.0.attention.qkv.weight"]
    assert_filled(qkv[:4], 2.0)
    assert same_bytes(qkv[4:8], full(4, 4))
    assert_filled(qkv[8:], 3.0)
    assert fused.document["components"]["transformer"]["fused"] == 1
    assert fused.lora["applied"]["pairs"] == 2


# B25


def test_B25_a_fused_pair_on_a_split_base_shares_its_down_factor(tmp_path: Path) -> None:
    """Rank 3, which divides by 3: each part needs all of ``down``, not a third of it."""
    attention = "transformer_blocks.0.attn"
    names = [f"{attention}.{name}.weight" for name in ("to_q", "to_k", "to_v", "to_add_out")]
    of_flux = "time_text_embed.guidance_embedder.linear_1.weight"  # which tells FLUX.1 from its kin
    base = base_of(tmp_path / "base", {name: full(4, 4, value=0.0) for name in (*names, of_flux)})
    up = torch.zeros(12, 3)
    for part in range(3):
        up[4 * part : 4 * part + 4, part] = torch.arange(4.0 * part, 4.0 * part + 4)
    module = "double_blocks.0.img_attn.qkv"
    lora = {f"{module}.lora_A.weight": torch.eye(3, 4), f"{module}.lora_B.weight": up}
    found = fuse(base, save(tmp_path / "x.safetensors", lora)).tensors()
    for part, name in enumerate(names[:3]):
        wanted = torch.zeros(4, 4)
        wanted[:, part] = torch.arange(4.0 * part, 4.0 * part + 4)
        assert torch.equal(found[name], wanted)
    assert not found[names[3]].any()
