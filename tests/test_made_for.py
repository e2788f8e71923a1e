"""Whether a LoRA is for another family than the base's: by what it says, its names, and its blocks."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import TYPE_CHECKING, Any

import diffusers
import pytest
import torch

from fuselora.describe import describe
from fuselora.description import CheckpointDescription, LoraDescription
from fuselora.errors import Refused
from fuselora.families.recognition import families_named
from fuselora.marker import FILE_NAME
from fuselora.pipeline import merge, plan
from fuselora.synth import Spec, write_safetensors
from tests import listings
from tests.inputs import pair, tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from fuselora.errors import Notice

JOINT = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
classes: Any = diffusers  # without annotations
KLEIN = {
    "num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24, "joint_attention_dim": 7680,
    "guidance_embeds": False,
}  # fmt: skip
BUILT: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "chroma": ("ChromaTransformer2DModel", {}),
    "flux.2-klein-4b": ("Flux2Transformer2DModel", KLEIN),
    "sd": ("UNet2DConditionModel", {"cross_attention_dim": 768}),
}


@cache
def base_specs(name: str) -> tuple[Spec, ...]:
    """A published base at true size, from its list or from diffusers' class."""
    if name not in BUILT:
        return listings.base(name, "diffusers")
    class_name, config = BUILT[name]
    with torch.device("meta"):
        state = getattr(classes, class_name)(**config).state_dict()
    return tuple(Spec(key, "BF16", tuple(value.shape)) for key, value in state.items())


def base_of(folder: Path, name: str) -> Path:
    return listings.sparse(folder / f"{name}.safetensors", base_specs(name))


def attention(double: Iterable[int], single: Iterable[int] = (), dim: int = 3072) -> list[Spec]:
    """Pairs for the attention alone, in the names that diffusers gives to several families."""
    modules = [f"transformer_blocks.{n}.attn.{part}" for n in double for part in JOINT]
    modules += [f"single_transformer_blocks.{n}.attn.{part}" for n in single for part in JOINT[:3]]
    return [
        Spec(f"transformer.{module}.{part}.weight", "BF16", shape)
        for module in modules
        for part, shape in (("lora_A", (4, dim)), ("lora_B", (dim, 4)))
    ]


FLUX1, FLUX1_DOUBLE = attention(range(19), range(38)), attention(range(19))
KLEIN_DOUBLE, HUNYUAN = attention(range(5)), attention(range(20), range(40))


def notices(folder: Path, base: str, specs: Sequence[Spec], metadata: Any = None) -> list[Notice]:
    lora = listings.sparse(folder / "x.safetensors", specs, metadata)
    return list(plan(base_of(folder, base), [lora]).notices)


# By its blocks


@pytest.mark.parametrize(
    ("base", "named", "specs", "families"),
    [
        ("hunyuanvideo", "hunyuan-video", FLUX1, ["flux.1", "chroma"]),
        ("qwen-image", "qwen-image", FLUX1_DOUBLE, ["flux.1", "chroma"]),
        ("qwen-image", "qwen-image", attention(range(20)), ["hunyuan-video"]),
        ("flux.1-dev", "flux.1", KLEIN_DOUBLE, ["flux.2"]),
        ("chroma", "chroma", KLEIN_DOUBLE, ["flux.2"]),
        ("qwen-image", "qwen-image", KLEIN_DOUBLE, ["flux.2"]),
    ],
)
def test_a_lora_of_all_blocks_of_another_family_fits_and_is_warned_of(
    tmp_path: Path, base: str, named: str, specs: list[Spec], families: list[str]
) -> None:
    (notice,) = notices(tmp_path, base, specs)
    assert notice.code == "other_family"
    assert notice.facts["families"] == families and notice.facts["base"] == named
    assert all(family in notice.message for family in families)
    assert notice.message.endswith(f"the base is {named}")
    lora = listings.sparse(tmp_path / "x.safetensors", specs)
    with pytest.raises(Refused, match=r"x\.safetensors: is for ") as caught:
        plan(base_of(tmp_path, base), [lora], strict=True)
    assert [fault.kind for fault in caught.value.faults] == ["strict"]


