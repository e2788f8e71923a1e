"""Synthetic Wan checkpoints and LoRAs: true names, dtypes and structure, any width, seeded noise.

For the demo, the tests and the benchmark. Values are a function of the seed and of a tensor's native
name: the same checkpoint in both layouts holds the same numbers, and a LoRA of one rank and alpha the
same delta in every style. Files are written header first and then block by block, so that a
full-width checkpoint needs no more memory than a tiny one. torch is imported when values are made.
"""

from __future__ import annotations

from fuselora.synth.base import base_tensors
from fuselora.synth.checkpoints import (
    SHARD_BYTES,
    write_component,
    write_file,
    write_native,
    write_pipeline,
    write_skeleton,
)
from fuselora.synth.configs import config, native_config
from fuselora.synth.files import FORMAT, Fill, write_safetensors
from fuselora.synth.loras import lora_tensors, write_lora
from fuselora.synth.sizes import PATCH, SIZES, VACE_CHANNELS, WanSize, tiny
from fuselora.synth.styles import (
    ALL_BUT_HEAD,
    ATTENTION,
    BLOCKS,
    COMFY,
    EVERYTHING,
    EVERYWHERE,
    KOHYA,
    NORMS_AND_BIASES,
    STYLES,
    LoraStyle,
)
from fuselora.synth.values import BLOCK_ELEMENTS, TORCH_DTYPES, Shape, Spec, value_blocks

__all__ = [
    "ALL_BUT_HEAD",
    "ATTENTION",
    "BLOCKS",
    "BLOCK_ELEMENTS",
    "COMFY",
    "EVERYTHING",
    "EVERYWHERE",
    "FORMAT",
    "KOHYA",
    "NORMS_AND_BIASES",
    "PATCH",
    "SHARD_BYTES",
    "SIZES",
    "STYLES",
    "TORCH_DTYPES",
    "VACE_CHANNELS",
    "Fill",
    "LoraStyle",
    "Shape",
    "Spec",
    "WanSize",
    "base_tensors",
    "config",
    "lora_tensors",
    "native_config",
    "tiny",
    "value_blocks",
    "write_component",
    "write_file",
    "write_lora",
    "write_native",
    "write_pipeline",
    "write_safetensors",
    "write_skeleton",
]
