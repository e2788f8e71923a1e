"""What a plan fixes: chunk grid, byte ranges, offsets, dtypes, headers, sizes and the fingerprint."""

from __future__ import annotations

import errno
import json
import os
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import fuselora
from fuselora import synth
from fuselora.errors import ReadError
from fuselora.families.wan import WAN
from fuselora.header import DTYPE_BITS, PAGE, TensorInfo, read_header
from fuselora.marker import COMPONENT_KEY, FINGERPRINT_KEY
from fuselora.planning import PENDING, OutputFile
from fuselora.steps import CHUNK_ELEMENTS, UNIT_ROWS, Copy, Fuse, Step, chunk_grid
from tests.small import FORMAT, lora, noise, pair, planned, tree, write

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fuselora.planning import FusePlan

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SIZE = synth.tiny("wan2.2-t2v-a14b", blocks=1)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


@pytest.fixture
def wan_lora(tmp_path: Path) -> Path:
    return synth.write_lora(tmp_path / "lora.safetensors", SIZE, rank=2)


def only_file(plan: FusePlan) -> OutputFile:
    (file,) = plan.files
    return file


def span(step: Step) -> tuple[int, int]:
    return step.target, step.target + step.n_bytes


def placed(plan_file: OutputFile, folder: Path) -> tuple[TensorInfo, ...]:
    """The output's tensors, read from a file that holds the planned header."""
    path = folder / "planned.safetensors"
    with path.open("wb") as stream:
        stream.write(plan_file.header)
        stream.truncate(plan_file.n_bytes)
    return read_header(path).tensors


def check_file(file: OutputFile, folder: Path) -> None:
    """Steps fill the output without gap or overlap, and each takes its bytes from the right place."""
    at = len(file.header)
    for step in file.steps:
        assert step.target == at
        at += step.n_bytes
    assert at == file.n_bytes
    assert len(file.header) % PAGE == file.base.data_start % PAGE
    source_of = {}
    for step in file.steps:
        if isinstance(step, Fuse):
            source_of[step.target] = (step.source, step.base_bytes)
    base = file.base.by_name()
    copies = [step for step in file.steps if isinstance(step, Copy)]
    for tensor in placed(file, folder):
        source = base[tensor.name]
        assert tensor.shape == source.shape
        start, begin = len(file.header) + tensor.start, file.base.data_start + source.start
        if start in source_of and tensor.n_bytes:
            assert source_of[start] == (begin, source.n_bytes)
        elif tensor.n_bytes:
            assert tensor.dtype == source.dtype
            (copy,) = [c for c in copies if c.target <= start < c.target + c.n_bytes]
            assert copy.source - copy.target == begin - start


# the chunk grid


@given(st.integers(1, 300_000), st.integers(1, 300_000))
def test_chunks_cover_the_rows_in_pieces_of_64_or_more(rows: int, columns: int) -> None:
    grid = chunk_grid(rows, columns)
    assert grid[0][0] == 0
    assert grid[-1][1] == rows
    assert all(before[1] == after[0] for before, after in pairwise(grid))
    assert all(first % UNIT_ROWS == 0 for first, _ in grid)
    assert all(last - first >= min(rows, UNIT_ROWS) for first, last in grid)


@given(st.integers(1, 300_000), st.integers(1, 300_000))
def test_chunks_stay_in_the_cache_where_64_rows_do(rows: int, columns: int) -> None:
    largest = max(last - first for first, last in chunk_grid(rows, columns)) * columns
    assert largest < 2 * max(CHUNK_ELEMENTS, UNIT_ROWS * columns)


@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_the_grid_is_a_function_of_the_shape(rows: int, columns: int) -> None:
    assert chunk_grid(rows, columns) == chunk_grid(rows, columns)
    assert chunk_grid(rows, columns)[-1][1] == rows