@pytest.mark.parametrize(
    ("base", "specs"),
    [
        ("flux.1-dev", FLUX1),
        ("chroma", FLUX1),  # Chroma has FLUX.1's names, widths and blocks
        ("hunyuanvideo", HUNYUAN),
        ("qwen-image", attention(range(60))),
        ("qwen-image", attention(range(1, 60))),
        ("qwen-image", attention(range(7, 12))),  # some blocks are all blocks of nothing
        ("hunyuanvideo", attention(range(7, 9), range(3))),
        ("hunyuanvideo", attention((), range(38))),
        ("flux.2-klein-4b", KLEIN_DOUBLE),
    ],
)
def test_families_that_it_fits_as_well_are_no_evidence(tmp_path: Path, base: str, specs: list[Spec]) -> None:
    assert notices(tmp_path, base, specs) == []


def test_a_base_of_no_published_size_is_its_own_measure(tmp_path: Path) -> None:
    """FLUX.1 cut to as many double blocks as FLUX.2-klein-4B has; all of them changed."""
    cut = re.compile(r"transformer_blocks\.(?:[5-9]|1\d)\.")
    specs = [spec for spec in base_specs("flux.1-dev") if not cut.match(spec.name)]
    base = listings.sparse(tmp_path / "b.safetensors", specs)
    lora = listings.sparse(tmp_path / "x.safetensors", KLEIN_DOUBLE)
    assert plan(base, [lora]).notices == ()


@pytest.mark.parametrize("base", ["wan2.1-t2v-14b", "wan2.2-t2v-a14b"])
def test_close_kin_are_one_family(tmp_path: Path, base: str) -> None:
    for lora in ("wan2.1-t2v-14b.causvid-v1.r32", "wan2.2-t2v-a14b.musubi-kohya.r32"):
        found = notices(tmp_path, base, listings.lora(lora), {"ss_base_model_version": "wan2.1"})
        assert [notice.code for notice in found if notice.code == "other_family"] == []


def unet_pairs(attention: str, *, text_encoder: bool = False) -> list[Spec]:
    """kohya's names for one attention of Stable Diffusion 1; down_blocks 0 to 2 of 4 have it."""
    modules = [
        (spec.name.removesuffix(".weight"), spec.shape)
        for spec in base_specs("sd")
        if re.search(rf"\.{attention}\.to_[qkv]\.weight$", spec.name)
    ]
    found = [(f"lora_unet_{name.replace('.', '_')}", shape) for name, shape in modules]
    if text_encoder:
        found += [(f"lora_te_text_model_encoder_layers_{n}_mlp_fc1", (3072, 768)) for n in range(12)]
    return [
        Spec(f"{name}.{part}.weight", "F16", factor)
        for name, (rows, columns) in found
        for part, factor in (("lora_down", (4, columns)), ("lora_up", (rows, 4)))
    ]


@pytest.mark.parametrize("which", ["attn1", "attn2", r"attn\d"])
def test_blocks_that_differ_are_no_measure(tmp_path: Path, which: str) -> None:
    """As many as SDXL has in all; only the text's width tells the two apart."""
    assert notices(tmp_path, "sd", unet_pairs(which)) == []


# By what it says


SAYS = {
    "kohya": {"ss_base_model_version": "flux1"},
    "ModelSpec": {"modelspec.architecture": "flux-1-dev/lora"},
    "a file": {"ss_sd_model_name": "flux1-dev.safetensors"},
    "diffusers": {
        "lora_adapter_metadata": json.dumps(
            {
                "transformer.lora_alpha": 4,
                "transformer.r": 4,
                "transformer.base_model_name_or_path": "black-forest-labs/FLUX.1-dev",
            }
        )
    },
}


@pytest.mark.parametrize("metadata", SAYS.values(), ids=SAYS)
@pytest.mark.parametrize(("base", "named"), [("chroma", "chroma"), ("qwen-image", "qwen-image")])
def test_what_a_lora_says_is_believed(
    tmp_path: Path, base: str, named: str, metadata: dict[str, str]
) -> None:
    (notice,) = notices(tmp_path, base, attention(range(3, 5)), metadata)
    assert (notice.code, notice.facts["families"], notice.facts["base"]) == (
        "other_family",
        ["flux.1"],
        named,
    )
    assert "flux" in str(notice.facts["evidence"]).lower()


