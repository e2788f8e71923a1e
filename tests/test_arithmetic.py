"""Whole merges against float64: the bound that is promised, the share that is exact, and fixed bits."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fuselora
from fuselora.engine.kernel import FLOAT32, REFERENCE, Kernel, Loaded, choose
from fuselora.errors import NumericError
from fuselora.planning import OutputFile
from fuselora.steps import Fuse
from tests.delta.reference import Values, exact, rounded, ulp
from tests.small import lora, noise, pair, planned, write

if TYPE_CHECKING:
    from collections.abc import Iterator

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = {"bf16": BF16, "fp16": F16, "fp32": F32}
STRENGTHS = (1.0, 0.8, -0.3, 1.5)
RANK = 16


@pytest.fixture(autouse=True)
def _quick_and_restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)


@dataclass(frozen=True)
class Inputs:
    """A base, LoRAs with their strengths, and what float64 makes of them."""

    base: Path
    loras: tuple[Path, ...]
    specs: tuple[str, ...]
    tensors: dict[str, torch.Tensor]
    parts: tuple[dict[str, torch.Tensor], ...]

    def sums(self, name: str) -> tuple[Values, Values]:
        """In float64 W + the deltas, and how much is summed: |W| + the sum of |scale| |up| @ |down|."""
        module, leaf = name.rsplit(".", 1)
        total = exact(self.tensors[name]).copy()
        size = np.abs(total)
        for strength, parts in zip(STRENGTHS, self.parts, strict=False):
            if leaf == "weight" and f"{module}.lora_up.weight" in parts:
                up, down = (
                    exact(parts[f"{module}.lora_up.weight"]),
                    exact(parts[f"{module}.lora_down.weight"]),
                )
                scale = strength * parts[f"{module}.alpha"].item() / down.shape[0]
                total += scale * (up @ down)
                size += abs(scale) * (np.abs(up) @ np.abs(down))
            key = f"{module}.diff_b" if leaf == "bias" else f"{module}.diff"
            if key in parts:
                total += strength * exact(parts[key])
                size += abs(strength) * np.abs(exact(parts[key]))
        return total, size


def make(
    folder: Path, base: torch.dtype, factors: torch.dtype, n_loras: int, shape: tuple[int, int]
) -> Inputs:
    """W ~ N(0, 0.02), each delta about a tenth of it; a bias and a norm with diffs."""
    rows, columns = shape
    tensors = {
        "a.weight": noise(rows, columns, std=0.02, seed=1, dtype=base),
        "a.bias": noise(rows, std=0.02, seed=2, dtype=base),
        "norm.weight": noise(columns, std=0.1, seed=3).add_(1).to(base),
    }
    parts = tuple(_parts(number, rows, columns, factors) for number in range(n_loras))
    loras = tuple(lora(folder / f"l{number}.safetensors", each) for number, each in enumerate(parts))
    specs = tuple(f"{path}:{strength}" for path, strength in zip(loras, STRENGTHS, strict=False))
    return Inputs(write(folder / "base.safetensors", tensors), loras, specs, tensors, parts)


def _parts(number: int, rows: int, columns: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    # alpha is half the rank: up @ down has twice the deviation of the delta
    up = noise(rows, RANK, std=0.1, seed=10 * number + 4, dtype=dtype)
    down = noise(RANK, columns, std=0.04 / RANK**0.5, seed=10 * number + 5, dtype=dtype)
    return {
        **pair("a", up, down, alpha=RANK / 2),
        "a.diff_b": noise(rows, std=0.002, seed=10 * number + 6, dtype=dtype),
        "norm.diff": noise(columns, std=0.01, seed=10 * number + 7, dtype=dtype),
    }


def merged(inputs: Inputs, out: Path, **options: Any) -> dict[str, torch.Tensor]:
    fuselora.merge(inputs.base, list(inputs.specs), out, **options)
    return load_file(out / "base.safetensors")


def beyond_bound(found: Values, total: Values, size: Values, dtype: torch.dtype, room: float) -> int:
    """How many elements are further from float64 than one output step plus ``room`` of what was summed."""
    return int((np.abs(found - total) > ulp(total, dtype) + room * size).sum())


CASES = list(itertools.product(DTYPES, DTYPES, (1, 4)))


@pytest.mark.parametrize(("base", "factors", "n_loras"), CASES)
def test_every_element_is_within_the_bound(tmp_path: Path, base: str, factors: str, n_loras: int) -> None:
    inputs = make(tmp_path, DTYPES[base], DTYPES[factors], n_loras, (193, 320))
    found = merged(inputs, tmp_path / "out")
    for name, tensor in found.items():
        assert tensor.dtype == DTYPES[base]
        total, size = inputs.sums(name)
        assert not np.array_equal(exact(tensor), exact(inputs.tensors[name]))
        assert beyond_bound(exact(tensor), total, size, DTYPES[base], 2.0**-20) == 0


@pytest.mark.parametrize(("base", "factors", "n_loras"), CASES)
def test_the_reference_rounds_once_what_float64_gives(
    tmp_path: Path, base: str, factors: str, n_loras: int
) -> None:
    """Half a step is the error of one rounding; the float64 sum itself is good to 2^-40 of what it sums."""
    inputs = make(tmp_path, DTYPES[base], DTYPES[factors], n_loras, (70, 90))
    found = merged(inputs, tmp_path / "out", kernel="reference")
    for name, tensor in found.items():
        total, size = inputs.sums(name)
        error = np.abs(exact(tensor) - total)
        near = rounded(total, DTYPES[base])
        assert bool(
            (error <= ulp(np.maximum(np.abs(near), np.abs(total)), DTYPES[base]) / 2 + 2.0**-40 * size).all()
        )
        assert (exact(tensor) == near).mean() > 0.9999


@pytest.mark.parametrize("target", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("base", DTYPES)
def test_another_output_dtype_is_rounded_once_too(tmp_path: Path, base: str, target: str) -> None:
    inputs = make(tmp_path, DTYPES[base], BF16, 2, (130, 96))
    dtype = getattr(torch, target)
    for kernel in ("auto", "reference"):
        found = merged(inputs, tmp_path / kernel, kernel=kernel, dtype=target)
        for name, tensor in found.items():
            assert tensor.dtype == dtype
            total, size = inputs.sums(name)
            assert beyond_bound(exact(tensor), total, size, dtype, 2.0**-20) == 0


@pytest.mark.parametrize("factors", DTYPES)
@pytest.mark.parametrize("n_loras", [1, 4])
def test_nearly_all_of_bfloat16_is_the_once_rounded_float64(
    tmp_path: Path, factors: str, n_loras: int
) -> None:
    inputs = make(tmp_path, BF16, DTYPES[factors], n_loras, (1024, 1024))
    found = exact(merged(inputs, tmp_path / "out")["a.weight"])
    total, _ = inputs.sums("a.weight")
    delta = total - exact(inputs.tensors["a.weight"])
    assert 0.05 < delta.std() / 0.02 < 0.4
    assert (found == rounded(total, BF16)).mean() >= 0.9999


def test_adding_in_bfloat16_would_not_pass(tmp_path: Path) -> None:
    """The share above means something: the usual way, two roundings, is far below it."""
    inputs = make(tmp_path, BF16, BF16, 1, (512, 512))
    parts = inputs.parts[0]
    delta = 0.5 * parts["a.lora_up.weight"] @ parts["a.lora_down.weight"]
    usual = inputs.tensors["a.weight"] + delta
    total, _ = inputs.sums("a.weight")
    assert (exact(usual) == rounded(total, BF16)).mean() < 0.95


def test_cancellation_is_within_the_bound(tmp_path: Path) -> None:
    """A LoRA that takes the weight back almost to zero: many steps off, but not by what was summed."""
    up, down = noise(128, 8, std=0.1, seed=1), noise(8, 128, std=0.1, seed=2)
    weight = (-(up @ down)).to(BF16)
    base = write(tmp_path / "base.safetensors", {"a.weight": weight})
    parts = {**pair("a", up.to(BF16), down.to(BF16), alpha=8.0)}
    one = lora(tmp_path / "l.safetensors", parts)
    inputs = Inputs(base, (one,), (f"{one}",), {"a.weight": weight}, (parts,))
    total, size = inputs.sums("a.weight")
    found = exact(merged(inputs, tmp_path / "out")["a.weight"])
    assert np.median(np.abs(total) / size) < 0.02
    assert beyond_bound(found, total, size, BF16, 2.0**-20) == 0


@pytest.mark.parametrize("scale", [1e-38, 2e-39])
def test_subnormals_are_not_flushed(tmp_path: Path, scale: float) -> None:
    weight = noise(64, 64, std=scale, seed=1).to(BF16)
    base = write(tmp_path / "base.safetensors", {"a.weight": weight})
    parts = {"a.diff": noise(64, 64, std=scale, seed=2)}
    inputs = Inputs(base, (), (str(lora(tmp_path / "l.safetensors", parts)),), {"a.weight": weight}, (parts,))
    total, _ = inputs.sums("a.weight")
    found = exact(merged(inputs, tmp_path / "out")["a.weight"])
    assert (found != 0).mean() > 0.9
    assert np.abs(found - total).max() <= ulp(total, BF16).max()


# bits


@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (F32, F32), (F16, F32)])
def test_bits_do_not_depend_on_the_number_of_threads(
    tmp_path: Path, kernel: str, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    shape = (1025, 1100) if kernel == "auto" else (130, 140)
    inputs = make(tmp_path, *dtypes, 2, shape)
    found = set()
    for jobs in (1, 2, 3, None):
        merged(inputs, tmp_path / f"{jobs}", kernel=kernel, jobs=jobs)
        found.add((tmp_path / f"{jobs}" / "base.safetensors").read_bytes())
    assert len(found) == 1


@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_bits_do_not_depend_on_the_callers_matmul_settings(tmp_path: Path, kernel: str) -> None:
    """ "medium" lets float32 products be taken in bfloat16 on some CPUs."""
    inputs = make(tmp_path, F32, F32, 1, (256, 256))
    found = set()
    for precision in ("highest", "high", "medium"):
        torch.set_float32_matmul_precision(precision)
        merged(inputs, tmp_path / precision, kernel=kernel)
        found.add((tmp_path / precision / "base.safetensors").read_bytes())
    assert len(found) == 1


def test_a_merge_leaves_the_callers_torch_settings_alone(tmp_path: Path) -> None:
    inputs = make(tmp_path, BF16, BF16, 1, (64, 64))
    torch.set_num_threads(2)
    torch.set_float32_matmul_precision("medium")
    merged(inputs, tmp_path / "out", jobs=1)
    assert torch.get_num_threads() == 2
    assert torch.get_float32_matmul_precision() == "medium"


def test_settings_come_back_after_a_failure(tmp_path: Path) -> None:
    inputs = make(tmp_path, F16, F16, 1, (64, 64))
    torch.set_num_threads(2)
    torch.set_float32_matmul_precision("medium")
    with pytest.raises(NumericError):
        merged(replace(inputs, specs=(f"{inputs.loras[0]}:1e30",)), tmp_path / "out", jobs=1)
    assert torch.get_num_threads() == 2
    assert torch.get_float32_matmul_precision() == "medium"


def fused(file: OutputFile, kernel: Kernel, key: str) -> bytes:
    """One tensor's bytes, computed chunk by chunk."""
    (step,) = [step for step in file.steps if isinstance(step, Fuse) and step.base_key == key]
    source = bytearray(file.base.path.read_bytes()[step.source : step.source + step.base_bytes])
    target = bytearray(step.n_bytes)
    loaded = Loaded(step, kernel.load(step))
    base_row, out_row = step.base_bytes // step.rows, step.n_bytes // step.rows
    for first, last in step.chunks:
        loaded.fuse(
            memoryview(source)[first * base_row : last * base_row],
            memoryview(target)[first * out_row : last * out_row],
            [(first, last)],
        )
    return bytes(target)


