from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import fuselora
from fuselora.engine import kernel as room
from fuselora.engine.buffers import own_memory
from fuselora.engine.factors import read_factor, read_joined, read_rows
from fuselora.engine.kernel import (
    BF16,
    FLOAT32,
    REFERENCE,
    Kernel,
    Kernels,
    Loaded,
    Lost,
    choose,
    computes_bf16,
)
from fuselora.errors import ChangedError, NumericError, ReadError
from fuselora.steps import Delta, Factor, Fuse, chunk_grid
from fuselora.tensors import TORCH_DTYPES
from tests.delta.reference import Values, exact, rounded, ulp
from tests.deltas import full, low_rank
from tests.small import CODES, lora, noise, pair, raw, write

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

BFLOAT16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
KERNELS: list[Kernel] = [FLOAT32, REFERENCE]
ALL: list[Kernel] = [FLOAT32, REFERENCE, BF16]


def stored(path: Path, tensor: torch.Tensor, *, before: bytes = b"") -> Factor:
    """A tensor as the whole content of a file, after some other bytes."""
    path.write_bytes(before + raw(tensor))
    n_bytes = tensor.numel() * tensor.element_size()
    return Factor(path, path.stem, CODES[tensor.dtype], tuple(tensor.shape), len(before), n_bytes)


def step(
    weight: torch.Tensor, *deltas: Delta, dtype: torch.dtype | None = None, key: str = "a.weight"
) -> Fuse:
    rows, columns = weight.shape
    out = CODES[dtype or weight.dtype]
    grid = chunk_grid(rows, columns)
    return Fuse(Path("base"), key, CODES[weight.dtype], out, rows, columns, 0, 0, grid, deltas, columns)


def load(kernel: Kernel, what: Fuse) -> Loaded:
    return Loaded(what, kernel.load(what))


def run(kernel: Kernel, weight: torch.Tensor, what: Fuse) -> tuple[torch.Tensor, Lost]:
    """The fused tensor and what was lost, all rows in one chunk."""
    target = bytearray(what.n_bytes)
    source = memoryview(bytearray(raw(weight)))
    lost = load(kernel, what).fuse(source, memoryview(target), [(0, what.rows)])
    return torch.frombuffer(target, dtype=TORCH_DTYPES[what.dtype]).view(what.rows, what.columns), lost


def pair_of(
    folder: Path,
    rows: int,
    rank: int,
    columns: int,
    scale: float,
    seed: int = 0,
    dtype: torch.dtype = BFLOAT16,
) -> Delta:
    """Stored factors whose product is about as large as a weight of deviation one."""
    up, down = noise(rows, rank, seed=seed), noise(rank, columns, std=rank**-0.5, seed=seed + 1)
    name = f"{rows}.{rank}.{columns}.{seed}"
    return low_rank(
        stored(folder / f"{name}.up", up.to(dtype)), stored(folder / f"{name}.down", down.to(dtype)), scale
    )


def sums(weight: torch.Tensor, pairs: Sequence[Delta]) -> tuple[Values, Values]:
    """In float64 the result and how much was summed: |W| + the sum of |scale| |up| @ |down|."""
    total = exact(weight).copy()
    size = np.abs(total)
    for each in pairs:
        up, down = (
            exact(read_factor(factor, torch.float64)) for factor in (each.factors["up"], each.factors["down"])
        )
        total += each.scale * (up @ down)
        size += abs(each.scale) * (np.abs(up) @ np.abs(down))
    return total, size


# which kernel a step gets


def test_kernels_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose("reference").choices == (REFERENCE,)
    monkeypatch.setattr(room, "computes_bf16", lambda: True)
    assert choose("auto").choices == (BF16, FLOAT32)
    monkeypatch.setattr(room, "computes_bf16", lambda: False)
    assert choose("auto").choices == (FLOAT32,)
    assert (FLOAT32.sums.dtype, REFERENCE.sums.dtype) == (F32, torch.float64)
    assert [(kernel.name, kernel.accumulate) for kernel in ALL] == [
        ("float32", "float32"), ("reference", "float64"), ("bf16-addmm", "float32"),
    ]  # fmt: skip


KINDS = [
    "one",
    "joined",
    "two scales",
    "f32 base",
    "f32 out",
    "f16",
    "f32 up",
    "f32 down",
    "mixed",
    "diff",
    "cast",
]


