"""FLUX.1: its published lists, its models, and merges of LoRAs in every spelling, in both layouts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from diffusers.loaders import lora_conversion_utils
from safetensors.torch import load_file, save_file

from fuselora.errors import Refused
from fuselora.families.flux1 import FLUX1
from fuselora.pipeline import merge
from fuselora.verify import verify
from tests import listings, small
from tests.families.flux_bases import (
    CHANNELS,
    DIM,
    FLUX1_BASE,
    LAYOUTS,
    SPELLINGS,
    assert_all_land,
    assert_runs_as_another,
    assert_verifies,
    in_each_layout,
    largest_difference,
    merged,
    write_lora,
)

if TYPE_CHECKING:
    from pathlib import Path

    from fuselora.families import Layout

converters: Any = lora_conversion_utils
block_diag: Any = torch.block_diag
GUIDANCE = "time_text_embed.guidance_embedder"


def shapes(layout: Layout) -> dict[str, tuple[int, ...]]:
    return {spec.name: spec.shape for spec in listings.base("flux.1-dev", layout)}


def dev(channels: int = 64, *, guidance: bool = True) -> dict[str, tuple[int, ...]]:
    """FLUX.1-dev with another width of input, and without its guidance."""
    found = {**shapes("diffusers"), "x_embedder.weight": (3072, channels)}
    return {name: shape for name, shape in found.items() if guidance or GUIDANCE not in name}


# Names and shapes


def test_the_published_lists_are_one_model() -> None:
    assert FLUX1.canonical_shapes(shapes("native"), "native") == shapes("diffusers")
    spelled = {found.name: found.shape for found in FLUX1.spellings(shapes("diffusers"), "native")}
    assert spelled == shapes("native")


@pytest.mark.parametrize("layout", [*LAYOUTS, "xlabs"])
def test_every_name_is_known(layout: Layout) -> None:
    names = [found.name for found in FLUX1.spellings(shapes("diffusers"), layout)]
    assert FLUX1.share(names) == 1


@pytest.mark.parametrize(
    ("channels", "guidance", "models"),
    [
        (64, True, ("FLUX.1-dev", "FLUX.1-Kontext-dev", "FLUX.1-Krea-dev")),
        (64, False, ("FLUX.1-schnell",)),
        (128, True, ("FLUX.1-Depth-dev", "FLUX.1-Canny-dev")),
        (384, True, ("FLUX.1-Fill-dev",)),
        (96, True, ()),
    ],
)
def test_models_are_told_by_their_input_and_guidance(
    channels: int, guidance: bool, models: tuple[str, ...]
) -> None:
    base = dev(channels, guidance=guidance)
    assert FLUX1.models_of(base) == models
    native = {found.name: found.shape for found in FLUX1.spellings(base, "native")}
    assert FLUX1.models_of(native) == models


@pytest.mark.parametrize(
    ("deltas", "models"),
    [
        ({f"{GUIDANCE}.linear_1.weight": (3072, 256)}, {"FLUX.1-dev", "FLUX.1-Depth-dev", "FLUX.1-Fill-dev"}),
        ({"x_embedder.weight": (3072, 384)}, {"FLUX.1-Fill-dev"}),
        ({"x_embedder.weight": (3072, 64)}, {"FLUX.1-dev", "FLUX.1-schnell"}),
        # FLUX.2-klein-4B is as wide, but for its feed-forward
        ({"transformer_blocks.0.ff.net.0.proj.weight": (18432, 3072)}, set()),
        ({"single_transformer_blocks.0.proj_mlp.weight": (18432, 3072)}, set()),
        ({"context_embedder.weight": (3072, 7680)}, set()),
    ],
)
def test_models_with_room_for_a_lora(deltas: dict[str, tuple[int, ...]], models: set[str]) -> None:
    found = {model for kin in FLUX1.kin_of_deltas(deltas) for model in kin.models}
    assert models <= found if models else not found
    assert ("FLUX.1-schnell" in found) == ("FLUX.1-schnell" in models)


@pytest.mark.parametrize(
    ("name", "steps", "guidance"),
    [
        ("FLUX.1-Turbo-Alpha", 8, 3.5),
        ("alimama-creative/FLUX.1-Turbo-Alpha", 8, 3.5),
        ("Hyper-FLUX.1-dev-8steps-lora.safetensors", None, 3.5),
    ],
)
def test_few_step_loras(name: str, steps: int | None, guidance: float) -> None:
    row = FLUX1.few_step_named(name)
    assert row is not None
    assert (row.num_inference_steps, row.guidance_scale) == (steps, guidance)


def test_hyper_s_strength_is_in_its_remark() -> None:
    row = FLUX1.few_step_named("Hyper-FLUX.1-dev-16steps-lora")
    assert row is not None
    assert "0.125" in (row.remark or "")


# Merges


@in_each_layout
@pytest.mark.parametrize("spelling", sorted(SPELLINGS))
def test_every_linear_layer_in_every_spelling(tmp_path: Path, layout: Layout, spelling: str) -> None:
    lora = write_lora(tmp_path / "lora.safetensors", FLUX1_BASE, spelling)
    assert len(lora.deltas) == (36 if lora.layout == "native" else 50)
    assert_all_land(tmp_path, FLUX1_BASE, layout, lora)


@in_each_layout
@pytest.mark.parametrize("only", [r"attn\.to_k$", r"add_v_proj$", "proj_mlp$", r"single.*to_q$"])
def test_a_part_of_a_fused_layer(tmp_path: Path, layout: Layout, only: str) -> None:
    lora = write_lora(tmp_path / "lora.safetensors", FLUX1_BASE, "diffusers", only)
    assert 2 <= len(lora.deltas) <= 4
    assert_all_land(tmp_path, FLUX1_BASE, layout, lora)


@in_each_layout
def test_three_pairs_in_one(tmp_path: Path, layout: Layout) -> None:
    """kohya's split_qkv saves the factors of q, k and v side by side, zeros between."""
    module = "lora_unet_double_blocks_1_img_attn_qkv"
    downs = [small.noise(2, DIM, seed=seed) for seed in range(3)]
    ups = [small.noise(DIM, 2, seed=seed) for seed in range(3, 6)]
    path = tmp_path / "lora.safetensors"
    small.lora(path, small.pair(module, block_diag(*ups), torch.cat(downs), alpha=6.0))
    found = merged(tmp_path, FLUX1_BASE, layout, path)
    key = "double_blocks.1.img_attn.qkv.weight"
    base = FLUX1_BASE.native(FLUX1_BASE.tensors())
    delta = torch.cat([up @ down for up, down in zip(ups, downs, strict=True)])
    assert torch.allclose(found.pop(key), base.pop(key) + delta, atol=1e-5)
    assert largest_difference(found, base) == 0


