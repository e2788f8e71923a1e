"""Public reports about strength: alpha lost, doubled, guessed or unreadable, and what divides it."""
# ruff: noqa: N802 - cases keep their names

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from fuselora.verify import verify
from tests.adapters import SAMPLES, Sample, say_content
from tests.cases.builders import (
    MODULE,
    NATIVE_MODULE,
    NATIVE_Q,
    PEFT,
    PLAIN,
    K,
    Q,
    assert_filled,
    base_of,
    command,
    full,
    fuse,
    merge,
    refuse,
    same_bytes,
    save,
    save_json,
    std_base,
    std_pair,
    std_tensors,
    tree,
)

# B10


@pytest.mark.parametrize("style", [PLAIN, PEFT])
@pytest.mark.parametrize("prefix", ["", "diffusion_model.", "base_model.model.transformer."])
def test_B10_alpha_of_each_layer_counts_once(style: tuple[str, str], prefix: str, tmp_path: Path) -> None:
    lora = save(tmp_path / "x.safetensors", std_pair(64, prefix + MODULE, alpha=8.0, style=style))
    fused = fuse(std_base(tmp_path / "base"), lora)
    assert_filled(fused.tensors()[Q], 1.125)
    (scale,) = fused.lora["scales"]
    assert (scale["scale"], scale["alpha"], scale["rank"]) == (0.125, 8.0, 64)


def test_B10_layers_of_one_file_have_their_own_alpha_and_rank(tmp_path: Path) -> None:
    to_v, to_k = "blocks.0.attn1.to_v", K.removesuffix(".weight")
    base = base_of(tmp_path / "base", {**std_tensors(), f"{to_v}.weight": full(4, 4)})
    lora = {**std_pair(64, alpha=8.0), **std_pair(4, to_k, alpha=2.0), **std_pair(2, to_v)}
    found = fuse(base, save(tmp_path / "x.safetensors", lora)).tensors()
    assert_filled(found[Q], 1.125)
    assert_filled(found[K], 2.5)
    assert_filled(found[f"{to_v}.weight"], 2.0)


# B11


@pytest.mark.parametrize("style", [PLAIN, PEFT])
@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}, {"ss_network_alpha": "None"}])
def test_B11_no_alpha_means_the_rank(
    style: tuple[str, str], metadata: dict[str, str] | None, tmp_path: Path
) -> None:
    lora = save(tmp_path / "x.safetensors", std_pair(16, style=style), metadata)
    fused = fuse(std_base(tmp_path / "base"), lora)
    assert_filled(fused.tensors()[Q], 2.0)
    assert fused.lora["alpha"] == {"source": "rank", "values": [16]}
    assert "none stored: rank used" in fused.run.stdout


# B12


METADATA = [
    {"alpha": "8"},
    {"alpha": "8.0"},
    {"lora_alpha": "8"},
    {"ss_network_alpha": "8"},
    {"transformer.lora_alpha": "8"},
    {"lora_adapter_metadata": '{"transformer.lora_alpha": 8, "transformer.r": 128}'},
    {"lora_adapter_metadata": '{"lora_alpha": 8}'},
]


@pytest.mark.parametrize("metadata", METADATA)
@pytest.mark.parametrize("style", [PLAIN, PEFT])
def test_B12_alpha_in_the_metadata(metadata: dict[str, str], style: tuple[str, str], tmp_path: Path) -> None:
    fused = fuse(
        std_base(tmp_path / "base"), save(tmp_path / "x.safetensors", std_pair(128, style=style), metadata)
    )
    assert_filled(fused.tensors()[Q], 1.0625)
    assert fused.lora["alpha"] == {"source": "metadata", "values": [8.0]}