def kind(folder: Path, name: str) -> Fuse:
    weight = noise(70, 8).to({"f32 base": F32, "f16": F16}.get(name, BFLOAT16))
    one, other = pair_of(folder, 70, 2, 8, 0.5), pair_of(folder, 70, 3, 8, 0.5, seed=5)
    f32 = pair_of(folder, 70, 2, 8, 0.5, seed=9, dtype=F32)
    found: dict[str, tuple[Delta, ...]] = {
        "joined": (one, other, one),
        "two scales": (one, replace(other, strength=0.25)),
        "f32 up": (low_rank(f32.factors["up"], one.factors["down"], 0.5),),
        "f32 down": (low_rank(one.factors["up"], f32.factors["down"], 0.5),),
        "mixed": (one, full(stored(folder / "diff", noise(70, 8).bfloat16()), 0.5)),
        "diff": (full(stored(folder / "diff", noise(70, 8).bfloat16()), 0.5),),
        "cast": (),
    }
    return step(weight, *found.get(name, (one,)), dtype={"f32 base": BFLOAT16, "f32 out": F32}.get(name))


@pytest.mark.parametrize("name", KINDS)
def test_only_bfloat16_throughout_with_one_scale_goes_the_fast_way(tmp_path: Path, name: str) -> None:
    what = kind(tmp_path, name)
    assert BF16.fits(what) is (name in ("one", "joined"))
    assert FLOAT32.fits(what)
    assert REFERENCE.fits(what)
    assert Kernels((BF16, FLOAT32)).of(what) is (BF16 if name in ("one", "joined") else FLOAT32)
    assert Kernels((FLOAT32,)).of(what) is FLOAT32


def test_a_step_is_loaded_by_its_kernel(tmp_path: Path) -> None:
    both = Kernels((BF16, FLOAT32))
    narrow, wide = kind(tmp_path, "one"), kind(tmp_path, "f32 up")
    for what, kernel in ((narrow, BF16), (wide, FLOAT32)):
        loaded = both.load(what)
        assert loaded.step is what
        assert type(loaded.sum) is type(kernel.load(what))


# the check at the start


