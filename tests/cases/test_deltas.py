"""Public reports about deltas: biases, norms and modulations left out, layers that are not linear."""
# ruff: noqa: N802 - cases keep their names

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tests.cases.builders import (
    MODULE,
    NATIVE_MODULE,
    NATIVE_Q,
    Q,
    assert_filled,
    base_of,
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

CROSS = "blocks.0.cross_attn"

# B20


MODULATIONS = [("native", "blocks.0.modulation"), ("diffusers", "blocks.0.scale_shift_table")]


@pytest.mark.parametrize(("layout", "key"), MODULATIONS)
@pytest.mark.parametrize("prefix", ["", "diffusion_model.", "model.diffusion_model.", "transformer."])
@pytest.mark.parametrize(("strength", "value"), [("1", 1.5), ("2", 2.0), ("-2", 0.0)])
def test_B20_modulations_are_added(
    strength: str, value: float, prefix: str, layout: str, key: str, tmp_path: Path
) -> None:
    base = base_of(tmp_path / "base", {key: full(1, 6, 4)})
    lora = save(tmp_path / "x.safetensors", {f"{prefix}blocks.0.diff_m": full(1, 6, 4, value=0.5)})
    fused = fuse(base, f"{lora}:{strength}")
    assert same_bytes(fused.tensors()[key], full(1, 6, 4, value=value))
    assert fused.lora["applied"]["diff_m"] == 1


@pytest.mark.parametrize(("layout", "key"), MODULATIONS)
def test_B20_alpha_and_rank_are_for_pairs(layout: str, key: str, tmp_path: Path) -> None:
    native = layout == "native"
    base = base_of(tmp_path / "base", {**std_tensors(native=native), key: full(1, 6, 4)})
    lora = {
        **std_pair(64, f"diffusion_model.{NATIVE_MODULE}", alpha=8.0),
        "diffusion_model.blocks.0.diff_m": full(1, 6, 4, value=0.5),
        "diffusion_model.blocks.0.alpha": torch.tensor(8.0),
    }
    path = save(tmp_path / "x.safetensors", lora, {"alpha": "8"})
    found = fuse(base, f"{path}:2").tensors()
    assert_filled(found[key], 2.0)
    assert_filled(found[NATIVE_Q if native else Q], 1.25)


@pytest.mark.parametrize(
    ("native", "key"), [(True, "head.modulation"), (False, "scale_shift_table")], ids=["native", "diffusers"]
)
def test_B20_the_modulation_of_the_head(native: bool, key: str, tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", {**std_tensors(native=native), key: full(1, 2, 4)})
    lora = save(tmp_path / "x.safetensors", {"diffusion_model.head.diff_m": full(1, 2, 4, value=0.5)})
    assert_filled(fuse(base, f"{lora}:2").tensors()[key], 2.0)


@pytest.mark.parametrize(("layout", "key"), MODULATIONS)
@pytest.mark.parametrize("shape", [(6, 4), (1, 6, 3), (1, 1, 4), (1, 6, 1), (1,)])
def test_B20_a_modulation_of_another_shape(
    shape: tuple[int, ...], layout: str, key: str, tmp_path: Path
) -> None:
    base = base_of(tmp_path / "base", {key: full(1, 6, 4)})
    lora = save(tmp_path / "x.safetensors", {"diffusion_model.blocks.0.diff_m": full(*shape)})
    refuse(base, lora, says=("x.safetensors", key, str(list(shape)), "[1, 6, 4]"))


def test_B20_a_modulation_with_no_home(tmp_path: Path) -> None:
    lora = {**std_pair(4, MODULE), "diffusion_model.blocks.0.diff_m": full(1, 6, 4)}
    path = save(tmp_path / "x.safetensors", lora)
    refuse(std_base(tmp_path / "base"), path, says=("x.safetensors", "blocks.0", "no home"))


# B21


def cross_base(root: Path, *, native: bool = True) -> Path:
    """Cross attention's norm of 1.0, bias of 0 and weight of 1.0."""
    norm, q = cross_names(native)
    tensors = {f"{norm}.weight": full(4), f"{q}.bias": torch.zeros(4), f"{q}.weight": full(4, 4)}
    return base_of(root, tensors)


def cross_names(native: bool) -> tuple[str, str]:
    if native:
        return f"{CROSS}.norm_k", f"{CROSS}.q"
    return "blocks.0.attn2.norm_k", "blocks.0.attn2.to_q"


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("prefix", ["", "diffusion_model.", "lora_unet_"])
def test_B21_differences_are_added(prefix: str, native: bool, tmp_path: Path) -> None:
    flat = prefix.startswith("lora_")
    norm, q = (prefix + (name.replace(".", "_") if flat else name) for name in cross_names(native=True))
    lora = {
        f"{norm}.diff": full(4, value=0.25),
        f"{q}.diff_b": full(4, value=0.5),
        **std_pair(4, q, alpha=2.0),
    }
    base = cross_base(tmp_path / "base", native=native)
    fused = fuse(base, f"{save(tmp_path / 'x.safetensors', lora)}:2")
    norm, q = cross_names(native)
    found = fused.tensors()
    assert_filled(found[f"{norm}.weight"], 1.5)
    assert_filled(found[f"{q}.bias"], 1.0)
    assert_filled(found[f"{q}.weight"], 2.0)
    assert fused.lora["applied"] == {"pairs": 1, "diff": 1, "diff_b": 1, "diff_m": 0, "replace": 0}


@pytest.mark.parametrize("shape", [(4, 4), (1, 6, 4), (4, 3, 1, 2, 2)])
def test_B21_a_whole_difference_of_any_shape(shape: tuple[int, ...], tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", {**std_tensors(native=True), "patch_embedding.weight": full(*shape)})
    lora = save(tmp_path / "x.safetensors", {"diffusion_model.patch_embedding.diff": full(*shape, value=0.5)})
    assert_filled(fuse(base, f"{lora}:2").tensors()["patch_embedding.weight"], 2.0)


def test_B21_a_pair_and_a_difference_on_one_weight_add_up(tmp_path: Path) -> None:
    lora = {**std_pair(4, alpha=2.0), f"{MODULE}.diff": full(4, 4, value=0.25)}
    fused = fuse(std_base(tmp_path / "base"), f"{save(tmp_path / 'x.safetensors', lora)}:2")
    assert_filled(fused.tensors()[Q], 1 + 2 * 0.5 + 2 * 0.25)


@pytest.mark.parametrize("shape", [(3,), (1,), (4, 1), (1, 4), (4, 4), ()])
@pytest.mark.parametrize("part", ["norm_k.diff", "q.diff_b"])
def test_B21_a_difference_of_another_shape(part: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    lora = save(tmp_path / "x.safetensors", {f"{CROSS}.{part}": full(*shape)})
    key = f"{CROSS}.{'norm_k.weight' if 'norm' in part else 'q.bias'}"
    refuse(cross_base(tmp_path / "base"), lora, says=("x.safetensors", key, str(list(shape)), "[4]"))


@pytest.mark.parametrize("with_pair", [False, True])
def test_B21_no_bias_to_add_to(with_pair: bool, tmp_path: Path) -> None:
    lora = {f"{MODULE}.diff_b": full(4), **(std_pair(4) if with_pair else {})}
    path = save(tmp_path / "x.safetensors", lora)
    for options in ([], ["--allow-unmatched", "*"]):
        refuse(
            std_base(tmp_path / "base"),
            path,
            says=("x.safetensors", MODULE, "no bias to add"),
            options=options,
        )


def test_B21_a_bias_may_change_alone(tmp_path: Path) -> None:
    """Some published files hold a module's bias and not its pair."""
    lora = save(tmp_path / "x.safetensors", {f"{CROSS}.q.diff_b": full(4, value=0.5)})
    found = fuse(cross_base(tmp_path / "base"), lora).tensors()
    assert_filled(found[f"{CROSS}.q.bias"], 0.5)
    assert same_bytes(found[f"{CROSS}.q.weight"], full(4, 4))


# B26


CONV = "blocks.0.conv"
EACH_KERNEL = pytest.mark.parametrize("kernel", ["auto", "reference"])


@EACH_KERNEL
def test_B26_a_convolution(kernel: str, tmp_path: Path) -> None:
    """Two places of a kernel of nine, for every output."""
    down = torch.zeros(2, 3, 3, 3)
    down[0, 0, 1, 1], down[1, 2, 0, 0] = 1.0, 2.0
    lora = {
        f"{CONV}.lora_down.weight": down,
        f"{CONV}.lora_up.weight": full(4, 2, 1, 1, value=0.5),
        f"{CONV}.alpha": torch.tensor(2.0),
    }
    base = base_of(tmp_path / "base", {f"{CONV}.weight": torch.zeros(4, 3, 3, 3)})
    fused = fuse(base, save(tmp_path / "x.safetensors", lora), options=["--kernel", kernel])
    found, wanted = fused.tensors()[f"{CONV}.weight"], torch.zeros(4, 3, 3, 3)
    wanted[:, 0, 1, 1], wanted[:, 2, 0, 0] = 0.5, 1.0
    assert same_bytes(found, wanted)
    assert found.sum() == 6


@EACH_KERNEL
@pytest.mark.parametrize(
    ("base", "down", "up"),
    [
        ((4, 4), (2, 4, 1, 1), (4, 2, 1, 1)),
        ((4, 4), (2, 4, 1, 1), (4, 2)),
        ((4, 4, 1, 1), (2, 4), (4, 2)),
        ((4, 4, 1), (2, 4), (4, 2)),
        ((4, 3, 5), (2, 3, 5), (4, 2, 1)),
        ((4, 3, 1, 2, 2), (2, 3, 1, 2, 2), (4, 2, 1, 1, 1)),
    ],
)
def test_B26_other_dimensions(
    base: tuple[int, ...], down: tuple[int, ...], up: tuple[int, ...], kernel: str, tmp_path: Path
) -> None:
    lora = {
        f"{CONV}.lora_down.weight": full(*down),
        f"{CONV}.lora_up.weight": full(*up, value=0.5),
        f"{CONV}.alpha": torch.tensor(1.0),
    }
    path = save(tmp_path / "x.safetensors", lora)
    folder = base_of(tmp_path / "base", {f"{CONV}.weight": full(*base)})
    found = fuse(folder, path, options=["--kernel", kernel]).tensors()[f"{CONV}.weight"]
    assert same_bytes(found, full(*base, value=1.5))


@pytest.mark.parametrize("style", ["diff", "pair"])
def test_B26_a_grouped_convolution_is_never_broadcast(style: str, tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", {f"{CONV}.weight": full(8, 1, 4)})
    pair = {f"{CONV}.lora_down.weight": full(2, 8, 4), f"{CONV}.lora_up.weight": full(8, 2, 1)}
    lora = save(tmp_path / "x.safetensors", {f"{CONV}.diff": full(8, 8, 4)} if style == "diff" else pair)
    refuse(base, lora, says=("x.safetensors", CONV, "[8, 8, 4]", "[8, 1, 4]"))


@EACH_KERNEL
def test_B26_a_core_between_two_pointwise_layers(kernel: str, tmp_path: Path) -> None:
    """down takes input 2 into rank 0; the core takes rank 0 into rank 1 at one place; up reads rank 1."""
    down, mid = torch.zeros(2, 3, 1, 1), torch.zeros(2, 2, 3, 3)
    down[0, 2], mid[1, 0, 0, 2] = 2.0, 3.0
    up = torch.tensor([[0.0, 1.0], [0.0, 5.0]]).view(2, 2, 1, 1)
    parts = {"lora_down.weight": down, "lora_mid.weight": mid, "lora_up.weight": up}
    stored = {f"{CONV}.{name}": tensor for name, tensor in parts.items()}
    lora = save(tmp_path / "x.safetensors", {**stored, f"{CONV}.alpha": torch.tensor(1.0)})
    base = base_of(tmp_path / "base", {f"{CONV}.weight": torch.zeros(2, 3, 3, 3)})
    wanted = torch.zeros(2, 3, 3, 3)
    wanted[0, 2, 0, 2], wanted[1, 2, 0, 2] = 3.0, 15.0
    found = fuse(base, lora, options=["--kernel", kernel]).tensors()
    assert same_bytes(found[f"{CONV}.weight"], wanted)


def test_B26_a_core_alone(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", {f"{CONV}.weight": torch.zeros(2, 3, 3, 3)})
    lora = save(tmp_path / "x.safetensors", {f"{CONV}.lora_mid.weight": full(2, 2, 3, 3)})
    refuse(base, lora, says=("x.safetensors", CONV, "mid"))


# B29 and B48


def adapter(folder: Path, tensors: Mapping[str, torch.Tensor], **config: object) -> Path:
    """An adapter as PEFT saves one, of rank 1 unless ``config`` says otherwise."""
    save(folder / "adapter_model.safetensors", {f"base_model.model.{k}": t for k, t in tensors.items()})
    save_json(folder / "adapter_config.json", {"peft_type": "LORA", "r": 1, "lora_alpha": 1, **config})
    return folder


TURNED = {"q.lora_A.weight": torch.tensor([[1.0, 2.0]]), "q.lora_B.weight": torch.tensor([[1.0], [3.0]])}


@EACH_KERNEL
@pytest.mark.parametrize(
    ("says", "wanted"), [(True, [[1.0, 3.0], [2.0, 6.0]]), (False, [[1.0, 2.0], [3.0, 6.0]])]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_B29_a_square_weight_stored_as_in_and_out(
    dtype: torch.dtype, says: bool, wanted: list[list[float]], kernel: str, tmp_path: Path
) -> None:
    base = base_of(tmp_path / "base", {"q.weight": torch.zeros(2, 2, dtype=dtype)})
    pair = {name: tensor.to(dtype) for name, tensor in TURNED.items()}
    lora = adapter(tmp_path / "lora", pair, fan_in_fan_out=says)
    fused = fuse(base, lora, options=["--kernel", kernel])
    assert same_bytes(fused.tensors()["q.weight"], torch.tensor(wanted, dtype=dtype))
    assert fused.lora["applied"]["pairs"] == 1


@pytest.mark.parametrize("says", [True, False])
@pytest.mark.parametrize("shape", [(2, 3), (3, 2)])
def test_B48_a_transposed_weight_that_is_not_square(
    shape: tuple[int, int], says: bool, tmp_path: Path
) -> None:
    """Two inputs and three outputs: only one of the two shapes is right."""
    base = base_of(tmp_path / "base", {"q.weight": torch.zeros(shape)})
    pair = {**TURNED, "q.lora_B.weight": torch.tensor([[1.0], [3.0], [10.0]])}
    lora = adapter(tmp_path / "lora", pair, fan_in_fan_out=says)
    if says == (shape == (2, 3)):
        found = fuse(base, lora).tensors()["q.weight"]
        outputs = torch.tensor([[1.0, 2.0], [3.0, 6.0], [10.0, 20.0]])
        assert same_bytes(found, outputs.T.contiguous() if says else outputs)
    else:
        refuse(base, lora, says=("adapter_model.safetensors", "q.weight", str(list(shape))))


def test_B29_a_configuration_in_metadata_counts_too(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", {"q.weight": torch.zeros(2, 2)})
    said = json.dumps({"lora_alpha": 1, "r": 1, "fan_in_fan_out": True})
    lora = save(tmp_path / "x.safetensors", TURNED, {"lora_adapter_metadata": said})
    assert fuse(base, lora).tensors()["q.weight"].tolist() == [[1.0, 3.0], [2.0, 6.0]]


# B30


EXPERTS = "experts.down_proj"
EXPERT_PAIR = {
    "experts.lora_A.weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
    "experts.lora_B.weight": torch.tensor([[0.0, 1.0], [0.0, 2.0], [0.0, 3.0], [0.0, 4.0]]),
}
SECOND = [[3.0, 4.0], [6.0, 8.0], [9.0, 12.0], [12.0, 16.0]]


@EACH_KERNEL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_B30_fused_experts(dtype: torch.dtype, kernel: str, tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", {EXPERTS: torch.zeros(2, 4, 2, dtype=dtype)})
    pair = {name: tensor.to(dtype) for name, tensor in EXPERT_PAIR.items()}
    lora = adapter(tmp_path / "lora", pair, target_parameters=[EXPERTS])
    fused = fuse(base, lora, options=["--kernel", kernel])
    first, second = fused.tensors()[EXPERTS]
    assert same_bytes(first, torch.zeros(4, 2, dtype=dtype))
    assert second.tolist() == SECOND
    assert fused.lora["applied"]["experts"] == 1
    assert fused.lora["ranks"] == [1]


@EACH_KERNEL
def test_B30_experts_stored_as_in_and_out(kernel: str, tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", {EXPERTS: torch.zeros(2, 2, 4)})
    lora = adapter(tmp_path / "lora", EXPERT_PAIR, target_parameters=[EXPERTS])
    found = fuse(base, lora, options=["--kernel", kernel]).tensors()[EXPERTS]
    assert found[0].abs().sum() == 0
    assert found[1].T.tolist() == SECOND


@EACH_KERNEL
def test_B30_two_adapters_and_a_difference_on_the_same_experts(kernel: str, tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", {EXPERTS: torch.zeros(2, 4, 2)})
    lora = adapter(tmp_path / "lora", EXPERT_PAIR, target_parameters=[EXPERTS])
    again = {"experts.lora_A.weight": full(2, 2), "experts.lora_B.weight": full(4, 2)}
    other = adapter(tmp_path / "other", again, target_parameters=[EXPERTS])
    diff = save(tmp_path / "diff.safetensors", {f"{EXPERTS}.diff": full(2, 4, 2, value=100.0)})
    loras = [f"{lora}:2", str(other), str(diff)]
    found = fuse(base, *loras, options=["--kernel", kernel]).tensors()[EXPERTS]
    assert_filled(found[0], 101.0)
    assert found[1].tolist() == [[2 * value + 101 for value in row] for row in SECOND]


@pytest.mark.parametrize(
    ("shape", "why"), [((2, 3, 2), "neither"), ((3, 4, 2), "neither"), ((2, 2, 2), "both")]
)
def test_B30_shapes_that_fit_no_way_or_both(shape: tuple[int, ...], why: str, tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", {EXPERTS: torch.zeros(shape)})
    up = EXPERT_PAIR["experts.lora_B.weight"]
    pair = {**EXPERT_PAIR, "experts.lora_B.weight": up[:2].contiguous() if why == "both" else up}
    lora = adapter(tmp_path / "lora", pair, target_parameters=[EXPERTS])
    refuse(base, lora, says=("adapter_model.safetensors", EXPERTS, why))


def test_B30_no_configuration_names_the_parameter(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", {EXPERTS: torch.zeros(2, 4, 2)})
    refuse(base, adapter(tmp_path / "lora", EXPERT_PAIR), says=("adapter_model.safetensors", "experts"))


def test_B30_two_parameters_that_look_alike(tmp_path: Path) -> None:
    names = ["experts.gate", "experts.up"]
    base = base_of(tmp_path / "base", {name: torch.zeros(2, 4, 2) for name in names})
    lora = adapter(tmp_path / "lora", EXPERT_PAIR, target_parameters=names)
    refuse(base, lora, says=("adapter_model.safetensors", "experts", *names))


@pytest.mark.parametrize("extra", ["experts.lora_B.bias", "experts.lora_magnitude_vector"])
def test_B30_what_else_a_parameters_pair_holds_is_refused(extra: str, tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", {EXPERTS: torch.zeros(2, 4, 2)})
    lora = adapter(tmp_path / "lora", {**EXPERT_PAIR, extra: full(4)}, target_parameters=[EXPERTS])
    refuse(base, lora, says=("adapter_model.safetensors", "experts", "target_parameters"))


# B34


@EACH_KERNEL
@pytest.mark.parametrize("name", ["", ".default"])
@pytest.mark.parametrize(("strength", "factor"), [("1", 1.0), ("-0.5", -0.5)])
def test_B34_an_embedding(strength: str, factor: float, name: str, kernel: str, tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", {"emb.weight": torch.zeros(3, 2)})
    pair = {
        f"emb.lora_embedding_A{name}": torch.tensor([[1.0, 2.0, 3.0]]),
        f"emb.lora_embedding_B{name}": torch.tensor([[1.0], [10.0]]),
    }
    lora = adapter(tmp_path / "lora", pair, lora_alpha=2)
    fused = fuse(base, f"{lora}:{strength}", options=["--kernel", kernel])
    wanted = torch.tensor([[2.0, 20.0], [4.0, 40.0], [6.0, 60.0]]) * factor
    assert same_bytes(fused.tensors()["emb.weight"], wanted)
    assert fused.lora["applied"]["embeddings"] == 1


def test_B34_half_an_embeddings_pair(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", {"emb.weight": torch.zeros(3, 2)})
    lora = adapter(tmp_path / "lora", {"emb.lora_embedding_A": torch.ones(1, 3)})
    refuse(base, lora, says=("adapter_model.safetensors", "emb", "embedding_up"))


def test_B34_an_embedding_of_another_size(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", {"emb.weight": torch.zeros(4, 2)})
    pair = {"emb.lora_embedding_A": torch.ones(1, 3), "emb.lora_embedding_B": torch.ones(2, 1)}
    refuse(base, adapter(tmp_path / "lora", pair), says=("adapter_model.safetensors", "[3, 2]", "[4, 2]"))


# Split outputs and biases of pairs


@EACH_KERNEL
def test_outputs_split_into_blocks(kernel: str, tmp_path: Path) -> None:
    """Rank 2 in three blocks: alpha 1 is half of that rank, not a sixth."""
    base = base_of(tmp_path / "base", {"qkv.weight": torch.zeros(5, 2)})
    down = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0], [0.0, 2.0], [3.0, 0.0], [0.0, 3.0]])
    ups = (torch.eye(2), torch.ones(1, 2), torch.eye(2) * 10)
    blocks = {f"qkv.lora_up.blocks.{k}.weight": up for k, up in enumerate(ups)}
    lora = {"qkv.lora_down.weight": down, **blocks, "qkv.alpha": torch.tensor(1.0)}
    fused = fuse(base, save(tmp_path / "x.safetensors", lora), options=["--kernel", kernel])
    wanted = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0], [30.0, 0.0], [0.0, 30.0]]) / 2
    assert same_bytes(fused.tensors()["qkv.weight"], wanted)
    assert fused.lora["ranks"] == [2]


@pytest.mark.parametrize("left_out", [0, 1])
def test_a_block_of_outputs_that_is_missing(left_out: int, tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", {"qkv.weight": torch.zeros(6, 2)})
    blocks = {f"qkv.lora_up.blocks.{k}.weight": torch.eye(2) for k in range(3) if k != left_out}
    lora = {"qkv.lora_down.weight": torch.ones(6, 2), **blocks}
    refuse(base, save(tmp_path / "x.safetensors", lora), says=("x.safetensors", "qkv"))


@EACH_KERNEL
@pytest.mark.parametrize("name", ["", ".default"])
def test_the_bias_of_a_pair_is_scaled_with_it(name: str, kernel: str, tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", {"q.weight": full(4, 4), "q.bias": full(4)})
    pair = std_pair(4, "q", style=(f"lora_A{name}.weight", f"lora_B{name}.weight"))
    lora = adapter(tmp_path / "lora", {**pair, f"q.lora_B{name}.bias": full(4, value=4.0)}, r=4, lora_alpha=2)
    fused = fuse(base, f"{lora}:0.5", options=["--kernel", kernel])
    assert_filled(fused.tensors()["q.weight"], 1.25)
    assert_filled(fused.tensors()["q.bias"], 2.0)
    (scale,) = fused.lora["scales"]
    assert scale["modules"] == ["q"]


def test_the_bias_of_a_pair_without_the_pair(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", {"q.weight": full(4, 4), "q.bias": full(4)})
    lora = adapter(tmp_path / "lora", {"q.lora_B.bias": full(4)}, lora_bias=True)
    refuse(base, lora, says=("adapter_model.safetensors", "q", "without its pair"))


def test_the_bias_of_a_pair_for_a_layer_without_one(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", {"q.weight": full(4, 4)})
    pair = std_pair(4, "q", style=("lora_A.weight", "lora_B.weight"))
    lora = adapter(tmp_path / "lora", {**pair, "q.lora_B.bias": full(4)}, r=4, lora_bias=True)
    refuse(base, lora, says=("adapter_model.safetensors", "q", "no bias"))