@in_each_layout
def test_xlabs_processors(tmp_path: Path, layout: Layout) -> None:
    """A single block's q, k and v are the first rows of ``linear1``."""
    meant = {
        "double_blocks.0.processor.qkv_lora1": ("double_blocks.0.img_attn.qkv", 3 * DIM, DIM),
        "double_blocks.0.processor.qkv_lora2": ("double_blocks.0.txt_attn.qkv", 3 * DIM, DIM),
        "double_blocks.1.processor.proj_lora1": ("double_blocks.1.img_attn.proj", DIM, DIM),
        "diffusion_model.double_blocks.1.processor.proj_lora2": ("double_blocks.1.txt_attn.proj", DIM, DIM),
        "single_blocks.0.processor.qkv_lora": ("single_blocks.0.linear1", 3 * DIM, DIM),
        "single_blocks.1.processor.proj_lora": ("single_blocks.1.linear2", DIM, 5 * DIM),
    }
    lora: dict[str, torch.Tensor] = {}
    wanted = FLUX1_BASE.native(FLUX1_BASE.tensors())
    for seed, (module, (key, out, into)) in enumerate(meant.items()):
        down, up = small.noise(2, into, seed=seed), small.noise(out, 2, seed=seed + 10)
        lora |= {f"{module}.down.weight": down, f"{module}.up.weight": up}
        wanted[f"{key}.weight"] = wanted[f"{key}.weight"].double()
        wanted[f"{key}.weight"][:out] += up.double() @ down.double()
    save_file(lora, tmp_path / "lora.safetensors")
    found = merged(tmp_path, FLUX1_BASE, layout, tmp_path / "lora.safetensors")
    assert largest_difference(found, wanted) < 2e-6