@pytest.fixture
def _able(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that says it has bfloat16 products, whatever the one of the tests has."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)


def rounds_once(base: torch.Tensor, up: torch.Tensor, down: torch.Tensor, alpha: float) -> torch.Tensor:
    return base.copy_(base.float() + alpha * (up.float() @ down.float()))


def rounds_twice(base: torch.Tensor, up: torch.Tensor, down: torch.Tensor, alpha: float) -> torch.Tensor:
    product = alpha * (up.float() @ down.float())
    return base.copy_(base.float() + product.to(base.dtype).float())


def narrows_the_scale(base: torch.Tensor, up: torch.Tensor, down: torch.Tensor, alpha: float) -> torch.Tensor:
    return rounds_once(base, up, down, torch.tensor(alpha).to(base.dtype).item())


def spoils_one(base: torch.Tensor, up: torch.Tensor, down: torch.Tensor, alpha: float) -> torch.Tensor:
    rounds_once(base, up, down, alpha)
    if base.dtype == BFLOAT16:
        base[5, 7] *= 1.1
    return base


def makes_nan(base: torch.Tensor, up: torch.Tensor, down: torch.Tensor, alpha: float) -> torch.Tensor:
    return base.fill_(float("nan"))


def refuses(base: torch.Tensor, up: torch.Tensor, down: torch.Tensor, alpha: float) -> torch.Tensor:
    raise RuntimeError("could not create a primitive descriptor for a matmul primitive")


@pytest.mark.usefixtures("_able")
@pytest.mark.parametrize(
    "act", [rounds_once, rounds_twice, narrows_the_scale, spoils_one, makes_nan, refuses]
)
def test_a_product_that_disagrees_with_float32_is_not_used(monkeypatch: pytest.MonkeyPatch, act: Any) -> None:
    monkeypatch.setattr(torch.Tensor, "addmm_", act)
    assert computes_bf16() is (act is rounds_once)
    assert choose("auto").choices == ((BF16, FLOAT32) if act is rounds_once else (FLOAT32,))


def test_a_cpu_or_a_torch_without_bfloat16_products_uses_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> bool:
        raise AttributeError("no operator of that name")

    for supported in (lambda: False, missing):
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", supported)
        assert not computes_bf16()


def test_the_choice_does_not_depend_on_the_caller_s_settings() -> None:
    """And it leaves them, its random numbers too, as they are."""
    wanted = computes_bf16()
    before = torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.get_default_dtype()
    state = torch.get_rng_state()
    try:
        torch.set_num_threads(2)
        torch.set_float32_matmul_precision("medium")
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            assert computes_bf16() is wanted
        found = torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.get_default_dtype()
        assert found == (2, "medium", torch.float64)
        assert torch.equal(torch.get_rng_state(), state)
    finally:
        torch.set_num_threads(before[0])
        torch.set_float32_matmul_precision(before[1])
        torch.set_default_dtype(before[2])


# factors


@pytest.mark.parametrize("dtype", [BFLOAT16, F16, F32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("target", [F32, torch.float64])
def test_factors_of_every_dtype(tmp_path: Path, dtype: torch.dtype, target: torch.dtype) -> None:
    tensor = noise(3, 5).to(dtype)
    factor = stored(tmp_path / "f", tensor, before=b"header")
    found = read_factor(factor, target)
    assert found.dtype == target
    assert torch.equal(found, tensor.to(target))


def test_rows_of_a_difference_are_read_alone(tmp_path: Path) -> None:
    tensor = noise(6, 2, 2)
    factor = stored(tmp_path / "f", tensor, before=b"12345")
    assert torch.equal(read_rows(factor, 4, 2, 5, F32), tensor.view(6, 4)[2:5])


@pytest.mark.parametrize("dim", [0, 1])
def test_factors_are_joined_along_their_rank(tmp_path: Path, dim: int) -> None:
    shapes = [(3, 5), (2, 5), (4, 5)] if dim == 0 else [(5, 3), (5, 2), (5, 4)]
    tensors = [noise(*shape, seed=number).bfloat16() for number, shape in enumerate(shapes)]
    factors = [stored(tmp_path / f"{n}", tensor, before=b"ab") for n, tensor in enumerate(tensors)]
    for count in (1, 2, 3):
        found = read_joined(factors[:count], BFLOAT16, dim)
        assert torch.equal(found, torch.cat(tensors[:count], dim))
        assert found.is_contiguous()


def test_every_factor_of_the_fast_way_is_checked(tmp_path: Path) -> None:
    weight = noise(70, 8).bfloat16()
    one, other = pair_of(tmp_path, 70, 2, 8, 0.5), pair_of(tmp_path, 70, 3, 8, 0.5, seed=5)
    for factor in (*one.factors.values(), *other.factors.values()):
        content = factor.path.read_bytes()
        factor.path.write_bytes(content[:-1])
        with pytest.raises(ChangedError, match=f"{factor.path.name}: was changed"):
            BF16.load(step(weight, one, other))
        factor.path.write_bytes(content)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_file_that_grew_short_is_named(tmp_path: Path, kernel: Kernel) -> None:
    weight = noise(4, 4)
    up, down = stored(tmp_path / "up", noise(4, 1)), stored(tmp_path / "down", noise(1, 4))
    diff = stored(tmp_path / "diff", noise(4, 4))
    for path in (down.path, diff.path):
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ChangedError, match="down: was changed") as caught:
        kernel.load(step(weight, low_rank(up, down, 1.0)))
    assert caught.value.facts["path"] == str(down.path)
    with pytest.raises(ChangedError, match="diff: was changed"):
        run(kernel, weight, step(weight, full(diff, 1.0)))


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    diff = stored(tmp_path / "diff", noise(4, 4))
    diff.path.unlink()
    with pytest.raises(ReadError, match="diff: cannot be read: No such file"):
        run(FLOAT32, noise(4, 4), step(noise(4, 4), full(diff, 1.0)))


# sums


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_step_without_deltas_only_casts(kernel: Kernel) -> None:
    weight = noise(5, 7)
    found, lost = run(kernel, weight, step(weight, dtype=BFLOAT16))
    assert torch.equal(found, weight.bfloat16())
    assert lost == Lost()


@pytest.mark.parametrize("kernel", KERNELS)
def test_pairs_and_differences_add_up(tmp_path: Path, kernel: Kernel) -> None:
    weight, up, down, diff = noise(5, 7), noise(5, 2, seed=1), noise(2, 7, seed=2), noise(5, 7, seed=3)
    of_rank_two = low_rank(stored(tmp_path / "up", up), stored(tmp_path / "down", down), 0.5)
    found, _ = run(kernel, weight, step(weight, of_rank_two, full(stored(tmp_path / "diff", diff), -2.0)))
    wanted = exact(weight) + 0.5 * exact(up) @ exact(down) - 2 * exact(diff)
    assert np.allclose(exact(found), wanted, rtol=0, atol=1e-5)


def test_chunks_take_their_own_rows(tmp_path: Path) -> None:
    weight, up, down, diff = noise(6, 3), noise(6, 2, seed=1), noise(2, 3, seed=2), noise(6, 3, seed=3)
    of_rank_two = low_rank(stored(tmp_path / "up", up), stored(tmp_path / "down", down), 1.0)
    what = step(weight, of_rank_two, full(stored(tmp_path / "diff", diff), 1.0))
    whole, _ = run(REFERENCE, weight, what)
    loaded, rows = load(REFERENCE, what), []
    for chunks in ([(0, 2)], [(2, 3)], [(3, 4), (4, 6)]):
        first, last = chunks[0][0], chunks[-1][1]
        target = bytearray((last - first) * 12)
        loaded.fuse(memoryview(bytearray(raw(weight[first:last]))), memoryview(target), chunks)
        rows.append(torch.frombuffer(target, dtype=F32).view(-1, 3))
    assert torch.equal(torch.cat(rows), whole)


@pytest.mark.parametrize("kernel", ALL)
def test_the_base_bytes_are_left_alone_where_the_result_goes_elsewhere(
    tmp_path: Path, kernel: Kernel
) -> None:
    weight = noise(70, 8).bfloat16()
    what = step(weight, pair_of(tmp_path, 70, 2, 8, 0.5))
    source, target = bytearray(raw(weight)), bytearray(what.n_bytes)
    load(kernel, what).fuse(memoryview(source), memoryview(target), what.chunks)
    assert bytes(source) == raw(weight) != bytes(target)


# the bar for every kernel that a run may choose


SHAPES = [(1, 1, 1), (1, 3, 300), (300, 4, 1), (64, 1, 65), (65, 7, 130), (193, 16, 320), (512, 64, 768)]


@pytest.mark.parametrize("scales", [(1.0,), (0.3,), (-1.7,), (0.3, 0.3, 0.3), (1.0, -0.25)])
@pytest.mark.parametrize(("rows", "rank", "columns"), SHAPES)
def test_a_kernel_that_is_chosen_is_within_the_bound_and_nearly_always_exact(
    tmp_path: Path, rows: int, rank: int, columns: int, scales: tuple[float, ...]
) -> None:
    weight = noise(rows, columns, seed=1).bfloat16()
    pairs = [
        pair_of(tmp_path, rows, rank, columns, scale, seed=10 * n) for n, scale in enumerate(scales, start=1)
    ]
    what = step(weight, *pairs)
    total, size = sums(weight, pairs)
    wanted = rounded(total, BFLOAT16)
    for kernel in (kernel for kernel in choose("auto").choices if kernel.fits(what)):
        found = exact(run(kernel, weight, what)[0])
        assert (np.abs(found - total) <= ulp(total, BFLOAT16) + 2.0**-20 * size).all()
        if found.size > 100_000 and max(map(abs, scales)) <= 1:  # the deltas of a LoRA are smaller yet
            assert (found == wanted).mean() >= 0.9999


def test_the_fast_way_is_the_float32_way(tmp_path: Path) -> None:
    """Where this CPU has it: 99.99 % of the elements are the same, and the rest are a step apart."""
    weight = noise(1024, 1024, seed=1).bfloat16()
    what = step(weight, pair_of(tmp_path, 1024, 64, 1024, 0.1))
    wanted = exact(run(FLOAT32, weight, what)[0])
    _, size = sums(weight, what.deltas)
    for kernel in choose("auto").choices:
        found = exact(run(kernel, weight, what)[0])
        assert (found == wanted).mean() >= 0.9999
        assert (np.abs(found - wanted) <= ulp(wanted, BFLOAT16) + 2.0**-20 * size).all()


@pytest.mark.parametrize("scale", [1e-30, 1e-36, 1e-38, 2e-39])
@pytest.mark.parametrize("where", ["all", "base", "pair"])
def test_the_smallest_numbers_are_within_the_bound_too(tmp_path: Path, scale: float, where: str) -> None:
    """CPUs' bfloat16 instructions would take what is below 2^-126 for zero."""
    weight = noise(128, 320, std=1e-20 if where == "pair" else scale, seed=1).bfloat16()
    weight[:, ::3] = 0
    up, down = noise(128, 24, seed=2), noise(24, 320, std=1e-20 if where == "base" else scale, seed=3)
    up[::2] = 0
    pairs = [
        low_rank(stored(tmp_path / "up", up.bfloat16()), stored(tmp_path / "down", down.bfloat16()), 0.5)
    ]
    total, size = sums(weight, pairs)
    for kernel in ALL:
        found = exact(run(kernel, weight, step(weight, *pairs))[0])
        assert (np.abs(found - total) <= ulp(total, BFLOAT16) + 2.0**-20 * size).all()


def test_pairs_of_one_scale_are_one_pair_of_all_their_ranks(tmp_path: Path) -> None:
    weight = noise(200, 96, seed=1).bfloat16()
    ups, downs = (
        [noise(200, n, seed=n).bfloat16() for n in (3, 8, 5)],
        [noise(n, 96, seed=-n).bfloat16() for n in (3, 8, 5)],
    )
    several = [
        low_rank(stored(tmp_path / f"up{n}", up), stored(tmp_path / f"down{n}", down), 0.3)
        for n, (up, down) in enumerate(zip(ups, downs, strict=True))
    ]
    joined = low_rank(
        stored(tmp_path / "up", torch.cat(ups, 1)), stored(tmp_path / "down", torch.cat(downs, 0)), 0.3
    )
    assert torch.equal(
        run(BF16, weight, step(weight, *several))[0], run(BF16, weight, step(weight, joined))[0]
    )


# one set of bits


@pytest.fixture
def _many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuselora.steps.CHUNK_ELEMENTS", 64 * 90)


def steps_of(folder: Path, base: torch.dtype, out: torch.dtype) -> tuple[torch.Tensor, Fuse]:
    """One pair, and a difference where the fast way is none."""
    weight = noise(64 * 7 + 30, 90, seed=1).to(base)
    deltas: list[Delta] = [pair_of(folder, len(weight), 16, 90, 0.3)]
    if out != BFLOAT16:
        deltas.append(full(stored(folder / "diff", noise(len(weight), 90, seed=4)), 0.7))
    return weight, step(weight, *deltas, dtype=out)


def placed(content: bytes, head: int) -> memoryview:
    """Bytes at a place within a page of memory."""
    memory = memoryview(own_memory(head + len(content)))
    memory[head:] = content
    return memory[head:]


@pytest.mark.usefixtures("_many_chunks")
@pytest.mark.parametrize(
    ("kernel", "base", "out"),
    [
        (BF16, BFLOAT16, BFLOAT16), (FLOAT32, BFLOAT16, BFLOAT16), (REFERENCE, BFLOAT16, BFLOAT16),
        (FLOAT32, F32, F32), (FLOAT32, F16, F16), (FLOAT32, F16, BFLOAT16), (REFERENCE, BFLOAT16, F16),
    ],
)  # fmt: skip
def test_in_place_and_apart_on_any_address_and_in_any_lots(
    tmp_path: Path, kernel: Kernel, base: torch.dtype, out: torch.dtype
) -> None:
    weight, what = steps_of(tmp_path, base, out)
    content, chunks = raw(weight), what.chunks
    assert len(chunks) == 7
    row = len(content) // what.rows
    loaded = load(kernel, what)
    found: set[bytes] = set()
    for head, in_place, lots in product((0, 1, 2, 8, 64, 4095), (True, False), ([7], [1] * 7, [2, 4, 1])):
        source = placed(content, head)
        target = source if in_place else placed(bytes(len(content)), 7 - head % 2)
        at = 0
        for n_chunks in lots:
            lot = chunks[at : at + n_chunks]
            part = slice(lot[0][0] * row, lot[-1][1] * row)
            loaded.fuse(source[part], target[part], lot)
            at += n_chunks
        found.add(bytes(target))
    assert len(found) == 1
    assert found != {content}


@pytest.mark.usefixtures("_many_chunks")
@pytest.mark.parametrize("kernel", ALL)
def test_threads_compute_side_by_side(tmp_path: Path, kernel: Kernel) -> None:
    """One step's chunks on four threads at once, each with its own scratch memory."""
    weight, what = steps_of(tmp_path, BFLOAT16, BFLOAT16)
    content, chunks = raw(weight), what.chunks
    wanted = bytearray(content)
    loaded = load(kernel, what)
    lost = loaded.fuse(memoryview(wanted), memoryview(wanted), chunks)
    row = len(content) // what.rows
    barrier = threading.Barrier(len(chunks))

    def fuse(target: memoryview, chunk: tuple[int, int]) -> Lost:
        barrier.wait(60)
        part = target[chunk[0] * row : chunk[1] * row]
        return loaded.fuse(part, part, [chunk])

    for _ in range(5):
        shared = bytearray(content)
        with ThreadPoolExecutor(len(chunks)) as pool:
            found = list(pool.map(fuse, [memoryview(shared)] * len(chunks), chunks))
        assert shared == wanted
        assert sum(found, Lost()) == lost != Lost()


def test_scratch_memory_serves_one_size_and_dtype_after_another(tmp_path: Path) -> None:
    cases = [(FLOAT32, 200), (REFERENCE, 80), (FLOAT32, 70), (REFERENCE, 300), (FLOAT32, 300)]
    for kernel, rows in cases * 2:
        weight = noise(rows, 20, seed=rows)
        diff = noise(rows, 20, seed=rows + 1)
        found, _ = run(kernel, weight, step(weight, full(stored(tmp_path / f"{rows}", diff), 1.0)))
        assert torch.equal(found, weight + diff)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 3e38])
