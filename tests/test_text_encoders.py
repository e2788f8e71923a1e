"""LoRAs for a pipeline's text encoders, from keys to a fused folder that is resumed, checked and served."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CLIPTextConfig, CLIPTextModel

from fuselora.check.folder import check
from fuselora.checkpoint import open_checkpoint
from fuselora.describe import describe
from fuselora.errors import AlreadyFused, Refused
from fuselora.header import read_header
from fuselora.lora.config import config_of_metadata
from fuselora.marker import FINGERPRINT_KEY, read_marker
from fuselora.output import staging
from fuselora.pipeline import FuseReport, merge, plan
from fuselora.serving.guard import AskedLora, StartUp, decide
from fuselora.specs import parse_lora
from fuselora.text_encoders import encoders_meant, ties_head
from fuselora.verify import verify
from tests.cases.builders import (
    MODULE,
    WEIGHTS,
    K,
    Q,
    assert_filled,
    base_of,
    full,
    read_folder,
    same_bytes,
    save,
    save_json,
    std_base,
    std_pair,
    tree,
)
from tests.validated import assert_valid

FC1 = "encoder.layers.0.mlp.fc1"
CLIP_L = {"model_type": "clip_text_model", "architectures": ["CLIPTextModel"], "hidden_size": 768}
CLIP_G = {**CLIP_L, "architectures": ["CLIPTextModelWithProjection"], "hidden_size": 1280}
T5 = {"model_type": "t5", "architectures": ["T5EncoderModel"], "d_model": 4096}
UMT5 = {"model_type": "umt5", "architectures": ["UMT5EncoderModel"], "d_model": 4096}
QWEN = {"model_type": "qwen2_5_vl", "text_config": {"hidden_size": 3584, "tie_word_embeddings": False}}
UNET = "lora_unet_blocks_0_attn1_to_q"
T5_WI = "encoder.block.0.layer.1.DenseReluDense.wi_0"
QWEN_Q = "layers.0.self_attn.q_proj"

Tensors = Mapping[str, torch.Tensor]


def encoder(root: Path, name: str, tensors: Tensors, config: Mapping[str, object] | None = None) -> None:
    """A text encoder's folder of a pipeline."""
    save(root / name / "model.safetensors", tensors, {"format": "pt"})
    if config is not None:
        save_json(root / name / "config.json", config)


def clip(root: Path, name: str = "text_encoder", config: Mapping[str, object] | None = CLIP_L) -> None:
    encoder(root, name, {f"text_model.{FC1}.weight": full(4, 4), "logit_scale": full(1)}, config)


def clip_base(root: Path) -> Path:
    clip(std_base(root))
    return root


def sd3_base(root: Path) -> Path:
    """Three encoders, as Stable Diffusion 3 has them."""
    std_base(root)
    clip(root, "text_encoder", CLIP_L)
    clip(root, "text_encoder_2", CLIP_G)
    encoder(root, "text_encoder_3", {f"{T5_WI}.weight": full(4, 4)}, T5)
    return root


def flat(module: str) -> str:
    return module.replace(".", "_")


def lora_of(folder: Path, *modules: str, name: str = "x.safetensors", **options: Any) -> Path:
    """Standard pairs of rank 4 on these modules."""
    pairs = {key: t for module in modules for key, t in std_pair(4, module, **options).items()}
    return save(folder / name, pairs)


def refused(base: Path, *loras: str | Path, **options: Any) -> str:
    """Every fault's text and hint; nothing may be left behind."""
    out = base.parent / "out"
    with pytest.raises(Refused) as caught:
        merge(base, loras, out, **options)
    assert not out.exists()
    return "\n".join(f"{f.path}: {f.message} {f.hint}" for f in caught.value.faults)


def value(folder: Path, key: str) -> float:
    """The one value of a tensor."""
    tensor = read_folder(folder)[key]
    assert_filled(tensor, tensor.flatten()[0].item())
    return float(tensor.flatten()[0])


def rows(report: FuseReport) -> list[tuple[str, int]]:
    return [(c.name, c.n_fused) for c in report.plan.components]


# Which encoder a name means


CONFIGS: dict[str, Mapping[str, object]] = {
    "text_encoder": CLIP_L,
    "text_encoder_2": CLIP_G,
    "text_encoder_3": T5,
}
FLUX: dict[str, Mapping[str, object]] = {"text_encoder": CLIP_L, "text_encoder_2": T5}
WAN: dict[str, Mapping[str, object]] = {"text_encoder": UMT5}
QWEN_IMAGE: dict[str, Mapping[str, object]] = {"text_encoder": QWEN}
BARE: dict[str, Mapping[str, object]] = {"text_encoder": {}}