@pytest.mark.parametrize(
    ("rows", "columns", "grid"),
    [
        (1, 5120, ((0, 1),)),
        (63, 1 << 20, ((0, 63),)),
        (64, 1 << 20, ((0, 64),)),
        (127, 1 << 20, ((0, 127),)),
        (128, 1 << 20, ((0, 64), (64, 128))),
        (129, 1 << 20, ((0, 64), (64, 129))),
        (500, 5120, ((0, 192), (192, 500))),
        (0, 16, ((0, 0),)),
        (5120, 1, ((0, 5120),)),
        (3 << 20, 1, ((0, 1 << 20), (1 << 20, 2 << 20), (2 << 20, 3 << 20))),  # a vector is one column
    ],
)
def test_known_grids(rows: int, columns: int, grid: tuple[tuple[int, int], ...]) -> None:
    assert chunk_grid(rows, columns) == grid


# steps


def test_neighbouring_copies_are_one_range(tmp_path: Path) -> None:
    names = ("a.weight", "b.weight", "c.weight", "d.weight", "e.weight")
    base = write(tmp_path / "base.safetensors", {name: noise(8, 8, dtype=BF16) for name in names}, pad=24)
    one = lora(tmp_path / "l.safetensors", pair("c", noise(8, 2), noise(2, 8)))
    file = only_file(planned(base, [one]))
    first, fuse, last = file.steps
    start, at = file.base.data_start, len(file.header)
    assert (first, last) == (Copy(start, at, 256), Copy(start + 384, at + 384, 256))
    assert isinstance(fuse, Fuse)
    assert (fuse.base_key, fuse.rows, fuse.columns) == ("c.weight", 8, 8)
    assert (file.n_fused, file.n_tensors, file.in_base_order) == (1, 5, True)
    check_file(file, tmp_path)


def test_copies_before_and_after_a_cast_tensor_stay_apart(tmp_path: Path) -> None:
    tensors = {
        "n": torch.zeros(4, dtype=torch.int64),
        "a.weight": noise(4, 4),
        "m": torch.zeros(4, dtype=torch.int64),
    }
    base = write(tmp_path / "base.safetensors", tensors)
    one = lora(tmp_path / "l.safetensors", pair("a", noise(4, 1), noise(1, 4)))
    file = only_file(planned(base, [one], dtype="bfloat16"))
    assert [type(step) for step in file.steps] == [Copy, Fuse, Copy]
    assert [step.n_bytes for step in file.steps] == [32, 32, 32]
    check_file(file, tmp_path)


def test_deltas_stand_in_the_order_of_the_loras(tmp_path: Path) -> None:
    base = write(tmp_path / "base.safetensors", {"a.weight": noise(8, 6), "a.bias": noise(8)})
    both = {**pair("a", noise(8, 2), noise(2, 6), alpha=1.0), "a.diff_b": noise(8)}
    first = lora(tmp_path / "z.safetensors", both)
    second = lora(tmp_path / "a.safetensors", pair("a", noise(8, 4, seed=1), noise(4, 6, seed=1)))
    third = lora(tmp_path / "m.safetensors", {"a.diff": noise(8, 6, seed=2)})
    plan = planned(base, [f"{first}:0.5", second, f"{third}:-2"])
    by_key = {step.base_key: step for step in only_file(plan).steps if isinstance(step, Fuse)}
    one, two, three = by_key["a.weight"].deltas
    assert [d.kind.name for d in (one, two, three)] == ["pair", "pair", "diff"]
    assert [d.scale for d in (one, two, three)] == [0.5 * 1.0 / 2, 1.0, -2.0]
    assert [f.path for f in (one.factors["up"], two.factors["up"], three.factors["diff"])] == [
        first,
        second,
        third,
    ]
    assert (one.factors["up"].shape, one.factors["down"].shape) == ((8, 2), (2, 6))
    (bias,) = by_key["a.bias"].deltas
    assert (bias.kind.name, list(bias.factors), bias.scale) == ("diff_b", ["diff_b"], 0.5)
    assert (by_key["a.bias"].rows, by_key["a.bias"].columns) == (8, 1)


