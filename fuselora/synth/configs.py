"""The JSON files of a Wan checkpoint: ``config.json`` in both forms, and the rest of a pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuselora.synth.sizes import PATCH, VACE_CHANNELS

if TYPE_CHECKING:
    from fuselora.synth.sizes import WanSize


def config(size: WanSize) -> dict[str, object]:
    """``config.json`` of diffusers' WanTransformer3DModel or WanVACETransformer3DModel."""
    found: dict[str, object] = {
        "_class_name": "WanTransformer3DModel",
        "_diffusers_version": "0.35.0",
        "added_kv_proj_dim": size.dim if size.image_dim else None,
        "attention_head_dim": size.head_dim,
        "cross_attn_norm": True,
        "eps": 1e-6,
        "ffn_dim": size.ffn,
        "freq_dim": size.freq_dim,
        "image_dim": size.image_dim,
        "in_channels": size.in_channels,
        "num_attention_heads": size.heads,
        "num_layers": size.blocks,
        "out_channels": size.out_channels,
        "patch_size": list(PATCH),
        "pos_embed_seq_len": None,
        "qk_norm": "rms_norm_across_heads",
        "rope_max_seq_len": 1024,
        "text_dim": size.text_dim,
    }
    if size.vace_blocks:
        vace = {"_class_name": "WanVACETransformer3DModel", "vace_in_channels": VACE_CHANNELS}
        found |= vace | {"vace_layers": _vace_layers(size)}
    return found


def native_config(size: WanSize) -> dict[str, object]:
    """``config.json`` as Wan's own repositories hold it."""
    found: dict[str, object] = {
        "_class_name": "VaceWanModel" if size.vace_blocks else "WanModel",
        "_diffusers_version": "0.33.0",
        "dim": size.dim,
        "eps": 1e-6,
        "ffn_dim": size.ffn,
        "freq_dim": size.freq_dim,
        "in_dim": size.in_channels,
        "model_type": _model_type(size),
        "num_heads": size.heads,
        "num_layers": size.blocks,
        "out_dim": size.out_channels,
        "text_len": 512,
    }
    if size.vace_blocks:
        found |= {"vace_in_dim": VACE_CHANNELS, "vace_layers": _vace_layers(size)}
    return found


def model_index(size: WanSize, experts: bool) -> dict[str, object]:
    """``model_index.json`` of the diffusers pipeline that runs this transformer."""
    kind = _model_type(size)
    classes = {"i2v": "WanImageToVideoPipeline", "vace": "WanVACEPipeline"}
    boundary = 0.9 if kind == "i2v" else 0.875
    transformer = ["diffusers", config(size)["_class_name"]]
    found: dict[str, object] = {
        "_class_name": classes.get(kind, "WanPipeline"),
        "_diffusers_version": "0.35.0",
        "boundary_ratio": boundary if experts else None,
        "expand_timesteps": kind == "ti2v",
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "T5TokenizerFast"],
        "transformer": transformer,
        "transformer_2": transformer if experts else [None, None],
        "vae": ["diffusers", "AutoencoderKLWan"],
    }
    if size.image_dim:
        found["image_encoder"] = ["transformers", "CLIPVisionModel"]
        found["image_processor"] = ["transformers", "CLIPImageProcessor"]
    return found


def side_files(size: WanSize) -> dict[str, dict[str, object]]:
    """Stand-in configs of a pipeline's other components, by path inside the pipeline."""
    found: dict[str, dict[str, object]] = {
        "scheduler/scheduler_config.json": {
            "_class_name": "UniPCMultistepScheduler",
            "flow_shift": 3.0,
            "prediction_type": "flow_prediction",
            "use_flow_sigmas": True,
        },
        "text_encoder/config.json": {"architectures": ["UMT5EncoderModel"], "model_type": "umt5"},
        "tokenizer/tokenizer_config.json": {"tokenizer_class": "T5Tokenizer"},
        "vae/config.json": {"_class_name": "AutoencoderKLWan", "z_dim": size.out_channels},
    }
    if size.image_dim:
        found["image_encoder/config.json"] = {"architectures": ["CLIPVisionModel"]}
        found["image_processor/preprocessor_config.json"] = {"image_processor_type": "CLIPImageProcessor"}
    return found


def _vace_layers(size: WanSize) -> list[int]:
    return [number * (size.blocks // size.vace_blocks) for number in range(size.vace_blocks)]


def _model_type(size: WanSize) -> str:
    if size.vace_blocks:
        return "vace"
    return {36: "i2v", 48: "ti2v"}.get(size.in_channels, "t2v")