def test_what_is_not_finite_names_the_tensor(tmp_path: Path, kernel: Kernel, value: float) -> None:
    weight = torch.full((3, 4), 1e38)
    diff = torch.zeros(3, 4)
    diff[2, 3] = value
    what = step(weight, full(stored(tmp_path / "diff", diff), 1.0), key="blocks.7.ffn.0.weight")
    with pytest.raises(NumericError, match=r"blocks\.7\.ffn\.0\.weight: .* is not finite") as caught:
        run(kernel, weight, what)
    assert caught.value.facts == {"tensor": "blocks.7.ffn.0.weight"}
    assert caught.value.hint


@pytest.mark.parametrize("bad", ["base", "sum"])
@pytest.mark.parametrize("kernel", ALL)
def test_one_element_in_the_last_chunk_is_enough(tmp_path: Path, kernel: Kernel, bad: str) -> None:
    weight = noise(130, 8).bfloat16()
    one = pair_of(tmp_path, 130, 2, 8, 0.5 if bad == "base" else 1e38)
    if bad == "base":
        weight[129, 7] = float("nan")
    with pytest.raises(NumericError, match=r"a\.weight: the fused tensor is not finite"):
        run(kernel, weight, step(weight, one))


# deltas too small to count


@pytest.mark.parametrize("kernel", KERNELS)
def test_elements_that_did_not_move_are_counted(tmp_path: Path, kernel: Kernel) -> None:
    weight = torch.ones(2, 4).bfloat16()  # its neighbours are 2^-7 above and 2^-8 below
    diff = torch.tensor([[2.0**-7, 2.0**-7, 2.0**-10, 0.0], [2.0**-12, -(2.0**-8), -(2.0**-10), 0.0]])
    _, lost = run(kernel, weight, step(weight, full(stored(tmp_path / "diff", diff), 1.0)))
    assert lost == Lost(touched=6, unchanged=3)