def test_factors_are_found_by_their_offsets(tmp_path: Path) -> None:
    base = write(tmp_path / "base.safetensors", {"a.weight": noise(8, 6), "b.weight": noise(6, 8)})
    parts = pair("a", noise(8, 2, seed=3), noise(2, 6, seed=4)) | pair(
        "b", noise(6, 3, seed=5), noise(3, 8, seed=6)
    )
    one = write(tmp_path / "l.safetensors", dict(reversed(parts.items())), pad=40)
    content = one.read_bytes()
    for step in only_file(planned(base, [one])).steps:
        assert isinstance(step, Fuse)
        (delta,) = step.deltas
        assert delta.factors.keys() == {"up", "down"}
        for factor in delta.factors.values():
            stored = content[factor.offset : factor.offset + factor.n_bytes]
            assert stored == parts[factor.key].numpy().tobytes()


@pytest.mark.parametrize("shape", [(6, 3, 1, 2, 2), (6, 12), (1, 6, 4), (7,), ()])
def test_a_diff_of_any_shape_is_seen_as_a_matrix(tmp_path: Path, shape: tuple[int, ...]) -> None:
    base = write(tmp_path / "base.safetensors", {"a.weight": noise(*shape)})
    one = lora(tmp_path / "l.safetensors", {"a.diff": noise(*shape)})
    (step,) = only_file(planned(base, [one])).steps
    assert isinstance(step, Fuse)
    assert step.rows * step.columns == noise(*shape).numel()
    assert step.rows == (shape[0] if shape else 1)
    assert step.chunks == chunk_grid(step.rows, step.columns)


@pytest.mark.parametrize("how", ["strength", "alpha", "up", "down"])
def test_a_delta_of_nothing_leaves_the_bytes_and_counts(tmp_path: Path, how: str) -> None:
    base = write(tmp_path / "base.safetensors", {"a.weight": noise(8, 6), "b.weight": noise(8, 6)})
    up = torch.zeros(8, 2) if how == "up" else noise(8, 2)
    down = torch.zeros(2, 6) if how == "down" else noise(2, 6)
    alpha = 0.0 if how == "alpha" else 2.0
    one = lora(tmp_path / "l.safetensors", pair("a", up, down, alpha))
    file = only_file(planned(base, [f"{one}:{0 if how == 'strength' else 1}"]))
    assert [type(step) for step in file.steps] == [Copy]
    assert file.n_fused == 1


# dtypes and offsets


def header_of(plan: FusePlan, folder: Path) -> dict[str, TensorInfo]:
    return {tensor.name: tensor for file in plan.files for tensor in placed(file, folder)}


@pytest.mark.parametrize("layout", ["native", "diffusers"])
def test_float32_kept_names_stay_unless_uniform(tmp_path: Path, wan_lora: Path, layout: str) -> None:
    which = "diffusers" if layout == "diffusers" else "native"
    base = synth.write_file(tmp_path / "base.safetensors", SIZE, layout=which, prefix="", dtype="F32")
    plan = planned(base, [wan_lora], dtype="bfloat16")
    dtypes = {name: tensor.dtype for name, tensor in header_of(plan, tmp_path).items()}
    kept = {name for name in dtypes if WAN.keeps_float32(name, which)}
    assert kept
    assert {name for name, dtype in dtypes.items() if dtype == "F32"} == kept
    assert {dtypes[name] for name in dtypes.keys() - kept} == {"BF16"}
    uniform = planned(base, [wan_lora], dtype="bfloat16", uniform=True)
    assert {tensor.dtype for tensor in header_of(uniform, tmp_path).values()} == {"BF16"}
    for each in (plan, uniform):
        check_file(only_file(each), tmp_path)


