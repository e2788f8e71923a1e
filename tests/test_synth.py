"""Synthetic checkpoints against the published lists, and against diffusers as the one who reads them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file

from fuselora import synth
from fuselora.families.wan import WAN
from fuselora.header import read_header
from fuselora.synth import (
    SIZES,
    STYLES,
    Spec,
    base_tensors,
    lora_tensors,
    tiny,
    value_blocks,
    write_component,
    write_file,
    write_lora,
    write_native,
    write_pipeline,
    write_safetensors,
)
from tests import listings

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from fuselora.families import Layout

T2V = "wan2.2-t2v-a14b"
LISTED = sorted(name for name in SIZES if "vace" not in name)
SCRIPT = Path(__file__).parents[1] / "scripts" / "make_fixture.py"


def model_class(name: str) -> Any:
    return getattr(diffusers, str(synth.config(SIZES[name])["_class_name"]))


def q(layout: Layout = "native") -> str:
    return "blocks.0.self_attn.q" if layout == "native" else "blocks.0.attn1.to_q"


# Names and shapes


@pytest.mark.parametrize("layout", ["native", "diffusers"])
@pytest.mark.parametrize("name", LISTED)
def test_published_sizes_are_the_published_lists(name: str, layout: Layout) -> None:
    assert listings.rows(base_tensors(SIZES[name], layout)) == listings.rows(listings.base(name, layout))


@pytest.mark.parametrize("name", LISTED)
def test_config_is_the_published_one(name: str) -> None:
    published = listings.config(name)
    assert synth.config(SIZES[name]) | {"_diffusers_version": ""} == published | {"_diffusers_version": ""}


@pytest.mark.parametrize("name", ["wan2.1-vace-14b", "wan2.1-vace-1.3b"])
def test_vace_is_what_diffusers_builds(name: str) -> None:
    with torch.device("meta"):
        model = model_class(name).from_config(synth.config(SIZES[name]))
    built = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    assert {spec.name: spec.shape for spec in base_tensors(SIZES[name], "diffusers")} == built


@pytest.mark.parametrize("name", sorted(SIZES))
def test_tiny_keeps_names_and_every_difference_of_width(name: str) -> None:
    full, small = SIZES[name].with_blocks(2), tiny(name)
    assert [s.name for s in base_tensors(small)] == [s.name for s in base_tensors(full)]
    dims = listings.widths(full, small)
    wide = [n for n in dims if n >= 1280]
    assert len({dims[n] for n in wide}) == len(wide)
    assert sum(spec.n_bytes for spec in base_tensors(small)) < 1_000_000


def test_tiny_models_of_other_sizes_do_not_fit_each_other() -> None:
    assert len({tiny(name).dim for name in (T2V, "wan2.2-ti2v-5b", "wan2.1-t2v-1.3b")}) == 3


def test_mixed_keeps_what_the_model_class_keeps() -> None:
    mixed = base_tensors(tiny(T2V), "diffusers", dtype="BF16", mixed=True)
    kept = {spec.name for spec in mixed if spec.dtype == "F32"}
    assert kept == {spec.name for spec in mixed if WAN.keeps_float32(spec.name, "diffusers")}
    assert {"scale_shift_table", "blocks.1.norm2.bias"} < kept
    assert "blocks.0.attn1.norm_q.weight" not in kept
    assert {spec.dtype for spec in base_tensors(tiny(T2V), dtype="BF16")} == {"BF16"}


PUBLISHED_LORAS = [
    # style, base, list, rank, alpha, dtype
    ("comfy", T2V, "wan2.2-t2v-a14b.x2v-distill-1217.r64", 64, None, "BF16"),
    ("comfy", T2V, "wan2.2-a14b.kijai-lightning-fp16.r64", 64, 8, "F16"),
    ("lightning", T2V, "wan2.2-a14b.lightning-seko.r64", 64, 8, "F32"),
    ("comfy-extractor", "wan2.1-i2v-14b", "wan2.1-i2v-14b-480p.kijai-cfgstep.r128", 128, None, "BF16"),
    ("comfy-extractor", "wan2.2-ti2v-5b", "wan2.2-ti2v-5b.turbo.r64", 64, None, "F16"),
    ("extractor", "wan2.2-i2v-a14b", "wan2.2-i2v-a14b.x2v-distill-1022.high.r64", 64, None, "BF16"),
    ("extractor", "wan2.1-i2v-14b", "wan2.1-i2v-14b-480p.x2v-cfgstep.r64.with-diff_m", 64, None, "BF16"),
    ("trainer", "wan2.2-i2v-a14b", "wan2.2-i2v-a14b.diffusion-pipe.r32", 32, None, "BF16"),
    ("default", T2V, "wan2.2-t2v-a14b.diffsynth-default.r32", 32, None, "BF16"),
    ("kohya", T2V, "wan2.2-t2v-a14b.musubi-kohya.r32", 32, 16, "BF16"),
    ("diffusers", T2V, "wan2.2-t2v-a14b.diffusers-peft.r16", 16, 32, "BF16"),
    ("adapter", T2V, "wan2.2-t2v-a14b.peft-plain.r16", 16, 32, "F32"),
]


@pytest.mark.parametrize(("style", "base", "listing", "rank", "alpha", "dtype"), PUBLISHED_LORAS)
def test_styles_are_the_published_lists(
    style: str, base: str, listing: str, rank: int, alpha: float | None, dtype: str
) -> None:
    made = lora_tensors(SIZES[base], style=style, rank=rank, alpha=alpha, dtype=dtype)
    assert sorted(listings.rows(made)) == sorted(listings.rows(listings.lora(listing)))


def test_every_style_but_the_bare_one_is_held_against_a_published_list() -> None:
    assert {row[0] for row in PUBLISHED_LORAS} == STYLES.keys() - {"peft"}


# Checkpoints on disk


@pytest.mark.parametrize(
    "name", [T2V, "wan2.2-i2v-a14b", "wan2.1-i2v-14b", "wan2.2-ti2v-5b", "wan2.1-vace-14b"]
)
def test_a_tiny_base_loads_whole_in_diffusers(tmp_path: Path, name: str) -> None:
    size = tiny(name)
    write_component(tmp_path, base_tensors(size, "diffusers"), config=synth.config(size), shard_bytes=200_000)
    model, info = model_class(name).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    stored = {
        name: tensor for path in tmp_path.glob("*.safetensors") for name, tensor in load_file(path).items()
    }
    loaded = model.state_dict()
    assert stored.keys() == loaded.keys()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in stored.items())


def test_a_tiny_base_runs(tmp_path: Path) -> None:
    size = tiny(T2V)
    write_component(tmp_path, base_tensors(size, "diffusers"), config=synth.config(size))
    model = model_class(T2V).from_pretrained(tmp_path)
    with torch.no_grad():
        result = model(torch.ones(1, 16, 1, 4, 4), torch.tensor([500]), torch.ones(1, 3, size.text_dim))[0]
    assert result.shape == (1, 16, 1, 4, 4)
    assert 0.01 < result.std() < 100


def test_both_layouts_hold_the_same_values(tmp_path: Path) -> None:
    size = tiny("wan2.1-i2v-14b")
    native = load_file(write_file(tmp_path / "n.safetensors", size, prefix=""))
    ours = load_file(write_file(tmp_path / "d.safetensors", size, layout="diffusers", prefix=""))
    assert {WAN.translate(name, "diffusers") for name in native} == ours.keys()
    assert all(torch.equal(t, ours[WAN.translate(name, "diffusers")]) for name, t in native.items())


def test_shards_and_their_index_agree(tmp_path: Path) -> None:
    specs = base_tensors(tiny(T2V))
    write_component(tmp_path, specs, shard_bytes=60_000)
    index = json.loads((tmp_path / "diffusion_pytorch_model.safetensors.index.json").read_text())
    headers = {path.name: read_header(path) for path in tmp_path.glob("*.safetensors")}
    found = {tensor.name: name for name, header in headers.items() for tensor in header.tensors}
    assert found == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(spec.n_bytes for spec in specs)
    assert len(headers) > 3
    assert sorted(headers)[0] == f"diffusion_pytorch_model-00001-of-{len(headers):05d}.safetensors"
    for header in headers.values():
        assert header.metadata == {"format": "pt"}
        assert len(header.tensors) == 1 or sum(t.n_bytes for t in header.tensors) <= 60_000


def test_one_shard_needs_no_index(tmp_path: Path) -> None:
    write_component(tmp_path, base_tensors(tiny(T2V)), config={"a": 1})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "diffusion_pytorch_model.safetensors",
    ]


@pytest.mark.parametrize("shard_bytes", [60_000, 1_000_000])
def test_a_variant_has_the_names_diffusers_looks_for(tmp_path: Path, shard_bytes: int) -> None:
    size = tiny(T2V)
    specs = base_tensors(size, "diffusers", dtype="F16")
    write_component(tmp_path, specs, config=synth.config(size), shard_bytes=shard_bytes, variant="fp16")
    _, info = model_class(T2V).from_pretrained(tmp_path, variant="fp16", output_loading_info=True)
    assert not any(info.values())
    weights = [path.name for path in tmp_path.glob("*.safetensors*")]
    assert all("fp16" in name for name in weights)
    assert (len(weights) > 1) == (shard_bytes == 60_000)


@pytest.mark.parametrize(
    ("name", "experts", "pipeline", "boundary"),
    [
        (T2V, True, "WanPipeline", 0.875),
        ("wan2.2-i2v-a14b", True, "WanImageToVideoPipeline", 0.9),
        ("wan2.1-t2v-14b", False, "WanPipeline", None),
        ("wan2.1-vace-1.3b", False, "WanVACEPipeline", None),
    ],
)
def test_a_pipeline_loads_in_diffusers(
    tmp_path: Path, name: str, experts: bool, pipeline: str, boundary: float | None
) -> None:
    write_pipeline(tmp_path, tiny(name), experts=experts, shard_bytes=200_000)
    pipeline_class: Any = diffusers.DiffusionPipeline
    loaded = pipeline_class.from_pretrained(
        tmp_path, vae=None, text_encoder=None, tokenizer=None, image_encoder=None, image_processor=None
    )
    assert type(loaded).__name__ == pipeline
    assert loaded.config.boundary_ratio == boundary
    high = loaded.transformer.state_dict()
    assert (loaded.transformer_2 is not None) == experts
    if experts:
        low = loaded.transformer_2.state_dict()
        assert not any(torch.equal(tensor, low[key]) for key, tensor in high.items())


def test_a_pipeline_has_the_other_components(tmp_path: Path) -> None:
    write_pipeline(tmp_path, tiny("wan2.1-i2v-14b"))
    index = json.loads((tmp_path / "model_index.json").read_text())
    named = {key for key, value in index.items() if isinstance(value, list) and value[0]}
    assert named == {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert read_header(tmp_path / "text_encoder" / "model.safetensors").tensors
    assert read_header(tmp_path / "vae" / "diffusion_pytorch_model.safetensors").tensors


def test_native_experts_are_two_folders_with_other_values(tmp_path: Path) -> None:
    write_native(tmp_path, tiny(T2V), experts=True)
    high, low = (
        load_file(tmp_path / part / "diffusion_pytorch_model.safetensors")
        for part in ("high_noise_model", "low_noise_model")
    )
    assert list(high) == list(low)
    assert not any(torch.equal(tensor, low[name]) for name, tensor in high.items())
    config = json.loads((tmp_path / "low_noise_model" / "config.json").read_text())
    assert (config["_class_name"], config["model_type"], config["num_layers"]) == ("WanModel", "t2v", 2)


def test_one_native_model_lies_beside_its_other_files(tmp_path: Path) -> None:
    write_native(tmp_path, tiny("wan2.2-ti2v-5b"))
    names = {path.name for path in tmp_path.iterdir()}
    assert {"config.json", "diffusion_pytorch_model.safetensors", "Wan2.1_VAE.pth"} < names


def test_native_vace_config() -> None:
    config = synth.native_config(SIZES["wan2.1-vace-14b"])
    assert (config["model_type"], config["vace_layers"]) == ("vace", [0, 5, 10, 15, 20, 25, 30, 35])


def test_one_file_carries_the_prefix(tmp_path: Path) -> None:
    header = read_header(write_file(tmp_path / "model.safetensors", tiny(T2V)))
    assert all(tensor.name.startswith("model.diffusion_model.") for tensor in header.tensors)
    assert {tensor.dtype for tensor in header.tensors} == {"BF16"}
    assert not header.metadata


# LoRAs on disk


def fits(loras: Iterable[Spec], base: Iterable[Spec]) -> int:
    """Count the pairs, after checking that every tensor has a home in ``base`` and its shape."""
    shapes = {spec.name.replace(".", "_"): spec.shape for spec in base}
    specs = {spec.name: spec for spec in loras}
    pairs = 0
    for name, spec in specs.items():
        stem, _, part = name.partition(".lora_")
        if part.startswith(("up", "B")):
            down = specs[name.replace("lora_up", "lora_down").replace("lora_B", "lora_A")]
            assert down.shape[0] == spec.shape[1], name
            assert shapes[home(stem, "weight")] == (spec.shape[0], down.shape[1]), name
            pairs += 1
        elif not part and not name.endswith(".alpha"):
            stem, _, part = name.rpartition(".")
            leaf = {"diff": "weight", "diff_b": "bias", "diff_m": "modulation"}[part]
            assert shapes[home(stem, leaf)] == spec.shape, name
    return pairs


def home(stem: str, leaf: str) -> str:
    for prefix in ("diffusion_model.", "lora_unet_", "transformer.", "base_model.model."):
        stem = stem.removeprefix(prefix)
    return f"{stem}.{leaf}".replace(".", "_")


@pytest.mark.parametrize("style", sorted(STYLES))
@pytest.mark.parametrize("base", [T2V, "wan2.1-i2v-14b", "wan2.1-vace-14b"])
def test_every_style_fits_its_base(style: str, base: str) -> None:
    size = tiny(base)
    tensors = lora_tensors(size, style=style, rank=3, alpha=6, diffs=True)
    assert fits(tensors, base_tensors(size, STYLES[style].layout)) > 15
    assert any(spec.name.endswith("diff_b") for spec in tensors)


@pytest.mark.parametrize("style", sorted(STYLES))
def test_every_style_writes_what_it_says(tmp_path: Path, style: str) -> None:
    said = {"rank": 3, "alpha": 6.0, "dtype": "F16"}
    path = write_lora(tmp_path / "lora", tiny(T2V), style=style, metadata={"by": "test"}, **said)  # type: ignore[arg-type]
    weights = path / "adapter_model.safetensors" if path.is_dir() else path
    header = read_header(weights)
    found = [(tensor.name, tensor.dtype, tensor.shape) for tensor in header.tensors]
    expected = lora_tensors(tiny(T2V), style=style, **said)  # type: ignore[arg-type]
    assert sorted(found) == sorted(listings.rows(expected))
    assert header.metadata["by"] == "test"
    assert load_file(weights).keys() == {name for name, _, _ in found}


def test_alpha_is_stored_where_the_style_keeps_it(tmp_path: Path) -> None:
    def written(style: str, **said: Any) -> Path:
        return write_lora(tmp_path / style, tiny(T2V), style=style, rank=4, **said)

    lightning = load_file(written("lightning", alpha=8))[f"diffusion_model.{q()}.alpha"]
    assert (lightning.dtype, lightning.shape, lightning.item()) == (torch.int64, (), 8)
    comfy = load_file(written("comfy", alpha=2.5))[f"diffusion_model.{q()}.alpha"]
    assert (comfy.dtype, comfy.item()) == (torch.bfloat16, 2.5)
    kohya = written("kohya")
    assert load_file(kohya)["lora_unet_blocks_0_self_attn_q.alpha"].item() == 4
    assert read_header(kohya).metadata["ss_network_alpha"] == "4.0"
    header = json.loads(read_header(written("diffusers", alpha=8)).metadata["lora_adapter_metadata"])
    assert (header["transformer.r"], header["transformer.lora_alpha"]) == (4, 8)
    assert "ffn.net.2" not in header["transformer.target_modules"]
    adapter = json.loads((written("adapter", alpha=8) / "adapter_config.json").read_text())
    assert (adapter["r"], adapter["lora_alpha"]) == (4, 8)
    assert {"attn1.to_q", "ffn.net.2"} < set(adapter["target_modules"])
    assert not any(name.endswith("alpha") for name in load_file(written("trainer")))


def test_the_other_expert_of_the_diffusers_style(tmp_path: Path) -> None:
    path = write_lora(tmp_path / "lora", tiny(T2V), style="diffusers", prefix="transformer_2.")
    header = read_header(path)
    assert all(tensor.name.startswith("transformer_2.blocks.") for tensor in header.tensors)
    assert "transformer_2.lora_alpha" in json.loads(header.metadata["lora_adapter_metadata"])


@pytest.mark.parametrize("alpha", [None, 0.5, 32])
def test_a_delta_is_about_a_tenth_of_the_weight(tmp_path: Path, alpha: float | None) -> None:
    size = replace(tiny(T2V), heads=16)
    weight = load_file(write_file(tmp_path / "b", size, dtype="F32", prefix=""))[f"{q()}.weight"]
    lora = load_file(write_lora(tmp_path / "l", size, style="default", rank=8, alpha=alpha, dtype="F32"))
    up, down = (lora[f"{q()}.lora_{side}.default.weight"] for side in "BA")
    delta = (1 if alpha is None else alpha / 8) * up @ down
    assert 0.08 < delta.std() / weight.std() < 0.12


def test_one_lora_has_the_same_factors_in_every_style(tmp_path: Path) -> None:
    found = []
    for style, how in STYLES.items():
        path = write_lora(tmp_path / style, tiny(T2V), style=style, rank=4, alpha=2, dtype="F32")
        tensors = load_file(path / "adapter_model.safetensors" if path.is_dir() else path)
        module = q(how.layout).replace(".", "_") if how.flat else q(how.layout)
        name = f"{how.prefix}{module}"
        found.append((tensors[f"{name}.{how.down}.weight"], tensors[f"{name}.{how.up}.weight"]))
    assert all(torch.equal(down, found[0][0]) and torch.equal(up, found[0][1]) for down, up in found)


# Values and streaming


def test_values_are_a_function_of_the_seed(tmp_path: Path) -> None:
    first, again, other = (
        write_file(tmp_path / str(n), tiny(T2V), seed=seed) for n, seed in enumerate((1, 1, 2))
    )
    assert first.read_bytes() == again.read_bytes()
    assert first.read_bytes() != other.read_bytes()


@pytest.mark.parametrize("dtype", sorted(synth.TORCH_DTYPES))
def test_every_dtype_is_written_as_itself(tmp_path: Path, dtype: str) -> None:
    path = write_safetensors(tmp_path / "one", [Spec("a", dtype, (3, 5), mean=2.0), Spec("b", dtype, (0, 4))])
    found = load_file(path)
    assert str(found["a"].dtype) == f"torch.{synth.TORCH_DTYPES[dtype]}"
    assert found["a"].float().eq(2).all()
    assert found["b"].shape == (0, 4)


def test_data_starts_anywhere_as_in_published_files(tmp_path: Path) -> None:
    header = read_header(write_file(tmp_path / "model", tiny(T2V)))
    assert header.data_start % 8 == 0
    assert header.data_start % 4096 != 0


def test_a_full_width_block_streams() -> None:
    specs = base_tensors(SIZES[T2V].with_blocks(1), dtype="BF16")
    assert sum(spec.n_bytes for spec in specs) > 1_000_000_000
    for spec in specs:
        sizes = [block.nbytes for block in value_blocks(spec, 0, repeat=True)]
        assert max(sizes) <= 2 * synth.BLOCK_ELEMENTS
        assert sum(sizes) == spec.n_bytes


def test_blocks_are_written_as_they_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, mib = tmp_path / "big", 1 << 20
    on_disk = []

    def blocks(spec: Spec, seed: int, *, repeat: bool) -> Iterator[memoryview]:
        for _ in range(spec.n_bytes // mib):
            on_disk.append(path.stat().st_size)
            yield memoryview(bytes(mib))

    monkeypatch.setattr(synth, "value_blocks", blocks)
    write_safetensors(path, [Spec("a", "U8", (8, mib))])
    assert all(size >= (number - 1) * mib for number, size in enumerate(on_disk))
    assert read_header(path).tensors[0].n_bytes == 8 * mib


def test_noise_goes_on_and_repeat_repeats() -> None:
    spec = Spec("a", "F32", (2 * synth.BLOCK_ELEMENTS + 5,), std=1.0)
    fresh = [bytes(block) for block in value_blocks(spec, 0)]
    again = [bytes(block) for block in value_blocks(spec, 0, repeat=True)]
    assert [len(block) for block in fresh] == [len(block) for block in again]
    assert len(set(fresh)) == 3
    assert again == [fresh[0], fresh[0], fresh[0][:20]]


def test_a_hole_has_the_true_size_and_takes_no_room(tmp_path: Path) -> None:
    write_pipeline(tmp_path, SIZES[T2V], experts=True, fill="hole")
    shards = list(tmp_path.glob("transformer*/*.safetensors"))
    assert len(shards) == 24
    tensors = [tensor for path in shards for tensor in read_header(path).tensors]
    assert sum(tensor.n_bytes for tensor in tensors) == 2 * 4 * 14_288_491_584  # parameters
    assert sum(path.stat().st_blocks * 512 for path in shards) < 1_000_000


# The lists that tests are built on


def test_every_list_is_in_the_index() -> None:
    bases = {f"{name}.{layout}" for name in LISTED for layout in ("native", "diffusers")}
    files = {path.name.removesuffix(".tsv.gz") for path in listings.LISTINGS.glob("*.tsv.gz")}
    assert files == bases | listings.index().keys()
    assert len(listings.index()) == 28


def test_a_sparse_list_reads_back(tmp_path: Path) -> None:
    specs = listings.lora("wan2.1-t2v-14b.pusa.r512")
    path = listings.sparse(tmp_path / "pusa.safetensors", specs, {"a": "b"})
    header = read_header(path)
    assert sorted((t.name, t.dtype, t.shape) for t in header.tensors) == sorted(listings.rows(specs))
    assert header.metadata == {"a": "b"}
    assert path.stat().st_size > 4_900_000_000
    assert path.stat().st_blocks * 512 < 1_000_000


@pytest.mark.parametrize("name", sorted(listings.index()))
def test_a_tiny_lora_fits_its_tiny_base(tmp_path: Path, name: str) -> None:
    entry = listings.index()[name]
    path = listings.tiny_lora(tmp_path / "lora", name)
    weights = path / "adapter_model.safetensors" if entry.peft_config else path
    header = read_header(weights)
    specs = [Spec(tensor.name, tensor.dtype, tensor.shape) for tensor in header.tensors]
    pairs = fits(specs, base_tensors(tiny(entry.base), entry.layout))
    assert pairs >= (10 if "causvid-v1.5" in name else 16)
    assert {spec.dtype for spec in specs} == {spec.dtype for spec in listings.lora(name)}
    assert all(tensor.isfinite().all() and tensor.any() for tensor in load_file(weights).values())
    assert weights.stat().st_size < 400_000


def test_a_tiny_lora_keeps_missing_blocks_missing(tmp_path: Path) -> None:
    path = listings.tiny_lora(tmp_path / "lora", "wan2.1-t2v-14b.causvid-v1.5.r32", blocks=3)
    names = [tensor.name for tensor in read_header(path).tensors]
    assert {name.split(".")[2] for name in names if ".blocks." in name} == {"1", "2"}
    assert any("head.head" in name for name in names)


def test_a_tiny_lora_keeps_alpha_and_says_its_own_rank(tmp_path: Path) -> None:
    seko = load_file(listings.tiny_lora(tmp_path / "seko", "wan2.2-a14b.lightning-seko.r64"))
    assert seko[f"diffusion_model.{q()}.alpha"].item() == 8
    assert seko[f"diffusion_model.{q()}.lora_down.weight"].shape == (4, tiny(T2V).dim)
    kohya = listings.tiny_lora(tmp_path / "kohya", "wan2.2-t2v-a14b.musubi-kohya.r32")
    assert read_header(kohya).metadata["ss_network_dim"] == "2"
    theirs = listings.tiny_lora(tmp_path / "theirs", "wan2.2-t2v-a14b.diffusers-peft.r16", divisor=8)
    said = json.loads(read_header(theirs).metadata["lora_adapter_metadata"])
    assert (said["transformer.r"], said["transformer.lora_alpha"]) == (2, 32)
    peft = listings.tiny_lora(tmp_path / "peft", "wan2.2-t2v-a14b.peft-plain.r16")
    config = json.loads((peft / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (1, 32)


# The script


def test_the_script_writes_a_pair_and_its_loras(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path), "--experts", "--shard-bytes", "100000", "--mixed"]
    command += ["--dtype", "BF16", "--lora", "lightning", "--lora", "adapter", "--alpha", "8"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    loras = [Path(line).name for line in printed[1:]]
    assert printed[0] == str(tmp_path / "base")
    assert loras == [
        "lightning.high.safetensors",
        "lightning.low.safetensors",
        "adapter.high",
        "adapter.low",
    ]
    high, low = (load_file(tmp_path / "loras" / name) for name in loras[:2])
    assert high.keys() == low.keys()
    assert not torch.equal(*(lora[f"diffusion_model.{q()}.lora_up.weight"] for lora in (high, low)))
    shards = list((tmp_path / "base" / "transformer_2").glob("*.safetensors"))
    assert len(shards) > 1
    assert {tensor.dtype for path in shards for tensor in read_header(path).tensors} == {"BF16", "F32"}