def test_only_the_first_rows_are_counted(tmp_path: Path) -> None:
    weight = torch.ones(300, 2).bfloat16()
    diff = torch.full((300, 2), 2.0**-20)
    what = step(weight, full(stored(tmp_path / "diff", diff), 1.0))
    assert run(FLOAT32, weight, what)[1] == Lost(128, 128)
    chunk = memoryview(bytearray(raw(weight[64:128])))
    assert load(FLOAT32, what).fuse(chunk, chunk, [(64, 128)]) == Lost()


@pytest.mark.parametrize("kernel", ALL)
@pytest.mark.parametrize("in_place", [True, False])
def test_pairs_are_counted_alike_by_every_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: Kernel, in_place: bool
) -> None:
    """In the first rows of the first of three chunks, also where the result takes the base's place."""
    monkeypatch.setattr("fuselora.steps.CHUNK_ELEMENTS", 64 * 4)
    weight = torch.ones(200, 4).bfloat16()
    down = torch.tensor([[2.0**-7, 2.0**-10, -(2.0**-8), 0.0]]).bfloat16()
    up = torch.ones(200, 1).bfloat16()
    what = step(weight, low_rank(stored(tmp_path / "up", up), stored(tmp_path / "down", down), 1.0))
    source = memoryview(bytearray(raw(weight)))
    target = source if in_place else memoryview(bytearray(what.n_bytes))
    assert load(kernel, what).fuse(source, target, what.chunks) == Lost(touched=192, unchanged=64)