@pytest.mark.parametrize("metadata", METADATA)
def test_B12_a_tensor_beats_metadata_that_disagrees(metadata: dict[str, str], tmp_path: Path) -> None:
    lora = save(tmp_path / "x.safetensors", std_pair(128, alpha=128.0), metadata)
    fused = fuse(std_base(tmp_path / "base"), lora)
    assert_filled(fused.tensors()[Q], 2.0)
    message = fused.warning("metadata_disagrees")["message"]
    assert "x.safetensors" in message and "8" in message and "128" in message


def test_B12_a_tensor_that_agrees_needs_no_warning(tmp_path: Path) -> None:
    lora = save(tmp_path / "x.safetensors", std_pair(128, alpha=8.0), {"alpha": "8"})
    fused = fuse(std_base(tmp_path / "base"), lora)
    assert_filled(fused.tensors()[Q], 1.0625)
    assert fused.warnings == []


@pytest.mark.parametrize("value", ["abc", "", "8,5", "0x8", "8 8", "[8]", "true", "None?"])
def test_B12_metadata_that_is_no_number(value: str, tmp_path: Path) -> None:
    lora = save(tmp_path / "x.safetensors", std_pair(128), {"alpha": value})
    refuse(std_base(tmp_path / "base"), lora, says=("x.safetensors", "metadata", "alpha", repr(value)))


@pytest.mark.parametrize(
    ("nested", "says"),
    [
        ("{", "lora_adapter_metadata"),
        ("[]", "lora_adapter_metadata"),
        ("null", "lora_adapter_metadata"),
        ('{"lora_alpha": "abc"}', "alpha 'abc' is not a number"),
        ('{"transformer.lora_alpha": [8]}', "alpha [8] is not a number"),
        ('{"lora_alpha": {}}', "alpha {} is not a number"),
        ('{"lora_alpha": NaN}', "not a finite number"),
    ],
)
def test_B12_a_nested_config_that_is_no_config(nested: str, says: str, tmp_path: Path) -> None:
    lora = save(tmp_path / "x.safetensors", std_pair(128), {"lora_adapter_metadata": nested})
    refuse(std_base(tmp_path / "base"), lora, says=("x.safetensors", says))


@pytest.mark.parametrize("metadata", [None, *METADATA, {"alpha": "abc"}])
@pytest.mark.parametrize("option", ["128", "x.safetensors=128"])
def test_B12_the_user_overrides_the_metadata(
    metadata: dict[str, str] | None, option: str, tmp_path: Path
) -> None:
    lora = save(tmp_path / "x.safetensors", std_pair(128), metadata)
    fused = fuse(std_base(tmp_path / "base"), lora, options=["--alpha", option])
    assert_filled(fused.tensors()[Q], 2.0)
    assert fused.lora["alpha"] == {"source": "option", "values": [128.0]}


def test_B12_the_user_overrides_an_adapter_config(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    save(folder / "adapter_model.safetensors", std_pair(128, f"base_model.model.{MODULE}", style=PEFT))
    save_json(folder / "adapter_config.json", {"peft_type": "LORA", "r": 128, "lora_alpha": 8})
    base = std_base(tmp_path / "base")
    assert_filled(fuse(base, folder, out=tmp_path / "config").tensors()[Q], 1.0625)
    overridden = fuse(base, folder, out=tmp_path / "option", options=["--alpha", "128"])
    assert_filled(overridden.tensors()[Q], 2.0)


def test_B12_an_override_for_one_of_two_files(tmp_path: Path) -> None:
    first = save(tmp_path / "a.safetensors", std_pair(16), {"alpha": "8"})
    second = save(tmp_path / "b.safetensors", std_pair(16, value=2.0), {"alpha": "8"})
    fused = fuse(std_base(tmp_path / "base"), first, second, options=["--alpha", "b.safetensors=4"])
    assert_filled(fused.tensors()[Q], 1 + 0.5 + 0.5)


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("4", "applies to no module"),
        ("x.safetensors=4", "applies to no module"),
        ("other.safetensors=4", "no such LoRA was given"),
    ],
)
def test_B12_an_override_that_applies_to_nothing_is_refused(option: str, why: str, tmp_path: Path) -> None:
    lora = save(tmp_path / "x.safetensors", std_pair(16, alpha=8.0))
    refuse(std_base(tmp_path / "base"), lora, says=("--alpha", why), options=["--alpha", option])