@pytest.mark.parametrize(
    ("name", "configs", "meant"),
    [
        ("text_encoder", CONFIGS, ("text_encoder",)),
        ("text_encoder_3", FLUX, ()),
        ("lora_te1", CONFIGS, ("text_encoder",)),
        ("lora_te2", CONFIGS, ("text_encoder_2",)),
        ("lora_te3", CONFIGS, ("text_encoder_3",)),
        ("lora_te3", FLUX, ("text_encoder_2",)),
        ("lora_te2", FLUX, ("text_encoder_2",)),
        ("lora_te2", WAN, ()),
        ("lora_te", WAN, ("text_encoder",)),
        ("lora_te", BARE, ("text_encoder",)),
        ("lora_te", FLUX, ("text_encoder", "text_encoder_2")),
        ("clip_l", CONFIGS, ("text_encoder",)),
        ("clip_g", CONFIGS, ("text_encoder_2",)),
        ("clip_h", CONFIGS, ()),
        ("clip_g", FLUX, ()),
        ("clip_l", {"text_encoder": CLIP_L, "text_encoder_2": CLIP_L}, ("text_encoder", "text_encoder_2")),
        ("clip_l", {"text_encoder": {"architectures": ["CLIPTextModel"]}}, ("text_encoder",)),
        ("clip_l", BARE, ()),
        ("t5xxl", CONFIGS, ("text_encoder_3",)),
        ("t5xxl", WAN, ()),
        ("umt5xxl", WAN, ("text_encoder",)),
        ("umt5xxl", FLUX, ()),
        ("qwen25_7b", QWEN_IMAGE, ("text_encoder",)),
        ("qwen25_7b", {"text_encoder": {**QWEN, "text_config": {"hidden_size": 2048}}}, ()),
        ("transformer_2", CONFIGS, ()),
        ("clip_l", {}, ()),
    ],
)
def test_what_a_name_means(
    name: str, configs: Mapping[str, Mapping[str, object]], meant: tuple[str, ...]
) -> None:
    assert encoders_meant(name, configs) == meant


