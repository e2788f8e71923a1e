"""Which modules a GLOB means, in ``--blocks`` and ``--allow-unmatched`` alike."""

from __future__ import annotations

import pytest

from fuselora.globs import glob_of, means


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("diffusion_model.blocks.0.q", True),
        ("blocks.0.q", True),
        ("blocks.*", True),
        ("*.q", True),
        ("*", True),
        ("blocks.?.q", True),
        ("blocks.[0-3].q", True),
        ("BLOCKS.0.Q", False),
        ("blocks.0", True),
        ("0.q", False),
        ("", False),
    ],
)
def test_a_module_with_its_prefix_or_without(pattern: str, meant: bool) -> None:
    assert means(pattern, "diffusion_model.blocks.0.q") is meant


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("blocks.1", True), ("blocks_1", True), ("lora_unet_blocks_1", True), ("blocks.10", False),
        ("*.attn", True), ("attn", False), ("blocks.1.attn.q", True),
    ],
)  # fmt: skip
def test_a_flattened_module(pattern: str, meant: bool) -> None:
    assert means(pattern, "lora_unet_blocks_1_attn_q") is meant
    assert not means("blocks.1", "lora_unet_blocks_10_attn_q")


@pytest.mark.parametrize(("pattern", "meant"), [("model.q", True), ("model.q.weight", True), ("model", True)])
def test_the_name_in_the_base(pattern: str, meant: bool) -> None:
    assert means(pattern, "lora_unet_other", "model.q.weight") is meant
    assert not means(pattern, "lora_unet_other")


@pytest.mark.parametrize(
    ("names", "glob"),
    [
        (["te.a"], "te.a"),
        (["te.layers.1", "te.layers.10"], "te.layers.*"),
        (["lora_te_x_q", "lora_te_x_k"], "lora_te_x_*"),
        (["a", "b"], "*"),
    ],
)
def test_one_glob_for_all(names: list[str], glob: str) -> None:
    assert glob_of(names) == glob
    assert all(means(glob, name) for name in names)
