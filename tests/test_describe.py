"""inspect: what a LoRA, a checkpoint and a fused folder are said to be, from headers alone."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fuselora import synth
from fuselora.describe import (
    CheckpointDescription,
    FusedDescription,
    LoraDescription,
    describe,
)
from fuselora.description import CUT, cut, ranges
from fuselora.errors import CheckpointError, FormatError, InputError, MarkerError
from fuselora.families import Layout
from fuselora.header import read_header
from fuselora.kinds import KINDS
from fuselora.lora.adapter import is_lora
from fuselora.lora.grammar import is_lora_key, parse_key
from fuselora.marker import FILE_NAME, FINGERPRINT_KEY, JOURNAL_NAME
from fuselora.pipeline import merge
from fuselora.synth import Spec, write_safetensors
from tests import listings
from tests.fused_pair import FUSED, SIZE, Pair, edit_marker, shard_of, write_pair
from tests.inputs import PEFT, pair, tensor

Q = "blocks.0.self_attn.q"
T2V, T2V_22 = "Wan2.1-T2V-14B", "Wan2.2-T2V-A14B (one expert)"
I2V, I2V_22 = "Wan2.1-I2V-14B", "Wan2.2-I2V-A14B (one expert)"
VACE = "Wan2.1-VACE-14B"
# Pairs in blocks fit every model of the width.
ANY_14B = (T2V, T2V_22, I2V, I2V_22, VACE)
IMAGE_BRANCH = {"image branch of Wan2.1, which this base does not have": (I2V_22,)}
SCALARS = {"I64": "<q", "F32": "<f", "F16": "<e"}
NO_DIFFS = {
    "wan2.1-t2v-14b.pusa.r512",
    "wan2.2-a14b.kijai-lightning-fp16.r64",
    "wan2.2-a14b.lightning-seko.r64",
    "wan2.2-i2v-a14b.diffusion-pipe.r32",
    "wan2.2-t2v-a14b.diffsynth-default.r32",
    "wan2.2-t2v-a14b.diffusers-peft.r16",
    "wan2.2-t2v-a14b.musubi-kohya.r32",
    "wan2.2-t2v-a14b.peft-plain.r16",
    "wan2.2-t2v-a14b.x2v-distill-1217.r64",
}
LORA_A = {
    "wan2.2-i2v-a14b.diffusion-pipe.r32",
    "wan2.2-t2v-a14b.diffsynth-default.r32",
    "wan2.2-t2v-a14b.diffusers-peft.r16",
    "wan2.2-t2v-a14b.peft-plain.r16",
}
PREFIXES = {
    "wan2.2-t2v-a14b.diffsynth-default.r32": "",
    "wan2.2-t2v-a14b.diffusers-peft.r16": "transformer.",
    "wan2.2-t2v-a14b.musubi-kohya.r32": "lora_unet_",
    "wan2.2-t2v-a14b.peft-plain.r16": "base_model.model.",
}
ALPHA_SOURCES = {
    "wan2.2-a14b.kijai-lightning-fp16.r64": "tensor",
    "wan2.2-a14b.lightning-seko.r64": "tensor",
    "wan2.2-t2v-a14b.diffusers-peft.r16": "metadata",
    "wan2.2-t2v-a14b.musubi-kohya.r32": "tensor",
    "wan2.2-t2v-a14b.peft-plain.r16": "adapter_config",
}
TOLD_BY_CHANNELS = {
    "wan2.1-t2v-14b.x2v-distill.r64": (T2V, T2V_22, VACE),
    "wan2.2-i2v-a14b.x2v-distill-1022.high.r64": (I2V, I2V_22),
}
BASES = ("wan2.1-i2v-14b", "wan2.1-t2v-1.3b", "wan2.1-t2v-14b", "wan2.2-i2v-a14b", "wan2.2-t2v-a14b",
         "wan2.2-ti2v-5b")  # fmt: skip


def lora(path: Path) -> LoraDescription:
    found = describe(path)
    assert isinstance(found, LoraDescription)
    return found


def checkpoint(path: Path) -> CheckpointDescription:
    found = describe(path)
    assert isinstance(found, CheckpointDescription)
    return found


def fused(path: Path) -> FusedDescription:
    found = describe(path)
    assert isinstance(found, FusedDescription)
    return found


def described(folder: Path, *specs: Spec, **options: Any) -> LoraDescription:
    return lora(write_safetensors(folder / "x.safetensors", specs, **options))


def rows(found: LoraDescription | CheckpointDescription | FusedDescription) -> dict[str, list[str]]:
    """The table as labels -> values, once it and the document have proved printable."""
    json.dumps(found.document(), allow_nan=False)
    assert "\n" not in found.title
    table: dict[str, list[str]] = {}
    for label, value in found.rows():
        table.setdefault(label, []).append(value)
    return table


Shelf = Callable[[str], LoraDescription]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    """Published LoRAs by name, each written and described once."""
    return cache(lambda name: lora(published(tmp_path_factory.mktemp("lora"), name)))


def published(folder: Path, name: str) -> Path:
    """The LoRA ``name`` at true size under a name that says nothing, its alphas with their values."""
    entry = listings.index()[name]
    path = folder / "adapter" if entry.peft_config else folder / "x.safetensors"
    weights = path / "adapter_model.safetensors" if entry.peft_config else path
    listings.sparse(weights, listings.lora(name), entry.metadata)
    if entry.peft_config:
        (path / "adapter_config.json").write_text(json.dumps(entry.peft_config))
    header = read_header(weights)
    with weights.open("r+b") as stream:
        for info in header.tensors:
            if info.name.endswith(".alpha"):
                assert entry.alpha is not None
                stream.seek(header.data_start + info.start)
                stream.write(scalar(entry.alpha, info.dtype))
    return path


def scalar(value: float, dtype: str) -> bytes:
    if dtype == "BF16":
        return struct.pack("<f", value)[2:]
    return struct.pack(SCALARS[dtype], int(value) if dtype == "I64" else value)


# Published LoRAs, without a word from their file names


@pytest.mark.parametrize("name", sorted(listings.wan()))
def test_a_published_lora(shelf: Shelf, name: str) -> None:
    entry, found = listings.index()[name], shelf(name)
    assert (found.target.family, found.target.layout) == ("wan", entry.layout)
    assert set(found.dialects) == dialects(name)
    assert set(found.prefixes) == {PREFIXES.get(name, "diffusion_model.")}
    assert found.flattened == (name == "wan2.2-t2v-a14b.musubi-kohya.r32")
    assert max(found.ranks) == entry.rank
    assert {r for r in found.ranks if r < entry.rank} <= {64}  # the head has 64 rows
    assert found.n_tensors == len(listings.lora(name)) == accounted(found)
    assert found.faults == ()
    assert found.metadata == (entry.metadata or {})
    assert found.target.models == candidates(name, entry.base)
    assert entry.base in {model.removesuffix(" (one expert)").lower() for model in found.target.models}
    assert rows(found)["could be for"] == [" or ".join(found.target.models)]


@pytest.mark.parametrize("name", sorted(listings.wan()))
def test_a_published_lora_s_alpha(shelf: Shelf, name: str) -> None:
    entry, found = listings.index()[name], shelf(name)
    assert sum(scale.modules for scale in found.scales) == found.kinds["pairs"] == sum(found.ranks.values())
    for scale in found.scales:
        assert scale.source == ALPHA_SOURCES.get(name, "rank")
        assert scale.alpha == (scale.rank if entry.alpha is None else entry.alpha)
        assert scale.scale == scale.alpha / scale.rank


@pytest.mark.parametrize("name", sorted(listings.wan()))
def test_a_published_lora_s_blocks_and_image_branch(shelf: Shelf, name: str) -> None:
    found = shelf(name).target
    n_blocks = 30 if "5b" in name else 40
    first = 1 if "causvid-v1.5" in name else 0
    assert found.n_blocks == n_blocks
    assert found.blocks == tuple(range(first, n_blocks))
    assert found.branches == {"image": has_image_branch(listings.index()[name].base), "vace": False}
    assert found.also == (IMAGE_BRANCH if found.branches["image"] else {})
    assert found.sizes["dim"] == (3072 if "5b" in name else 5120,)


def dialects(name: str) -> set[str]:
    return {"lora_A/B" if name in LORA_A else "lora_down/up", *(() if name in NO_DIFFS else ("diff",))}


def accounted(found: LoraDescription) -> int:
    kinds = found.kinds
    assert kinds["half_pairs"] == kinds["orphan_alpha"] == 0
    return 2 * kinds["pairs"] + sum(kinds[kind] for kind in ("diff", "diff_b", "diff_m", "alpha"))


def candidates(name: str, base: str) -> tuple[str, ...]:
    if base == "wan2.2-ti2v-5b":
        return ("Wan2.2-TI2V-5B",)
    return (I2V,) if has_image_branch(base) else TOLD_BY_CHANNELS.get(name, ANY_14B)


def has_image_branch(base: str) -> bool:
    return base == "wan2.1-i2v-14b"


def test_the_table_of_a_published_lora(shelf: Shelf) -> None:
    found = shelf("wan2.1-t2v-14b.causvid-v1.5.r32")
    table = rows(found)
    assert table["family"] == ["wan, native names"]
    assert table["blocks"] == ["1-39 of 40, without 0"]
    assert table["rank"] == ["32 (396 modules)"]
    assert table["alpha"] == ["32 (none stored: rank used), rank 32: scale 1, 396 modules"]
    assert table["modules"] == ["396 pairs, 195 diff, 436 diff_b"]
    assert table["tensors"] == ["1423, float16"]
    assert table["file"] == [f"x.safetensors, {found.path.stat().st_size:,} bytes"]
    (inside,) = table["in blocks.*"]
    assert inside.startswith("39 each: ") and "self_attn.norm_q" in inside
    assert "head.head" in table["elsewhere"][0]
    assert table["not read"] == ["finite values, all-zero modules"]


def test_the_document_of_a_published_lora(shelf: Shelf) -> None:
    document = shelf("wan2.2-a14b.lightning-seko.r64").document()
    assert document["kind"] == "lora"
    assert document["ranks"] == {"64": 400}
    assert document["scales"] == [
        {"alpha": 8.0, "rank": 64, "scale": 0.125, "source": "tensor", "modules": 400}
    ]
    assert document["dtypes"] == {"float32": 1_226_833_920, "I64": 3200}
    assert document["blocks"] == {"covered": list(range(40)), "of": 40}
    counted = {kind.counted for kind in KINDS}
    assert document["modules"] == {
        **dict.fromkeys(counted, 0), "pairs": 400, "alpha": 400, "orphan_alpha": 0, "half_pairs": 0,
    }  # fmt: skip
    assert {"pairs", "diff", "diff_b", "diff_m", "replace"} <= counted


def test_an_adapter_folder(shelf: Shelf) -> None:
    found = shelf("wan2.2-t2v-a14b.peft-plain.r16")
    assert (found.file, found.config) == ("adapter_model.safetensors", "adapter_config.json")
    assert found.title == f"{found.path}: a LoRA for wan, as an adapter folder"
    assert lora(found.path / "adapter_model.safetensors").scales == found.scales


def test_long_metadata_is_cut_in_the_table_only(shelf: Shelf) -> None:
    name = "wan2.2-t2v-a14b.diffusers-peft.r16"
    found = shelf(name)
    document: Any = found.document()
    assert document["metadata"] == listings.index()[name].metadata
    (value,) = rows(found)["metadata lora_adapter_metadata"]
    whole = document["metadata"]["lora_adapter_metadata"]
    assert value.endswith(f"... ({len(whole)} characters)") and len(value) < CUT + 30


# Names and sizes


def test_the_module_of_a_diff_m_is_counted_by_its_tensor(shelf: Shelf) -> None:
    found = shelf("wan2.1-i2v-14b-480p.x2v-cfgstep.r64.with-diff_m")
    assert found.places["blocks.*.modulation"] == 40
    assert found.places["head.modulation"] == 1
    assert found.places["time_embedding.0"] == 1


@pytest.mark.parametrize(
    ("module", "layout", "place"),
    [
        ("lora_unet_blocks_3_self_attn_q", "native", "blocks.*.self_attn.q"),
        ("lora_unet_blocks_3_attn2_to_out_0", "diffusers", "blocks.*.attn2.to_out.0"),
        ("lora_transformer_blocks_3_ffn_net_0_proj", "diffusers", "blocks.*.ffn.net.0.proj"),
        ("model.diffusion_model.blocks.3.ffn.0", "native", "blocks.*.ffn.0"),
        ("base_model.model.transformer.blocks.3.attn1.to_k", "diffusers", "blocks.*.attn1.to_k"),
    ],
)
def test_names_are_read_without_prefix_and_unflattened_by_the_family(
    tmp_path: Path, module: str, layout: Layout, place: str
) -> None:
    found = described(tmp_path, *pair(module, 5120, 5120))
    assert (found.target.family, found.target.layout) == ("wan", layout)
    assert dict(found.places) == {place: 1}
    assert found.target.blocks == (3,)


@pytest.mark.parametrize("module", ["encoder.0.attn.to_q", "lora_unet_stages_4_1_proj_in"])
def test_a_lora_of_an_unknown_family(tmp_path: Path, module: str) -> None:
    found = described(tmp_path, *pair(module, alpha=1))
    assert found.target.family is None
    assert found.document()["models"] == []
    assert found.title.endswith(": a LoRA for no known family")
    assert rows(found)["family"] == ["unknown"]
    assert found.scales[0].scale == 0.5


@pytest.mark.parametrize(
    ("out", "into", "models"),
    [
        (1536, 1536, ("Wan2.1-T2V-1.3B", "Wan2.1-VACE-1.3B")),
        (3072, 3072, ("Wan2.2-TI2V-5B",)),
        (5120, 5120, ANY_14B),
        (4096, 4096, ()),
    ],
)
def test_the_width_of_one_pair_narrows_the_models(
    tmp_path: Path, out: int, into: int, models: tuple[str, ...]
) -> None:
    found = described(tmp_path, *pair("blocks.0.self_attn.q", out, into))
    assert found.target.models == models
    said = rows(found)["could be for"]
    assert said == [" or ".join(models) or "no published model of this size"]


def test_a_block_that_only_larger_models_have_narrows_them(tmp_path: Path) -> None:
    found = described(tmp_path, tensor("blocks.30.cross_attn.norm_q.diff", 8), *pair("blocks.2.ffn.1"))
    assert found.target.models == ANY_14B
    found = described(tmp_path, tensor("blocks.40.cross_attn.norm_q.diff", 8))
    assert found.target.models == ()
    assert rows(found)["blocks"] == ["40"]


def test_sizes_that_contradict_each_other_fit_nothing(tmp_path: Path) -> None:
    specs = [*pair("blocks.0.self_attn.q", 5120, 5120), *pair("blocks.0.ffn.0", 8960, 1536)]
    found = described(tmp_path, *specs)
    assert found.target.sizes == {"dim": (1536, 5120)}
    assert found.target.models == ()


def test_vace_blocks_are_for_vace_models(tmp_path: Path) -> None:
    found = described(tmp_path, *pair("vace_blocks.0.self_attn.q", 1536, 1536))
    assert found.target.models == ("Wan2.1-VACE-1.3B",)
    assert found.target.branches == {"image": False, "vace": True}
    assert rows(found)["blocks"] == ["none"]


def test_a_file_for_both_experts_is_for_the_models_that_have_two(tmp_path: Path) -> None:
    specs = [
        spec
        for prefix in ("transformer.", "transformer_2.")
        for spec in pair(f"{prefix}blocks.0.attn1.to_q", 5120, 5120, style=PEFT)
    ]
    found = described(tmp_path, *specs)
    assert found.named_components == ("transformer", "transformer_2")
    assert found.target.models == ("Wan2.2-T2V-A14B", "Wan2.2-I2V-A14B")
    assert rows(found)["component"] == ["transformer and transformer_2, by its keys"]


@pytest.mark.parametrize(
    ("name", "expert"),
    [("Wan_HIGH_fp16.safetensors", ("high",)), ("low_noise_model.safetensors", ("low",)),
     ("high_rank.safetensors", ())],
)  # fmt: skip
def test_an_expert_in_the_file_s_name_is_a_hint(tmp_path: Path, name: str, expert: tuple[str, ...]) -> None:
    found = lora(write_safetensors(tmp_path / name, pair(Q)))
    assert found.named_experts == expert
    assert rows(found).get("expert") == ([f"{expert[0]} noise, by its name"] if expert else None)


def test_an_adapter_folder_s_own_name_counts_from_inside_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "low_noise"
    write_safetensors(folder / "adapter_model.safetensors", pair(Q, style=PEFT))
    monkeypatch.chdir(folder)
    assert lora(Path()).named_experts == ("low",)


# Parts, alphas and faults


def test_several_ranks_alphas_and_sources(tmp_path: Path) -> None:
    specs = [
        *pair("blocks.0.ffn.0", rank=4, alpha=2),
        *pair("blocks.1.ffn.0", rank=2, alpha=2),
        *pair("blocks.2.ffn.0", rank=4, alpha=2),
        *pair("blocks.3.ffn.0", rank=4),
    ]
    found = described(tmp_path, *specs, metadata={"lora_alpha": "12"})
    said = [(s.alpha, s.rank, s.scale, s.source, s.modules) for s in found.scales]
    assert said == [(2, 2, 1, "tensor", 1), (2, 4, 0.5, "tensor", 2), (12, 4, 3, "metadata", 1)]
    table = rows(found)
    assert table["rank"] == ["2 (1 module), 4 (3 modules)"]
    assert table["alpha"][2] == "12 (the file's metadata), rank 4: scale 3, 1 module"


def test_rslora_and_patterns_of_a_config(tmp_path: Path) -> None:
    write_safetensors(
        tmp_path / "adapter_model.safetensors",
        [*pair("base_model.model.l3", rank=4, style=PEFT), *pair("base_model.model.l7", rank=4, style=PEFT)],
    )
    config = {"r": 4, "lora_alpha": 8, "use_rslora": True, "alpha_pattern": {"l3": 6}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    said = [(s.alpha, s.scale, s.source) for s in lora(tmp_path).scales]
    assert said == [(6, 3, "adapter_config"), (8, 4, "adapter_config")]


def test_many_ranks_and_scales_are_summed_up_in_the_table(tmp_path: Path) -> None:
    specs = [spec for n in range(1, 10) for spec in pair(f"blocks.{n}.ffn.0", rank=n)]
    table = rows(described(tmp_path, *specs))
    assert table["rank"] == ["1 to 9, 9 different ones"]
    assert table["alpha"][-1] == "... and 3 more" and len(table["alpha"]) == 7


def test_an_alpha_that_is_no_number_leaves_no_scale(tmp_path: Path) -> None:
    found = described(tmp_path, *pair("blocks.0.ffn.0", alpha=float("nan")), *pair("blocks.1.ffn.0", alpha=1))
    assert [scale.modules for scale in found.scales] == [1]
    assert [fault.kind for fault in found.faults] == ["alpha"]
    assert "blocks.0.ffn.0.alpha" in rows(found)["fault"][0]


def test_metadata_that_is_no_number_is_a_fault(tmp_path: Path) -> None:
    found = described(tmp_path, *pair(Q), metadata={"alpha": "abc"})
    assert found.scales == ()
    assert rows(found)["fault"] == ["the file's metadata: alpha 'abc' is not a number"]
    assert rows(found)["metadata alpha"] == ["abc"]


def test_orphan_alphas_and_half_pairs_are_counted(tmp_path: Path) -> None:
    half = pair("blocks.0.ffn.0")[0]
    found = described(tmp_path, half, tensor("blocks.1.ffn.0.alpha"), *pair("blocks.2.ffn.0", alpha=3))
    kinds = {kind: count for kind, count in found.kinds.items() if count}
    assert kinds == {"pairs": 1, "alpha": 2, "orphan_alpha": 1, "half_pairs": 1}
    assert rows(found)["fault"] == ["blocks.0.ffn.0 has no up factor"]
    assert found.target.blocks == (0, 1, 2)


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        (("oft_diag",), "OFT as it was saved before 2024 (oft_diag, oft_r)"),
        (("scalar",), "a trained scale of its module (use_scalar)"),
    ],
)
def test_a_kind_that_cannot_be_fused_is_named(tmp_path: Path, keys: tuple[str, ...], kind: str) -> None:
    stem = "lora_unet_blocks_7_self_attn_q"
    found = described(tmp_path, *(tensor(f"{stem}.{key}", 2, 2) for key in keys))
    assert dict(found.unfused) == {kind: len(keys)}
    tensors = f"{len(keys)} tensor{'s' if len(keys) > 1 else ''}"
    assert rows(found)["not supported"] == [f"{kind} ({tensors})"]
    assert [fault.kind for fault in found.faults] == ["unsupported"] * len(keys)
    assert (found.target.family, found.target.blocks) == ("wan", (7,))


def test_dora_is_a_pair_with_a_magnitude(tmp_path: Path) -> None:
    specs = [*pair(Q, style=PEFT), tensor(f"{Q}.lora_magnitude_vector", 4)]
    found = described(tmp_path, *specs)
    assert dict(found.unfused) == {}
    assert found.faults == ()
    assert found.kinds["pairs"] == 1


def test_faults_of_one_sort_are_one_row(tmp_path: Path) -> None:
    specs = [spec for n in range(5) for spec in pair(f"blocks.{n}.ffn.0")[:1]]
    found = described(tmp_path, *specs, *pair("blocks.5.ffn.0.a" + "x" * 900)[:1])
    (row,) = rows(found)["fault"]
    assert row == "blocks.0.ffn.0 has no up factor ... and 5 more of this kind"
    document: Any = found.document()
    assert len(document["faults"]) == 6


def test_ambiguous_adapters_and_a_config_that_would_be_ignored(tmp_path: Path) -> None:
    specs = [spec for n in ("style", "char") for spec in pair(Q, style=(f"lora_A.{n}", f"lora_B.{n}"))]
    write_safetensors(tmp_path / "adapter_model.safetensors", specs)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"lora_alpha": 4, "use_dora": True}))
    found = lora(tmp_path)
    assert found.adapter_names == ("char", "style")
    assert {fault.kind for fault in found.faults} == {"ambiguous", "config"}
    assert rows(found)["adapter name"] == ["char, style"]


@pytest.mark.parametrize("rank_shape", [(), (4,), (0, 4)])
def test_factors_without_a_rank_are_faults_and_no_crash(tmp_path: Path, rank_shape: tuple[int, ...]) -> None:
    specs = [tensor(f"{Q}.lora_down.weight", *rank_shape), tensor(f"{Q}.lora_up.weight", 4, 0)]
    found = described(tmp_path, *specs)
    assert found.faults and found.scales == () and dict(found.ranks) == {}
    rows(found)


def test_a_number_too_long_to_be_a_block(tmp_path: Path) -> None:
    found = described(
        tmp_path,
        *pair(f"blocks.{'9' * 900}.self_attn.q"),
        *pair("blocks.1.self_attn.q"),
        *pair("blocks.1.self_attn.k"),
    )
    assert found.target.blocks == (1,)


# LoRA or not


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([], False),
        (["a.weight", "b.bias", "c.scale"], False),
        (["a.alpha", "b.alpha"], False),
        (["a.lora_down.weight", "a.lora_up.weight"], True),
        (["a.lora_A.weight", "b.weight"], False),
        (["a.lora_A.weight", "a.lora_B.weight", "b.weight"], True),
        (["a.diff"], True),
        (["a.dora_scale", "a.alpha", "b.weight"], True),
        (["a.hada_w1_a", "decoder.alpha", "b.weight", "c.weight"], False),
    ],
)
def test_a_lora_is_told_by_most_of_its_keys(tmp_path: Path, names: list[str], said: bool) -> None:
    path = write_safetensors(tmp_path / "x.safetensors", [tensor(name, 2, 2) for name in names])
    assert is_lora(read_header(path)) is said


@pytest.mark.parametrize("key", ["x.weight", "x.bias", "x.scale"])
def test_a_plain_weight_is_the_one_kind_that_makes_no_lora(key: str) -> None:
    assert parse_key(key)
    assert not is_lora_key(key)


@pytest.mark.parametrize("layout", ["native", "diffusers"])
@pytest.mark.parametrize("name", BASES)
def test_a_published_base(tmp_path: Path, name: str, layout: Layout) -> None:
    specs = listings.base(name, layout)
    found = checkpoint(listings.sparse(tmp_path / "x.safetensors", specs))
    assert (found.container, found.family, found.layout) == ("file", "wan", layout)
    assert name in {model.removesuffix(" (one expert)").lower() for model in found.models}
    (part,) = found.components
    assert (part.n_tensors, part.n_other, part.prefix) == (len(specs), 0, "")
    assert dict(part.dtypes) == {"float32": sum(spec.n_bytes for spec in specs)}
    assert rows(found)["model"] == [" or ".join(found.models)]


# Checkpoints


def test_a_pipeline_with_two_experts(tmp_path: Path) -> None:
    base = synth.write_pipeline(
        tmp_path / "wan", synth.SIZES["wan2.2-t2v-a14b"], experts=True, dtype="BF16", mixed=True, fill="hole"
    )
    found = checkpoint(base)
    assert found.title == f"{base}: a diffusers pipeline"
    assert (found.container, found.pipeline_class) == ("pipeline", "WanPipeline")
    assert found.models == ("Wan2.2-T2V-A14B",)
    assert [(part.name, part.role) for part in found.components] == [
        ("transformer", "high_noise"),
        ("transformer_2", "low_noise"),
    ]
    part = found.components[1]
    assert part.index == "diffusion_pytorch_model.safetensors.index.json"
    assert len(part.shards) == 6 and part.config_class == "WanTransformer3DModel"
    assert part.n_bytes == sum(path.stat().st_size for path in (base / "transformer_2").glob("*.safetensors"))
    assert dict(part.dtypes) == {"bfloat16": 28_518_615_168, "float32": 116_736_000}
    assert found.fused is None
    table = rows(found)
    assert table["component"] == ["transformer (high_noise)", "transformer_2 (low_noise)"]
    assert table["  class"] == ["WanTransformer3DModel"] * 2


def test_a_native_pair_and_one_of_its_folders(tmp_path: Path) -> None:
    base = synth.write_native(
        tmp_path / "wan", synth.SIZES["wan2.2-i2v-a14b"], experts=True, dtype="BF16", fill="hole"
    )
    found = checkpoint(base)
    assert (found.container, found.layout, found.models) == ("experts", "native", ("Wan2.2-I2V-A14B",))
    assert [part.folder for part in found.components] == ["high_noise_model", "low_noise_model"]
    one = checkpoint(base / "low_noise_model")
    assert (one.container, one.models) == ("component", ("Wan2.2-I2V-A14B (one expert)",))
    assert one.named_expert == "low"
    assert rows(one)["expert"] == ["low noise, by its name"]
    assert "component" not in rows(one)


def test_a_file_for_comfyui_with_another_model_in_it(tmp_path: Path) -> None:
    prefix = "model.diffusion_model."
    specs = [*synth.base_tensors(SIZE, prefix=prefix), tensor("first_stage_model.conv.weight", 2, 2)]
    found = checkpoint(write_safetensors(tmp_path / "x.safetensors", specs))
    (part,) = found.components
    assert (part.prefix, part.n_other, part.n_tensors) == (prefix, 1, len(specs))
    table = rows(found)
    assert table["prefix"] == [prefix]
    assert table["tensors"] == [f"{len(specs)}, 1 of them not under the prefix, float32"]


def test_one_shard_of_several(tmp_path: Path) -> None:
    base = synth.write_component(tmp_path, synth.base_tensors(SIZE), shard_bytes=60_000)
    path = sorted(base.glob("*.safetensors"))[2]
    found = checkpoint(path)
    assert found.shard == (3, len(list(base.glob("*.safetensors"))))
    assert found.title == f"{path}: shard 3 of {found.shard[1]}"
    assert found.fused is None


def test_strays_are_listed(tmp_path: Path) -> None:
    base = synth.write_component(tmp_path, synth.base_tensors(SIZE), shard_bytes=60_000)
    write_safetensors(base / "old.safetensors", [tensor("x")])
    found = checkpoint(base)
    assert found.components[0].strays == ("old.safetensors",)
    assert rows(found)["strays"] == ["old.safetensors (neither read nor copied)"]


def test_a_model_of_no_known_family(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "AutoencoderKL"}))
    write_safetensors(tmp_path / "diffusion_pytorch_model.safetensors", [tensor("decoder.weight", 2)])
    found = checkpoint(tmp_path)
    assert (found.family, found.layout, found.models) == (None, None, ())
    table = rows(found)
    assert table["family"] == ["unknown, with names like decoder.weight"]
    assert table["class"] == ["AutoencoderKL"]


def test_a_file_without_tensors(tmp_path: Path) -> None:
    table = rows(checkpoint(write_safetensors(tmp_path / "x.safetensors", [])))
    assert table["family"] == ["unknown: it holds no tensors"]
    assert table["tensors"] == ["0, no dtype"]


def test_a_base_of_one_variant(tmp_path: Path) -> None:
    base = synth.write_pipeline(tmp_path / "wan", SIZE, dtype="F16", variant="fp16")
    found = checkpoint(base)
    assert found.variant == "fp16"
    assert rows(found)["variant"] == ["fp16"]


def test_two_variants_without_plain_weights_are_refused(tmp_path: Path) -> None:
    for variant in ("fp16", "bf16"):
        synth.write_component(tmp_path, synth.base_tensors(SIZE), variant=variant)
    with pytest.raises(CheckpointError, match="holds no safetensors weights"):
        describe(tmp_path)


def test_a_hub_snapshot_is_named_by_its_repository(tmp_path: Path) -> None:
    folder = tmp_path / "models--Wan-AI--Wan" / "snapshots" / ("0" * 40)
    synth.write_component(folder, synth.base_tensors(SIZE))
    found = checkpoint(folder)
    assert (found.source, found.revision) == ("Wan-AI/Wan", "0" * 40)
    assert rows(found)["source"] == [f"Wan-AI/Wan at {'0' * 40}"]


# Fused folders, and parts of them


@pytest.fixture(scope="module")
def pair_out(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_pair(tmp_path_factory.mktemp("pair"))


def test_a_fused_folder(pair_out: Pair) -> None:
    found = fused(pair_out.out)
    assert found.report.whole
    assert found.title == f"{pair_out.out}: fused and whole"
    document: Any = found.document()
    assert document["kind"] == "fused" and document["whole"] is True and document["findings"] == []
    assert document["fingerprint"] == found.marker.fingerprint
    assert document["base"]["family"] == "wan"
    assert [(c["name"], c["role"], c["tensors"], c["fused"]) for c in document["components"]] == [
        ("transformer", "high_noise", 69, 69),
        ("transformer_2", "low_noise", 69, 20),
    ]
    assert [(e["name"], e["component"], e["strength"], e["ranks"]) for e in document["loras"]] == [
        ("high.safetensors", "transformer", 1.0, [8]),
        ("low.safetensors", "transformer_2", 0.5, [8]),
    ]
    assert document["loras"][1]["scales"] == [{"scale": 0.25, "alpha": 4.0, "rank": 8, "source": "tensor"}]
    table = rows(found)
    assert table["fused with"] == [
        "high.safetensors on transformer, strength 1, alpha 4 (tensor), rank 8",
        "low.safetensors on transformer_2, strength 0.5, alpha 4 (tensor), rank 8",
    ]
    assert table["component"][1].startswith("transformer_2 (low_noise): bfloat16, 20 of 69 tensors fused")


def test_a_fused_folder_that_is_not_whole(pair_out: Pair, tmp_path: Path) -> None:
    out = pair_out.copy(tmp_path / "out")
    (out / "transformer" / "config.json").unlink()
    found = fused(out)
    assert not found.report.whole
    assert found.title == f"{out}: fused, but not whole"
    assert rows(found)["not whole: transformer/config.json"] == ["is missing"]
    document: Any = found.document()
    assert [finding["code"] for finding in document["findings"]] == ["missing"]


def test_what_a_newer_marker_says_otherwise(pair_out: Pair, tmp_path: Path) -> None:
    out = pair_out.copy(tmp_path / "out")

    def change(document: Any) -> None:
        document |= {"base": "x", "serving": {"num_inference_steps": 4}, "stacked_on": f"sha256:{'2' * 64}"}
        document["loras"][0] |= {"alpha": [1], "ranks": "many", "scales": {"a": 1}}

    edit_marker(out, change)
    table = rows(fused(out))
    assert table["to serve"] == ["4 steps"]
    assert table["stacked on"] == [f"sha256:{'2' * 64}"]
    assert "base" not in table
    assert table["fused with"][0] == "high.safetensors on transformer, strength 1"


@pytest.mark.parametrize("alone", [False, True])
def test_a_part_of_a_fused_folder_knows_its_marker(pair_out: Pair, alone: bool) -> None:
    shard = shard_of(pair_out.out, "transformer_2", FUSED)
    found = checkpoint(shard if alone else shard.parent)
    assert found.title.endswith(", already fused")
    assert found.fused is not None
    assert found.fused.marker == pair_out.out / FILE_NAME
    assert [record.name for record in found.fused.loras] == ["low.safetensors"]
    assert rows(found)["fused with"] == [
        "low.safetensors on transformer_2, strength 0.5, alpha 4 (tensor), rank 8"
    ]


def test_a_part_of_a_fused_folder_by_a_path_from_inside(
    pair_out: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(pair_out.out / "transformer")
    for path in (Path(), Path("../transformer")):
        found = checkpoint(path).fused
        assert found is not None and [record.name for record in found.loras] == ["high.safetensors"]
    assert isinstance(describe(Path("..")), FusedDescription)


def test_a_shard_moved_alone_says_that_it_is_fused(pair_out: Pair, tmp_path: Path) -> None:
    shard = shard_of(pair_out.out, "transformer_2", FUSED)
    found = checkpoint(Path(shutil.copy(shard, tmp_path / "x.safetensors")))
    assert found.fused is not None
    assert found.fused.components == ("transformer_2",)
    assert found.fused.fingerprints == (fused(pair_out.out).marker.fingerprint,)
    assert (found.fused.marker, found.fused.loras) == (None, ())
    table = rows(found)
    assert table["already fused"] == list(found.fused.fingerprints)
    assert table["a part of"] == ["transformer_2"]
    assert table["fused with"] == ["unknown: there is no fused.json beside it"]


def test_a_marker_of_another_fusion_or_a_broken_one_says_nothing_of_a_shard(
    pair_out: Pair, tmp_path: Path
) -> None:
    shard = next((pair_out.out / "transformer").glob("*-00001-*.safetensors"))
    moved = tmp_path / "a" / "x.safetensors"
    moved.parent.mkdir()
    shutil.copy(shard, moved)
    shutil.copy(pair_out.out / FILE_NAME, tmp_path / FILE_NAME)
    edit_marker(tmp_path, lambda document: document.update(fingerprint=f"sha256:{'3' * 64}"))
    found = checkpoint(moved).fused
    assert found is not None and found.marker is None
    (tmp_path / FILE_NAME).write_text("{}")
    found = checkpoint(moved).fused
    assert found is not None and found.marker is None


def test_a_fused_folder_without_its_marker(pair_out: Pair, tmp_path: Path) -> None:
    out = pair_out.copy(tmp_path / "out")
    (out / FILE_NAME).unlink()
    found = checkpoint(out)
    assert found.container == "pipeline" and found.fused is not None
    assert found.fused.marker is None
    document: Any = found.document()
    parts = ["transformer", "transformer_2"]
    assert document["fused"] == {
        "fingerprints": list(found.fused.fingerprints), "components": parts, "marker": None, "loras": [],
    }  # fmt: skip


def test_one_fused_file(tmp_path: Path) -> None:
    base = synth.write_file(tmp_path / "wan.safetensors", SIZE)
    source = synth.write_lora(tmp_path / "lora.safetensors", SIZE)
    out = merge(base, [str(source)], tmp_path / "out").out
    assert isinstance(describe(out), FusedDescription)
    found = checkpoint(out / "wan.safetensors").fused
    assert found is not None and found.marker == out / FILE_NAME
    assert [record.name for record in found.loras] == ["lora.safetensors"]


def test_a_base_beside_no_marker_is_not_fused(pair_out: Pair) -> None:
    assert checkpoint(pair_out.base / "transformer").fused is None


def test_the_fingerprint_alone_is_enough(tmp_path: Path) -> None:
    path = write_safetensors(
        tmp_path / "x.safetensors", [tensor("a.weight")], metadata={FINGERPRINT_KEY: "f"}
    )
    found = {"fingerprints": ["f"], "components": [], "marker": None, "loras": []}
    assert checkpoint(path).document()["fused"] == found


# What is none of these


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file or folder"):
        describe(tmp_path / "absent")
    (tmp_path / "link").symlink_to("absent")
    with pytest.raises(InputError, match="no such file or folder"):
        describe(tmp_path / "link")


def test_neither_a_file_nor_a_folder() -> None:
    with pytest.raises(InputError, match="/dev/null: is neither a file nor a folder"):
        describe(Path("/dev/null"))


def test_a_name_that_the_system_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        describe(tmp_path / ("x" * 5000))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"PK\x03\x04" + b"x" * 100, "zip archive"),
        (b"", "is empty"),
        (b"x" * 200, "header"),
    ],
)
def test_a_file_that_is_not_safetensors(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(FormatError, match=said):
        describe(tmp_path / "x.safetensors")


def test_a_json_file_points_to_its_folder(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(InputError, match="is a JSON file") as caught:
        describe(tmp_path / "model_index.json")
    assert str(tmp_path) in (caught.value.hint or "")


def test_a_folder_of_one_lora_and_of_two(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "high_noise_model.safetensors", pair(Q))
    assert lora(tmp_path).named_experts == ("high",)
    write_safetensors(tmp_path / "low_noise_model.safetensors", pair(Q))
    with pytest.raises(InputError, match=r"holds 2 LoRA files: high_noise_model\.safetensors, low"):
        describe(tmp_path)


def test_a_pipeline_with_a_lora_beside_it_is_a_pipeline(tmp_path: Path) -> None:
    base = synth.write_pipeline(tmp_path, SIZE)
    write_safetensors(base / "pytorch_lora_weights.safetensors", pair(Q, style=PEFT))
    assert checkpoint(base).container == "pipeline"


def test_a_folder_with_nothing_in_it(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no safetensors weights"):
        describe(tmp_path)


def test_an_adapter_folder_with_pickled_weights(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(FormatError, match=r"adapter_model\.bin"):
        describe(tmp_path)


def test_an_unfinished_and_a_broken_fused_folder(tmp_path: Path) -> None:
    (tmp_path / JOURNAL_NAME).write_text("{}")
    with pytest.raises(MarkerError, match="unfinished"):
        describe(tmp_path)
    (tmp_path / FILE_NAME).write_text("{}")
    with pytest.raises(MarkerError, match="schema"):
        describe(tmp_path)


def test_torch_is_not_imported(pair_out: Pair) -> None:
    paths = [str(path) for path in (pair_out.high, pair_out.base, pair_out.out)]
    code = (
        "import sys; from pathlib import Path; from fuselora.describe import describe\n"
        "for path in sys.argv[1:]: describe(Path(path)).document()\n"
        "print(sorted({'torch', 'safetensors', 'diffusers', 'huggingface_hub', 'rich'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


# Texts


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], ""), ([3], "3"), ([0, 1, 2, 3], "0-3"), ([0, 2, 3, 9], "0, 2-3, 9"), ([1, 2], "1-2")],
)
def test_ranges(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text


def test_a_text_is_cut_to_one_line() -> None:
    assert cut("a\n  b") == "a b"
    assert cut("x" * CUT) == "x" * CUT
    assert cut("x" * (CUT + 1)) == "x" * CUT + f"... ({CUT + 1} characters)"
