"""MiniMax-H3: q, k and v apart, stacked, or interleaved by heads, in bases and in LoRAs, all against float64.

The bases are diffusers' own class at two heads of the true width and its tensors as the other layouts have
them, written out here and held against diffusers' converter.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import diffusers
import pytest
import torch
from diffusers.loaders import lora_conversion_utils, single_file_utils
from safetensors.torch import load_file
from typer.testing import CliRunner

import fuselora
from fuselora.cli import app
from fuselora.describe import describe
from fuselora.description import CheckpointDescription
from fuselora.errors import InputError, Refused
from fuselora.families import RowOrder
from fuselora.families.minimax_h3 import MINIMAX_H3
from fuselora.header import read_header
from fuselora.marker import FILE_NAME
from fuselora.pipeline import plan
from fuselora.specs import AlphaSpec, LayoutSpec
from fuselora.summary import plan_document
from fuselora.synth import Spec
from fuselora.verify import verify
from tests import listings, small

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from fuselora.families import Layout

Model: Any = diffusers.MiniMaxH3Transformer3DModel
converted_by_diffusers: Any = single_file_utils.convert_minimax_h3_transformer_checkpoint_to_diffusers
block_diag: Any = torch.block_diag
lora_by_diffusers: Any = lora_conversion_utils._convert_non_diffusers_minimax_h3_lora_to_diffusers
Tensors = dict[str, torch.Tensor]
HEADS, HEAD, RANK = 2, 128, 3
CONFIG = {
    "num_attention_heads": HEADS, "attention_head_dim": HEAD, "hidden_size": 12, "num_layers": 2,
    "num_refiner_layers": 1, "ffn_dim": 10, "in_channels": 1, "audio_in_channels": 3, "text_dim": 7,
    "freq_dim": 8, "time_embed_hidden_dim": 9, "time_embed_dim": 6,
}  # fmt: skip
BLOCKS = {
    "transformer_blocks.0": "blocks.0",
    "transformer_blocks.1": "blocks.1",
    "token_refiner.refiner_blocks.0": "token_refiner.blocks.0",
}
RENAMED = {
    "proj_in": "video_patch_proj",
    "audio_proj_in": "audio_patch_proj",
    "context_embedder": "condition_proj",
    "time_embedder.linear_1": "time_embedder.proj_in",
    "time_embedder.linear_2": "time_embedder.proj_out",
    "norm_out.norm": "final_layer.norm",
    "norm_out.linear": "final_layer.adaln_proj.linear",
    "proj_out": "final_layer.video_out",
    "audio_proj_out": "final_layer.audio_out",
    "token_refiner.final_norm": "token_refiner.final_norm",
}
IN_BLOCK = {
    "norm1": "norm1", "norm2": "norm2", "attn.norm_q": "attn.q_norm", "attn.norm_k": "attn.k_norm",
    "attn.to_out.0": "attn.out_proj", "ff.net.2": "mlp.fc2", "adaln_proj.linear": "adaln_proj.linear",
}  # fmt: skip
LAYOUTS: tuple[Layout, ...] = ("diffusers", "native", "raw")
ORDERS = {"native": "stacked", "raw": "interleaved"}


# Tensors as each layout has them


def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The rows of ``qkv_proj``."""
    if layout == "native":
        return torch.cat((q, k, v))
    heads = [part.reshape(HEADS, HEAD, -1) for part in (q, k, v)]
    return torch.stack(heads, 1).reshape(3 * len(q), -1)


def swapped(rows: torch.Tensor) -> torch.Tensor:
    first, second = rows.chunk(2)
    return torch.cat((second, first))


def spelled(ours: Mapping[str, torch.Tensor], layout: Layout) -> Tensors:
    """Tensors by diffusers' names as ``layout`` has them."""
    if layout == "diffusers":
        return dict(ours)
    names = RENAMED | {f"{o}.{a}": f"{t}.{b}" for o, t in BLOCKS.items() for a, b in IN_BLOCK.items()}
    found = {
        f"{theirs}.{leaf}": ours[f"{name}.{leaf}"]
        for name, theirs in names.items()
        for leaf in ("weight", "bias")
        if f"{name}.{leaf}" in ours
    }
    for name, theirs in BLOCKS.items():
        q, k, v = (ours[f"{name}.attn.to_{part}.weight"] for part in "qkv")
        found[f"{theirs}.attn.qkv_proj.weight"] = fused(q, k, v, layout)
        found[f"{theirs}.mlp.fc1.weight"] = swapped(ours[f"{name}.ff.net.0.proj.weight"])
    return found


