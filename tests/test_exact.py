"""The float64 sum of one tensor, and the distance of a stored result from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from fuselora import exact
from fuselora.definitions import changed, difference, moves
from fuselora.errors import InputError
from fuselora.exact import Distance, Files, compare, measure, opened, round_to, scalar, slabs, ulp
from fuselora.kinds import Kind
from fuselora.kinds.difference import DIFF
from fuselora.kinds.loha import LOHA
from fuselora.kinds.low_rank import PAIR
from fuselora.kinds.replacement import REPLACE
from fuselora.kinds.settings import Settings
from fuselora.recorded import Delta, Stored

F64 = torch.float64
SIXTEEN_BITS = [torch.bfloat16, torch.float16]


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


def stored(path: Path, **tensors: torch.Tensor) -> dict[str, Stored]:
    save_file(tensors, path)
    return {key: Stored(path, key) for key in tensors}


def quiet(done: int) -> None:
    del done


def pair_of(lora: Mapping[str, Stored], scale: float) -> Delta:
    return Delta(PAIR, {"up": lora["up"], "down": lora["down"]}, abs(scale), math.copysign(1.0, scale))


# Units and rounding


@pytest.mark.parametrize(
    ("dtype", "value", "unit"),
    [
        (torch.bfloat16, 1.0, 2.0**-7),
        (torch.bfloat16, -1.99, 2.0**-7),
        (torch.bfloat16, 2.0, 2.0**-6),
        (torch.bfloat16, 0.999, 2.0**-8),
        (torch.bfloat16, 0.0, 2.0**-133),
        (torch.bfloat16, 2.0**-130, 2.0**-133),
        (torch.float16, 1.0, 2.0**-10),
        (torch.float16, 2.0**-14, 2.0**-24),
        (torch.float16, 2.0**-20, 2.0**-24),
        (torch.float16, -(2.0**-60), 2.0**-24),
        (torch.float32, 3.0, 2.0**-22),
        (torch.float32, 2.0**-140, 2.0**-149),
    ],
)
def test_a_unit_in_the_last_place(dtype: torch.dtype, value: float, unit: float) -> None:
    assert ulp(doubles(value), dtype).item() == unit


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_rounding_agrees_with_torch_where_float32_holds_the_value(dtype: torch.dtype) -> None:
    bits = torch.randint(-(1 << 31), (1 << 31) - 1, (200_000,), generator=torch.Generator().manual_seed(1))
    values = bits.to(torch.int32).view(torch.float32)
    values = values[values.abs() < 60_000]
    # ties between two neighbours too
    halves = values.to(dtype).double() + ulp(values.double(), dtype) / 2
    for exactly in (values, halves.float()):
        assert torch.equal(round_to(exactly.double(), dtype), exactly.to(dtype).double())


def test_rounding_happens_once() -> None:
    just_above_a_tie = 1 + 2.0**-8 + 2.0**-40
    assert round_to(doubles(just_above_a_tie), torch.bfloat16).item() == 1 + 2.0**-7
    assert doubles(just_above_a_tie).to(torch.bfloat16).item() == 1, "torch goes by way of float32"


def test_float32_is_rounded_as_torch_rounds_it() -> None:
    values = torch.randn(10_000, dtype=F64, generator=torch.Generator().manual_seed(2))
    assert torch.equal(round_to(values, torch.float32), values.float().double())


# Comparing


def test_a_value_rounded_once_is_equal() -> None:
    values = torch.randn(1000, dtype=F64, generator=torch.Generator().manual_seed(3))
    result = compare(round_to(values, torch.bfloat16).bfloat16(), values, torch.zeros(1000, dtype=F64))
    assert (result.elements, result.equal, result.beyond, result.unexplained) == (1000, 1000, 0, 0)
    assert 0.45 < result.max_ulps <= 0.5


@pytest.mark.parametrize(
    ("ulps", "beyond", "unexplained"), [(0.0, 0, 0), (1.0, 0, 1), (-1.0, 0, 1), (2.0, 1, 1), (-1.5, 1, 1)]
)
def test_more_than_one_unit_off_is_beyond_the_bound(ulps: float, beyond: int, unexplained: int) -> None:
    """Below 1 a unit is half as large, so -1.5 units is two steps of the dtype and a half more."""
    held = torch.tensor([1 + ulps * 2.0**-7], dtype=torch.bfloat16)
    result = compare(held, doubles(1.0), doubles(0.0))
    assert (result.beyond, result.unexplained) == (beyond, unexplained)
    assert result.max_ulps == abs(ulps)


def test_the_slack_of_the_sum_widens_both_bounds() -> None:
    tie = 1 + 2.0**-8
    held = torch.tensor([1 + 2.0**-7], dtype=torch.bfloat16)
    assert compare(held, doubles(tie - 1e-9), doubles(0.0)).unexplained == 1
    assert compare(held, doubles(tie - 1e-9), doubles(1e-8)).unexplained == 0
    two_off = torch.tensor([1 + 2.0**-6], dtype=torch.bfloat16)
    assert compare(two_off, doubles(1.0), doubles(2.0**-7)).beyond == 0
    assert compare(two_off, doubles(1.0), doubles(2.0**-7 - 1e-9)).beyond == 1


@pytest.mark.parametrize("held", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("value", [1.0, math.nan, math.inf])
def test_what_is_not_finite_is_never_right(held: float, value: float) -> None:
    result = compare(torch.tensor([held], dtype=torch.bfloat16), doubles(value), doubles(0.0))
    assert (result.equal, result.beyond, result.unexplained, result.max_ulps) == (0, 1, 1, math.inf)


def test_a_value_too_large_for_the_dtype_is_not_equal_to_infinity() -> None:
    result = compare(torch.tensor([math.inf], dtype=torch.float16), doubles(1e6), doubles(0.0))
    assert (result.equal, result.beyond) == (0, 1)


def test_the_smallest_subnormals_are_told_apart() -> None:
    tiny = 2.0**-24
    held = torch.tensor([tiny, 3 * tiny], dtype=torch.float16)
    result = compare(held, doubles(tiny, tiny), doubles(0.0, 0.0))
    assert (result.equal, result.beyond, result.max_ulps) == (1, 1, 2.0)


def test_distances_add_up() -> None:
    total = Distance(10, 9, 1, 1, 2.0) + Distance(5, 5, 0, 0, 0.5)
    assert total == Distance(15, 14, 1, 1, 2.0)


# Measuring files


@pytest.mark.parametrize("shape", [(), (7,), (9, 4), (5, 3, 2, 2), (1, 30)])
def test_slabs_cover_each_row_once(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "SLAB_ELEMENTS", 8)
    ranges = list(slabs(shape))
    rows = [row for first, last in ranges for row in range(first, last)]
    assert rows == list(range(shape[0] if shape else 1))
    width = math.prod(shape[1:])
    assert all(last - first == 1 or (last - first) * width <= 8 for first, last in ranges)


def sums(folder: Path, dtype: torch.dtype) -> tuple[Stored, list[Delta], torch.Tensor]:
    """A weight with a pair and a difference on it, and their exact sum."""
    noise = torch.Generator().manual_seed(4)
    weight = torch.randn(40, 24, generator=noise).to(dtype)
    up, down = torch.randn(40, 4, generator=noise).bfloat16(), torch.randn(4, 24, generator=noise).half()
    diff = torch.randn(40, 24, generator=noise)
    base = stored(folder / "base.safetensors", w=weight)["w"]
    lora = stored(folder / "lora.safetensors", up=up, down=down, diff=diff)
    deltas = [pair_of(lora, -0.25), Delta(DIFF, {"diff": lora["diff"]}, 1.0, 0.5)]
    return base, deltas, weight.double() - 0.25 * (up.double() @ down.double()) + 0.5 * diff.double()


@pytest.mark.parametrize("slab", [1, 24, 100, 1 << 19])
@pytest.mark.parametrize("dtype", [*SIXTEEN_BITS, torch.float32])
def test_the_sum_of_all_deltas_in_any_slabs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, slab: int
) -> None:
    monkeypatch.setattr(exact, "SLAB_ELEMENTS", slab)
    base, deltas, total = sums(tmp_path, dtype)
    out = stored(tmp_path / "out.safetensors", w=round_to(total, dtype).to(dtype))["w"]
    done: list[int] = []
    result = measure(base, out, deltas, done.append)
    assert (result.elements, result.beyond, result.unexplained) == (960, 0, 0)
    assert result.equal >= 959, "matrix products of other shapes may differ in float64's last bit"
    assert sum(done) == 960 * dtype.itemsize


@pytest.mark.parametrize("slab", [1, 50, 1 << 19])
@pytest.mark.parametrize("strength", [1.0, -0.75])
@pytest.mark.parametrize(
    ("kind", "shapes"),
    [
        (LOHA, {"hada_w1_a": (9, 2), "hada_w1_b": (2, 12), "hada_w2_a": (9, 2), "hada_w2_b": (2, 12)}),
        (PAIR, {"up": (9, 2), "down": (2, 4, 3), "dora_scale": (1, 4, 1)}),
        (REPLACE, {"weight": (9, 4, 3)}),
    ],
)
def test_kinds_that_are_computed_whole_or_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, shapes: dict[str, tuple[int, ...]],
    strength: float, slab: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(exact, "SLAB_ELEMENTS", slab)
    noise = torch.Generator().manual_seed(5)
    weight = torch.randn(9, 4, 3, generator=noise)
    parts = {part: torch.randn(shape, generator=noise) for part, shape in shapes.items()}
    wide = {part: tensor.double() for part, tensor in parts.items()}
    if moves(kind.name, parts):
        added = changed(kind.name, wide, weight.double(), 0.5, Settings()).value - weight.double()
    else:
        added = 0.5 * difference(kind.name, wide, weight.double()).value
    total = round_to(weight.double() + strength * added, torch.bfloat16).bfloat16()
    base = stored(tmp_path / "base.safetensors", w=weight)["w"]
    out = stored(tmp_path / "out.safetensors", w=total)["w"]
    delta = Delta(kind, stored(tmp_path / "lora.safetensors", **parts), 0.5, strength)
    result = measure(base, out, [delta], quiet)
    assert (result.elements, result.equal, result.beyond, result.unexplained) == (108, 108, 0, 0)


def test_slack_comes_from_the_magnitude_of_every_product(tmp_path: Path) -> None:
    """up @ down cancels to nothing, but a float32 sum of it need not."""
    base = stored(tmp_path / "base.safetensors", w=torch.zeros(1, 1))["w"]
    lora = stored(tmp_path / "l.safetensors", up=torch.tensor([[1.0, -1.0]]), down=torch.full((2, 1), 1000.0))
    delta = pair_of(lora, 1.0)
    for value, beyond in ((2000 * 2.0**-20, 0), (2000 * 2.0**-20 * 1.01, 1)):
        out = stored(tmp_path / "out.safetensors", w=torch.full((1, 1), value))["w"]
        assert measure(base, out, [delta], quiet).beyond == beyond


def test_numbers_and_vectors_are_measured_too(tmp_path: Path) -> None:
    base = stored(tmp_path / "base.safetensors", n=torch.tensor(1.0), v=torch.arange(5.0))
    out = stored(tmp_path / "out.safetensors", n=torch.tensor(1.0).half(), v=torch.arange(5.0).half())
    assert measure(base["n"], out["n"], (), quiet).equal == 1
    assert measure(base["v"], out["v"], (), quiet).equal == 5


@pytest.mark.parametrize(
    "value", [torch.tensor(8), torch.tensor([8.0]), torch.tensor(8.0).bfloat16(), torch.tensor(8).short()]
)
def test_a_scalar_of_any_dtype(tmp_path: Path, value: torch.Tensor) -> None:
    assert scalar(stored(tmp_path / "x.safetensors", alpha=value)["alpha"], Files()) == 8.0


def test_a_file_whose_name_is_not_utf8_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not UTF-8"):
        opened(tmp_path / "l\udcff.safetensors")


def count_opens(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    opens: list[Path] = []

    def counted(path: Path) -> safe_open:
        opens.append(path)
        return opened(path)

    monkeypatch.setattr(exact, "opened", counted)
    return opens


def test_files_stay_open_from_tensor_to_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The header of a large file takes longer to read than most tensors in it."""
    base, deltas, total = sums(tmp_path, torch.bfloat16)
    out = stored(tmp_path / "out.safetensors", w=round_to(total, torch.bfloat16).bfloat16())["w"]
    opens = count_opens(monkeypatch)
    files = Files()
    for _ in range(3):
        measure(base, out, deltas, quiet, files)
    assert sorted(path.name for path in opens) == ["base.safetensors", "lora.safetensors", "out.safetensors"]


@pytest.mark.parametrize("limit", ["MAX_OPEN", "MAX_READ"])
def test_files_are_closed_after_so_many_and_so_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """Of thousands of shards there are few descriptors, and of large files little stays in memory."""
    base = stored(tmp_path / "base.safetensors", v=torch.arange(5.0))["v"]
    opens = count_opens(monkeypatch)
    monkeypatch.setattr(exact, limit, 0)
    files = Files()
    for _ in range(3):
        measure(base, base, (), quiet, files)
    assert len(opens) == 3
