"""Public reports about strength: alpha lost, doubled, guessed or unreadable, and what divides it."""
# ruff: noqa: N802 - cases keep their names

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

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


@pytest.mark.parametrize("option", ["4", "x.safetensors=4", "other.safetensors=4"])
def test_B12_an_override_that_applies_to_nothing_is_refused(option: str, tmp_path: Path) -> None:
    lora = save(tmp_path / "x.safetensors", std_pair(16, alpha=8.0))
    refuse(
        std_base(tmp_path / "base"),
        lora,
        says=("--alpha", "applies to no module"),
        options=["--alpha", option],
    )


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
