"""Public reports about keys: prefixes, namings, pairs and components that found no home, or a wrong one."""
# ruff: noqa: N802 - cases keep their names

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cases.builders import (
    MODULE,
    NATIVE_MODULE,
    NATIVE_Q,
    PEFT,
    PLAIN,
    WEIGHTS,
    K,
    Q,
    assert_filled,
    base_of,
    command,
    full,
    fuse,
    refuse,
    same_bytes,
    save,
    save_json,
    std_base,
    std_pair,
    std_tensors,
)

FLAT = MODULE.replace(".", "_")
PREFIXES = (
    "",
    "transformer.",
    "diffusion_model.",
    "model.diffusion_model.",
    "base_model.model.",
    "base_model.model.transformer.",
    "lora_unet_",
)
MORE_PREFIXES = (
    "unet.",
    "model.",
    "net.",
    "base_model.model.model.",
    "lora_transformer_",
    "lycoris_",
    "lora___lorahyphen___",
    "transformer.base_model.model.",
    "base_model.model.model.diffusion_model.",
    "base_model.model.diffusion_model.",
)
DOTS = {
    "lora_unet_": "_",
    "lora_transformer_": "_",
    "lycoris_": "_",
    "lora___lorahyphen___": "___lorahyphen___",
}
STYLES = {
    "A": PLAIN,
    "B": PEFT,
    "C": ("lora_A.default.weight", "lora_B.default.weight"),
    "E": ("lora.down.weight", "lora.up.weight"),
    "H": ("lora_A", "lora_B"),
    "I": ("lora_linear_layer.down.weight", "lora_linear_layer.up.weight"),
}
IMAGE_BRANCH = "image branch of Wan2.1, which this base does not have"


def prefixed(prefix: str, module: str = MODULE) -> str:
    """The module under the prefix; some come with another character for the dots."""
    return prefix + module.replace(".", DOTS.get(prefix, "."))


# B01


@pytest.mark.parametrize(
    "spelling",
    [
        "lora_unet_blocks_12.self_attn.k",
        "lora_unet_blocks_12_self_attn_k",
        "lora_unet_blocks.12.self_attn.k",
        "lora_unet_blocks_12_self_attn.k",
    ],
)
def test_B01_half_underscored_names(spelling: str, tmp_path: Path) -> None:
    key = "blocks.12.self_attn.k.weight"
    base = base_of(tmp_path / "base", {key: full(4, 4)})
    lora = save(tmp_path / "x.safetensors", std_pair(4, spelling, alpha=4.0))
    fused = fuse(base, lora)
    assert same_bytes(fused.tensors()[key], full(4, 4, value=2.0))
    assert fused.lora["applied"]["pairs"] == 1


# B02


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("prefix", [*PREFIXES, *MORE_PREFIXES])
def test_B02_every_prefix_and_style_means_the_same(prefix: str, style: str, tmp_path: Path) -> None:
    lora = save(tmp_path / "x.safetensors", std_pair(4, prefixed(prefix), alpha=4.0, style=STYLES[style]))
    fused = fuse(std_base(tmp_path / "base"), lora)
    assert_filled(fused.tensors()[Q], 2.0)
    assert fused.tensors().keys() == {Q, K}


def test_B02_styles_may_be_mixed_in_one_file(tmp_path: Path) -> None:
    """As in DMD2: attention layers as diffusers wrote them once, all others as PEFT does."""
    proj = "blocks.0.ffn.net.2"
    base = base_of(tmp_path / "base", {**std_tensors(), f"{proj}.weight": full(4, 4)})
    lora = {
        **std_pair(4, f"unet.{MODULE}", style=STYLES["E"]),
        **std_pair(4, f"unet.{proj}", style=STYLES["B"]),
    }
    fused = fuse(base, save(tmp_path / "x.safetensors", lora))
    assert_filled(fused.tensors()[Q], 2.0)
    assert_filled(fused.tensors()[f"{proj}.weight"], 2.0)
    assert fused.lora["dialect"] == "lora.down/up + lora_A/B"