def test_the_reference_is_the_plain_float64_loop_bit_for_bit(tmp_path: Path) -> None:
    inputs = make(tmp_path, F32, F32, 3, (11, 13))
    (file,) = planned(inputs.base, inputs.specs).files
    total: list[list[float]] = inputs.tensors["a.weight"].tolist()
    for strength, parts in zip(STRENGTHS, inputs.parts, strict=False):
        up, down = parts["a.lora_up.weight"].tolist(), parts["a.lora_down.weight"].tolist()
        scale = strength * ((RANK / 2) / RANK)
        for i, j in itertools.product(range(11), range(13)):
            product = 0.0
            for k in range(RANK):
                product += up[i][k] * down[k][j]
            total[i][j] += product * scale
    wanted = np.array(total, dtype=np.float64)
    found = np.frombuffer(fused(file, REFERENCE, "a.weight"), np.float32).reshape(11, 13)
    assert np.array_equal(found, wanted.astype(np.float32))


def test_the_order_of_loras_is_the_order_of_the_sum(tmp_path: Path) -> None:
    """float64 sums of three terms of very different size depend on their order."""
    base = write(tmp_path / "base.safetensors", {"a.weight": torch.full((1, 1), 1.0)})
    names = []
    for number, value in enumerate((2.0**60, -(2.0**60), 2.0**-10)):
        names.append(lora(tmp_path / f"{number}.safetensors", {"a.diff": torch.full((1, 1), value)}))
    found = {}
    for order in itertools.permutations(range(3)):
        (file,) = planned(base, [names[number] for number in order]).files
        raw = fused(file, REFERENCE, "a.weight")
        found[order] = np.frombuffer(raw, np.float32)[0].item()
    assert found[0, 1, 2] == 2.0**-10  # 1 is lost beside 2^60
    assert found[2, 0, 1] == 0.0  # 1 + 2^-10 is lost


