"""How the tools that make Wan LoRAs write them, as data.

From the files that LightX2V, Kijai, diffusers, peft, musubi-tuner and DiffSynth-Studio publish or write.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from fuselora.synth.files import FORMAT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fuselora.families.family import Layout

ATTENTION = r"(vace_)?blocks\.\d+\.(self|cross)_attn\."
BLOCKS = r"(vace_)?blocks\."
EVERYWHERE = r""
# LightX2V's extractor decomposes weights of a million elements and more; only the head has fewer at 14B
ALL_BUT_HEAD = r"(?!head\.)"
NORMS_AND_BIASES = frozenset({"norm", "bias"})
EVERYTHING = frozenset({"norm", "bias", "modulation", "linear", "conv"})


@dataclass(frozen=True, slots=True)
class LoraStyle:
    """How one tool writes a LoRA.

    ``targets``: a regular expression of native names whose 2-D weights become pairs; ``diffs``: the
    kinds of all other tensors that are stored as full differences. ``alpha``: a tensor when one is
    given, a tensor always, or a number in the header or in ``adapter_config.json``;
    ``alpha_dtype``: the tensor's dtype, the factors' if None. ``capped``: a rank is at most a
    weight's shorter side, as a singular value decomposition gives. ``metadata``: with places for
    ``rank`` and ``alpha``.
    """

    layout: Layout
    prefix: str
    down: str = "lora_A"
    up: str = "lora_B"
    targets: str = BLOCKS
    diffs: frozenset[str] = frozenset()
    alpha: Literal["given", "always", "header", "config"] = "given"
    alpha_dtype: str | None = None
    flat: bool = False
    capped: bool = False
    metadata: Mapping[str, str] = field(default_factory=dict)


COMFY = LoraStyle("native", "diffusion_model.", "lora_down", "lora_up")
KOHYA = {
    "ss_network_module": "networks.lora_wan",
    "ss_network_dim": "{rank}",
    "ss_network_alpha": "{alpha:.1f}",
}
STYLES: Mapping[str, LoraStyle] = {
    "comfy": COMFY,
    "lightning": replace(COMFY, alpha="always", alpha_dtype="I64"),
    "comfy-extractor": replace(COMFY, targets=EVERYWHERE, diffs=NORMS_AND_BIASES, capped=True),
    "extractor": replace(COMFY, targets=ALL_BUT_HEAD, diffs=EVERYTHING, capped=True),
    "trainer": LoraStyle("native", "diffusion_model.", metadata=FORMAT),
    "default": LoraStyle("native", "", "lora_A.default", "lora_B.default"),
    "kohya": LoraStyle(
        "native", "lora_unet_", "lora_down", "lora_up", flat=True, alpha="always", metadata=KOHYA
    ),
    "peft": LoraStyle("diffusers", ""),
    "diffusers": LoraStyle("diffusers", "transformer.", targets=ATTENTION, alpha="header", metadata=FORMAT),
    "adapter": LoraStyle("diffusers", "base_model.model.", alpha="config", metadata=FORMAT),
}