def test_both_experts_change_their_dtype_fused_or_not(tmp_path: Path, wan_lora: Path) -> None:
    base = synth.write_pipeline(tmp_path / "base", SIZE, experts=True, dtype="F32")
    plan = planned(base, [f"transformer={wan_lora}"], dtype="float16", uniform=True)
    assert [(c.name, c.dtype) for c in plan.components] == [("transformer", "F16"), ("transformer_2", "F16")]
    assert plan.components[0].n_fused > 0
    assert plan.components[1].n_fused == 0
    for file in plan.files:
        assert {tensor.dtype for tensor in placed(file, tmp_path)} == {"F16"}


def test_what_is_not_the_model_keeps_its_dtype(tmp_path: Path, wan_lora: Path) -> None:
    specs = (
        *synth.base_tensors(SIZE, dtype="F16", prefix="model.diffusion_model."),
        synth.Spec("first_stage_model.conv.weight", "F32", (4, 4)),
        synth.Spec("model.diffusion_model.steps", "I64", (3,)),
    )
    base = synth.write_safetensors(tmp_path / "base.safetensors", specs)
    found = header_of(planned(base, [wan_lora], dtype="bfloat16", uniform=True), tmp_path)
    assert found.pop("first_stage_model.conv.weight").dtype == "F32"
    assert found.pop("model.diffusion_model.steps").dtype == "I64"
    assert {tensor.dtype for tensor in found.values()} == {"BF16"}


def test_a_cast_that_would_misalign_goes_widest_first(tmp_path: Path) -> None:
    tensors = {"odd.weight": noise(3, 1), "steps": torch.arange(5), "even.weight": noise(4, 4)}
    base = write(tmp_path / "base.safetensors", tensors)
    one = lora(tmp_path / "l.safetensors", pair("even", noise(4, 1), noise(1, 4)))
    plan = planned(base, [one], dtype="bfloat16")
    file = only_file(plan)
    assert [t.name for t in placed(file, tmp_path)] == ["steps", "odd.weight", "even.weight"]
    assert not file.in_base_order
    check_file(file, tmp_path)
    fuselora.merge(base, [str(one)], tmp_path / "out", dtype="bfloat16")
    merged = load_file(tmp_path / "out" / "base.safetensors")
    assert torch.equal(merged["steps"], tensors["steps"])
    assert torch.equal(merged["odd.weight"], tensors["odd.weight"].bfloat16())


def test_a_cast_that_stays_aligned_keeps_the_order(tmp_path: Path) -> None:
    tensors = {"z.weight": noise(4, 4), "steps": torch.arange(5), "a.weight": noise(4, 4)}
    base = write(tmp_path / "base.safetensors", tensors)
    one = lora(tmp_path / "l.safetensors", pair("z", noise(4, 1), noise(1, 4)))
    file = only_file(planned(base, [one], dtype="bfloat16"))
    assert [t.name for t in placed(file, tmp_path)] == ["z.weight", "steps", "a.weight"]
    assert file.in_base_order


def test_an_unaligned_base_keeps_its_order_where_nothing_is_cast(tmp_path: Path) -> None:
    tensors = {"odd": noise(3, dtype=BF16), "a.weight": noise(4, 4)}
    base = write(tmp_path / "base.safetensors", tensors)
    one = lora(tmp_path / "l.safetensors", pair("a", noise(4, 1), noise(1, 4)))
    fuselora.merge(base, [str(one)], tmp_path / "out")
    found = read_header(tmp_path / "out" / "base.safetensors")
    assert found.tensors == read_header(base).tensors