@pytest.mark.parametrize(
    ("args", "conv", "point"),
    [
        ({"conv_dim": "4", "conv_alpha": "1"}, 0.25, 2.0),
        ({"conv_dim": "4"}, 0.25, 2.0),
        ({"conv_dim": "None"}, 2.0, 2.0),
        ({}, 2.0, 2.0),
    ],
)
def test_B12_convolutions_have_an_alpha_of_their_own(
    args: dict[str, str], conv: float, point: float, tmp_path: Path
) -> None:
    """kohya's network_alpha is for linear layers and for convolutions of one place."""
    shapes = {"conv": (4, 4, 3, 3), "point": (4, 4, 1, 1), "linear": (4, 4)}
    tensors: dict[str, torch.Tensor] = {}
    for name, (_, _, *kernel) in shapes.items():
        tensors[f"{name}.lora_down.weight"] = full(4, 4, *kernel)
        tensors[f"{name}.lora_up.weight"] = full(4, 4, *[1] * len(kernel), value=0.25)
    base = base_of(tmp_path / "base", {f"{name}.weight": torch.zeros(s) for name, s in shapes.items()})
    metadata = {"ss_network_module": "networks.lora", "ss_network_alpha": "8.0"}
    lora = save(tmp_path / "x.safetensors", tensors, {**metadata, "ss_network_args": json.dumps(args)})
    fused = fuse(base, lora)
    for name, value in (("conv", conv), ("point", point), ("linear", 2.0)):
        assert_filled(fused.tensors()[f"{name}.weight"], value)
    assert verify(fused.out, base=base, loras=[lora]).findings == ()


# B13


FORMS = [
    ("f32 []", torch.tensor(8.0)),
    ("f32 [1]", torch.tensor([8.0])),
    ("bf16 []", torch.tensor(8.0, dtype=torch.bfloat16)),
    ("f16 [1]", torch.tensor([8.0], dtype=torch.float16)),
    ("int64 []", torch.tensor(8)),
    ("f32 [1,1]", torch.tensor([[8.0]])),
    ("f64 []", torch.tensor(8.0, dtype=torch.float64)),
    ("f64 [1]", torch.tensor([8.0], dtype=torch.float64)),
    ("uint8 []", torch.tensor(8, dtype=torch.uint8)),
    ("int8 [1]", torch.tensor([8], dtype=torch.int8)),
    ("int16 []", torch.tensor(8, dtype=torch.int16)),
    ("int32 [1,1,1]", torch.tensor([[[8]]], dtype=torch.int32)),
    ("uint16 []", torch.tensor(8, dtype=torch.uint16)),
    ("uint32 []", torch.tensor(8, dtype=torch.uint32)),
    ("uint64 []", torch.tensor(8, dtype=torch.uint64)),
    ("f8 e4m3 []", torch.tensor(8.0).to(torch.float8_e4m3fn)),
    ("f8 e5m2 [1]", torch.tensor([8.0]).to(torch.float8_e5m2)),
]


@pytest.mark.parametrize(("form", "alpha"), FORMS, ids=[form for form, _ in FORMS])
def test_B13_one_alpha_in_many_forms(form: str, alpha: torch.Tensor, tmp_path: Path) -> None:
    fused = fuse(std_base(tmp_path / "base"), save(tmp_path / "x.safetensors", std_pair(16, alpha=alpha)))
    assert_filled(fused.tensors()[Q], 1.5)
    assert fused.lora["alpha"] == {"source": "tensor", "values": [8.0]}