def test_counts_add_up() -> None:
    assert Lost(3, 1) + Lost(4, 4) == Lost(7, 5)


@pytest.mark.parametrize(("size", "said"), [(2.0**-12, True), (2.0**-6, False)])
def test_a_merge_says_when_most_of_a_delta_is_lost(tmp_path: Path, size: float, said: bool) -> None:
    base = write(tmp_path / "base.safetensors", {"a.weight": torch.ones(8, 8).bfloat16()})
    one = lora(tmp_path / "l.safetensors", {"a.diff": torch.full((8, 8), size)})
    report = fuselora.merge(base, [str(one)], tmp_path / "out")
    found = [notice for notice in report.notices if notice.code == "delta_lost"]
    assert [notice.facts for notice in found] == (
        [{"component": "transformer", "touched": 64, "unchanged": 64}] if said else []
    )


def test_a_zero_delta_is_not_called_lost(tmp_path: Path) -> None:
    base = write(tmp_path / "base.safetensors", {"a.weight": torch.ones(8, 8).bfloat16()})
    one = lora(tmp_path / "l.safetensors", pair("a", torch.zeros(8, 1), noise(1, 8)))
    report = fuselora.merge(base, [str(one)], tmp_path / "out")
    assert [notice.code for notice in report.notices] == ["zero_delta"]
    assert (tmp_path / "out" / "base.safetensors").read_bytes()[-128:] == base.read_bytes()[-128:]