def converted(tensors: Mapping[str, torch.Tensor], layout: Layout) -> Tensors:
    """By diffusers."""
    if layout == "diffusers":
        return dict(tensors)
    found: Tensors = converted_by_diffusers(dict(tensors), CONFIG, ORDERS[layout])
    return found


def base_of(path: Path, ours: Mapping[str, torch.Tensor], layout: Layout, *, sign: bool = True) -> Path:
    tensors = spelled(ours, layout)
    if layout == "raw" and sign:
        tensors["rope.inv_freq"] = torch.arange(16.0)
    return small.write(path, tensors)


@pytest.fixture(scope="module")
def ours() -> Tensors:
    torch.manual_seed(0)
    found: Tensors = Model(**CONFIG).state_dict()
    return found


def test_diffusers_agrees_about_the_bases(ours: Tensors) -> None:
    for layout in ("native", "raw"):
        found = converted(spelled(ours, layout), layout)
        assert found.keys() == ours.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in ours.items())
    assert not torch.equal(*(spelled(ours, x)["blocks.0.attn.qkv_proj.weight"] for x in ("native", "raw")))


# LoRAs, one in every way that they are published in


@dataclass(frozen=True)
class Factors:
    """A module's down (rank, in) and up (out, rank)."""

    down: torch.Tensor
    up: torch.Tensor

    @property
    def delta(self) -> torch.Tensor:
        return self.up.double() @ self.down.double()


LAYERS = (*(f"attn.to_{part}" for part in "qkv"), "attn.to_out.0", "ff.net.0.proj", "ff.net.2")


def factors(ours: Tensors) -> dict[str, Factors]:
    """For what LightX2V's file has pairs for."""
    found = {}
    for seed, name in enumerate(f"{block}.{layer}" for block in BLOCKS for layer in LAYERS):
        rows, columns = ours[f"{name}.weight"].shape
        down = small.noise(RANK, columns, seed=seed, std=0.4)
        found[name] = Factors(down, small.noise(rows, RANK, seed=seed + 99, std=0.4))
    return found


def fused_factors(given: Mapping[str, Factors], layout: Layout) -> dict[str, Factors]:
    """The same in native names: of q, k and v three ranks in one, block by block."""
    found = {}
    for name, theirs in BLOCKS.items():
        qkv = [given[f"{name}.attn.to_{part}"] for part in "qkv"]
        q, k, v = block_diag(*(one.up for one in qkv)).chunk(3)
        down = torch.cat([one.down for one in qkv])
        found[f"{theirs}.attn.qkv_proj"] = Factors(down, fused(q, k, v, layout))
        gate = given[f"{name}.ff.net.0.proj"]
        found[f"{theirs}.mlp.fc1"] = Factors(gate.down, swapped(gate.up))
        found[f"{theirs}.attn.out_proj"] = given[f"{name}.attn.to_out.0"]
        found[f"{theirs}.mlp.fc2"] = given[f"{name}.ff.net.2"]
    return found


def keyed(given: Mapping[str, Factors], style: str, *, alpha: float | None = None) -> Tensors:
    """Keys in a style that has {} for the module and DOWN for the factor; ``alpha`` is times the rank."""
    flat = style.startswith("lora_unet_")
    words = ("lora_down", "lora_up") if flat else ("lora_A", "lora_B")
    found: Tensors = {}
    for module, one in given.items():
        key = style.format(module.replace(".", "_") if flat else module)
        for word, factor in zip(words, (one.down, one.up), strict=True):
            found[key.replace("DOWN", word)] = factor.contiguous()
        if alpha is not None:
            found[f"{key.partition('.DOWN')[0]}.alpha"] = torch.tensor(alpha * len(one.down))
    return found


