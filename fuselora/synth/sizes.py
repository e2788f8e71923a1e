"""The sizes of the published Wan transformers, and tiny ones of the same structure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

PATCH = (1, 2, 2)
VACE_CHANNELS = 96


@dataclass(frozen=True, slots=True)
class WanSize:
    """The sizes that decide every shape of a Wan transformer. ``image_dim``: Wan2.1's image branch."""

    heads: int
    ffn: int
    blocks: int
    in_channels: int = 16
    out_channels: int = 16
    image_dim: int | None = None
    vace_blocks: int = 0
    head_dim: int = 128
    text_dim: int = 4096
    freq_dim: int = 256

    @property
    def dim(self) -> int:
        return self.heads * self.head_dim

    def with_blocks(self, blocks: int) -> WanSize:
        return replace(self, blocks=blocks, vace_blocks=min(self.vace_blocks, blocks))


SIZES: Mapping[str, WanSize] = {
    "wan2.2-t2v-a14b": WanSize(heads=40, ffn=13824, blocks=40),
    "wan2.2-i2v-a14b": WanSize(heads=40, ffn=13824, blocks=40, in_channels=36),
    "wan2.2-ti2v-5b": WanSize(heads=24, ffn=14336, blocks=30, in_channels=48, out_channels=48),
    "wan2.1-t2v-14b": WanSize(heads=40, ffn=13824, blocks=40),
    "wan2.1-t2v-1.3b": WanSize(heads=12, ffn=8960, blocks=30),
    "wan2.1-i2v-14b": WanSize(heads=40, ffn=13824, blocks=40, in_channels=36, image_dim=1280),
    "wan2.1-vace-14b": WanSize(heads=40, ffn=13824, blocks=40, vace_blocks=8),
    "wan2.1-vace-1.3b": WanSize(heads=12, ffn=8960, blocks=30, vace_blocks=15),
}


def tiny(name: str, blocks: int = 2) -> WanSize:
    """``SIZES[name]`` with small widths: channels and structure stay, and different widths stay different."""
    full = SIZES[name]
    return replace(
        full.with_blocks(blocks),
        heads=full.heads // 10,
        head_dim=12,  # rotary embeddings split it in three even parts
        ffn=full.ffn // 128,
        image_dim=full.image_dim and full.image_dim // 64,
        text_dim=32,
        freq_dim=16,
    )
