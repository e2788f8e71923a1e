"""Names that the tests of synth share, and whether a LoRA's names and shapes fit a base's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuselora.synth import SIZES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fuselora.families import Layout
    from fuselora.synth import Spec

T2V = "wan2.2-t2v-a14b"
LISTED = sorted(name for name in SIZES if "vace" not in name)


def q(layout: Layout = "native") -> str:
    return "blocks.0.self_attn.q" if layout == "native" else "blocks.0.attn1.to_q"


def fits(loras: Iterable[Spec], base: Iterable[Spec]) -> int:
    """Count the pairs, after checking that every tensor has a home in ``base`` and its shape."""
    shapes = {spec.name.replace(".", "_"): spec.shape for spec in base}
    specs = {spec.name: spec for spec in loras}
    pairs = 0
    for name, spec in specs.items():
        stem, _, part = name.partition(".lora_")
        if part.startswith(("up", "B")):
            down = specs[name.replace("lora_up", "lora_down").replace("lora_B", "lora_A")]
            assert down.shape[0] == spec.shape[1], name
            assert shapes[home(stem, "weight")] == (spec.shape[0], down.shape[1]), name
            pairs += 1
        elif not part and not name.endswith(".alpha"):
            stem, _, part = name.rpartition(".")
            leaf = {"diff": "weight", "diff_b": "bias", "diff_m": "modulation"}[part]
            assert shapes[home(stem, leaf)] == spec.shape, name
    return pairs


def home(stem: str, leaf: str) -> str:
    for prefix in ("diffusion_model.", "lora_unet_", "transformer.", "base_model.model."):
        stem = stem.removeprefix(prefix)
    return f"{stem}.{leaf}".replace(".", "_")