Written = tuple[Tensors, "dict[str, str]", float]
GROUPED = {"format": "pt", "key_format": "minimax-h3-native", "qkv_layout": "grouped"}
PLAIN = {"format": "pt"}
# tensors, metadata, and what the deltas are times
STYLES: dict[str, Callable[[Mapping[str, Factors]], Written]] = {
    "lightx2v": lambda given: (keyed(given, "{}.DOWN.default.weight"), PLAIN, 1.0),
    "diffusers": lambda given: (keyed(given, "transformer.{}.DOWN.weight"), PLAIN, 1.0),
    "comfyui": lambda given: (
        keyed(fused_factors(given, "native"), "diffusion_model.{}.DOWN.weight"), PLAIN, 1.0,
    ),
    "larryvrh": lambda given: (keyed(fused_factors(given, "native"), "{}.DOWN.weight"), PLAIN, 1.0),
    "musubi": lambda given: (
        keyed(fused_factors(given, "native"), "lora_unet_{}.DOWN.weight", alpha=0.5), PLAIN, 0.5,
    ),
    "diffsynth": lambda given: (keyed(fused_factors(given, "raw"), "{}.DOWN.default.weight"), PLAIN, 1.0),
    "flashgen": lambda given: (keyed(fused_factors(given, "raw"), "{}.DOWN.weight"), GROUPED, 1.0),
}  # fmt: skip


def agree(got: Tensors, ours: Tensors, given: Mapping[str, Factors], scale: float) -> None:
    """``got``, in diffusers' names, is base + scale * up @ down, and nothing else moved."""
    assert got.keys() == ours.keys()
    for name, tensor in got.items():
        one = given.get(name.removesuffix(".weight"))
        if one is None:
            assert torch.equal(tensor, ours[name]), name
        else:
            exact = ours[name].double() + scale * one.delta
            torch.testing.assert_close(tensor.double(), exact, rtol=2e-6, atol=2e-6, msg=name)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_style_on_every_base(tmp_path: Path, ours: Tensors, layout: Layout, style: str) -> None:
    given = factors(ours)
    tensors, metadata, scale = STYLES[style](given)
    base = base_of(tmp_path / "base.safetensors", ours, layout)
    lora = small.write(tmp_path / "x.safetensors", tensors, metadata)
    report = fuselora.merge(base, [lora], out=tmp_path / "out")
    checkpoint = report.plan.checkpoint
    assert checkpoint.family is MINIMAX_H3 and checkpoint.layout == layout
    assert not report.notices
    agree(converted(load_file(tmp_path / "out" / "base.safetensors"), layout), ours, given, scale)


@pytest.mark.parametrize("style", ["comfyui", "larryvrh", "musubi", "diffsynth"])
def test_diffusers_reads_the_loras_so_too(ours: Tensors, style: str) -> None:
    """Its LoRA converter agrees with its base converter about this family."""
    given = factors(ours)
    tensors, _, scale = STYLES[style](given)
    found = lora_by_diffusers(dict(tensors))
    for name, one in given.items():
        down, up = (found[f"transformer.{name}.lora_{part}.weight"].double() for part in "AB")
        torch.testing.assert_close(up @ down, scale * one.delta, rtol=1e-6, atol=1e-6)


# What the sign cannot tell, the user says


def test_a_lora_s_layout_can_be_said(tmp_path: Path, ours: Tensors) -> None:
    """Names of its own saving, without DiffSynth's infix, and yet for the shards."""
    given = factors(ours)
    base = base_of(tmp_path / "base.safetensors", ours, "native")
    lora = small.write(tmp_path / "x.safetensors", keyed(fused_factors(given, "raw"), "{}.DOWN.weight"))
    fuselora.merge(base, [lora], out=tmp_path / "out", lora_layouts=(LayoutSpec("raw"),))
    agree(converted(load_file(tmp_path / "out" / "base.safetensors"), "native"), ours, given, 1.0)
    fuselora.merge(base, [lora], out=tmp_path / "told", lora_layouts=(LayoutSpec("native", lora.name),))
    with pytest.raises(AssertionError):
        agree(converted(load_file(tmp_path / "told" / "base.safetensors"), "native"), ours, given, 1.0)


