"""diffusers' WanTransformer3DModel and WanVACETransformer3DModel as data, by Wan's own tensor names.

The tests hold every name and shape against the classes themselves.
"""

from __future__ import annotations

from collections.abc import Mapping

from fuselora.families.model_class import ModelClass, Row, in_blocks, linear, norm

DIM = "num_attention_heads*attention_head_dim"
PATCH = ("patch_size.0", "patch_size.1", "patch_size.2")

STEM_ROWS = (
    Row("patch_embedding.weight", (DIM, "in_channels", *PATCH)),
    Row("patch_embedding.bias", (DIM,)),
    Row("head.modulation", ("1", "2", DIM)),
    *linear("head.head", "*".join(("out_channels", *PATCH)), DIM),
    *linear("time_embedding.0", DIM, "freq_dim"),
    *linear("time_embedding.2", DIM, DIM),
    *linear("time_projection.1", f"6*{DIM}", DIM),
    *linear("text_embedding.0", DIM, "text_dim"),
    *linear("text_embedding.2", DIM, DIM),
    *norm("img_emb.proj.0", "image_dim", when="image_dim"),
    *linear("img_emb.proj.1", "image_dim", "image_dim", when="image_dim"),
    *linear("img_emb.proj.3", DIM, "image_dim", when="image_dim"),
    *norm("img_emb.proj.4", DIM, when="image_dim"),
    Row("img_emb.emb_pos", ("1", "pos_embed_seq_len", "image_dim"), when="pos_embed_seq_len"),
)
ATTENTION_ROWS = (
    *(row for linear_name in "qkvo" for row in linear(linear_name, DIM, DIM)),
    Row("norm_q.weight", (DIM,)),
    Row("norm_k.weight", (DIM,)),
)
IMAGE_ROWS = (
    *linear("k_img", DIM, "added_kv_proj_dim", when="added_kv_proj_dim"),
    *linear("v_img", DIM, "added_kv_proj_dim", when="added_kv_proj_dim"),
    Row("norm_k_img.weight", (DIM,), when="added_kv_proj_dim"),
)
BLOCK_ROWS = (
    Row("modulation", ("1", "6", DIM)),
    *(Row(f"self_attn.{row.name}", row.shape) for row in ATTENTION_ROWS),
    *(Row(f"cross_attn.{row.name}", row.shape, row.when) for row in (*ATTENTION_ROWS, *IMAGE_ROWS)),
    *norm("norm3", DIM, when="cross_attn_norm"),
    *linear("ffn.0", "ffn_dim", DIM),
    *linear("ffn.2", DIM, "ffn_dim"),
)
PLAIN_ROWS = STEM_ROWS + in_blocks(BLOCK_ROWS, "blocks", "num_layers")
VACE_ROWS = (
    Row("vace_patch_embedding.weight", (DIM, "vace_in_channels", *PATCH)),
    Row("vace_patch_embedding.bias", (DIM,)),
    *linear("vace_blocks.0.before_proj", DIM, DIM),
    *in_blocks((*BLOCK_ROWS, *linear("after_proj", DIM, DIM)), "vace_blocks", "vace_layers"),
)

DEFAULTS: Mapping[str, object] = {
    "patch_size": [1, 2, 2],
    "num_attention_heads": 40,
    "attention_head_dim": 128,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 4096,
    "freq_dim": 256,
    "ffn_dim": 13824,
    "num_layers": 40,
    "cross_attn_norm": True,
    "eps": 1e-6,
    "image_dim": None,
    "added_kv_proj_dim": None,
    "pos_embed_seq_len": None,
}
VACE_DEFAULTS: Mapping[str, object] = {
    **DEFAULTS,
    "vace_layers": [0, 5, 10, 15, 20, 25, 30, 35],
    "vace_in_channels": 96,
}
INSTEAD = {"out_channels": "in_channels"}
ALIKE = {"num_heads": "num_attention_heads", "eps": "eps"}
VACE_ALIKE = {**ALIKE, "vace_layers": "vace_layers"}
VACE_NUMBERS = {"vace_layers": "num_layers"}

WAN_CLASSES = (
    ModelClass("WanTransformer3DModel", PLAIN_ROWS, DEFAULTS, INSTEAD, ALIKE, {}),
    ModelClass(
        "WanVACETransformer3DModel", PLAIN_ROWS + VACE_ROWS, VACE_DEFAULTS, INSTEAD, VACE_ALIKE, VACE_NUMBERS
    ),
)
