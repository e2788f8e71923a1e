"""Seeded values, block by block."""

from __future__ import annotations

from fuselora import synth
from fuselora.synth import SIZES, Spec, base_tensors, value_blocks
from tests.synth.names import T2V


def test_a_full_width_block_streams() -> None:
    specs = base_tensors(SIZES[T2V].with_blocks(1), dtype="BF16")
    assert sum(spec.n_bytes for spec in specs) > 1_000_000_000
    for spec in specs:
        sizes = [block.nbytes for block in value_blocks(spec, 0, repeat=True)]
        assert max(sizes) <= 2 * synth.BLOCK_ELEMENTS
        assert sum(sizes) == spec.n_bytes


def test_noise_goes_on_and_repeat_repeats() -> None:
    spec = Spec("a", "F32", (2 * synth.BLOCK_ELEMENTS + 5,), std=1.0)
    fresh = [bytes(block) for block in value_blocks(spec, 0)]
    again = [bytes(block) for block in value_blocks(spec, 0, repeat=True)]
    assert [len(block) for block in fresh] == [len(block) for block in again]
    assert len(set(fresh)) == 3
    assert again == [fresh[0], fresh[0], fresh[0][:20]]