@in_each_layout
def test_norms_are_replaced_and_biases_added(tmp_path: Path, layout: Layout) -> None:
    """As Black Forest Labs' control LoRAs have them."""
    norm, bias = "double_blocks.0.txt_attn.norm.key_norm.scale", "single_blocks.1.linear1"
    lora = {
        norm: small.noise(16, seed=1),
        f"{bias}.lora_A.weight": small.noise(2, DIM, seed=2),
        f"{bias}.lora_B.weight": small.noise(7 * DIM, 2, seed=3),
        f"{bias}.lora_B.bias": small.noise(7 * DIM, seed=4),
    }
    save_file(lora, tmp_path / "lora.safetensors")
    found = merged(tmp_path, FLUX1_BASE, layout, tmp_path / "lora.safetensors")
    wanted = {k: t.double() for k, t in FLUX1_BASE.native(FLUX1_BASE.tensors()).items()}
    wanted[norm] = lora[norm].double()
    wanted[f"{bias}.weight"] += (
        lora[f"{bias}.lora_B.weight"].double() @ lora[f"{bias}.lora_A.weight"].double()
    )
    wanted[f"{bias}.bias"] += lora[f"{bias}.lora_B.bias"].double()
    assert torch.equal(found[norm], lora[norm])
    assert largest_difference(found, wanted) < 2e-6


NORM, OURS = "double_blocks.0.img_attn.norm.query_norm", "transformer_blocks.0.attn.norm_q"
NORM_DIFFS = (
    f"diffusion_model.{NORM}.diff", f"{NORM}.scale.diff", f"{NORM}.weight.diff", f"transformer.{OURS}.diff",
    f"{OURS}.w_norm", f"lora_unet_{NORM.replace('.', '_')}.w_norm",
    f"lora_unet_{NORM.replace('.', '_')}.diff",
)  # fmt: skip
NEW_NORMS = (
    f"{NORM}.scale", f"diffusion_model.{NORM}.weight", f"diffusion_model.{NORM}.set_weight",
    f"{NORM}.scale.set_weight", f"transformer.{OURS}.weight", f"{OURS}.set_weight",
)  # fmt: skip


@pytest.mark.parametrize("spelling", ["scale", "weight", "diffusers"])
@pytest.mark.parametrize("key", [*NORM_DIFFS, *NEW_NORMS])
def test_a_norm_by_any_name_in_any_base(tmp_path: Path, spelling: str, key: str) -> None:
    """Black Forest Labs call it a scale, and so does ComfyUI, of which newer versions say weight."""
    layout = "diffusers" if spelling == "diffusers" else "native"
    path = FLUX1_BASE.write(tmp_path, layout)
    if spelling == "weight":
        named = {name.replace("_norm.scale", "_norm.weight"): t for name, t in load_file(path).items()}
        save_file(named, path)
    given, pair = small.noise(16, seed=1), small.pair("img_in", small.noise(DIM, 2), small.noise(2, CHANNELS))
    save_file({key: given, **pair}, tmp_path / "lora.safetensors")
    report = merge(path, [f"{tmp_path / 'lora.safetensors'}:0.5"], tmp_path / "out")
    (hit,) = (hit for matching in report.plan.matchings for hit in matching.hits if hit.rank is None)
    file = next((tmp_path / "out").rglob("*.safetensors"))
    old = FLUX1_BASE.tensors()[f"{OURS}.weight"].double()
    wanted = old + 0.5 * (given.double() - old if key in NEW_NORMS else given.double())
    wanted_key = f"{OURS}.weight" if layout == "diffusers" else f"{NORM}.{spelling}"
    assert hit.base_key == wanted_key
    assert torch.allclose(load_file(file)[wanted_key].double(), wanted, atol=1e-6)
    assert verify(tmp_path / "out", base=path, loras=[tmp_path / "lora.safetensors"]).ok