@pytest.mark.parametrize("alpha", [-8.0, 0.5, 2.0**-10])
def test_B13_an_alpha_need_not_be_a_whole_number(alpha: float, tmp_path: Path) -> None:
    fused = fuse(std_base(tmp_path / "base"), save(tmp_path / "x.safetensors", std_pair(16, alpha=alpha)))
    assert_filled(fused.tensors()[Q], 1 + alpha / 16)


@pytest.mark.parametrize(
    "alpha",
    [
        torch.tensor([8.0, 8.0]),
        torch.tensor([[8.0], [8.0]]),
        torch.tensor([8, 8]),
        torch.zeros(0),
        torch.tensor([True, False]),
    ],
    ids=["[2]", "[2,1]", "int [2]", "[0]", "bool [2]"],
)
def test_B13_an_alpha_that_is_not_one_number(alpha: torch.Tensor, tmp_path: Path) -> None:
    lora = save(tmp_path / "x.safetensors", std_pair(16, alpha=alpha))
    refuse(
        std_base(tmp_path / "base"),
        lora,
        says=("x.safetensors", f"{MODULE}.alpha", "alpha is not one number"),
    )


def test_B13_a_truth_value_is_no_number(tmp_path: Path) -> None:
    lora = save(tmp_path / "x.safetensors", std_pair(16, alpha=torch.tensor(True)))
    refuse(std_base(tmp_path / "base"), lora, says=("x.safetensors", f"{MODULE}.alpha", "BOOL"))


def test_B13_an_alpha_of_0_is_0(tmp_path: Path) -> None:
    base = std_base(tmp_path / "base")
    lora = save(tmp_path / "x.safetensors", std_pair(16, alpha=0.0))
    fused = fuse(base, lora)
    assert command("check", fused.out, "--lora", lora).exit_code == 0  # nothing would be added twice
    assert same_bytes(fused.tensors()[Q], full(4, 4))
    assert fused.lora["alpha"] == {"source": "tensor", "values": [0.0]}
    assert verify(fused.out, base=base, loras=[tmp_path / "x.safetensors"]).findings == ()


# LongCat-Video's alpha_scale, which lora-hyphen files have in place of an alpha


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("strength", "value"), [("", 1.5), (":-2", 0.0), (":0", 1.0)])
def test_B13_a_finished_factor_is_not_divided(
    strength: str, value: float, dtype: torch.dtype, tmp_path: Path
) -> None:
    lora = {**std_pair(16), f"{MODULE}.alpha_scale": torch.tensor(0.5, dtype=dtype)}
    path, base = save(tmp_path / "x.safetensors", lora), std_base(tmp_path / "base")
    fused = fuse(base, f"{path}{strength}")
    assert_filled(fused.tensors()[Q], value)
    assert fused.lora["alpha"] == {"source": "alpha_scale", "values": [0.5]}
    assert verify(fused.out, base=base, loras=[path]).findings == ()


def test_B13_a_finished_factor_of_a_split_pair(tmp_path: Path) -> None:
    name = "lora___lorahyphen___blocks___lorahyphen___0___lorahyphen___attn___lorahyphen___qkv"
    lora = {
        f"{name}.lora_down.weight": full(4, 4),
        f"{name}.lora_up.blocks.0.weight": full(4, 2),
        f"{name}.lora_up.blocks.1.weight": full(4, 2, value=2.0),
        f"{name}.alpha_scale": torch.tensor(0.5),
    }
    qkv = "blocks.0.attn.qkv.weight"
    base = base_of(tmp_path / "base", {**std_tensors(), qkv: torch.zeros(8, 4)})
    path = save(tmp_path / "x.safetensors", lora)
    fused = fuse(base, path)
    assert_filled(fused.tensors()[qkv][:4], 1.0)
    assert_filled(fused.tensors()[qkv][4:], 2.0)
    assert verify(fused.out, base=base, loras=[path]).findings == ()