def test_so_is_what_its_configuration_says(tmp_path: Path) -> None:
    config = {"peft_type": "LORA", "lora_alpha": 4, "r": 4, "base_model_name_or_path": "/m/sd3/FLUX.1-dev"}
    write_safetensors(tmp_path / "x" / "adapter_model.safetensors", attention([3]))
    (tmp_path / "x" / "adapter_config.json").write_text(json.dumps(config))
    (notice,) = plan(base_of(tmp_path, "qwen-image"), [tmp_path / "x"]).notices
    assert notice.facts["families"] == ["flux.1"]
    assert "base_model_name_or_path in adapter_config.json" in notice.message
    described = describe(tmp_path / "x")
    assert isinstance(described, LoraDescription)
    assert described.target.families == ("flux.1",)
    assert ("trained on", f"{config['base_model_name_or_path']} (base_model_name_or_path in "
            "adapter_config.json)") in described.rows()  # fmt: skip


@pytest.mark.parametrize(
    "metadata",
    [
        {"ss_base_model_version": "hunyuan_video"},
        {"ss_base_model_version": "framepack"},
        {"ss_base_model_version": "flux1", "modelspec.architecture": "hunyuan-video/lora"},
    ],
)
def test_the_base_s_own_family_beats_the_blocks(tmp_path: Path, metadata: dict[str, str]) -> None:
    assert notices(tmp_path, "hunyuanvideo", FLUX1, metadata) == []


def test_a_name_that_nobody_knows_says_nothing(tmp_path: Path) -> None:
    assert notices(tmp_path, "qwen-image", attention([3]), {"ss_base_model_version": "lumina2"}) == []


def test_a_long_name_is_shown_by_its_end(tmp_path: Path) -> None:
    name = f"{'x' * 5000}/FLUX.1-dev"
    (notice,) = notices(tmp_path, "qwen-image", attention([3]), {"ss_base_model_version": name})
    assert "FLUX.1-dev" in notice.message and len(notice.message) < 300


NAMED = {
    "wan": ("wan", "wan2.1", "wan22_14b", "Wan-AI/Wan2.2-T2V-A14B-Diffusers", "FastVideo/FastWan2.1-T2V"),
    "qwen-image": ("qwen_image", "Qwen-Image-Edit-2511", "qwen_image_edit"),
    "flux.1": ("flux1", "flux-1-dev/lora", "flux_kontext", "models--x--FLUX.1-dev/snapshots/0abc1/"),
    "flux.2": ("flux_2_klein_9b", "flux2_klein_4b", "Flux.2-dev", "black-forest-labs/FLUX.2-klein-4B"),
    "z-image": ("z_image", "zimage", "Tongyi-MAI/Z-Image-Turbo"),
    "chroma": ("chroma/lora", "lodestones/Chroma1-HD"),
    "sd3": ("stable-diffusion-3-m/lora", "stabilityai/stable-diffusion-3.5-large", "sd3.5_large"),
    "sd": ("sd_v1", "sd_v2", "sd_1.5", "stable-diffusion-v1/lora", "runwayml/stable-diffusion-v1-5"),
    "sdxl": ("sdxl_base_v1-0", "stable-diffusion-xl-v1-base/lora", "sd_xl_base_1.0.safetensors"),
    "hunyuan-video": ("hunyuan_video", "hunyuan-video", "framepack", "tencent/HunyuanVideo-I2V"),
    "hunyuan-video-1.5": ("hunyuan_video_1_5", "x/HunyuanVideo-1.5-Diffusers-480p_t2v"),
    "ltx-video": ("ltxv", "Lightricks/LTX-Video", "ltx-video-2b-v0.9.safetensors"),
    "ltx-2": ("ltx2", "Lightricks/LTX-2", "ltx-2-19b-dev.safetensors"),
    "minimax-h3": ("minimax_h3", "MiniMaxAI/MiniMax-H3"),
    "sensenova-u1": ("sensenova/SenseNova-U1-8B-MoT",),
    "longcat-video": ("meituan-longcat/LongCat-Video",),
    "kandinsky-5": ("kandinsky5", "Kandinsky-5"),
}