def test_a_tensor_of_no_elements_can_be_cast(tmp_path: Path) -> None:
    tensors = {"none.weight": torch.zeros(0, 4), "a.weight": noise(4, 4), "nil": torch.zeros(4, 0)}
    base = write(tmp_path / "base.safetensors", tensors)
    one = lora(tmp_path / "l.safetensors", pair("a", noise(4, 1), noise(1, 4)))
    fuselora.merge(base, [str(one)], tmp_path / "out", dtype="bfloat16")
    merged = load_file(tmp_path / "out" / "base.safetensors")
    assert {name: (t.dtype, tuple(t.shape)) for name, t in merged.items()} == {
        name: (BF16, tuple(t.shape)) for name, t in tensors.items()
    }


tensors_to_lay_out = st.lists(
    st.tuples(
        st.sampled_from([BF16, F16, F32, torch.int64]),
        st.lists(st.integers(0, 3), max_size=3).map(tuple),
        st.booleans(),
    ),
    min_size=1,
    max_size=7,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tensors_to_lay_out, st.sampled_from(["keep", "bfloat16", "float16", "float32"]), st.integers(0, PAGE - 1)
)
def test_every_layout_holds(
    tmp_path: Path, items: list[tuple[torch.dtype, tuple[int, ...], bool]], dtype: str, pad: int
) -> None:
    tensors: dict[str, torch.Tensor] = {
        f"t{number}.weight": torch.ones(shape, dtype=kind) for number, (kind, shape, _) in enumerate(items)
    }
    base = write(tmp_path / "base.safetensors", {**tensors, "z.weight": noise(2, 2)}, pad=pad)
    fused = {
        f"t{number}.diff": torch.ones(shape)
        for number, (kind, shape, hit) in enumerate(items)
        if hit and kind != torch.int64 and 0 not in shape
    }
    one = lora(tmp_path / "l.safetensors", fused, pair("z", noise(2, 1), noise(1, 2)))
    file = only_file(planned(base, [one], dtype=dtype))
    check_file(file, tmp_path)
    found = placed(file, tmp_path)
    assert {t.name for t in found} == {*tensors, "z.weight"}
    codes = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
    stored = file.base.by_name()
    for tensor in found:
        was = stored[tensor.name].dtype
        assert tensor.dtype == (was if was == "I64" else codes.get(dtype, was))
    if any(tensor.dtype != stored[tensor.name].dtype for tensor in found):
        assert all(tensor.start % (DTYPE_BITS[tensor.dtype] // 8) == 0 for tensor in found)


# headers


def test_a_shard_without_a_fused_tensor_is_the_bases_bytes(tmp_path: Path, wan_lora: Path) -> None:
    base = synth.write_pipeline(tmp_path / "base", SIZE, dtype="BF16", shard_bytes=4000)
    one = lora(
        tmp_path / "one.safetensors", pair("blocks.0.self_attn.q", noise(SIZE.dim, 1), noise(1, SIZE.dim))
    )
    plan = planned(base, [one])
    (component,) = plan.components
    plain = [file for file in component.files if file.n_fused == 0]
    assert len(plain) == len(component.files) - 1
    fuselora.merge(base, [str(one)], tmp_path / "out")
    for file in component.files:
        same = (tmp_path / "out" / file.path).read_bytes() == file.base.path.read_bytes()
        assert same == (file.n_fused == 0)


def test_a_fused_shard_says_so_and_keeps_its_metadata(tmp_path: Path) -> None:
    metadata = {"format": "pt", "author": "\u00e9", "modelspec.title": "x"}
    base = write(tmp_path / "base.safetensors", {"a.weight": noise(4, 4)}, metadata)
    one = lora(tmp_path / "l.safetensors", pair("a", noise(4, 1), noise(1, 4)))
    plan = planned(base, [one])
    fuselora.merge(base, [str(one)], tmp_path / "out")
    found = read_header(tmp_path / "out" / "base.safetensors").metadata
    assert found == {**metadata, FINGERPRINT_KEY: plan.fingerprint, COMPONENT_KEY: "transformer"}


def test_the_format_is_added_where_it_is_missing(tmp_path: Path) -> None:
    base = write(tmp_path / "base.safetensors", {"a.weight": noise(4, 4)}, {"note": "x"})
    one = lora(tmp_path / "l.safetensors", pair("a", noise(4, 1), noise(1, 4)))
    fuselora.merge(base, [str(one)], tmp_path / "out")
    found = read_header(tmp_path / "out" / "base.safetensors").metadata
    assert (found["format"], found["note"]) == ("pt", "x")


@pytest.mark.parametrize("pad", [0, 8, 24, 1234, 4095])
def test_data_starts_where_the_bases_did_modulo_a_page(tmp_path: Path, pad: int) -> None:
    base = write(tmp_path / "base.safetensors", {"a.weight": noise(4, 4)}, pad=pad)
    one = lora(tmp_path / "l.safetensors", pair("a", noise(4, 1), noise(1, 4)))
    assert len(only_file(planned(base, [one])).header) % PAGE == pad


def test_a_plan_from_headers_has_a_header_of_the_same_length(tmp_path: Path, wan_lora: Path) -> None:
    base = synth.write_pipeline(tmp_path / "base", SIZE, dtype="BF16")
    pending, whole = planned(base, [wan_lora], content=False), planned(base, [wan_lora])
    assert pending.fingerprint is None
    assert whole.fingerprint is not None
    (before,), (after,) = pending.files, whole.files
    assert before.header.replace(PENDING.encode(), whole.fingerprint.encode()) == after.header
    assert (before.steps, before.n_bytes) == (after.steps, after.n_bytes)


# sizes and indexes


@pytest.mark.parametrize("dtype", ["keep", "bfloat16"])
def test_total_size_is_the_sum_of_the_tensors(tmp_path: Path, wan_lora: Path, dtype: str) -> None:
    base = synth.write_pipeline(tmp_path / "base", SIZE, dtype="F32", shard_bytes=40_000)
    plan = planned(base, [wan_lora], dtype=dtype)
    fuselora.merge(base, [str(wan_lora)], tmp_path / "out", dtype=dtype)
    index = json.loads((tmp_path / "out" / plan.components[0].index.as_posix()).read_text())  # type: ignore[union-attr]
    (component,) = plan.components
    assert len(component.files) > 1
    written = [read_header(tmp_path / "out" / file.path) for file in component.files]
    total = sum(tensor.n_bytes for header in written for tensor in header.tensors)
    assert index["metadata"]["total_size"] == component.total_size == total
    assert index["weight_map"] == {t.name: h.path.name for h in written for t in h.tensors}
    assert plan.bytes_out == sum(header.n_bytes for header in written)
    assert plan.bytes_in == sum(file.base.path.stat().st_size for file in component.files)


def test_shards_without_an_index_get_one(tmp_path: Path, wan_lora: Path) -> None:
    base = synth.write_component(
        tmp_path / "base",
        synth.base_tensors(SIZE, dtype="BF16"),
        config=synth.config(SIZE),
        shard_bytes=40_000,
    )
    (base / "diffusion_pytorch_model.safetensors.index.json").unlink()
    (component,) = planned(base, [wan_lora]).components
    assert component.index == PurePosixPath("diffusion_pytorch_model.safetensors.index.json")


def test_one_file_has_no_index(tmp_path: Path, wan_lora: Path) -> None:
    base = synth.write_file(tmp_path / "base.safetensors", SIZE)
    plan = planned(base, [wan_lora])
    assert [component.index for component in plan.components] == [None]
    assert [file.path for file in plan.files] == [PurePosixPath("base.safetensors")]


def test_a_config_follows_the_dtype_and_changes_in_nothing_else(tmp_path: Path, wan_lora: Path) -> None:
    base = synth.write_pipeline(tmp_path / "base", SIZE, dtype="F32")
    config = base / "transformer" / "config.json"
    text = config.read_text().replace("{", '{\n   "torch_dtype" :  "float32",', 1)
    config.write_text(text)
    assert planned(base, [wan_lora]).edited == {}
    edited = planned(base, [wan_lora], dtype="bfloat16").edited
    wanted = text.replace('"torch_dtype" :  "float32"', '"torch_dtype" :  "bfloat16"').encode()
    assert edited == {PurePosixPath("transformer/config.json"): wanted}


@pytest.mark.parametrize(
    ("encoding", "kept"), [("utf-8", True), ("utf-8-sig", True), ("utf-16", False), ("utf-16-le", False)]
)
def test_a_config_in_any_encoding_follows_the_dtype(
    tmp_path: Path, wan_lora: Path, encoding: str, kept: bool
) -> None:
    """One that json reads and that is not UTF-8 is spelled anew."""
    base = synth.write_pipeline(tmp_path / "base", SIZE, dtype="F32")
    config = base / "transformer" / "config.json"
    text = config.read_text().replace("{", '{"torch_dtype":"float32", "note": "\u00fc",', 1)
    config.write_bytes(text.encode(encoding))
    (edited,) = planned(base, [wan_lora], dtype="bfloat16").edited.values()
    assert json.loads(edited) == {**json.loads(text), "torch_dtype": "bfloat16"}
    assert (edited == text.replace("float32", "bfloat16").encode(encoding)) == kept


def test_a_config_that_can_no_longer_be_read(
    tmp_path: Path, wan_lora: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = synth.write_pipeline(tmp_path / "base", SIZE, dtype="F32")
    config = base / "transformer" / "config.json"
    config.write_text(config.read_text().replace("{", '{"torch_dtype": "float32",', 1))
    read = Path.read_bytes

    def not_whole(path: Path) -> bytes:
        if path == config:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", not_whole)
    with pytest.raises(ReadError, match=rf"^{config}: cannot be read: Input/output error"):
        planned(base, [wan_lora], dtype="bfloat16")


# the fingerprint


def fingerprint(base: Path, *loras: Path | str, **options: Any) -> str:
    found = planned(base, loras, **options).fingerprint
    assert found is not None
    return found


def test_what_the_fingerprint_follows_and_what_not(tmp_path: Path) -> None:
    base = write(tmp_path / "base.safetensors", {"a.weight": noise(4, 4)})
    one = lora(tmp_path / "one.safetensors", pair("a", noise(4, 1), noise(1, 4)))
    two = lora(tmp_path / "two.safetensors", pair("a", noise(4, 1, seed=1), noise(1, 4)))
    plain = fingerprint(base, one)
    assert plain.startswith("sha256:")
    moved = one.with_name("renamed.safetensors")
    moved.write_bytes(one.read_bytes())
    same: list[Mapping[str, Any]] = [
        {"jobs": 1},
        {"digest": False},
        {"assets": "skip"},
        {"out": tmp_path / "o"},
    ]
    assert {fingerprint(base, one, **options) for options in same} == {plain}
    assert fingerprint(base, moved) == plain
    others = [
        fingerprint(base, two),
        fingerprint(base, one, two),
        fingerprint(base, two, one),
        fingerprint(base, f"{one}:0.5"),
        fingerprint(base, one, dtype="bfloat16"),
        fingerprint(base, one, kernel="reference"),
        fingerprint(base, one, alphas=["7"]),
    ]
    assert len({plain, *others}) == len(others) + 1
    write(tmp_path / "base.safetensors", {"a.weight": noise(4, 4)}, {**FORMAT, "x": "y"})
    assert fingerprint(base, one) != plain


def test_planning_changes_no_file(tmp_path: Path, wan_lora: Path) -> None:
    base = synth.write_pipeline(tmp_path / "base", SIZE, dtype="BF16", shard_bytes=40_000)
    before = tree(tmp_path)
    planned(base, [wan_lora], dtype="float16", out=tmp_path / "out")
    assert tree(tmp_path) == before