@in_each_layout
@pytest.mark.parametrize("order", [1, -1])
def test_a_control_lora_with_strength_and_alpha_beside_another(
    tmp_path: Path, layout: Layout, order: int
) -> None:
    """Black Forest Labs' control LoRAs give img_in as many channels again, for the control image."""
    up, down, bias = small.noise(DIM, 4, seed=1), small.noise(4, 2 * CHANNELS, seed=2), small.noise(DIM)
    control = {"img_in.lora_A.weight": down, "img_in.lora_B.weight": up, "img_in.lora_B.bias": bias,
               "img_in.alpha": torch.tensor(1.0)}  # fmt: skip
    plain_up, plain_down = small.noise(DIM, 2, seed=3), small.noise(2, CHANNELS, seed=4)
    plain = {f"transformer.x_embedder.{part}.weight": t for part, t in
             (("lora_A", plain_down), ("lora_B", plain_up))}  # fmt: skip
    loras = [f"{tmp_path / 'control.safetensors'}:0.75", f"{tmp_path / 'plain.safetensors'}:-0.5"][::order]
    save_file(control, tmp_path / "control.safetensors")
    save_file(plain, tmp_path / "plain.safetensors")
    path = FLUX1_BASE.write(tmp_path, layout)
    found = FLUX1_BASE.read_native(merge(path, loras, tmp_path / "out").out, layout)
    wanted = {k: t.double() for k, t in FLUX1_BASE.native(FLUX1_BASE.tensors()).items()}
    old = wanted["img_in.weight"] - 0.5 * plain_up.double() @ plain_down.double()
    zeros = torch.zeros(DIM, CHANNELS, dtype=torch.float64)
    wanted["img_in.weight"] = torch.cat([old, zeros], 1) + 0.75 / 4 * up.double() @ down.double()
    wanted["img_in.bias"] += 0.75 / 4 * bias.double()
    assert largest_difference(found, wanted) < 2e-6
    report = verify(tmp_path / "out", base=path, loras=[tmp_path / "plain.safetensors",
                                                        tmp_path / "control.safetensors"])  # fmt: skip
    assert report.ok, report.findings
    if layout == "diffusers":
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert (config["in_channels"], config["out_channels"]) == (2 * CHANNELS, CHANNELS)


def test_the_last_layers_alpha_counts_which_diffusers_drops(tmp_path: Path) -> None:
    lora = write_lora(tmp_path / "lora.safetensors", FLUX1_BASE, "kohya", r"^final_layer")
    converted = converters._convert_kohya_flux_lora_to_diffusers(load_file(lora.path))
    theirs = converted["proj_out.lora_B.weight"].double() @ converted["proj_out.lora_A.weight"].double()
    ours = lora.deltas["final_layer.linear.weight"]
    assert torch.allclose(theirs, 2 * ours)
    assert_all_land(tmp_path, FLUX1_BASE, "diffusers", lora)


@in_each_layout
def test_a_base_without_guidance_says_what_it_lacks(tmp_path: Path, layout: Layout) -> None:
    lora = write_lora(tmp_path / "lora.safetensors", FLUX1_BASE, "diffusers", "guidance|x_embedder")
    path = FLUX1_BASE.write(tmp_path, layout)
    weights = path if layout == "native" else path / "diffusion_pytorch_model.safetensors"
    kept = {name: tensor for name, tensor in load_file(weights).items() if "guidance" not in name}
    save_file(kept, weights)
    with pytest.raises(Refused, match=r"guidance embedding of FLUX\.1-dev") as caught:
        merge(path, [lora.path], tmp_path / "out")
    assert len(caught.value.faults) == 2
    allowed = merge(path, [lora.path], tmp_path / "out", allow_unmatched=["*guidance*"])
    (matching,) = allowed.plan.matchings
    assert len(matching.skipped) == 2
    assert len(matching.hits) == 1


# What loads


def test_the_merged_model_runs_and_is_another(tmp_path: Path) -> None:
    assert_runs_as_another(tmp_path, FLUX1_BASE, "kohya")


@in_each_layout
def test_the_merged_base_verifies(tmp_path: Path, layout: Layout) -> None:
    assert_verifies(tmp_path, FLUX1_BASE, layout, "comfyui")