def test_B13_verify_sees_a_finished_factor_that_the_marker_has_not(tmp_path: Path) -> None:
    base, plain = std_base(tmp_path / "base"), std_pair(16, alpha=8.0)
    out = fuse(base, save(tmp_path / "x.safetensors", plain)).out
    factor = {**std_pair(16), f"{MODULE}.alpha_scale": torch.tensor(0.25)}
    path = save(tmp_path / "y.safetensors", factor)
    say_content(out, path)
    found = verify(out, base=base, loras=[path]).findings
    assert any("its alpha_scale is 0.25" in finding.message for finding in found)


@pytest.mark.parametrize("strength", ["", ":0"])
def test_B13_an_alpha_and_a_finished_factor_are_refused(strength: str, tmp_path: Path) -> None:
    lora = {**std_pair(16, alpha=8.0), f"{MODULE}.alpha_scale": torch.tensor(0.5)}
    path = save(tmp_path / "x.safetensors", lora)
    says = ("x.safetensors", f"{MODULE}.alpha and {MODULE}.alpha_scale")
    refuse(std_base(tmp_path / "base"), f"{path}{strength}", says=says)


# B14


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_B14_an_alpha_that_is_not_finite(value: float, dtype: torch.dtype, tmp_path: Path) -> None:
    lora = save(tmp_path / "x.safetensors", std_pair(4, alpha=torch.tensor(value, dtype=dtype)))
    refuse(
        std_base(tmp_path / "base"), lora, says=("x.safetensors", f"{MODULE}.alpha", "not a finite number")
    )