# what the marker says of it


def math_of(out: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((out / "fused.json").read_bytes())["math"]
    return found


@pytest.fixture
def mixed(tmp_path: Path) -> Iterator[tuple[Path, list[str]]]:
    """A base of two dtypes, and a LoRA for each of its tensors."""
    tensors = {"a.weight": noise(70, 8).bfloat16(), "b.weight": noise(70, 8)}
    parts = pair("a", noise(70, 2).bfloat16(), noise(2, 8).bfloat16())
    others = pair("b", noise(70, 2).bfloat16(), noise(2, 8).bfloat16())
    names = [
        str(lora(tmp_path / "a.safetensors", parts)),
        str(lora(tmp_path / "b.safetensors", others)),
    ]
    yield write(tmp_path / "base.safetensors", tensors), names


@pytest.mark.parametrize(
    ("chosen", "loras", "kernel", "accumulate"),
    [
        ((BF16, FLOAT32), [0], "bf16-addmm", "float32"),
        ((BF16, FLOAT32), [1], "float32", "float32"),
        ((BF16, FLOAT32), [0, 1], "bf16-addmm + float32", "float32"),
        ((FLOAT32,), [0, 1], "float32", "float32"),
        ((REFERENCE,), [0, 1], "reference", "float64"),
        ((BF16, REFERENCE), [0, 1], "bf16-addmm + reference", "float32 + float64"),
    ],
)
def test_the_marker_names_the_kernels_that_computed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mixed: tuple[Path, list[str]],
    chosen: tuple[Kernel, ...],
    loras: list[int],
    kernel: str,
    accumulate: str,
) -> None:
    base, names = mixed
    monkeypatch.setattr("fuselora.engine.means.choose", lambda name: Kernels(chosen))
    fuselora.merge(base, [names[number] for number in loras], tmp_path / "out")
    found = math_of(tmp_path / "out")
    assert (found["kernel"], found["accumulate"]) == (kernel, accumulate)


def test_the_marker_of_a_merge_that_only_copied_names_a_kernel_too(
    tmp_path: Path, mixed: tuple[Path, list[str]]
) -> None:
    base, names = mixed
    fuselora.merge(base, [f"{names[0]}:0"], tmp_path / "out")
    assert math_of(tmp_path / "out")["kernel"] == "float32"
