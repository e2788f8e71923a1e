"""Whole pipelines of tiny width that vLLM-Omni loads: transformers of any kind, real other components."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from tokenizers import Tokenizer, models

from fuselora.synth import WanSize, tiny, write_pipeline
from fuselora.synth.files import write_json

# these have no types, or wrong ones
DIFFUSERS: Any = diffusers
TRANSFORMERS: Any = transformers
WAN = tiny("wan2.2-t2v-a14b")
SHARD_BYTES = 60_000
VOCABULARY = {"<pad>": 0, "</s>": 1, "<unk>": 2, "a": 3}
QWEN_SIZES = {
    "patch_size": 2,
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 24,
    "axes_dims_rope": (4, 6, 6),
}
# the linears of its blocks: name -> (out, in)
QWEN_LINEARS = {
    f"transformer_blocks.{block}.{module}": shape
    for block in range(2)
    for module, shape in {
        **{f"attn.{name}": (32, 32) for name in ("to_q", "to_k", "to_v", "to_out.0", "to_add_out")},
        **{f"attn.add_{part}_proj": (32, 32) for part in "qkv"},
        **{f"{side}_mlp.net.0.proj": (128, 32) for side in ("img", "txt")},
        **{f"{side}_mlp.net.2": (32, 128) for side in ("img", "txt")},
        **{f"{side}_mod.1": (192, 32) for side in ("img", "txt")},
    }.items()
}


def write_wan(folder: Path, size: WanSize = WAN, **options: Any) -> Path:
    """``synth.write_pipeline`` with a text encoder, a tokenizer and a VAE that load."""
    written: dict[str, Any] = {"dtype": "BF16", "mixed": True, **options}
    base = write_pipeline(folder, size, **written)
    for component in ("text_encoder", "tokenizer", "vae"):
        shutil.rmtree(base / component)
    text = TRANSFORMERS.UMT5Config(
        vocab_size=16, d_model=size.text_dim, d_kv=8, d_ff=16, num_layers=1, num_heads=2
    )
    TRANSFORMERS.UMT5EncoderModel(text).to(torch.bfloat16).save_pretrained(base / "text_encoder")
    words = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    tokenizer = TRANSFORMERS.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(base / "tokenizer")
    vae = DIFFUSERS.AutoencoderKLWan(
        base_dim=8, z_dim=size.out_channels, dim_mult=[1, 1, 1, 1], num_res_blocks=1
    )
    vae.save_pretrained(base / "vae")
    return base


def write_qwen(folder: Path) -> Path:
    """A Qwen-Image pipeline in bfloat16 with nothing in it but its transformer."""
    torch.manual_seed(0)
    model = DIFFUSERS.QwenImageTransformer2DModel(**QWEN_SIZES).to(torch.bfloat16)
    model.save_pretrained(folder / "transformer", max_shard_size=SHARD_BYTES)
    transformer = ["diffusers", "QwenImageTransformer2DModel"]
    write_json(folder / "model_index.json", {"_class_name": "QwenImagePipeline", "transformer": transformer})
    return folder
