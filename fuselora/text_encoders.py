"""A pipeline's text encoders: what LoRA keys call them, and which one a name means. Standard library only.

kohya's trainers number them, in the pipeline's order; ComfyUI's names say their type, which config.json
tells. LTX-2's text connectors count as one, which no trainer numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

CONNECTORS = "connectors"  # LTX-2's, between its text encoder and its transformer
TEXT_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3", CONNECTORS)
# Lightricks' names of their layers, behind "text_embedding_projection." in keys
CONNECTOR_NAMES: Mapping[str, str] = {
    "aggregate_embed": "text_proj_in",
    "video_aggregate_embed": "video_text_proj_in",
    "audio_aggregate_embed": "audio_text_proj_in",
}

Config = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a name in a key means.

    ``component``: this one, where the pipeline has it. Otherwise every one of which config.json has one
    of ``model_types``, or a class that begins as one of ``classes``, and the hidden ``size``; any type or
    size where none is given.
    """

    component: str | None = None
    model_types: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    size: int | None = None

    def fits(self, config: Config) -> bool:
        """Whether the type is right, and the size where both are known."""
        return self._is_type(config) and self.size in (None, _size(config) or self.size)

    def _is_type(self, config: Config) -> bool:
        named = config.get("architectures")
        classes = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
        return config.get("model_type") in self.model_types or any(
            name.startswith(self.classes) for name in classes
        )


CLIP, T5 = (("clip_text_model", "clip"), ("CLIPText",)), (("t5",), ("T5",))
# ComfyUI's, which stand behind "text_encoders." in keys.
COMFY_ENCODERS: Mapping[str, Meaning] = {
    "clip_l": Meaning(None, *CLIP, 768),
    "clip_h": Meaning(None, *CLIP, 1024),
    "clip_g": Meaning(None, *CLIP, 1280),
    "t5xxl": Meaning(None, *T5, 4096),
    "umt5xxl": Meaning(None, ("umt5",), ("UMT5",), 4096),
    "qwen25_7b": Meaning(None, ("qwen2_5_vl", "qwen2_5_vl_text"), ("Qwen2_5_VL",), 3584),
    "qwen3_4b": Meaning(None, ("qwen3",), ("Qwen3",), 2560),
}
# kohya's. For FLUX, which has no third one, its trainers call the T5 lora_te3 (sd-scripts lora_flux.py).
KOHYA_ENCODERS: Mapping[str, Meaning] = {
    "lora_te": Meaning(),
    "lora_te1": Meaning("text_encoder"),
    "lora_te2": Meaning("text_encoder_2"),
    "lora_te3": Meaning("text_encoder_3", ("t5", "umt5"), ("T5", "UMT5")),
}
MEANINGS: Mapping[str, Meaning] = {
    **{name: Meaning(name) for name in TEXT_ENCODERS},
    **KOHYA_ENCODERS,
    **COMFY_ENCODERS,
}


def encoders_meant(name: str, configs: Mapping[str, Config]) -> tuple[str, ...]:
    """The text encoders that ``name`` can mean, of those with these config.json, by component."""
    meaning = MEANINGS.get(name)
    if meaning is None:
        return ()
    if meaning.component is not None and meaning.component in configs:
        return (meaning.component,)
    if meaning == Meaning():
        return tuple(component for component in configs if component != CONNECTORS)
    return tuple(component for component, config in configs.items() if meaning.fits(config))


def ties_head(config: Config) -> bool:
    """Whether the head has the embedding's weight, by a config.json or its part about text."""
    return any(part.get("tie_word_embeddings") is True for part in _parts(config))


def _size(config: Config) -> object:
    sizes = (part.get(key) for part in _parts(config) for key in ("hidden_size", "d_model"))
    return next((size for size in sizes if isinstance(size, int)), None)


def _parts(config: Config) -> tuple[Config, ...]:
    """A config, after its part about text if it has one."""
    text = config.get("text_config")
    return (text, config) if isinstance(text, dict) else (config,)