@pytest.mark.parametrize("key", ["alpha", "lora_alpha", "ss_network_alpha", "transformer.lora_alpha"])
@pytest.mark.parametrize("text", ["nan", "NaN", "inf", "-Infinity", "1e999"])
def test_B14_metadata_that_is_not_finite(key: str, text: str, tmp_path: Path) -> None:
    lora = save(tmp_path / "x.safetensors", std_pair(4), {key: text})
    refuse(
        std_base(tmp_path / "base"), lora, says=("x.safetensors", "metadata", "alpha", "not a finite number")
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("part", PLAIN)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_B14_a_factor_that_is_not_finite(value: float, part: str, dtype: torch.dtype, tmp_path: Path) -> None:
    lora = std_pair(4, dtype=dtype)
    lora[f"{MODULE}.{part}"][-1, -1] = value
    path = save(tmp_path / "x.safetensors", lora)
    for options in ([], ["--no-digest"]):
        refuse(
            std_base(tmp_path / "base"),
            path,
            says=("x.safetensors", f"{MODULE}.{part}", "NaN or infinity"),
            options=options,
        )


@pytest.mark.parametrize(
    ("module", "part", "shape"),
    [(MODULE, "diff", (4, 4)), (MODULE, "diff_b", (4,)), ("blocks.0", "diff_m", (1, 6, 4))],
)
def test_B14_a_difference_that_is_not_finite(
    module: str, part: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    base = base_of(
        tmp_path / "base",
        {**std_tensors(), f"{MODULE}.bias": full(4), "blocks.0.scale_shift_table": full(1, 6, 4)},
    )
    lora = save(tmp_path / "x.safetensors", {f"{module}.{part}": full(*shape, value=math.nan)})
    refuse(base, lora, says=("x.safetensors", f"{module}.{part}", "NaN or infinity"))


def test_B14_a_skipped_module_that_is_not_finite_is_still_a_broken_file(tmp_path: Path) -> None:
    skipped = std_pair(4, "text_encoder.x", value=math.nan)
    lora = save(tmp_path / "x.safetensors", {**std_pair(4), **skipped})
    refuse(
        std_base(tmp_path / "base"),
        lora,
        says=("x.safetensors", "text_encoder.x.lora_up.weight", "NaN or infinity"),
        options=["--allow-unmatched", "text_encoder.*"],
    )


# B15


def adapter(folder: Path, modules: Mapping[str, int], **settings: object) -> Path:
    """Standard pairs of these ranks as a PEFT adapter folder, with zeros as their base beside it."""
    tensors: dict[str, torch.Tensor] = {}
    for module, rank in modules.items():
        tensors |= std_pair(rank, f"base_model.model.{module}", style=PEFT)
    save(folder / "adapter_model.safetensors", tensors)
    save_json(folder / "adapter_config.json", {"peft_type": "LORA", **settings})
    base_of(folder.parent / "base", {f"{module}.weight": full(4, 4, value=0.0) for module in modules})
    return folder


L3, L7 = "layers.3.proj", "layers.7.proj"


@pytest.mark.parametrize("key", [L3, r".*layers\.3\..*", r"layers\.3\.\w+", "3.proj"])
def test_B15_patterns_of_rank_and_alpha_count(key: str, tmp_path: Path) -> None:
    patterns = {"rank_pattern": {key: 32}, "alpha_pattern": {key: 128}}
    lora = adapter(tmp_path / "lora", {L3: 32, L7: 8}, r=8, lora_alpha=16, **patterns)
    fused = fuse(tmp_path / "base", lora)
    assert_filled(fused.tensors()[f"{L3}.weight"], 4.0)
    assert_filled(fused.tensors()[f"{L7}.weight"], 2.0)
    assert fused.lora["alpha"] == {"source": "adapter_config", "values": [16.0, 128.0]}
    assert verify(fused.out, base=tmp_path / "base", loras=[lora]).findings == ()


def test_B15_a_whole_name_of_one_part(tmp_path: Path) -> None:
    patterns = {"rank_pattern": {"l3": 32}, "alpha_pattern": {"l3": 128}}
    lora = adapter(tmp_path / "lora", {"l3": 32, "l7": 8}, r=8, lora_alpha=16, **patterns)
    found = fuse(tmp_path / "base", lora).tensors()
    assert_filled(found["l3.weight"], 4.0)
    assert_filled(found["l7.weight"], 2.0)


@pytest.mark.parametrize("pattern", [{}, {"l7": 32}, {"l": 32}, {"l3": 16}])
def test_B15_a_rank_that_the_configuration_does_not_say_is_refused(
    pattern: dict[str, int], tmp_path: Path
) -> None:
    lora = adapter(tmp_path / "lora", {"l3": 32, "l7": 8}, r=8, lora_alpha=16, rank_pattern=pattern)
    refuse(tmp_path / "base", lora, says=("adapter_config.json", "l3", "its factors have 32"))


# B16


@pytest.mark.parametrize(("use_rslora", "value"), [(True, 2.0), (False, 0.5)])
@pytest.mark.parametrize("in_header", [False, True])
def test_B16_rank_stabilised_loras_divide_by_the_root(
    use_rslora: bool, value: float, in_header: bool, tmp_path: Path
) -> None:
    settings: dict[str, object] = {"r": 16, "lora_alpha": 8, "use_rslora": use_rslora}
    lora = adapter(tmp_path / "lora", {"q": 16}, **settings)
    if in_header:
        text = json.dumps({f"transformer.{key}": setting for key, setting in settings.items()})
        lora = save(
            tmp_path / "x.safetensors",
            std_pair(16, "transformer.q", style=PEFT),
            {"lora_adapter_metadata": text},
        )
    fused = fuse(tmp_path / "base", lora)
    assert_filled(fused.tensors()["q.weight"], value)
    (scale,) = fused.lora["scales"]
    assert (scale["scale"], scale["alpha"], scale["rank"]) == (value, 8.0, 16)
    assert verify(fused.out, base=tmp_path / "base", loras=[lora]).findings == ()


def test_B16_a_root_that_is_no_whole_number(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", {"q.weight": torch.zeros(2, 2)})
    tensors = {f"base_model.model.q.lora_{half}.weight": torch.eye(2) for half in "AB"}
    save(tmp_path / "lora" / "adapter_model.safetensors", tensors)
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "use_rslora": True}
    save_json(tmp_path / "lora" / "adapter_config.json", settings)
    found = fuse(base, tmp_path / "lora").tensors()["q.weight"]
    assert torch.equal(found, torch.eye(2) * torch.tensor(8 / math.sqrt(2), dtype=torch.float32))
    assert found[0, 0].item() == pytest.approx(5.656854, abs=1e-6)


# B33


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora", "loftq", "corda", "lora_ga"])
@pytest.mark.parametrize("in_header", [False, True])
def test_B33_an_adapter_of_a_changed_base_is_refused(init: str, in_header: bool, tmp_path: Path) -> None:
    lora = adapter(tmp_path / "lora", {"q": 4}, r=4, lora_alpha=4, init_lora_weights=init)
    if in_header:
        text = json.dumps({"transformer.lora_alpha": 4, "transformer.init_lora_weights": init})
        lora = save(tmp_path / "x.safetensors", std_pair(4, "q"), {"lora_adapter_metadata": text})
    refuse(tmp_path / "base", lora, says=("trained against a base changed by", repr(init), "PEFT"))


@pytest.mark.parametrize("init", [True, False, "gaussian", "eva", "orthogonal", "mica"])
def test_B33_a_start_from_zero_is_not(init: object, tmp_path: Path) -> None:
    lora = adapter(tmp_path / "lora", {"q": 4}, r=4, lora_alpha=4, init_lora_weights=init)
    assert_filled(fuse(tmp_path / "base", lora).tensors()["q.weight"], 1.0)


# B17


@pytest.mark.parametrize(
    ("strength", "value"),
    [("0.5", 1.25), ("-1", 0.5), ("2", 2.0), ("1", 1.5), ("+1", 1.5), ("5e-1", 1.25), (".5", 1.25)],
)
@pytest.mark.parametrize("style", [PLAIN, PEFT])
def test_B17_strength_and_alpha(strength: str, value: float, style: tuple[str, str], tmp_path: Path) -> None:
    lora = save(tmp_path / "x.safetensors", std_pair(4, alpha=2.0, style=style))
    fused = fuse(std_base(tmp_path / "base"), f"{lora}:{strength}")
    assert_filled(fused.tensors()[Q], value)
    assert fused.lora["strength"] == float(strength)


@pytest.mark.parametrize("zero", ["0", "-0", "0.0", "0e5"])
def test_B17_strength_zero_is_the_base(zero: str, tmp_path: Path) -> None:
    tensors = {Q: torch.randn(4, 4), K: full(4, 4, value=2.0)}
    tensors[Q][0, 0] = -0.0
    lora = save(tmp_path / "x.safetensors", std_pair(4, alpha=2.0))
    fused = fuse(base_of(tmp_path / "base", tensors), f"{lora}:{zero}")
    found = fused.tensors()
    assert all(same_bytes(found[name], tensor) for name, tensor in tensors.items())
    assert fused.lora["strength"] == 0.0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{a}:0.5,0.7", "0.7"),
        ("{a}:0.5:0.7", "a.safetensors:0.5"),
        ("{a},{b}:0.5,0.7", "0.7"),
        ("{a}:", "a.safetensors:"),
        ("{a}:half", "a.safetensors:half"),
        ("{a}:0.5,", "item without a file"),
    ],
)
def test_B17_more_strengths_than_loras(text: str, says: str, tmp_path: Path) -> None:
    first = save(tmp_path / "a.safetensors", std_pair(4, alpha=2.0))
    second = save(tmp_path / "b.safetensors", std_pair(4, alpha=2.0, value=2.0))
    refuse(std_base(tmp_path / "base"), text.format(a=first, b=second), says=(says,))