def test_a_base_s_layout_can_be_said(tmp_path: Path, ours: Tensors) -> None:
    """A file made of the shards by hand, without the frequencies."""
    given = factors(ours)
    base = base_of(tmp_path / "base.safetensors", ours, "raw", sign=False)
    lora = small.write(tmp_path / "x.safetensors", keyed(given, "{}.DOWN.default.weight"))
    assert plan(base, [lora]).checkpoint.layout == "native"
    fuselora.merge(base, [lora], out=tmp_path / "out", base_layout="raw")
    agree(converted(load_file(tmp_path / "out" / "base.safetensors"), "raw"), ours, given, 1.0)
    with pytest.raises(InputError, match="the layouts of minimax-h3 are diffusers, native, raw"):
        plan(base, [lora], base_layout="sgm")
    with pytest.raises(Refused, match="sgm is no layout of minimax-h3"):
        plan(base, [lora], lora_layouts=(LayoutSpec("sgm"),))


NO_SIGN = "no sign of raw"
LORA_ORDERS = {
    "lightx2v": None,
    "comfyui": ("native", NO_SIGN),
    "diffsynth": ("raw", "its key blocks.0.attn.qkv_proj.lora_A.default.weight"),
    "flashgen": ("raw", "qkv_layout grouped in its metadata"),
}
BASE_ORDERS = {"diffusers": None, "native": NO_SIGN, "raw": "its tensor rope.inv_freq"}


@pytest.mark.parametrize("style", LORA_ORDERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_told_the_order_of_rows_is_said_and_kept(
    tmp_path: Path, ours: Tensors, layout: Layout, style: str
) -> None:
    tensors, metadata, _ = STYLES[style](factors(ours))
    base = base_of(tmp_path / "base.safetensors", ours, layout)
    lora = small.write(tmp_path / "x.safetensors", tensors, metadata)
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["merge", "--base", str(base), "--lora", str(lora), "--out", str(out)])
    assert done.exit_code == 0, done.output
    said = [line.strip() for line in done.stdout.splitlines() if "rows in the order of" in line]
    wanted = []
    if told := BASE_ORDERS[layout]:
        wanted.append(f"rows in the order of {layout} ({told}; --base-layout overrules)")
    if order := LORA_ORDERS[style]:
        wanted.append(f"rows in the order of {order[0]} ({order[1]}; --lora-layout overrules)")
    assert said == wanted
    marker = json.loads((out / FILE_NAME).read_text())
    (kept,) = marker["loras"]
    assert marker["base"].get("layout_told_by") == told
    seen = describe(base)
    assert isinstance(seen, CheckpointDescription)
    assert dict(seen.rows()).get("rows") == (f"in the order of {layout} ({told})" if told else None)
    assert seen.document()["layout_told_by"] == told
    assert (kept.get("layout"), kept.get("layout_told_by")) == (order or (None, None))
    assert verify(out, base=base, loras=[lora]).ok


def test_the_options_are_what_told(tmp_path: Path, ours: Tensors) -> None:
    base = base_of(tmp_path / "base.safetensors", ours, "raw", sign=False)
    lora = small.write(
        tmp_path / "x.safetensors", keyed(fused_factors(factors(ours), "raw"), "{}.DOWN.weight")
    )
    made = plan(base, [lora], base_layout="raw", lora_layouts=(LayoutSpec("raw"),))
    (matching,) = made.matchings
    assert made.checkpoint.row_order == RowOrder("raw", "--base-layout")
    assert matching.row_order == RowOrder("raw", "--lora-layout")
    document = plan_document(made)
    assert document["base"]["layout_told_by"] == "--base-layout"  # type: ignore[index]
    assert document["loras"][0]["layout_told_by"] == "--lora-layout"  # type: ignore[index]


def test_rows_that_mean_the_same_in_every_order_need_no_sign(tmp_path: Path, ours: Tensors) -> None:
    given = {name: one for name, one in fused_factors(factors(ours), "raw").items() if "qkv" not in name}
    lora = small.write(tmp_path / "x.safetensors", keyed(given, "{}.DOWN.weight"))
    (matching,) = plan(base_of(tmp_path / "base.safetensors", ours, "native"), [lora]).matchings
    assert matching.row_order is None


# Alpha, which the first files store nowhere