@pytest.mark.parametrize(
    ("layer", "module"),
    [
        ("attn1.processor.to_q_lora", "attn1.to_q"),
        ("attn1.to_q_lora", "attn1.to_q"),
        ("attn1.processor.to_out_lora", "attn1.to_out.0"),
    ],
)
def test_B02_layers_of_an_attention_processor(layer: str, module: str, tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", {K: full(4, 4, value=2.0), f"blocks.0.{module}.weight": full(4, 4)})
    pair = std_pair(4, f"unet.blocks.0.{layer}", alpha=2.0, style=("down.weight", "up.weight"))
    fused = fuse(base, save(tmp_path / "x.safetensors", pair))
    assert_filled(fused.tensors()[f"blocks.0.{module}.weight"], 1.5)


def test_B02_layers_that_no_base_tensor_is_called_after_are_named(tmp_path: Path) -> None:
    layer = "double_blocks.0.processor.qkv_lora1"
    lora = {**std_pair(4), **std_pair(4, layer, style=("down.weight", "up.weight"))}
    says = ("x.safetensors", f"{layer} has no home in transformer")
    refuse(std_base(tmp_path / "base"), save(tmp_path / "x.safetensors", lora), says=says)


@pytest.mark.parametrize(("first", "second"), [("A", "B"), ("B", "E"), ("C", "A"), ("H", "B"), ("E", "I")])
def test_B02_one_module_in_two_styles_is_refused(first: str, second: str, tmp_path: Path) -> None:
    lora = {**std_pair(4, style=STYLES[first]), **std_pair(4, style=STYLES[second])}
    keys = (f"{MODULE}.{STYLES[style][0]}" for style in (first, second))
    refuse(std_base(tmp_path / "base"), save(tmp_path / "x.safetensors", lora), says=("x.safetensors", *keys))


def test_B02_a_flattened_name_that_two_tensors_could_have_is_refused(tmp_path: Path) -> None:
    twins = ("blocks.0.attn1.to_q", "blocks.0.attn1_to.q")
    base = base_of(tmp_path / "base", {f"{name}.weight": full(4, 4) for name in twins})
    lora = save(tmp_path / "x.safetensors", std_pair(4, f"lora_unet_{FLAT}"))
    refuse(base, lora, says=("x.safetensors", f"lora_unet_{FLAT}: could be", *twins))


@pytest.mark.parametrize(
    ("base_prefix", "one_file"),
    [
        ("model.diffusion_model.", False),
        ("model.diffusion_model.", True),
        ("diffusion_model.", True),
        ("net.", True),
        ("model.", False),
    ],
)
@pytest.mark.parametrize("prefix", PREFIXES)
def test_B02_a_base_keeps_its_own_prefix(
    base_prefix: str, prefix: str, one_file: bool, tmp_path: Path
) -> None:
    tensors = {base_prefix + name: tensor for name, tensor in std_tensors().items()}
    base = save(tmp_path / "base.safetensors", tensors) if one_file else base_of(tmp_path / "base", tensors)
    lora = save(tmp_path / "x.safetensors", std_pair(4, prefixed(prefix), alpha=4.0))
    found = fuse(base, lora).tensors("" if one_file else "transformer")
    assert found.keys() == tensors.keys()
    assert_filled(found[base_prefix + Q], 2.0)
    assert same_bytes(found[base_prefix + K], tensors[base_prefix + K])


def test_B02_a_prefix_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    lora = save(tmp_path / "x.safetensors", std_pair(4, f"somebody.{MODULE}", alpha=4.0))
    refuse(
        std_base(tmp_path / "base"),
        lora,
        says=("x.safetensors", "0 of 1 modules match", f"somebody.{MODULE}"),
    )


def test_B02_two_prefixes_for_one_module_are_refused(tmp_path: Path) -> None:
    pairs = {**std_pair(4, f"transformer.{MODULE}"), **std_pair(4, f"diffusion_model.{MODULE}")}
    lora = save(tmp_path / "x.safetensors", pairs)
    refuse(
        std_base(tmp_path / "base"),
        lora,
        says=("x.safetensors", Q, "twice", f"transformer.{MODULE}", f"diffusion_model.{MODULE}"),
    )


# B03


@pytest.mark.parametrize("name", ["default", "default_0.default", "default.default", "my-style", "weight"])
@pytest.mark.parametrize("prefix", ["", "base_model.model.", "transformer."])
def test_B03_adapter_names_in_keys(prefix: str, name: str, tmp_path: Path) -> None:
    style = (f"lora_A.{name}.weight", f"lora_B.{name}.weight")
    lora = save(tmp_path / "x.safetensors", std_pair(4, prefix + MODULE, style=style))
    assert_filled(fuse(std_base(tmp_path / "base"), lora).tensors()[Q], 2.0)


@pytest.mark.parametrize(
    ("first", "second"), [(".style", ".char"), ("", ".char"), (".default", ".default_0.default")]
)
def test_B03_two_adapters_in_one_file_are_ambiguous(first: str, second: str, tmp_path: Path) -> None:
    pairs = {
        **std_pair(4, style=(f"lora_A{first}.weight", f"lora_B{first}.weight")),
        **std_pair(4, style=(f"lora_A{second}.weight", f"lora_B{second}.weight"), value=3.0),
    }
    lora = save(tmp_path / "x.safetensors", pairs)
    refuse(
        std_base(tmp_path / "base"),
        lora,
        says=("x.safetensors", MODULE, "several adapters", second.removeprefix(".")),
    )


def test_B03_two_adapters_with_modules_of_their_own_are_ambiguous(tmp_path: Path) -> None:
    pairs = {
        **std_pair(4, style=("lora_A.style.weight", "lora_B.style.weight")),
        **std_pair(4, K.removesuffix(".weight"), style=("lora_A.char.weight", "lora_B.char.weight")),
    }
    lora = save(tmp_path / "x.safetensors", pairs)
    says = ("x.safetensors", "several adapters", "char (", "style (", f"{MODULE}.lora_")
    refuse(std_base(tmp_path / "base"), lora, says=says)


# B04


SDXL = "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn1_to_q"


@pytest.mark.parametrize(
    "options", [[], ["--allow-unmatched", "*"], ["--allow-unmatched", SDXL], ["--allow-unmatched", "lora_*"]]
)
def test_B04_nothing_matches(options: list[str], tmp_path: Path) -> None:
    lora = save(tmp_path / "sdxl.safetensors", std_pair(4, SDXL, alpha=4.0))
    refuse(
        std_base(tmp_path / "base"),
        lora,
        says=("sdxl.safetensors", "0 of 1 modules match", f"{SDXL}.", "blocks.0.attn1."),
        options=options,
    )


@pytest.mark.parametrize(
    "tensors",
    [
        {"text_encoder.x.lora_down.weight": full(4, 4), "text_encoder.x.lora_up.weight": full(4, 4, value=0)},
        {"blocks.9.attn1.to_q.diff_b": full(4)},
        {f"{MODULE}.alpha": torch.tensor(4.0)},
        {"vae.decoder.diff": full(4)},
    ],
    ids=["zeros", "diff_b", "alphas", "diff"],
)
def test_B04_nothing_matches_whatever_the_kind(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    lora = save(tmp_path / "x.safetensors", tensors)
    for options in ([], ["--allow-unmatched", "*"]):
        refuse(
            std_base(tmp_path / "base"),
            lora,
            says=("x.safetensors", "0 of 1 modules match", next(iter(tensors))),
            options=options,
        )


def test_B04_one_of_two_loras_matches_nothing(tmp_path: Path) -> None:
    good = save(tmp_path / "good.safetensors", std_pair(4))
    other = save(tmp_path / "other.safetensors", std_pair(4, SDXL))
    for options in ([], ["--allow-unmatched", "*"]):
        refuse(
            std_base(tmp_path / "base"),
            good,
            other,
            says=("other.safetensors", "0 of 1 modules match"),
            options=options,
        )


# B05


FF = "blocks.0.ff.net.0.proj"


def partly_matching(tmp_path: Path) -> Path:
    return save(tmp_path / "x.safetensors", {**std_pair(4), **std_pair(4, FF)})


def test_B05_a_part_that_does_not_match_is_refused(tmp_path: Path) -> None:
    lora = partly_matching(tmp_path)
    said = refuse(
        std_base(tmp_path / "base"), lora, says=("x.safetensors", f"{FF} has no home", "--allow-unmatched")
    )
    assert said.count("has no home") == 1
    assert f"{MODULE} has" not in said


@pytest.mark.parametrize("glob", [FF, "blocks.*.ff.*", "*.ff.net.?.proj"])
def test_B05_a_part_that_may_stay_unmatched_is_listed(glob: str, tmp_path: Path) -> None:
    fused = fuse(std_base(tmp_path / "base"), partly_matching(tmp_path), options=["--allow-unmatched", glob])
    assert_filled(fused.tensors()[Q], 2.0)
    assert fused.lora["applied"]["pairs"] == 1
    (skipped,) = fused.lora["skipped"]
    assert skipped["module"] == FF
    assert fused.warning("skipped")["modules"] == 1


def test_B05_a_glob_for_something_else_allows_nothing(tmp_path: Path) -> None:
    refuse(
        std_base(tmp_path / "base"),
        partly_matching(tmp_path),
        says=("x.safetensors", f"{FF} has no home"),
        options=["--allow-unmatched", "blocks.*.attn1.*"],
    )


def test_B05_every_part_that_does_not_match_is_listed_at_once(tmp_path: Path) -> None:
    misses = {FF: "pair", "blocks.0.norm3": "diff", "blocks.7.attn1.to_q": "pair"}
    lora = std_pair(4)
    for module, kind in misses.items():
        lora |= std_pair(4, module) if kind == "pair" else {f"{module}.diff": full(4)}
    said = refuse(std_base(tmp_path / "base"), save(tmp_path / "x.safetensors", lora), says=tuple(misses))
    assert said.count("has no home") == 3


# B06


NATIVE, DIFFUSERS = NATIVE_MODULE, MODULE
SPELLINGS = [
    "lora_unet_blocks_0_self_attn_q",
    "diffusion_model.blocks.0.self_attn.q",
    "transformer.blocks.0.attn1.to_q",
    "lora_unet_blocks_0_attn1_to_q",
    "blocks.0.self_attn.q",
]


@pytest.mark.parametrize("native_base", [False, True])
@pytest.mark.parametrize("style", [PLAIN, PEFT])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_B06_alpha_survives_every_renaming(
    spelling: str, style: tuple[str, str], native_base: bool, tmp_path: Path
) -> None:
    base = base_of(tmp_path / "base", std_tensors(native=native_base))
    lora = save(tmp_path / "x.safetensors", std_pair(4, spelling, alpha=2.0, style=style))
    fused = fuse(base, lora)
    assert_filled(fused.tensors()[NATIVE_Q if native_base else Q], 1.5)
    assert fused.lora["alpha"] == {"source": "tensor", "values": [2.0]}


FFN = [("ffn.0", "ffn.net.0.proj"), ("ffn.2", "ffn.net.2"), ("cross_attn.o", "attn2.to_out.0")]


@pytest.mark.parametrize(("native", "diffusers"), FFN)
@pytest.mark.parametrize("native_base", [False, True])
@pytest.mark.parametrize("native_lora", [False, True])
@pytest.mark.parametrize("flat", [False, True])
def test_B06_the_feed_forward_maps_too(
    native: str, diffusers: str, native_base: bool, native_lora: bool, flat: bool, tmp_path: Path
) -> None:
    key = f"blocks.0.{native if native_base else diffusers}.weight"
    base = base_of(tmp_path / "base", {**std_tensors(native=native_base), key: full(4, 4)})
    module = f"blocks.0.{native if native_lora else diffusers}"
    spelling = f"lora_unet_{module.replace('.', '_')}" if flat else f"diffusion_model.{module}"
    fused = fuse(base, save(tmp_path / "x.safetensors", std_pair(4, spelling, alpha=2.0)))
    assert_filled(fused.tensors()[key], 1.5)
    assert_filled(fused.tensors()[NATIVE_Q if native_base else Q], 1.0)


@pytest.mark.parametrize("native_base", [False, True])
def test_B06_norms_that_change_places_land_where_they_belong(native_base: bool, tmp_path: Path) -> None:
    """Wan's norm3 is diffusers' norm2: each name exists in both layouts and means the other there."""
    key = f"blocks.0.{'norm3' if native_base else 'norm2'}.weight"
    other = f"blocks.0.{'norm2' if native_base else 'norm3'}.weight"
    tensors = {**std_tensors(native=native_base), key: full(4), other: full(4, value=5.0)}
    lora = {**std_pair(4, NATIVE_MODULE, alpha=2.0), "blocks.0.norm3.diff": full(4, value=0.5)}
    fused = fuse(base_of(tmp_path / "base", tensors), save(tmp_path / "x.safetensors", lora))
    assert_filled(fused.tensors()[key], 1.5)
    assert_filled(fused.tensors()[other], 5.0)


# B07


FC1 = "encoder.layers.0.mlp.fc1"
HALVES = [f"lora_te1_text_model_{FC1.replace('.', '_')}", f"lora_te_text_model_{FC1.replace('.', '_')}"]


def base_with_encoder(root: Path, key: str) -> Path:
    std_base(root)
    save(root / "text_encoder" / "model.safetensors", {key: full(4, 4)})
    return root


@pytest.mark.parametrize("level", ["text_model.", ""])
@pytest.mark.parametrize("half", [*HALVES, f"text_encoder.text_model.{FC1}", f"text_encoder.{FC1}"])
def test_B07_both_halves_are_applied(half: str, level: str, tmp_path: Path) -> None:
    key = f"{level}{FC1}.weight"
    base = base_with_encoder(tmp_path / "base", key)
    lora = {**std_pair(4, f"lora_unet_{FLAT}"), **std_pair(4, half)}
    fused = fuse(base, save(tmp_path / "x.safetensors", lora))
    assert_filled(fused.tensors()[Q], 2.0)
    assert_filled(fused.tensors("text_encoder")[key], 2.0)
    assert [row["applied"]["pairs"] for row in fused.document["loras"]] == [1, 1]


@pytest.mark.parametrize("half", HALVES)
def test_B07_a_half_without_its_encoder_is_never_dropped_in_silence(half: str, tmp_path: Path) -> None:
    lora = save(tmp_path / "x.safetensors", {**std_pair(4), **std_pair(4, half)})
    base = std_base(tmp_path / "base")
    refuse(base, lora, says=("x.safetensors", half, "text encoder lora_te", "--allow-unmatched"))
    fused = fuse(base, lora, options=["--allow-unmatched", "lora_te*"])
    assert [skip["module"] for skip in fused.lora["skipped"]] == [half]
    assert fused.warning("skipped")["modules"] == 1


@pytest.mark.parametrize("glob", ["lora_te1_*", "*layers_1*"])
def test_B07_a_half_that_misses_the_encoder_may_be_allowed_to_stay_out(glob: str, tmp_path: Path) -> None:
    """The other half is applied; with no hit anywhere nothing allows it."""
    base = base_with_encoder(tmp_path / "base", f"text_model.{FC1}.weight")
    missing = std_pair(4, "lora_te1_text_model_encoder_layers_1_mlp_fc1")
    refuse(base, save(tmp_path / "x.safetensors", {**std_pair(4), **missing}), says=("--allow-unmatched",))
    fused = fuse(base, tmp_path / "x.safetensors", options=["--allow-unmatched", glob])
    assert [row["applied"]["pairs"] for row in fused.document["loras"]] == [1, 0]
    alone = save(tmp_path / "alone.safetensors", missing)
    refuse(base, alone, says=("0 of 1 modules match",), options=["--allow-unmatched", glob])


def test_B07_a_tensor_of_the_encoder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    base = base_with_encoder(tmp_path / "base", f"text_model.{FC1}.weight")
    lora = {**std_pair(4), **std_pair(4, "lora_te1_text_model_encoder_layers_1_mlp_fc1")}
    says = ("x.safetensors", "lora_te1_text_model_encoder_layers_1_mlp_fc1 has no home in text_encoder")
    said = refuse(base, save(tmp_path / "x.safetensors", lora), says=("0 of 1 modules match text_encoder",))
    assert "x.safetensors" in said
    lora |= std_pair(4, HALVES[0])
    refuse(base, save(tmp_path / "x.safetensors", lora), says=says)


# B08


T5 = "text_encoders.t5xxl.transformer.encoder.block.0.layer.1.DenseReluDense.wi_0"


def zero_leftover(style: tuple[str, str]) -> dict[str, torch.Tensor]:
    down, up = style
    return {f"{T5}.{down}": torch.zeros(4, 8), f"{T5}.{up}": torch.zeros(16, 4)}


@pytest.mark.parametrize("style", [PLAIN, PEFT])
@pytest.mark.parametrize("alpha", [False, True])
def test_B08_zero_leftovers_are_harmless(style: tuple[str, str], alpha: bool, tmp_path: Path) -> None:
    lora = {**std_pair(4, alpha=4.0), **zero_leftover(style)}
    lora |= {f"{T5}.alpha": torch.tensor(4.0)} if alpha else {}
    fused = fuse(std_base(tmp_path / "base"), save(tmp_path / "x.safetensors", lora))
    assert_filled(fused.tensors()[Q], 2.0)
    warning = fused.warning("skipped")
    assert (warning["modules"], warning["reason"]) == (1, "all values are zero")
    assert [skip["module"] for skip in fused.lora["skipped"]] == [T5]


def test_B08_a_zero_difference_is_harmless_too(tmp_path: Path) -> None:
    lora = {**std_pair(4), "text_encoders.clip_l.final_layer_norm.diff": torch.zeros(4)}
    fused = fuse(std_base(tmp_path / "base"), save(tmp_path / "x.safetensors", lora))
    assert fused.warning("skipped")["modules"] == 1


@pytest.mark.parametrize("part", PLAIN)
def test_B08_one_value_that_is_not_zero_is_a_miss(part: str, tmp_path: Path) -> None:
    leftover = zero_leftover(PLAIN)
    leftover[f"{T5}.{part}"][-1, -1] = 2.0**-24
    lora = save(tmp_path / "x.safetensors", {**std_pair(4), **leftover})
    refuse(std_base(tmp_path / "base"), lora, says=("x.safetensors", f"{T5} has no home"))


def test_B08_strict_refuses_zero_leftovers(tmp_path: Path) -> None:
    lora = save(tmp_path / "x.safetensors", {**std_pair(4), **zero_leftover(PLAIN)})
    refuse(std_base(tmp_path / "base"), lora, says=("x.safetensors", T5, "zero"), options=["--strict"])


# B22


IMAGE_MODULES = (
    "blocks.0.cross_attn.k_img",
    "blocks.0.cross_attn.v_img",
    "blocks.0.cross_attn.norm_k_img",
    "img_emb.proj.1",
)
DIFFUSERS_IMAGE_MODULES = (
    "blocks.0.attn2.add_k_proj",
    "blocks.0.attn2.add_v_proj",
    "blocks.0.attn2.norm_added_k",
    "condition_embedder.image_embedder.ff.net.0.proj",
)


def wan21_i2v_lora(path: Path, *, prefix: str = "", diffusers: bool = False) -> tuple[Path, list[str]]:
    """A LoRA with an image branch, and its image modules as it spells them."""
    modules = DIFFUSERS_IMAGE_MODULES if diffusers else IMAGE_MODULES
    k_img, v_img, norm, emb = names = [prefixed(prefix, module) for module in modules]
    lora = {
        **std_pair(4, prefixed(prefix, MODULE if diffusers else NATIVE_MODULE)),
        **std_pair(4, k_img),
        f"{k_img}.diff_b": full(4),
        **std_pair(4, v_img),
        f"{norm}.diff": full(4),
        **std_pair(4, emb),
    }
    return save(path, lora), names


def wan22_base(root: Path, channels: int) -> Path:
    patch = {"patch_embedding.weight": full(4, channels, 1, 2, 2)}
    return base_of(root, {**std_tensors(native=True), **patch})


LORA_SPELLINGS = [("", False), ("diffusion_model.", False), ("lora_unet_", False), ("transformer.", True)]


@pytest.mark.parametrize(("prefix", "diffusers"), LORA_SPELLINGS)
def test_B22_an_image_base_without_the_branch_skips_it(prefix: str, diffusers: bool, tmp_path: Path) -> None:
    lora, names = wan21_i2v_lora(tmp_path / "x.safetensors", prefix=prefix, diffusers=diffusers)
    fused = fuse(wan22_base(tmp_path / "base", 36), lora)
    assert_filled(fused.tensors()[NATIVE_Q], 2.0)
    assert sorted(skip["module"] for skip in fused.lora["skipped"]) == sorted(names)
    assert {skip["reason"] for skip in fused.lora["skipped"]} == {IMAGE_BRANCH}
    assert fused.warning("skipped")["modules"] == 4
    assert IMAGE_BRANCH in fused.run.stdout and IMAGE_BRANCH in fused.run.stderr


def test_B22_strict_refuses_the_skips(tmp_path: Path) -> None:
    lora, names = wan21_i2v_lora(tmp_path / "x.safetensors")
    refuse(
        wan22_base(tmp_path / "base", 36),
        lora,
        says=("x.safetensors", *names, IMAGE_BRANCH),
        options=["--strict"],
    )


@pytest.mark.parametrize("channels", [16, 48])
@pytest.mark.parametrize(("prefix", "diffusers"), LORA_SPELLINGS)
def test_B22_a_text_base_refuses_the_branch(
    prefix: str, diffusers: bool, channels: int, tmp_path: Path
) -> None:
    lora, names = wan21_i2v_lora(tmp_path / "x.safetensors", prefix=prefix, diffusers=diffusers)
    refuse(
        wan22_base(tmp_path / "base", channels),
        lora,
        says=("x.safetensors: 4 faults", *names, IMAGE_BRANCH, "--allow-unmatched"),
    )


def test_B22_a_text_base_may_be_told_to_skip_the_branch(tmp_path: Path) -> None:
    lora, names = wan21_i2v_lora(tmp_path / "x.safetensors")
    options = ["--allow-unmatched", "*_img", "--allow-unmatched", "img_emb.*"]
    fused = fuse(wan22_base(tmp_path / "base", 16), lora, options=options)
    assert_filled(fused.tensors()[NATIVE_Q], 2.0)
    assert sorted(skip["module"] for skip in fused.lora["skipped"]) == sorted(names)


def test_B22_what_else_is_missing_is_no_part_of_the_branch(tmp_path: Path) -> None:
    lora = {**std_pair(4, NATIVE_MODULE), **std_pair(4, "blocks.0.cross_attn.k_img"), **std_pair(4, FF)}
    said = refuse(
        wan22_base(tmp_path / "base", 36),
        save(tmp_path / "x.safetensors", lora),
        says=("x.safetensors", f"{FF} has no home"),
    )
    assert "k_img has no home" not in said


# B23


def test_B23_a_text_lora_leaves_the_image_branch_alone(tmp_path: Path) -> None:
    to_k, add_k = "blocks.0.attn2.to_k.weight", "blocks.0.attn2.add_k_proj.weight"
    base = base_of(tmp_path / "base", {to_k: full(4, 4), add_k: full(4, 4)})
    lora = save(tmp_path / "x.safetensors", std_pair(4, "transformer.blocks.0.attn2.to_k"))
    fused = fuse(base, lora)
    assert_filled(fused.tensors()[to_k], 2.0)
    assert same_bytes(fused.tensors()[add_k], full(4, 4))
    assert fused.warnings == []
    assert "warning" not in fused.run.said


# B24


def test_B24_another_size_is_refused_whole(tmp_path: Path) -> None:
    key = "blocks.0.attn1.to_v.weight"
    base = base_of(tmp_path / "base", {**std_tensors(), key: full(4, 4)})
    lora = {**std_pair(2, out=3, into=3), **std_pair(4, "blocks.0.attn1.to_v")}
    path = save(tmp_path / "x.safetensors", lora)
    for options in ([], ["--allow-unmatched", "*"]):
        said = refuse(base, path, says=("x.safetensors", Q, "[4, 4]", "[3, 3]"), options=options)
        assert key not in said


@pytest.mark.parametrize(
    ("base_shape", "out", "into"),
    [
        ((4, 4), 4, 1),
        ((4, 4), 1, 4),
        ((4, 4), 8, 4),
        ((4, 4), 4, 8),
        ((4, 6), 6, 4),
        ((4,), 4, 4),
        ((4, 4, 3, 3), 4, 4),
    ],
)
def test_B24_a_delta_is_never_stretched_or_reshaped(
    base_shape: tuple[int, ...], out: int, into: int, tmp_path: Path
) -> None:
    base = base_of(tmp_path / "base", {Q: full(*base_shape), K: full(4, 4)})
    lora = save(tmp_path / "x.safetensors", std_pair(2, out=out, into=into))
    refuse(base, lora, says=("x.safetensors", Q, str(list(base_shape)), str([out, into])))


def test_B24_factors_of_two_ranks_are_no_pair(tmp_path: Path) -> None:
    down, up = PLAIN
    lora = {f"{MODULE}.{down}": full(2, 4), f"{MODULE}.{up}": full(4, 3)}
    refuse(
        std_base(tmp_path / "base"),
        save(tmp_path / "x.safetensors", lora),
        says=("x.safetensors", MODULE, "[4, 3]", "[2, 4]", "rank"),
    )


# B32


TIED = {"model_type": "qwen3", "tie_word_embeddings": True, "hidden_size": 2}
HEADS = ["text_encoder.lm_head", "lora_te1_lm_head", "text_encoders.qwen3_4b.transformer.lm_head"]


def tied_base(root: Path, *, config: dict[str, object], head: bool = False) -> Path:
    std_base(root)
    names = ["model.embed_tokens.weight", *(["lm_head.weight"] if head else [])]
    save(root / "text_encoder" / "model.safetensors", {name: full(4, 2) for name in names}, {"format": "pt"})
    save_json(root / "text_encoder" / "config.json", config)
    return root


@pytest.mark.parametrize("config", [TIED, {**TIED, "tie_word_embeddings": False, "text_config": TIED}])
@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("module", HEADS[:2])
def test_B32_a_lora_on_a_tied_head_is_refused(
    module: str, head: bool, config: dict[str, object], tmp_path: Path
) -> None:
    base = tied_base(tmp_path / "base", config=config, head=head)
    lora = save(tmp_path / "x.safetensors", {**std_pair(4), **std_pair(1, module, into=2)})
    says = ("x.safetensors", f"{module}: the head is tied", "tie_word_embeddings")
    for options in ([], ["--allow-unmatched", "*"]):
        refuse(base, lora, says=says, options=options)


def test_B32_the_name_of_the_encoder_is_its_own(tmp_path: Path) -> None:
    base = tied_base(tmp_path / "base", config={**TIED, "hidden_size": 2560})
    lora = save(tmp_path / "x.safetensors", {**std_pair(4), **std_pair(1, HEADS[2], into=2)})
    refuse(base, lora, says=("x.safetensors", f"{HEADS[2]}: the head is tied"))


def test_B32_a_head_of_its_own_is_fused_and_the_embedding_kept(tmp_path: Path) -> None:
    base = tied_base(tmp_path / "base", config={**TIED, "tie_word_embeddings": False}, head=True)
    lora = save(tmp_path / "x.safetensors", {**std_pair(4), **std_pair(1, HEADS[0], into=2)})
    found = fuse(base, lora).tensors("text_encoder")
    assert_filled(found["lm_head.weight"], 2.0)
    assert same_bytes(found["model.embed_tokens.weight"], full(4, 2))


# B35


EXPERTS = [("transformer", "transformer_2"), ("high_noise_model", "low_noise_model")]


def two_experts(root: Path, folders: tuple[str, str]) -> Path:
    native = folders[0] == "high_noise_model"
    for folder, value in zip(folders, (1.0, 3.0), strict=True):
        tensors = {
            name: torch.full_like(tensor, value) for name, tensor in std_tensors(native=native).items()
        }
        if native:
            save(root / folder / WEIGHTS, tensors)
        else:
            base_of(root, tensors, component=folder)
    return root


def key_in(folders: tuple[str, str]) -> str:
    return NATIVE_Q if folders[0] == "high_noise_model" else Q


@pytest.mark.parametrize("folders", EXPERTS)
@pytest.mark.parametrize("name", ["x", "x_HIGH", "wan2.2_low_noise_4steps"])
def test_B35_one_lora_for_nobody_is_refused(folders: tuple[str, str], name: str, tmp_path: Path) -> None:
    lora = save(tmp_path / f"{name}.safetensors", std_pair(4))
    refuse(
        two_experts(tmp_path / "base", folders),
        lora,
        says=(f"{name}.safetensors", "two experts", "transformer_2=", "all=", ".safetensors,"),
    )


@pytest.mark.parametrize("folders", EXPERTS)
def test_B35_one_lora_for_both_changes_both(folders: tuple[str, str], tmp_path: Path) -> None:
    lora = save(tmp_path / "x.safetensors", std_pair(4))
    fused = fuse(two_experts(tmp_path / "base", folders), f"all={lora}")
    for folder, value in zip(folders, (2.0, 4.0), strict=True):
        assert_filled(fused.tensors(folder)[key_in(folders)], value)
    counts = {name: (entry["fused"], entry["copied"]) for name, entry in fused.document["components"].items()}
    assert counts == {"transformer": (1, 1), "transformer_2": (1, 1)}
    assert [lora["component"] for lora in fused.document["loras"]] == ["transformer", "transformer_2"]


@pytest.mark.parametrize("folders", EXPERTS)
@pytest.mark.parametrize(
    ("target", "values", "counts"),
    [
        ("transformer", (2.0, 3.0), (1, 0)),
        ("high", (2.0, 3.0), (1, 0)),
        ("transformer_2", (1.0, 4.0), (0, 1)),
        ("low_noise", (1.0, 4.0), (0, 1)),
    ],
)
def test_B35_one_expert_is_changed_when_it_is_named(
    folders: tuple[str, str],
    target: str,
    values: tuple[float, float],
    counts: tuple[int, int],
    tmp_path: Path,
) -> None:
    lora = save(tmp_path / "x.safetensors", std_pair(4))
    fused = fuse(two_experts(tmp_path / "base", folders), f"{target}={lora}")
    for folder, value in zip(folders, values, strict=True):
        assert_filled(fused.tensors(folder)[key_in(folders)], value)
    components = fused.document["components"]
    assert tuple(components[name]["fused"] for name in ("transformer", "transformer_2")) == counts


@pytest.mark.parametrize("folders", EXPERTS)
@pytest.mark.parametrize("how", ["list", "high and low", "named list"])
def test_B35_a_file_for_each_expert(folders: tuple[str, str], how: str, tmp_path: Path) -> None:
    base = two_experts(tmp_path / "base", folders)
    high = save(tmp_path / "a.safetensors", std_pair(4))
    low = save(tmp_path / "b.safetensors", std_pair(4, value=2.0))
    if how == "list":
        fused = fuse(base, f"{high},{low}")
    elif how == "named list":
        fused = fuse(base, f"low={low},high={high}")
    else:
        fused = fuse(base, options=["--high", str(high), "--low", str(low)])
    assert_filled(fused.tensors(folders[0])[key_in(folders)], 2.0)
    assert_filled(fused.tensors(folders[1])[key_in(folders)], 5.0)


@pytest.mark.parametrize("folders", EXPERTS)
def test_B35_swapped_names_refuse_a_list_and_warn_when_named(
    folders: tuple[str, str], tmp_path: Path
) -> None:
    base = two_experts(tmp_path / "base", folders)
    high = save(tmp_path / "high_noise_model.safetensors", std_pair(4))
    low = save(tmp_path / "low_noise_model.safetensors", std_pair(4, value=2.0))
    refuse(base, f"{low},{high}", says=("low_noise_model.safetensors", "high_noise_model.safetensors"))
    fused = fuse(base, options=["--high", str(low), "--low", str(high)])
    assert fused.codes == ["swapped_name", "swapped_name"]


def test_B35_a_lora_whose_keys_name_an_expert_goes_there(tmp_path: Path) -> None:
    base = two_experts(tmp_path / "base", EXPERTS[0])
    pairs = {
        **std_pair(4, f"transformer.{MODULE}"),
        **std_pair(4, f"transformer_2.{MODULE}", value=2.0),
    }
    fused = fuse(base, save(tmp_path / "x.safetensors", pairs))
    assert_filled(fused.tensors("transformer")[Q], 2.0)
    assert_filled(fused.tensors("transformer_2")[Q], 5.0)


@pytest.mark.parametrize("target", ["transformer=", "all="])
def test_B35_keys_for_the_other_expert_are_never_dropped(target: str, tmp_path: Path) -> None:
    base = two_experts(tmp_path / "base", EXPERTS[0])
    lora = save(tmp_path / "x.safetensors", std_pair(4, f"transformer_2.{MODULE}"))
    refuse(base, f"{target}{lora}", says=("x.safetensors", "transformer_2"))


def test_B35_a_list_on_one_transformer_is_refused(tmp_path: Path) -> None:
    high = save(tmp_path / "a.safetensors", std_pair(4))
    low = save(tmp_path / "b.safetensors", std_pair(4, value=2.0))
    refuse(
        std_base(tmp_path / "base"),
        f"{high},{low}",
        says=("a.safetensors", "one transformer", "repeat --lora"),
    )


def test_B35_the_plan_says_it_without_the_run(tmp_path: Path) -> None:
    lora = save(tmp_path / "x.safetensors", std_pair(4))
    base = two_experts(tmp_path / "base", EXPERTS[0])
    run = command("plan", "--base", base, "--lora", lora)
    assert run.exit_code == 1
    assert "two experts" in run.stderr