@pytest.mark.parametrize("strength", ["nan", "inf", "-inf", "1e999"])
def test_B17_a_strength_that_is_not_finite(strength: str, tmp_path: Path) -> None:
    lora = save(tmp_path / "a.safetensors", std_pair(4, alpha=2.0))
    refuse(std_base(tmp_path / "base"), f"{lora}:{strength}", says=("a.safetensors", strength, "finite"))


def test_B17_each_lora_has_its_own_strength(tmp_path: Path) -> None:
    first = save(tmp_path / "a.safetensors", std_pair(4, alpha=2.0))
    second = save(tmp_path / "b.safetensors", std_pair(4, alpha=2.0, value=2.0))
    fused = fuse(std_base(tmp_path / "base"), f"{first}:0.5", f"{second}:-1")
    assert_filled(fused.tensors()[Q], 1 + 0.25 - 1.0)


@pytest.mark.parametrize("sample", SAMPLES, ids=[sample.name for sample in SAMPLES])
def test_B17_every_kind_goes_as_far_as_it_is_told(sample: Sample, tmp_path: Path) -> None:
    """Strength 0 leaves every byte; -1 and 2 go once back and twice on, of what 1 does."""
    lora = sample.write(tmp_path / "lora", sample.tensors())
    before = sample.bases(torch.float32)
    base = base_of(tmp_path / "base", before)
    found = {
        strength: fuse(base, f"{lora}:{strength}", out=tmp_path / f"at{strength}").tensors()
        for strength in (0, 1, -1, 2)
    }
    for key in sample.targets:
        assert same_bytes(found[0][key], before[key])
        step = found[1][key].double() - before[key].double()
        assert step.any()
        for strength in (-1, 2):
            moved = found[strength][key].double() - before[key].double()
            torch.testing.assert_close(moved, strength * step, rtol=1e-4, atol=1e-4 * float(step.abs().max()))