@pytest.mark.parametrize(("alpha", "scale", "source"), [(None, 1.0, "rank"), (0.75, 0.25, "option")])
def test_the_user_says_alpha(
    tmp_path: Path, ours: Tensors, alpha: float | None, scale: float, source: str
) -> None:
    given = factors(ours)
    base = base_of(tmp_path / "base.safetensors", ours, "raw")
    lora = small.write(tmp_path / "x.safetensors", keyed(given, "{}.DOWN.default.weight"))
    alphas = (AlphaSpec(alpha),) if alpha else ()
    report = fuselora.merge(base, [lora], out=tmp_path / "out", alphas=alphas)
    assert {hit.alpha.source for m in report.plan.matchings for hit in m.hits if hit.alpha} == {source}
    agree(converted(load_file(tmp_path / "out" / "base.safetensors"), "raw"), ours, given, scale)


@pytest.mark.parametrize(
    ("name", "shift", "alpha"),
    [
        ("minimax_h3_fl2v_turbo_4step_v0.1.safetensors", 12.0, 8.0),
        ("minimax_h3_fl2v_turbo_8step_v1.0_bf16.safetensors", 12.0, 8.0),
        ("minimax_h3_fl2v_turbo_8step_v1.0_comfyui_bf16.safetensors", 12.0, 8.0),
        ("minimax_h3_fl2v_lightx2v_turbo_4step_v0.1_comfy.safetensors", 12.0, 8.0),
        ("minimax_h3_fl2v_turbo_4step_v1.0_768p_bf16.safetensors", 6.0, 128.0),
        ("minimax_h3_fl2v_turbo_8step_v1.0_768p_bf16.safetensors", 6.0, 128.0),
        ("minimax_h3_ref2v_turbo_8step_v1.0_768p_bf16.safetensors", 6.0, 128.0),
    ],
)
def test_what_is_published_of_the_turbo_loras(name: str, shift: float, alpha: float) -> None:
    row = MINIMAX_H3.few_step_named(name)
    assert row is not None and (row.flow_shift, row.guidance_scale) == (shift, 1.0)
    assert row.alpha == alpha


TURBO_544, TURBO_768 = "minimax_h3_fl2v_turbo_4step_v0.1", "minimax_h3_fl2v_turbo_4step_v1.0_768p_bf16"


@pytest.mark.parametrize(
    ("name", "stored", "option", "says"),
    [
        (TURBO_544, None, None, "8 is published for LightX2V's MiniMax-H3 Turbo (544p)"),
        (TURBO_768, None, None, "128 is published for LightX2V's MiniMax-H3 Turbo (768p)"),
        (TURBO_544, None, 8.0, None),
        (TURBO_544, 1.0, None, None),
        ("style", None, None, None),
    ],
)
def test_a_published_alpha_that_the_file_does_not_store(
    tmp_path: Path, ours: Tensors, name: str, stored: float | None, option: float | None, says: str | None
) -> None:
    lora = small.write(
        tmp_path / f"{name}.safetensors",
        keyed(factors(ours), "{}.DOWN.default.weight", alpha=stored),
    )
    alphas = (AlphaSpec(option),) if option else ()
    found = plan(base_of(tmp_path / "base.safetensors", ours, "raw"), [lora], alphas=alphas).notices
    assert [notice.code for notice in found] == (["published_alpha"] if says else [])
    if says:
        alpha = says.split()[0]
        assert says in found[0].message and found[0].message.endswith(f"say --alpha {alpha}")
        assert found[0].facts["alpha"] == float(alpha)
    described = describe(lora)
    rows = [value for label, value in described.rows() if label == "alpha"]
    assert any("is published for" in value for value in rows) == (says is not None or option is not None)


def test_a_strength_stands_in_where_ranks_differ(tmp_path: Path, ours: Tensors) -> None:
    """q, k and v in one have three times the rank: one alpha would not do for all."""
    lora = keyed(fused_factors(factors(ours), "native"), "{}.DOWN.weight")
    path = small.write(tmp_path / f"{TURBO_544}.safetensors", lora)
    (notice,) = plan(base_of(tmp_path / "base.safetensors", ours, "native"), [path]).notices
    assert notice.facts["ranks"] == [RANK, 3 * RANK]
    assert notice.message.endswith(f"say a strength of {8 / RANK:g}")


def test_a_published_alpha_that_is_the_rank_is_no_matter(tmp_path: Path) -> None:
    """The published list has rank 128."""
    base = listings.sparse(tmp_path / "b.safetensors", listings.base("minimax-h3", "diffusers"))
    for name, codes in ((TURBO_544, ["published_alpha"]), (TURBO_768, [])):
        specs = listings.lora("minimax-h3.lightx2v-turbo.r128")
        lora = listings.sparse(tmp_path / f"{name}.safetensors", specs)
        assert [notice.code for notice in plan(base, [lora]).notices] == codes