@pytest.mark.parametrize(("family", "text"), [(f, text) for f, texts in NAMED.items() for text in texts])
def test_what_trainers_call_a_family(family: str, text: str) -> None:
    assert [found.name for found in families_named(text)] == [family]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("/home/wang/m/FLUX.1-dev/transformer", ["flux.1"]),
        ("C:\\sd3\\flux1-dev.safetensors", ["flux.1"]),
        ("hunyuan-image-2.1", []),
        ("model.safetensors", []),
        ("Swan/foo-v2", []),
        ("", []),
    ],
)
def test_a_path_speaks_by_the_last_part_that_says_something(text: str, names: list[str]) -> None:
    assert [found.name for found in families_named(text)] == names


# In the marker


def test_the_warning_is_in_the_marker(tmp_path: Path) -> None:
    modules = [f"transformer_blocks.{n}.attn.to_q" for n in range(3)]
    stem = [tensor("img_in.weight", 4, 4), tensor("txt_norm.weight", 4), tensor("txt_in.weight", 4, 4)]
    base = write_safetensors(
        tmp_path / "b.safetensors", [*stem, *(tensor(f"{name}.weight", 4, 4) for name in modules)]
    )
    pairs = [tensor(f"{modules[0]}.lora_{part}.weight", 4, 4) for part in "AB"]
    said = {"ss_base_model_version": "flux1"}
    lora = write_safetensors(tmp_path / "x.safetensors", pairs, metadata=said)
    merge(base, [lora], tmp_path / "out")
    (warning,) = json.loads((tmp_path / "out" / FILE_NAME).read_text())["warnings"]
    assert (warning["code"], warning["families"], warning["base"]) == (
        "other_family",
        ["flux.1"],
        "qwen-image",
    )


# Where it does not fit


def refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, base: str, specs: Sequence[Spec], metadata: Any = None
) -> str:
    """The hint; the lists have no data, so what has no home would pass for zeros."""
    monkeypatch.setattr("fuselora.misses.is_zero", lambda adapter, module: False)
    lora = listings.sparse(folder / "x.safetensors", specs, metadata)
    with pytest.raises(Refused) as caught:
        plan(base_of(folder, base), [lora])
    hint = caught.value.hint
    assert hint is not None
    sentences = hint.split(". ")
    assert len(set(sentences)) == len(sentences), hint
    return hint


@pytest.mark.parametrize(
    ("base", "specs", "says"),
    [
        ("qwen-image", FLUX1, ("is for flux.1 (FLUX.1-dev", "or chroma (", "the base is qwen-image")),
        ("flux.1-dev", HUNYUAN, ("is for hunyuan-video (HunyuanVideo", "the base is flux.1")),
        ("flux.1-dev", attention(range(60)), ("is for qwen-image (", "the base is flux.1")),
        ("flux.2-klein-4b", FLUX1, ("is for flux.1 (FLUX.1-dev", "the base is flux.2")),
        ("sdxl-base-unet", unet_pairs("attn2"), ("is for sd (SD-1.4, SD-1.5", "the base is sdxl")),
        ("sd", listings.lora("sdxl.hyper.r64"), ("is for sdxl (SDXL-base-1.0", "the base is sd")),
    ],
)
def test_a_file_for_another_family_is_not_to_be_fused_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: str, specs: list[Spec], says: tuple[str, ...]
) -> None:
    hint = refused(tmp_path, monkeypatch, base, specs)
    assert all(text in hint for text in says), hint
    assert "--allow-unmatched" not in hint


def test_a_text_encoder_s_half_is_not_another_family_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hint = refused(tmp_path, monkeypatch, "sd", unet_pairs("attn2", text_encoder=True))
    assert "For lora_te fuse into a pipeline that has it." in hint and "--allow-unmatched" in hint


def test_what_it_says_is_the_hint_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hint = refused(tmp_path, monkeypatch, "qwen-image", FLUX1, {"ss_base_model_version": "flux1"})
    assert (
        hint == "The LoRA is for flux.1, as its ss_base_model_version says: 'flux1'; the base is qwen-image."
    )


