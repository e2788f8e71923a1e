"""Converted folders in diffusers: every key finds its place, and the model computes what its twin does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from fuselora import merge
from fuselora.synth import (
    Spec,
    base_tensors,
    tiny,
    write_file,
    write_lora,
    write_native,
    write_pipeline,
    write_safetensors,
    write_skeleton,
)
from tests.oracle.definition import in_diffusers_names, weights
from tests.oracle.diffusers_side import quiet
from tests.oracle.test_loading import distance, model_class, output

BASES = ("wan2.2-t2v-a14b", "wan2.2-i2v-a14b", "wan2.1-i2v-14b", "wan2.2-ti2v-5b", "wan2.1-vace-14b")


@pytest.mark.parametrize("name", BASES)
def test_the_model_computes_what_its_twin_does(tmp_path: Path, name: str) -> None:
    size = tiny(name)
    native = write_native(tmp_path / "native", size, shard_bytes=100_000)
    twin = write_pipeline(tmp_path / "twin", size)
    skeleton = write_skeleton(tmp_path / "skeleton", size)
    lora = write_lora(tmp_path / "lora.safetensors", size, style="extractor")
    ours = merge(native, [lora], tmp_path / "ours", layout="diffusers", skeleton=skeleton).out
    theirs = merge(twin, [lora], tmp_path / "theirs").out
    with quiet():
        model, info = model_class(size).from_pretrained(ours / "transformer", output_loading_info=True)
        wanted = model_class(size).from_pretrained(theirs / "transformer")
        plain = model_class(size).from_pretrained(twin / "transformer")
    assert info.keys() == {"missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"}
    assert not any(info.values()), info
    state = wanted.state_dict()
    assert [key for key, tensor in model.state_dict().items() if not torch.equal(state[key], tensor)] == []
    # equal weights at other addresses: last bits of products may differ
    assert distance(output(model, size), output(wanted, size)) < 1e-6
    assert distance(output(plain, size), output(model, size)) > 1e-3, "the LoRA should show"


@pytest.mark.parametrize("name", ["wan2.2-i2v-a14b", "wan2.1-i2v-14b", "wan2.1-vace-14b"])
def test_names_are_those_of_diffusers_own_converter(tmp_path: Path, name: str) -> None:
    """For one file as well, whose prefix that converter takes off by itself."""
    size = tiny(name)
    base = write_file(tmp_path / "wan.safetensors", size, dtype="F32")
    lora = write_lora(tmp_path / "lora.safetensors", size, style="extractor")
    skeleton = write_skeleton(tmp_path / "skeleton", size)
    plain = merge(base, [lora], tmp_path / "plain").out
    ours = merge(base, [lora], tmp_path / "ours", layout="diffusers", skeleton=skeleton).out
    found, wanted = weights(ours / "transformer"), in_diffusers_names(weights(plain))
    assert found.keys() == wanted.keys()
    assert [key for key in found if not torch.equal(found[key], wanted[key])] == []


def test_a_first_and_last_frame_model(tmp_path: Path) -> None:
    """Wan2.1-FLF2V has one tensor more, which diffusers' single-file converter leaves out."""
    size = tiny("wan2.1-i2v-14b", blocks=1)
    positions = Spec("img_emb.emb_pos", "F32", (1, 10, size.image_dim or 0), std=0.1)
    base = write_safetensors(tmp_path / "base" / "flf2v.safetensors", [*base_tensors(size), positions])
    skeleton = write_skeleton(tmp_path / "skeleton", size)
    path = skeleton / "transformer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pos_embed_seq_len": 10}))
    lora = write_lora(tmp_path / "lora.safetensors", size)
    ours = merge(base, [lora], tmp_path / "ours", layout="diffusers", skeleton=skeleton).out
    with quiet():
        model, info = model_class(size).from_pretrained(ours / "transformer", output_loading_info=True)
    assert not any(info.values()), info
    wanted = weights(base.parent)["img_emb.emb_pos"]
    assert torch.equal(model.condition_embedder.image_embedder.pos_embed, wanted)


def test_a_whole_pipeline(tmp_path: Path) -> None:
    size = tiny("wan2.2-i2v-a14b", blocks=1)
    native = write_native(tmp_path / "native", size, experts=True)
    skeleton = write_skeleton(tmp_path / "skeleton", size, experts=True)
    loras = [write_lora(tmp_path / f"{n}.safetensors", size, style="extractor", seed=n) for n in range(2)]
    asked: dict[str, Any] = {"layout": "diffusers", "skeleton": skeleton, "dtype": "bfloat16"}
    out = merge(native, [f"{loras[0]},{loras[1]}"], tmp_path / "out", **asked).out
    absent = dict.fromkeys(("text_encoder", "tokenizer", "vae", "image_encoder", "image_processor"))
    pipeline_class: Any = diffusers.WanImageToVideoPipeline
    with quiet():
        pipe = pipeline_class.from_pretrained(out, torch_dtype=torch.bfloat16, **absent)
    assert pipe.config.boundary_ratio == 0.9
    for model, part in ((pipe.transformer, "transformer"), (pipe.transformer_2, "transformer_2")):
        state, stored = model.state_dict(), weights(out / part)
        assert state.keys() == stored.keys()
        assert [key for key, tensor in stored.items() if not torch.equal(state[key], tensor)] == []