def test_others_are_not_taken_for_them() -> None:
    assert MINIMAX_H3.few_step_named("minimax_h3_turbo_v4_step600_ema.safetensors") is None
    assert MINIMAX_H3.few_step_named("my_minimax_h3_fl2v_turbo_4step_v0.1_style.safetensors") is None


# At true size


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_published_list_on_each_base(tmp_path: Path, layout: Layout) -> None:
    """624 tensors; on a fused base q, k and v land on one."""
    listed = listings.base("minimax-h3", "diffusers" if layout == "diffusers" else "native")
    specs = [*listed, *([Spec("rope.inv_freq", "F32", (16,))] if layout == "raw" else [])]
    base = listings.sparse(tmp_path / "base.safetensors", specs)
    lora = listings.sparse(tmp_path / "x.safetensors", listings.lora("minimax-h3.lightx2v-turbo.r128"))
    made = plan(base, [lora])
    assert (made.checkpoint.layout, made.notices) == (layout, ())
    (matching,) = made.matchings
    used = {tensor.name for hit in matching.hits for tensor in hit.tensors}
    assert used == {tensor.name for tensor in read_header(lora).tensors} and len(used) == 624
    assert len(made.fused_steps) == (312 if layout == "diffusers" else 208)
    runs = {len(hit.rows) for hit in matching.hits if hit.base_key.endswith("qkv_proj.weight")}
    assert runs == {"diffusers": set(), "native": {1}, "raw": {56}}[layout]


def test_names_lead_to_the_native_list_and_back() -> None:
    ours, theirs = (
        {s.name: s.shape for s in listings.base("minimax-h3", x)} for x in ("diffusers", "native")
    )
    for layout in ("native", "raw"):
        assert {s.name: s.shape for s in MINIMAX_H3.spellings(ours, layout)} == theirs
        assert MINIMAX_H3.canonical_shapes(theirs, layout) == ours


def test_what_the_class_keeps_in_float32() -> None:
    for spec in listings.base("minimax-h3", "diffusers"):
        kept = any(part in spec.name for part in Model._keep_in_fp32_modules)
        assert MINIMAX_H3.keeps_float32(spec.name, "diffusers") == kept == (spec.dtype == "F32")
        native = MINIMAX_H3.translate(spec.name, "diffusers", "native")
        assert MINIMAX_H3.keeps_float32(native, "native") == kept
    assert MINIMAX_H3.keeps_float32("rope.inv_freq", "raw")


# Loaded and run


def output(model: Any) -> torch.Tensor:
    arguments = {
        "hidden_states": small.noise(1, 4, 4), "audio_hidden_states": small.noise(1, 2, 3),
        "encoder_hidden_states": small.noise(1, 3, 7), "timestep": torch.tensor([0.5]),
        "timestep_indices": torch.zeros(9, dtype=torch.long),
        "token_tags": torch.tensor([1, 1, 1, 0, 0, 0, 0, 2, 2]),
        "position_ids": torch.arange(9)[:, None].expand(9, 3), "text_indices": torch.arange(3),
        "video_indices": torch.arange(3, 7), "audio_indices": torch.arange(7, 9), "return_dict": False,
    }  # fmt: skip
    with torch.no_grad():
        video, audio = model.eval()(**arguments)
    return torch.cat((video.flatten(), audio.flatten()))


def test_the_merged_folder_loads_and_runs(tmp_path: Path, ours: Tensors) -> None:
    model = Model(**CONFIG)
    model.load_state_dict(ours)
    base, out = tmp_path / "base", tmp_path / "out"
    model.save_pretrained(base / "transformer")
    given = factors(ours)
    tensors, metadata, _ = STYLES["diffsynth"](given)
    lora = small.write(tmp_path / "x.safetensors", tensors, metadata)
    fuselora.merge(base, [lora], out=out)
    merged = Model.from_pretrained(out / "transformer")
    agree(merged.state_dict(), ours, given, 1.0)
    before, after = output(model), output(merged)
    assert after.isfinite().all() and not torch.allclose(before, after)
    assert verify(out, base=base, loras=[lora]).ok