def test_a_tensor_is_the_same_alone_and_among_others(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    alone = make(tmp_path / "one", BF16, BF16, 1, (700, 300))
    others = {**alone.tensors, "b.weight": noise(5, 7, dtype=BF16), "a0": noise(33, dtype=BF16)}
    base = write(tmp_path / "base.safetensors", dict(sorted(others.items())), pad=1000)
    fuselora.merge(base, list(alone.specs), tmp_path / "many")
    want = merged(alone, tmp_path / "out")
    found = load_file(tmp_path / "many" / "base.safetensors")
    for name, tensor in want.items():
        assert torch.equal(found[name].view(torch.int16), tensor.view(torch.int16))
    assert torch.equal(found["a0"], others["a0"])


@pytest.mark.parametrize("factors", [BF16, F32])
def test_each_kernel_alone_is_within_the_bound(tmp_path: Path, factors: torch.dtype) -> None:
    """Of those that this CPU may choose, and the fallback for where it has no bfloat16 products."""
    inputs = make(tmp_path, BF16, factors, 1, (300, 200))
    (file,) = planned(inputs.base, inputs.specs).files
    total, size = inputs.sums("a.weight")
    (step,) = [step for step in file.steps if isinstance(step, Fuse) and step.base_key == "a.weight"]
    for kernel in {FLOAT32, *choose("auto").choices}:
        if kernel.fits(step):
            raw = bytearray(fused(file, kernel, "a.weight"))
            found = exact(torch.frombuffer(raw, dtype=BF16).view(300, 200))
            assert beyond_bound(found, total, size, BF16, 2.0**-20) == 0


@pytest.mark.parametrize("n_loras", [1, 4])
def test_nearly_all_is_exact_by_the_fallback_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_loras: int
) -> None:
    """A CPU without bfloat16 products meets the same bar."""
    inputs = make(tmp_path, BF16, BF16, n_loras, (1024, 1024))
    monkeypatch.setattr("fuselora.engine.kernel.computes_bf16", lambda: False)
    found = exact(merged(inputs, tmp_path / "out")["a.weight"])
    total, _ = inputs.sums("a.weight")
    assert (found == rounded(total, BF16)).mean() >= 0.9999


