from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import fuselora
from fuselora.engine.kernel import FLOAT32, REFERENCE, Kernel, Lost, choose, read_factor, read_rows
from fuselora.errors import ChangedError, NumericError, ReadError
from fuselora.planning import Factor, Full, Fuse, LowRank, chunk_grid
from tests.delta.reference import exact
from tests.small import CODES, lora, noise, pair, raw, write

BF16, F32 = torch.bfloat16, torch.float32
KERNELS = [FLOAT32, REFERENCE]


def stored(path: Path, tensor: torch.Tensor, *, before: bytes = b"") -> Factor:
    """A tensor as the whole content of a file, after some other bytes."""
    path.write_bytes(before + raw(tensor))
    n_bytes = tensor.numel() * tensor.element_size()
    return Factor(path, path.stem, CODES[tensor.dtype], tuple(tensor.shape), len(before), n_bytes)


def step(
    weight: torch.Tensor, *deltas: LowRank | Full, dtype: torch.dtype | None = None, key: str = "a.weight"
) -> Fuse:
    rows, columns = weight.shape
    out = CODES[dtype or weight.dtype]
    grid = chunk_grid(rows, columns)
    return Fuse(key, CODES[weight.dtype], out, rows, columns, 0, 0, grid, deltas)


def run(kernel: Kernel, weight: torch.Tensor, what: Fuse) -> tuple[torch.Tensor, Lost]:
    """The fused tensor and what was lost, all rows in one chunk."""
    out = {CODES[d]: d for d in (BF16, torch.float16, F32)}[what.dtype]
    target = bytearray(what.n_bytes)
    loaded = kernel.load(what)
    lost = loaded.fuse(memoryview(bytearray(raw(weight))), memoryview(target), 0, what.rows)
    return torch.frombuffer(target, dtype=out).view(what.rows, what.columns), lost


def test_kernels_by_name() -> None:
    assert choose("auto") is FLOAT32
    assert choose("reference") is REFERENCE
    assert (FLOAT32.dtype, REFERENCE.dtype) == (F32, torch.float64)


# factors


@pytest.mark.parametrize(
    "dtype", [BF16, torch.float16, F32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
)
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


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_file_that_grew_short_is_named(tmp_path: Path, kernel: Kernel) -> None:
    weight = noise(4, 4)
    up, down = stored(tmp_path / "up", noise(4, 1)), stored(tmp_path / "down", noise(1, 4))
    diff = stored(tmp_path / "diff", noise(4, 4))
    for path in (down.path, diff.path):
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ChangedError, match="down: was changed") as caught:
        kernel.load(step(weight, LowRank(up, down, 1.0)))
    assert caught.value.facts["path"] == str(down.path)
    with pytest.raises(ChangedError, match="diff: was changed"):
        run(kernel, weight, step(weight, Full(diff, 1.0)))


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    diff = stored(tmp_path / "diff", noise(4, 4))
    diff.path.unlink()
    with pytest.raises(ReadError, match="diff: cannot be read: No such file"):
        run(FLOAT32, noise(4, 4), step(noise(4, 4), Full(diff, 1.0)))


# sums


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_step_without_deltas_only_casts(kernel: Kernel) -> None:
    weight = noise(5, 7)
    found, lost = run(kernel, weight, step(weight, dtype=BF16))
    assert torch.equal(found, weight.bfloat16())
    assert lost == Lost()


@pytest.mark.parametrize("kernel", KERNELS)
def test_pairs_and_differences_add_up(tmp_path: Path, kernel: Kernel) -> None:
    weight, up, down, diff = noise(5, 7), noise(5, 2, seed=1), noise(2, 7, seed=2), noise(5, 7, seed=3)
    pair_of = LowRank(stored(tmp_path / "up", up), stored(tmp_path / "down", down), 0.5)
    found, _ = run(kernel, weight, step(weight, pair_of, Full(stored(tmp_path / "diff", diff), -2.0)))
    wanted = exact(weight) + 0.5 * exact(up) @ exact(down) - 2 * exact(diff)
    assert np.allclose(exact(found), wanted, rtol=0, atol=1e-5)


def test_chunks_take_their_own_rows(tmp_path: Path) -> None:
    weight, up, down, diff = noise(6, 3), noise(6, 2, seed=1), noise(2, 3, seed=2), noise(6, 3, seed=3)
    pair_of = LowRank(stored(tmp_path / "up", up), stored(tmp_path / "down", down), 1.0)
    what = step(weight, pair_of, Full(stored(tmp_path / "diff", diff), 1.0))
    whole, _ = run(REFERENCE, weight, what)
    loaded, rows = REFERENCE.load(what), []
    for first, last in ((0, 2), (2, 3), (3, 6)):
        target = bytearray((last - first) * 12)
        loaded.fuse(memoryview(bytearray(raw(weight[first:last]))), memoryview(target), first, last)
        rows.append(torch.frombuffer(target, dtype=F32).view(-1, 3))
    assert torch.equal(torch.cat(rows), whole)


def test_the_base_bytes_are_left_alone(tmp_path: Path) -> None:
    """They are hashed by another thread at the same time."""
    weight = noise(4, 4)
    what = step(weight, Full(stored(tmp_path / "diff", noise(4, 4, seed=1)), 1.0))
    source, target = bytearray(raw(weight)), bytearray(what.n_bytes)
    for kernel in KERNELS:
        kernel.load(what).fuse(memoryview(source), memoryview(target), 0, 4)
        assert bytes(source) == raw(weight)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 3e38])
def test_what_is_not_finite_names_the_tensor(tmp_path: Path, kernel: Kernel, value: float) -> None:
    weight = torch.full((3, 4), 1e38)
    diff = torch.zeros(3, 4)
    diff[2, 3] = value
    what = step(weight, Full(stored(tmp_path / "diff", diff), 1.0), key="blocks.7.ffn.0.weight")
    with pytest.raises(NumericError, match=r"blocks\.7\.ffn\.0\.weight: .* does not fit F32") as caught:
        run(kernel, weight, what)
    assert caught.value.facts == {"tensor": "blocks.7.ffn.0.weight"}
    assert caught.value.hint


# deltas too small to count


@pytest.mark.parametrize("kernel", KERNELS)
def test_elements_that_did_not_move_are_counted(tmp_path: Path, kernel: Kernel) -> None:
    weight = torch.ones(2, 4).bfloat16()  # its neighbours are 2^-7 above and 2^-8 below
    diff = torch.tensor([[2.0**-7, 2.0**-7, 2.0**-10, 0.0], [2.0**-12, -(2.0**-8), -(2.0**-10), 0.0]])
    _, lost = run(kernel, weight, step(weight, Full(stored(tmp_path / "diff", diff), 1.0)))
    assert lost == Lost(touched=6, unchanged=3)


def test_only_the_first_rows_are_counted(tmp_path: Path) -> None:
    weight = torch.ones(300, 2).bfloat16()
    diff = torch.full((300, 2), 2.0**-20)
    what = step(weight, Full(stored(tmp_path / "diff", diff), 1.0))
    assert run(FLOAT32, weight, what)[1] == Lost(128, 128)
    target = bytearray(64 * 4)
    chunk = memoryview(bytearray(raw(weight[64:128])))
    assert FLOAT32.load(what).fuse(chunk, memoryview(target), 64, 128) == Lost()


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
