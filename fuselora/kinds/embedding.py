"""Pairs of an embedding: W (entries, width) += scale * (B @ A)^T, as PEFT defines it."""

from __future__ import annotations

from fuselora.kinds.factored import leading
from fuselora.kinds.kind import MAGNITUDES, BadParts, Kind, Shape, Shapes, Suffix, need

# PEFT saves parameters, not layers, so that there is no .weight
ENDING = r"(?:\.(?P<name>.+?))??(?:\.weight)?"


def embedding_shape(shapes: Shapes, base: Shape) -> Shape:
    """``lora_embedding_A`` (rank, entries) and ``lora_embedding_B`` (width, rank)."""
    del base
    down, up = shapes["embedding_down"], shapes["embedding_up"]
    if not len(down) == len(up) == 2 or up[1] != down[0]:
        raise BadParts(f"lora_embedding_A {list(down)} and lora_embedding_B {list(up)} have no product")
    return (down[1], up[0])


def embedding_rank(shapes: Shapes) -> int | None:
    """The leading dimension of ``lora_embedding_A``."""
    return leading(shapes["embedding_down"])


EMBEDDING = Kind(
    name="embedding",
    counted="embeddings",
    suffixes=(
        Suffix("lora_embedding_A/B", "embedding_down", rf"\.lora_embedding_A{ENDING}"),
        Suffix("lora_embedding_A/B", "embedding_up", rf"\.lora_embedding_B{ENDING}"),
    ),
    needs=(need("embedding_up"), need("embedding_down")),
    optional=MAGNITUDES,
    leaves=(".weight",),
    shape=embedding_shape,
    rank=embedding_rank,
    outputs_last=True,
)