# B18


@pytest.mark.parametrize("native", [False, True])
def test_B18_a_glued_qkv_lora_follows_the_file_and_shows_its_scale(native: bool, tmp_path: Path) -> None:
    qkv = "blocks.0.attn.qkv"
    base = base_of(tmp_path / "base", {**std_tensors(native=native), f"{qkv}.weight": torch.zeros(12, 4)})
    up = torch.eye(3).repeat_interleave(4, 0).repeat_interleave(4, 1) / 4
    lora = {
        f"{qkv}.lora_down.weight": full(12, 4),
        f"{qkv}.lora_up.weight": up,
        f"{qkv}.alpha": full(1, value=4.0),
    }
    fused = fuse(base, save(tmp_path / "x.safetensors", lora))
    assert_filled(fused.tensors()[f"{qkv}.weight"], float(torch.tensor(1 / 3, dtype=torch.float32)))
    (scale,) = fused.lora["scales"]
    assert scale["scale"] == pytest.approx(1 / 3, abs=1e-12)
    assert (scale["alpha"], scale["rank"], scale["modules"]) == (4.0, 12, [qkv])
    assert "scale 0.333333" in fused.run.stdout
    assert_filled(fused.tensors()[NATIVE_Q if native else Q], 1.0)


def test_B18_the_rank_is_what_the_file_holds(tmp_path: Path) -> None:
    """A file's word about its rank changes nothing: alpha is divided by the rows of the down factor."""
    lora = save(
        tmp_path / "x.safetensors",
        std_pair(16, NATIVE_MODULE, alpha=8.0),
        {"ss_network_dim": "4", "rank": "4", "transformer.r": "4"},
    )
    base = base_of(tmp_path / "base", std_tensors(native=True))
    before = tree(base)
    assert merge(base, [lora], tmp_path / "out").exit_code == 0
    assert tree(base) == before
    assert_filled(fuse(base, lora, out=tmp_path / "again").tensors()[NATIVE_Q], 1.5)