def test_several_loras_of_one_scale_are_nearly_all_exact(tmp_path: Path) -> None:
    """The fast way joins them to one product."""
    inputs = make(tmp_path, BF16, BF16, 4, (1024, 1024))
    inputs = replace(inputs, specs=tuple(f"{path}:1" for path in inputs.loras))
    found = exact(merged(inputs, tmp_path / "out")["a.weight"])
    total = exact(inputs.tensors["a.weight"]).copy()
    for parts in inputs.parts:
        total += 0.5 * exact(parts["a.lora_up.weight"]) @ exact(parts["a.lora_down.weight"])
    assert (found == rounded(total, BF16)).mean() >= 0.9999


# what does not fit


@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_the_largest_number_fits_and_half_a_step_more_does_not(tmp_path: Path, kernel: str) -> None:
    weight = torch.tensor([[65504.0, -65504.0]], dtype=F16)
    base = write(tmp_path / "base.safetensors", {"a.weight": weight})
    fits = lora(tmp_path / "fits.safetensors", {"a.diff": torch.tensor([[15.0, -15.0]])})
    beyond = lora(tmp_path / "beyond.safetensors", {"a.diff": torch.tensor([[0.0, -16.0]])})
    fuselora.merge(base, [str(fits)], tmp_path / "out", kernel=kernel)
    assert torch.equal(load_file(tmp_path / "out" / "base.safetensors")["a.weight"], weight)
    with pytest.raises(NumericError, match=r"a\.weight.*does not fit F16") as caught:
        fuselora.merge(base, [str(beyond)], tmp_path / "no", kernel=kernel)
    assert caught.value.facts["tensor"] == "a.weight"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [(0, 0), (129, 63)])
def test_a_base_that_is_not_finite_is_said_to_be(
    tmp_path: Path, value: float, place: tuple[int, int]
) -> None:
    weight = noise(130, 64)
    weight[place] = value
    base = write(tmp_path / "base.safetensors", {"a.weight": weight})
    one = lora(tmp_path / "l.safetensors", pair("a", noise(130, 1), noise(1, 64)))
    with pytest.raises(NumericError, match=r"a\.weight.*the base itself holds NaN or infinity"):
        fuselora.merge(base, [str(one)], tmp_path / "out")


def test_a_cast_that_overflows_is_refused(tmp_path: Path) -> None:
    tensors = {"a.weight": noise(4, 4), "b.weight": torch.full((4, 4), 1e5)}
    base = write(tmp_path / "base.safetensors", tensors)
    one = lora(tmp_path / "l.safetensors", pair("a", noise(4, 1), noise(1, 4)))
    with pytest.raises(NumericError, match=r"b\.weight"):
        fuselora.merge(base, [str(one)], tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()
