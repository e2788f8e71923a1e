from __future__ import annotations

import pytest

from fuselora.kinds import Kind, Shapes
from fuselora.kinds.norm import B_NORM, W_NORM
from fuselora.lora.grammar import parse_key


@pytest.mark.parametrize(("kind", "leaf"), [(W_NORM, ".weight"), (B_NORM, ".bias")])
def test_a_difference_of_the_norms_own_shape(kind: Kind, leaf: str) -> None:
    shapes: Shapes = {kind.name: (8,)}
    assert kind.shape(shapes, (8,)) == (8,)
    assert kind.leaves == (leaf,)
    assert not kind.scaled
    assert not kind.moves
    parsed = parse_key(f"lora_unet_norm.{kind.name}")
    assert parsed
    assert (parsed.module, parsed.part) == ("lora_unet_norm", kind.name)