@pytest.mark.parametrize(
    ("lora", "base", "says", "allowed"),
    [
        ("wan2.1-t2v-14b.x2v-distill.r64", "wan2.1-t2v-1.3b", "the base is Wan2.1-T2V-1.3B", False),
        ("wan2.2-ti2v-5b.turbo.r64", "wan2.1-t2v-14b", "is for Wan2.2-TI2V-5B, and the base is", False),
        ("wan2.1-i2v-14b.fusionx.r32", "wan2.1-t2v-14b", "is for Wan2.1-I2V-14B, and the base is", True),
        ("ltx-2-19b.distilled-384", "ltx-video-13b", "is for ltx-2 (LTX-2-19B)", False),
        ("flux.1-dev.kohya.r16", "flux.2-dev", "is for flux.1 (FLUX.1-dev", False),
        ("flux.1-dev.turbo-alpha.r64", "chroma", "is for flux.1 (FLUX.1-dev", False),
        ("sdxl.dmd2.r64", "sd3.5-large", "is for sdxl (SDXL-base-1.0", False),
    ],
)
def test_published_loras_on_other_bases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: str, base: str, says: str, allowed: bool
) -> None:
    hint = refused(tmp_path, monkeypatch, base, listings.lora(lora))
    assert says in hint
    assert ("--allow-unmatched" in hint) == allowed
    assert "another size" not in hint  # which size is said


# In inspect


@pytest.mark.parametrize(
    ("specs", "metadata", "families", "others"),
    [
        (FLUX1, None, ("flux.1", "chroma"), {"chroma", "hunyuan-video"}),
        (FLUX1, {"ss_base_model_version": "flux1"}, ("flux.1",), {"chroma", "hunyuan-video"}),
        (HUNYUAN, None, ("hunyuan-video",), set()),
        (KLEIN_DOUBLE, None, ("flux.2",), {"qwen-image", "flux.1", "chroma", "hunyuan-video"}),
        (
            attention(range(7, 9)),
            None,
            ("qwen-image", "flux.1", "chroma", "hunyuan-video"),
            {"flux.1", "chroma", "hunyuan-video"},
        ),
    ],
)
def test_inspect_names_every_family(
    tmp_path: Path, specs: list[Spec], metadata: Any, families: tuple[str, ...], others: set[str]
) -> None:
    found = describe(listings.sparse(tmp_path / "x.safetensors", specs, metadata))
    assert isinstance(found, LoraDescription)
    assert found.target.families == families and set(found.target.others) == others
    assert found.title.endswith(f"a LoRA for {' or '.join(families)}")
    assert ("family", f"{' or '.join(families)}, diffusers names") in found.rows()
    assert found.document()["families"] == list(families)


@pytest.mark.parametrize(
    ("part", "families"), [("single_transformer_blocks", ("flux.1", "hunyuan-video")), ("", ("flux.1",))]
)
def test_a_part_of_a_base_is_of_every_family_that_has_its_names(
    tmp_path: Path, part: str, families: tuple[str, ...]
) -> None:
    specs = [spec for spec in base_specs("flux.1-dev") if spec.name.startswith(part)]
    found = describe(listings.sparse(tmp_path / "x.safetensors", specs))
    assert isinstance(found, CheckpointDescription)
    assert set(found.families) >= set(families) and (len(found.families) == 1) == (len(families) == 1)
    assert found.rows()[0] == ("family", f"{' or '.join(found.families)}, diffusers names")
    assert found.document()["families"] == list(found.families)


def test_the_half_of_a_text_encoder_does_not_hide_the_family(tmp_path: Path) -> None:
    """A few layers of the UNet beside many of two encoders."""
    unet = "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q"
    layers = [f"lora_te{n}_text_model_encoder_layers_{i}_mlp_fc1" for n in (1, 2) for i in range(12)]
    specs = [spec for module in (unet, *layers) for spec in pair(module)]
    found = describe(write_safetensors(tmp_path / "x.safetensors", specs))
    assert isinstance(found, LoraDescription)
    assert set(found.target.families) == {"sd", "sdxl"}