def test_a_head_may_be_tied_in_the_part_about_text() -> None:
    assert ties_head({"tie_word_embeddings": True})
    assert ties_head({"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}})
    assert not ties_head({"text_config": {}})
    assert not ties_head({"text_config": None})


@pytest.mark.parametrize("name", ["text_encoder", "text_encoder_2", "text_encoder_3"])
def test_an_encoder_can_be_named(name: str) -> None:
    (spec,) = parse_lora(f"{name}=x.safetensors:0.5", exists=lambda _: False)
    assert (spec.component, spec.strength, spec.source) == (name, 0.5, "x.safetensors")


# Opening


def test_an_encoder_is_a_component_only_if_it_is_asked_for(tmp_path: Path) -> None:
    root = sd3_base(tmp_path / "base")

    def names(*asked: str) -> list[str]:
        found = open_checkpoint(root, source="x", revision=None, variant=None, text_encoders=asked)
        assert [component.name for component in found.transformers] == ["transformer"]
        return [component.name for component in found.components]

    assert names() == ["transformer"]
    assert names("transformer_2") == ["transformer"]
    assert names("clip_g") == ["transformer", "text_encoder_2"]
    assert names("text_encoder_3", "lora_te1") == ["transformer", "text_encoder", "text_encoder_3"]
    assert names("lora_te") == ["transformer"]  # could be any of three


def test_a_config_that_nobody_asks_for_is_not_read(tmp_path: Path) -> None:
    root = clip_base(tmp_path / "base")
    (root / "text_encoder" / "config.json").write_text("{")
    merge(root, [lora_of(tmp_path, MODULE)], tmp_path / "out")
    assert (tmp_path / "out" / "text_encoder" / "config.json").read_text() == "{"


# Fusing


SPELLINGS = [
    f"lora_te1_text_model_{flat(FC1)}",
    f"lora_te1_{flat(FC1)}",
    f"lora_te_text_model_{flat(FC1)}",
    f"lora_te_{flat(FC1)}",
    f"text_encoder.text_model.{FC1}",
    f"text_encoder.{FC1}",
    f"base_model.model.text_encoder.text_model.{FC1}",
    f"text_encoders.clip_l.transformer.text_model.{FC1}",
    f"text_encoders.clip_l.transformer.{FC1}",
    f"text_encoders.clip_l.text_model.{FC1}",
]


@pytest.mark.parametrize("level", ["text_model.", ""])
@pytest.mark.parametrize("module", SPELLINGS)
def test_both_halves_with_and_without_the_level(module: str, level: str, tmp_path: Path) -> None:
    base = std_base(tmp_path / "base")
    key = f"{level}{FC1}.weight"
    encoder(base, "text_encoder", {key: full(4, 4), "logit_scale": full(1)}, CLIP_L)
    report = merge(base, [lora_of(tmp_path, UNET, module, alpha=2.0)], tmp_path / "out")
    assert rows(report) == [("transformer", 1), ("text_encoder", 1)]
    assert value(tmp_path / "out" / "transformer", Q) == 1.5
    assert value(tmp_path / "out" / "text_encoder", key) == 1.5


@pytest.mark.parametrize(
    ("module", "component", "key"),
    [
        (f"lora_te1_text_model_{flat(FC1)}", "text_encoder", f"text_model.{FC1}"),
        (f"lora_te2_text_model_{flat(FC1)}", "text_encoder_2", f"text_model.{FC1}"),
        (f"lora_te3_{flat(T5_WI)}", "text_encoder_3", T5_WI),
        (f"text_encoder_2.text_model.{FC1}", "text_encoder_2", f"text_model.{FC1}"),
        (f"text_encoders.clip_g.transformer.text_model.{FC1}", "text_encoder_2", f"text_model.{FC1}"),
        (f"text_encoders.t5xxl.transformer.{T5_WI}", "text_encoder_3", T5_WI),
        (f"text_encoder_3.{T5_WI}", "text_encoder_3", T5_WI),
    ],
)
def test_one_of_three_encoders(module: str, component: str, key: str, tmp_path: Path) -> None:
    base = sd3_base(tmp_path / "base")
    report = merge(base, [lora_of(tmp_path, MODULE, module)], tmp_path / "out")
    assert rows(report) == [("transformer", 1), (component, 1)]
    assert value(tmp_path / "out" / component, f"{key}.weight") == 2.0
    for other in {"text_encoder", "text_encoder_2", "text_encoder_3"} - {component}:
        assert tree(tmp_path / "out" / other) == tree(base / other)


def test_a_t5_that_is_the_second_encoder_is_kohyas_third(tmp_path: Path) -> None:
    base = clip_base(tmp_path / "base")
    encoder(base, "text_encoder_2", {f"{T5_WI}.weight": full(4, 4)}, T5)
    merge(base, [lora_of(tmp_path, MODULE, f"lora_te3_{flat(T5_WI)}")], tmp_path / "out")
    assert value(tmp_path / "out" / "text_encoder_2", f"{T5_WI}.weight") == 2.0


@pytest.mark.parametrize("held", ["model.", "model.language_model.", "language_model.model.", ""])
@pytest.mark.parametrize("spelled", ["model.", "model.language_model.", ""])
def test_qwen_with_and_without_its_levels(held: str, spelled: str, tmp_path: Path) -> None:
    base = std_base(tmp_path / "base")
    key = f"{held}{QWEN_Q}.weight"
    encoder(base, "text_encoder", {key: full(4, 4), "visual.x.weight": full(4, 4)}, QWEN)
    module = f"text_encoders.qwen25_7b.transformer.{spelled}{QWEN_Q}"
    merge(base, [lora_of(tmp_path, module)], tmp_path / "out")
    assert value(tmp_path / "out" / "text_encoder", key) == 2.0
    assert value(tmp_path / "out" / "text_encoder", "visual.x.weight") == 1.0
    assert value(tmp_path / "out" / "transformer", Q) == 1.0


def test_a_level_that_leaves_two_tensors_is_refused(tmp_path: Path) -> None:
    base = std_base(tmp_path / "base")
    twins = {f"model.{QWEN_Q}.weight": full(4, 4), f"text_model.{QWEN_Q}.weight": full(4, 4)}
    encoder(base, "text_encoder", twins, QWEN)
    said = refused(base, lora_of(tmp_path, f"text_encoder.{QWEN_Q}"))
    assert all(name in said for name in twins)
    merge(base, [lora_of(tmp_path, f"text_encoder.model.{QWEN_Q}")], tmp_path / "out")  # says which
    assert value(tmp_path / "out" / "text_encoder", f"model.{QWEN_Q}.weight") == 2.0
    assert value(tmp_path / "out" / "text_encoder", f"text_model.{QWEN_Q}.weight") == 1.0


@pytest.mark.parametrize(
    ("layer", "module"),
    [
        ("to_q_lora.down", "q_proj"),
        ("to_out_lora.down", "out_proj"),
        ("k_proj.lora_linear_layer.down", "k_proj"),
    ],
)
def test_old_layers_of_clip(layer: str, module: str, tmp_path: Path) -> None:
    base = std_base(tmp_path / "base")
    key = f"text_model.encoder.layers.0.self_attn.{module}.weight"
    encoder(base, "text_encoder", {key: full(4, 4)}, CLIP_L)
    stem = f"text_encoder.text_model.encoder.layers.0.self_attn.{layer}".removesuffix("down")
    lora = {f"{stem}down.weight": full(4, 4), f"{stem}up.weight": full(4, 4, value=0.25)}
    merge(base, [save(tmp_path / "x.safetensors", lora)], tmp_path / "out")
    assert value(tmp_path / "out" / "text_encoder", key) == 2.0


def test_embeddings_norms_and_biases_of_an_encoder(tmp_path: Path) -> None:
    base = std_base(tmp_path / "base")
    norm = "text_model.encoder.layers.0.layer_norm1"
    encoder(base, "text_encoder", {f"{norm}.weight": full(4), f"{norm}.bias": full(4)}, CLIP_L)
    prefix = f"text_encoders.clip_l.transformer.{norm}"
    lora = {f"{prefix}.diff": full(4), f"{prefix}.diff_b": full(4, value=2.0)}
    merge(base, [save(tmp_path / "x.safetensors", lora)], tmp_path / "out")
    assert value(tmp_path / "out" / "text_encoder", f"{norm}.weight") == 2.0
    assert value(tmp_path / "out" / "text_encoder", f"{norm}.bias") == 3.0


# Whose it is


def test_a_file_given_for_an_encoder_needs_no_prefix(tmp_path: Path) -> None:
    base = clip_base(tmp_path / "base")
    lora = lora_of(tmp_path, f"base_model.model.text_model.{FC1}")
    merge(base, [f"text_encoder={lora}:0.5"], tmp_path / "out")
    assert value(tmp_path / "out" / "text_encoder", f"text_model.{FC1}.weight") == 1.5
    assert value(tmp_path / "out" / "transformer", Q) == 1.0


def test_a_half_that_could_be_for_two_encoders_is_refused(tmp_path: Path) -> None:
    base = sd3_base(tmp_path / "base")
    said = refused(base, lora_of(tmp_path, UNET, f"lora_te_text_model_{flat(FC1)}"))
    assert "lora_te could be text_encoder or text_encoder_2 or text_encoder_3" in said
    assert "COMPONENT=FILE" in said


@pytest.mark.parametrize("module", [f"lora_te_text_model_{flat(FC1)}", f"text_model.{FC1}"])
def test_a_file_of_its_own_is_for_the_encoder_that_it_is_given_for(module: str, tmp_path: Path) -> None:
    base = sd3_base(tmp_path / "base")
    lora = lora_of(tmp_path, module)
    merge(base, [f"text_encoder_2={lora}"], tmp_path / "out")
    assert value(tmp_path / "out" / "text_encoder_2", f"text_model.{FC1}.weight") == 2.0
    assert verify(tmp_path / "out", base=base, loras=[lora]).ok


@pytest.mark.parametrize(
    ("target", "modules", "owner"),
    [
        ("text_encoder_2", [f"lora_te1_{flat(FC1)}"], "text_encoder"),
        ("text_encoder", [f"lora_te1_{flat(FC1)}", UNET], "transformer"),
        ("text_encoder", [f"lora_te1_{flat(FC1)}", f"lora_te2_{flat(FC1)}"], "text_encoder_2"),
        ("transformer", [f"lora_te1_{flat(FC1)}"], "text_encoder"),
        ("text_encoder", ["transformer_2.x", UNET], "transformer and transformer_2"),
    ],
)
def test_keys_for_another_component_than_the_target(
    target: str, modules: list[str], owner: str, tmp_path: Path
) -> None:
    said = refused(sd3_base(tmp_path / "base"), f"{target}={lora_of(tmp_path, *modules)}")
    assert f"has keys for {owner}, and was given for {target}" in said


def test_an_encoder_that_the_base_lacks_cannot_be_given(tmp_path: Path) -> None:
    base = clip_base(tmp_path / "base")
    said = refused(base, f"text_encoder_2={lora_of(tmp_path, FC1)}")
    assert "text_encoder_2, but this base has only transformer, text_encoder" in said


@pytest.mark.parametrize(
    "module",
    [f"lora_te1_text_model_{flat(FC1)}", f"text_encoder_2.{FC1}", f"text_encoders.t5xxl.transformer.{T5_WI}"],
)
def test_a_half_for_an_encoder_that_the_base_lacks(module: str, tmp_path: Path) -> None:
    base = save(tmp_path / "base.safetensors", {Q: full(4, 4), K: full(4, 4)})
    lora = lora_of(tmp_path, MODULE, module)
    named = next(part for part in ("lora_te1", "text_encoder_2", "t5xxl") if part in module)
    said = refused(base, lora)
    assert f"{module} has no home in transformer" in said
    assert f"for the text encoder {named}, which this base does not have" in said
    assert f"For {named} fuse into a pipeline that has it" in said and "--allow-unmatched" in said
    report = merge(base, [lora], tmp_path / "out", allow_unmatched=[module])
    assert value(tmp_path / "out", Q) == 2.0
    (matching,) = report.plan.matchings
    assert [skip.module.name for skip in matching.skipped] == [module]


@pytest.mark.parametrize(
    ("modules", "options"),
    [
        (
            ["lora_te1_text_model_encoder_layers_0_mlp_fc1", "lora_te1_text_model_encoder_layers_1_mlp_fc1"],
            ["lora_te1_text_model_encoder_layers_*"],
        ),
        (["text_encoder.text_model.x", "text_encoder.encoder.y"], ["text_encoder.*"]),
        (["lora_te1_a_b", "lora_te1_a_c", "lora_te2_a_b"], ["lora_te1_a_*", "lora_te2_a_b"]),
    ],
)
def test_the_hint_is_the_option_that_leaves_the_half_out(
    tmp_path: Path, modules: list[str], options: list[str]
) -> None:
    base, lora = std_base(tmp_path / "base"), lora_of(tmp_path, MODULE, *modules)
    with pytest.raises(Refused) as caught:
        merge(base, [lora], tmp_path / "out")
    asked = " ".join(f"--allow-unmatched '{glob}'" for glob in options)
    assert (caught.value.hint or "").endswith(f"To leave that out: {asked}")
    report = merge(base, [lora], tmp_path / "out", allow_unmatched=options)
    assert rows(report) == [("transformer", 1)]


def test_a_file_of_an_encoder_alone_matches_nothing_in_a_transformer(tmp_path: Path) -> None:
    """Even where the transformer has a tensor of that name."""
    base = save(tmp_path / "base.safetensors", {f"{FC1}.weight": full(4, 4), K: full(4, 4)})
    said = refused(base, lora_of(tmp_path, f"lora_te1_{flat(FC1)}"), allow_unmatched=["*"])
    assert "0 of 1 modules match transformer" in said
    said = refused(base, lora_of(tmp_path, f"text_encoder.{FC1}"))
    assert "it is for the text encoder text_encoder, which this base does not have" in said


# Two experts


def pair_base(root: Path) -> Path:
    for name in ("transformer", "transformer_2"):
        base_of(root, {Q: full(4, 4), K: full(4, 4)}, component=name)
    encoder(root, "text_encoder", {f"{T5_WI}.weight": full(4, 4)}, UMT5)
    return root


def test_on_two_experts_the_encoders_keys_go_by_themselves(tmp_path: Path) -> None:
    base = pair_base(tmp_path / "base")
    half = f"text_encoders.umt5xxl.transformer.{T5_WI}"
    lora = lora_of(tmp_path, MODULE, half)
    assert "none of this base's two experts" in refused(base, lora)
    merge(base, [f"transformer_2={lora}"], tmp_path / "low")
    assert value(tmp_path / "low" / "transformer", Q) == 1.0
    assert value(tmp_path / "low" / "transformer_2", Q) == 2.0
    assert value(tmp_path / "low" / "text_encoder", f"{T5_WI}.weight") == 2.0
    merge(base, [f"all={lora}"], tmp_path / "all")
    assert value(tmp_path / "all" / "transformer", Q) == value(tmp_path / "all" / "transformer_2", Q) == 2.0
    assert value(tmp_path / "all" / "text_encoder", f"{T5_WI}.weight") == 2.0  # once


def test_an_encoders_file_needs_no_expert(tmp_path: Path) -> None:
    base = pair_base(tmp_path / "base")
    report = merge(base, [lora_of(tmp_path, f"text_encoder.{T5_WI}")], tmp_path / "out")
    assert rows(report) == [("transformer", 0), ("transformer_2", 0), ("text_encoder", 1)]
    assert [c.role for c in report.plan.components] == ["high_noise", "low_noise", "single"]


def test_keys_of_all_three_route_themselves(tmp_path: Path) -> None:
    base = pair_base(tmp_path / "base")
    modules = (f"transformer.{MODULE}", f"transformer_2.{MODULE}", f"text_encoder.{T5_WI}")
    report = merge(base, [lora_of(tmp_path, *modules)], tmp_path / "out")
    assert rows(report) == [("transformer", 1), ("transformer_2", 1), ("text_encoder", 1)]


# What flows through


def test_without_keys_an_encoder_is_a_side_file(tmp_path: Path) -> None:
    base = clip_base(tmp_path / "base")
    (base / "text_encoder" / "pytorch_model.bin").write_bytes(b"x")
    report = merge(base, [lora_of(tmp_path, UNET)], tmp_path / "out")
    assert rows(report) == [("transformer", 1)]
    sides = {record.path for record in report.marker.side_files}
    assert {
        f"text_encoder/{name}" for name in ("model.safetensors", "config.json", "pytorch_model.bin")
    } <= sides
    assert tree(tmp_path / "out" / "text_encoder") == tree(base / "text_encoder")


def test_the_marker_has_the_encoder_as_a_component(tmp_path: Path) -> None:
    base = clip_base(tmp_path / "base")
    lora = lora_of(tmp_path, UNET, f"lora_te1_text_model_{flat(FC1)}", alpha=4.0)
    out = tmp_path / "out"
    report = merge(base, [lora], out)
    document = json.loads((out / "fused.json").read_bytes())
    assert_valid(document)
    entry = document["components"]["text_encoder"]
    assert (entry["tensors"], entry["fused"], entry["copied"], entry["dtype"]) == (2, 1, 1, "float32")
    (file,) = entry["files"]
    assert file["path"] == "text_encoder/model.safetensors"
    assert {"sha256", "base_sha256", "header_sha256"} <= file.keys()
    assert "role" not in entry
    assert "text_encoder/model.safetensors" not in {side["path"] for side in document["side_files"]}
    assert [(row["component"], row["applied"]["pairs"]) for row in document["loras"]] == [
        ("transformer", 1),
        ("text_encoder", 1),
    ]
    assert len({row["content_sha256"] for row in document["loras"]}) == 1
    metadata = read_header(out / "text_encoder" / "model.safetensors").metadata
    assert metadata[FINGERPRINT_KEY] == report.marker.fingerprint
    assert read_marker(out) is not None


def test_a_plan_lists_the_encoder(tmp_path: Path) -> None:
    base = clip_base(tmp_path / "base")
    planned = plan(base, [lora_of(tmp_path, UNET, f"lora_te1_{flat(FC1)}")])
    assert [(c.name, c.n_fused, c.n_tensors) for c in planned.components] == [
        ("transformer", 1, 2),
        ("text_encoder", 1, 2),
    ]


def test_check_and_verify_look_at_the_encoder(tmp_path: Path) -> None:
    base, out = clip_base(tmp_path / "base"), tmp_path / "out"
    lora = lora_of(tmp_path, UNET, f"lora_te1_text_model_{flat(FC1)}", alpha=2.0)
    merge(base, [lora], out)
    found = check(out, loras=[lora], digest=True)
    assert found.whole
    assert [record.component for record in found.already_fused] == ["transformer", "text_encoder"]
    report = verify(out, base=base, loras=[lora])
    assert report.ok, report.findings
    assert {(part.name, part.fused, part.identical) for part in report.components} == {
        ("transformer", 1, 1),
        ("text_encoder", 1, 1),
    }
    shutil.copy(base / "text_encoder" / "model.safetensors", out / "text_encoder" / "model.safetensors")
    assert {f.path for f in check(out, digest=True).findings} == {"text_encoder/model.safetensors"}
    assert not verify(out, base=base, loras=[lora]).ok


def test_a_weight_file_that_the_encoders_folder_has_beside_is_not_copied(tmp_path: Path) -> None:
    base = clip_base(tmp_path / "base")
    (base / "text_encoder" / "pytorch_model.bin").write_bytes(b"unfused")
    report = merge(base, [lora_of(tmp_path, UNET, f"lora_te1_{flat(FC1)}")], tmp_path / "out")
    assert not (tmp_path / "out" / "text_encoder" / "pytorch_model.bin").exists()
    (notice,) = [notice for notice in report.notices if notice.code == "stray_weights"]
    assert notice.facts == {"component": "text_encoder", "files": ["pytorch_model.bin"]}


def test_dtype_is_the_transformers_and_an_encoder_keeps_its_own(tmp_path: Path) -> None:
    base = std_base(tmp_path / "base")
    key = f"text_model.{FC1}.weight"
    encoder(base, "text_encoder", {key: full(4, 4, dtype=torch.float16)}, {**CLIP_L, "dtype": "float16"})
    lora = lora_of(tmp_path, UNET, f"lora_te1_{flat(FC1)}")
    out = tmp_path / "out"
    merge(base, [lora], out, dtype="bfloat16", uniform=True)
    assert read_folder(out / "transformer")[Q].dtype == torch.bfloat16
    assert same_bytes(read_folder(out / "text_encoder")[key], full(4, 4, value=2.0, dtype=torch.float16))
    config = "text_encoder/config.json"
    assert (out / config).read_bytes() == (base / config).read_bytes()
    assert verify(out, base=base, loras=[lora]).ok


@pytest.mark.parametrize("name", ["model.fp16.safetensors", "model.safetensors"])
def test_a_variant_counts_where_the_encoder_has_it(name: str, tmp_path: Path) -> None:
    base, key = tmp_path / "base", f"{FC1}.weight"
    save(base / "transformer" / "diffusion_pytorch_model.fp16.safetensors", {Q: full(4, 4), K: full(4, 4)})
    save(base / "text_encoder" / name, {key: full(4, 4)})
    lora = lora_of(tmp_path, UNET, f"lora_te1_{flat(FC1)}")
    merge(base, [lora], tmp_path / "out", variant="fp16")
    assert [p.name for p in (tmp_path / "out" / "text_encoder").iterdir()] == [name]
    assert value(tmp_path / "out" / "text_encoder", key) == 2.0


def test_an_encoder_in_shards(tmp_path: Path) -> None:
    base = std_base(tmp_path / "base")
    shards = {f"model-0000{n}-of-00002.safetensors": f"encoder.block.{n}.x.weight" for n in (1, 2)}
    for file, key in shards.items():
        save(base / "text_encoder" / file, {key: full(4, 4)}, {"format": "pt"})
    index = {"metadata": {"total_size": 128}, "weight_map": {key: file for file, key in shards.items()}}
    save_json(base / "text_encoder" / "model.safetensors.index.json", index)
    save_json(base / "text_encoder" / "config.json", UMT5)
    lora = lora_of(tmp_path, "text_encoders.umt5xxl.transformer.encoder.block.2.x")
    out = tmp_path / "out"
    merge(base, [lora], out)
    first, second = (out / "text_encoder" / name for name in shards)
    assert first.read_bytes() == (base / "text_encoder" / first.name).read_bytes()
    assert read_header(second).metadata[FINGERPRINT_KEY]
    found = json.loads((out / "text_encoder" / "model.safetensors.index.json").read_bytes())
    assert found == index
    assert verify(out, base=base, loras=[lora]).ok


def test_an_interrupted_run_keeps_the_finished_encoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, out = clip_base(tmp_path / "base"), tmp_path / "out"
    lora = lora_of(tmp_path, UNET, f"lora_te1_{flat(FC1)}")
    with monkeypatch.context() as patch:
        patch.setattr(staging, "publish", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            merge(base, [lora], out)
    assert not out.exists()
    report = merge(base, [lora], out)
    assert report.kept == (f"transformer/{WEIGHTS}", "text_encoder/model.safetensors")
    assert value(out / "text_encoder", f"text_model.{FC1}.weight") == 2.0


def _interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_a_fused_encoder_stays_a_component_when_more_is_stacked(tmp_path: Path) -> None:
    base = clip_base(tmp_path / "base")
    first = lora_of(tmp_path, UNET, f"lora_te1_{flat(FC1)}", name="first.safetensors")
    second = lora_of(tmp_path, UNET, name="second.safetensors", value=0.5)
    merge(base, [first], tmp_path / "one")
    report = merge(tmp_path / "one", [second], tmp_path / "two", stack=True)
    assert rows(report) == [("transformer", 1), ("text_encoder", 0)]
    assert value(tmp_path / "two" / "transformer", Q) == 2.5
    assert tree(tmp_path / "two" / "text_encoder") == tree(tmp_path / "one" / "text_encoder")
    assert check(tmp_path / "two", digest=True).whole
    assert verify(tmp_path / "two", base=tmp_path / "one", loras=[second]).ok


def test_the_same_lora_is_not_stacked_on_an_encoder_twice(tmp_path: Path) -> None:
    base = clip_base(tmp_path / "base")
    lora = lora_of(tmp_path, f"lora_te1_{flat(FC1)}")
    merge(base, [lora], tmp_path / "one")
    with pytest.raises(Refused, match="already fused into text_encoder"):
        merge(tmp_path / "one", [lora], tmp_path / "two", stack=True)


def test_a_server_is_told_of_both_halves(tmp_path: Path) -> None:
    lora = lora_of(tmp_path, UNET, f"lora_te1_{flat(FC1)}")
    marker = merge(clip_base(tmp_path / "base"), [lora], tmp_path / "out").marker
    with pytest.raises(AlreadyFused) as caught:
        decide(marker, StartUp("out", (AskedLora("x", (lora,)),), fuses=True))
    assert "transformer" in caught.value.message and "text_encoder" in caught.value.message


def test_blocks_may_be_an_encoders(tmp_path: Path) -> None:
    base = clip_base(tmp_path / "base")
    lora = lora_of(tmp_path, UNET, f"lora_te1_text_model_{flat(FC1)}")
    merge(base, [lora], tmp_path / "out", blocks=["text_encoder=*fc1*=0.5"])
    assert value(tmp_path / "out" / "transformer", Q) == 2.0
    assert value(tmp_path / "out" / "text_encoder", f"text_model.{FC1}.weight") == 1.5


@pytest.mark.parametrize(
    ("document", "component", "alpha"),
    [
        ({"transformer.lora_alpha": 8, "text_encoder.lora_alpha": 2}, "text_encoder", 2.0),
        ({"transformer.lora_alpha": 8, "text_encoder.lora_alpha": 2}, "transformer", 8.0),
        ({"transformer.lora_alpha": 8, "text_encoder.lora_alpha": 2}, "transformer_2", 8.0),
        ({"transformer.lora_alpha": 8}, "text_encoder", None),
        ({"text_encoder.lora_alpha": 8}, "transformer", None),
        ({"lora_alpha": 8}, "text_encoder_2", 8.0),
    ],
)
def test_whose_configuration_a_header_has(
    document: Mapping[str, object], component: str, alpha: float | None
) -> None:
    found = config_of_metadata({"lora_adapter_metadata": json.dumps(document)}, component)
    assert (found.lora_alpha if found else None) == alpha


def test_an_alpha_of_the_transformer_is_not_the_encoders() -> None:
    metadata = {"transformer.lora_alpha": "8", "text_encoder.lora_alpha": "2"}
    found = {
        name: config_of_metadata(metadata, name) for name in ("transformer", "text_encoder", "text_encoder_2")
    }
    assert {name: c.lora_alpha if c else None for name, c in found.items()} == {
        "transformer": 8.0,
        "text_encoder": 2.0,
        "text_encoder_2": None,
    }


def test_transformers_loads_a_fused_encoder(tmp_path: Path) -> None:
    base, out = std_base(tmp_path / "base"), tmp_path / "out"
    config = CLIPTextConfig(
        vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    CLIPTextModel(config).save_pretrained(base / "text_encoder")
    lora = lora_of(tmp_path, f"lora_te1_text_model_{flat(FC1)}", out=16, into=8)
    merge(base, [lora], out)
    said = [f for f in verify(out, load=True).findings if f.code == "load" and "text_encoder" in f.file]
    assert said == []
    before = CLIPTextModel.from_pretrained(base / "text_encoder").state_dict()
    after = CLIPTextModel.from_pretrained(out / "text_encoder").state_dict()
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert [name.endswith(f"{FC1}.weight") for name in changed] == [True]


def test_an_encoder_that_transformers_does_not_know_is_said(tmp_path: Path) -> None:
    base, out = std_base(tmp_path / "base"), tmp_path / "out"
    clip(base, config={**CLIP_L, "architectures": ["Nothing"]})
    merge(base, [lora_of(tmp_path, f"lora_te1_{flat(FC1)}")], out)
    said = [f.message for f in verify(out, load=True).findings if f.file == "text_encoder/config.json"]
    assert len(said) == 1 and "'Nothing'" in said[0]


def test_what_is_said_of_a_file_for_both_experts_and_an_encoder_leads_to_it(tmp_path: Path) -> None:
    base = pair_base(tmp_path / "base")
    lora = lora_of(tmp_path, MODULE, f"text_encoder.{T5_WI}")
    said = refused(base, f"high={lora}:0.5", f"low={lora}:0.75")
    assert f"Give it once, --lora all={lora}:0.5; what another" in said
    assert f"Give it for all of them: --lora all={lora}" in refused(base, f"text_encoder={lora}")
    merge(base, [f"all={lora}:0.5"], tmp_path / "out", blocks=["low=*=1.5"])
    found = [value(tmp_path / "out" / name, Q) for name in ("transformer", "transformer_2")]
    assert found == [1.5, 1.75]
    assert value(tmp_path / "out" / "text_encoder", f"{T5_WI}.weight") == 1.5


def test_inspect_lists_what_a_lora_can_be_given_for(tmp_path: Path) -> None:
    """By folders alone: an encoder that cannot be read is in nobody's way."""
    root = sd3_base(tmp_path / "base")
    (root / "text_encoder_3" / "config.json").write_text("{")
    found = describe(root)
    assert found.document()["text_encoders"] == ["text_encoder", "text_encoder_2", "text_encoder_3"]
    assert ("text encoders", "text_encoder, text_encoder_2, text_encoder_3") in found.rows()
