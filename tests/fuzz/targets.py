"""What is read, from a sound file of each kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from fuselora import synth
from fuselora.describe import describe
from fuselora.errors import FuseloraError
from fuselora.lora.adapter import open_adapter
from fuselora.marker import FILE_NAME, JOURNAL_NAME, decode, read_marker
from fuselora.output import journal
from fuselora.pipeline import plan
from fuselora.resolve import resolve_lora
from fuselora.shards import indexed_shards
from fuselora.specs import LoraSpec
from tests.fuzz.damage import damaged, damaged_header, damaged_json, damaged_lines, reshaped
from tests.inputs import pair, tensor
from tests.marked import INDEX, write_fused, write_safetensors

PLAN = "sha256:" + "a" * 64
Damage = Callable[[Random, bytes], bytes]


@dataclass(frozen=True, slots=True)
class Target:
    """``file`` in a folder that ``write`` fills; ``read`` takes that; ``damage`` keeps the structure."""

    name: str
    file: str
    write: Callable[[Path], object]
    read: Callable[[Path], object]
    damage: Damage

    def broken(self, chance: Random, sound: bytes) -> bytes:
        return (self.damage if chance.random() < 0.8 else damaged)(chance, sound)

    def survives(self, folder: Path) -> bool:
        """Whether there was a value; an error of ours is none. Raises whatever else was raised."""
        try:
            return bool(self.read(folder))
        except FuseloraError as error:
            assert error.message
            return False


def _write_lora(folder: Path) -> None:
    config = {
        "peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_rslora": True, "target_modules": ["to_q"],
        "rank_pattern": {"blocks.0.to_q": 2}, "alpha_pattern": {r".*\.to_k": 16}, "bias": "none",
        "use_dora": False, "modules_to_save": None, "peft_version": "0.17.0",
        "base_model_name_or_path": "Wan-AI/Wan2.2",
    }  # fmt: skip
    metadata = {
        "lora_adapter_metadata": json.dumps({"transformer.r": 4, "transformer.lora_alpha": 8}),
        "format": "pt",
    }
    tensors = {f"diffusion_model.to_q.lora_{part}.weight": b"abcdefgh" for part in "AB"}
    write_safetensors(folder / "adapter_model.safetensors", tensors, metadata)
    (folder / "adapter_config.json").write_text(json.dumps(config))


def _write_ia3(folder: Path) -> None:
    _write_lora(folder)
    config = {"peft_type": "IA3", "target_modules": ".*to_[qk]", "feedforward_modules": r".*\.ff\.\d+"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def _write_journal(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    with journal.Journal.open(folder, PLAN, files=["a.safetensors", "b.safetensors"]) as book:
        for name in ("a.safetensors", "b.safetensors"):
            book.record(journal.Entry(name, 8, "b" * 64, journal.BaseState("c" * 64, 8, 5, 6, 7)))


def _write_base(folder: Path) -> None:
    size = synth.tiny("wan2.2-t2v-a14b", blocks=1)
    synth.write_pipeline(folder / "base", size, experts=False, shard_bytes=60_000)
    synth.write_lora(folder / "lora.safetensors", size, style="comfy", rank=2)


def _write_single_file(folder: Path) -> None:
    """A UNet and both kinds of text encoders in one file, and a LoRA of all three."""
    folder.mkdir(exist_ok=True)
    clip, open_clip = "conditioner.embedders.0.transformer.text_model", "conditioner.embedders.1.model"
    block = "input_blocks.4.1.transformer_blocks.0.attn1.to_q"
    base = [
        tensor(f"model.diffusion_model.{block}.weight", 4, 4),
        tensor(f"{clip}.embeddings.token_embedding.weight", 8, 4),
        tensor(f"{clip}.encoder.layers.0.mlp.fc1.weight", 4, 4),
        tensor(f"{open_clip}.token_embedding.weight", 8, 4),
        tensor(f"{open_clip}.positional_embedding", 1),
        tensor(f"{open_clip}.transformer.resblocks.0.attn.in_proj_weight", 12, 4),
        tensor(f"{open_clip}.transformer.resblocks.0.attn.in_proj_bias", 12),
        tensor(f"{open_clip}.transformer.resblocks.0.mlp.c_fc.weight", 4, 4),
    ]
    layer = "text_model_encoder_layers_0"
    modules = [f"lora_unet_{block.replace('.', '_')}", f"lora_te1_{layer}_mlp_fc1"]
    modules += [f"lora_te2_{layer}_{name}" for name in ("self_attn_k_proj", "mlp_fc1")]
    synth.write_safetensors(folder / "base.safetensors", base)
    synth.write_safetensors(folder / "lora.safetensors", [spec for m in modules for spec in pair(m)])


def _single_file(folder: Path) -> object:
    describe(folder / "base.safetensors")
    return plan(folder / "base.safetensors", [folder / "lora.safetensors"])


def _adapter(folder: Path) -> object:
    adapter = open_adapter(resolve_lora(LoraSpec(str(folder))))
    describe(folder)
    return adapter


def _marker(folder: Path) -> object:
    return read_marker(folder), decode((folder / FILE_NAME).read_bytes()), describe(folder)


def _plan(folder: Path) -> object:
    return plan(folder / "base", [folder / "lora.safetensors"])


CONFIG = "adapter_config.json"
BASE_INDEX = "base/transformer/diffusion_pytorch_model.safetensors.index.json"
TARGETS = (
    Target("header", "adapter_model.safetensors", _write_lora, _adapter, damaged_header),
    Target("adapter_config", CONFIG, _write_lora, _adapter, damaged_json),
    Target("adapter_config of IA3", CONFIG, _write_ia3, _adapter, damaged_json),
    Target("marker", FILE_NAME, write_fused, _marker, damaged_json),
    Target("journal", JOURNAL_NAME, _write_journal, lambda folder: journal.read(folder, PLAN), damaged_lines),
    Target("index", INDEX, write_fused, lambda folder: indexed_shards(folder / INDEX), damaged_json),
    Target("base's index", BASE_INDEX, _write_base, _plan, damaged_json),
    Target("base's model_index.json", "base/model_index.json", _write_base, _plan, damaged_json),
    Target("base's config.json", "base/transformer/config.json", _write_base, _plan, damaged_json),
    Target("base in one file", "base.safetensors", _write_single_file, _single_file, reshaped),
    Target("LoRA for one file", "lora.safetensors", _write_single_file, _single_file, reshaped),
    Target("LoRA beside a base", "lora.safetensors", _write_base, _plan, damaged_header),
)
