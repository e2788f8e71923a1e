"""The path of an accelerator, on the CPU as torch's device; a real one where there is one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from fuselora.delta.sums import FLOAT32 as SUMS
from fuselora.engine import device as room
from fuselora.engine.buffers import own_memory
from fuselora.engine.device import (
    OnDevice,
    choose_device,
    device_name,
    free_bytes,
    needed_bytes,
    pinned_memory,
    sums_agree,
)
from fuselora.engine.kernel import FLOAT32, Lost, choose
from fuselora.engine.means import Means, choose_means
from fuselora.engine.threads import FACTOR_ELEMENTS
from fuselora.errors import InputError, NumericError, UsageError
from fuselora.specs import Request
from fuselora.steps import Delta, Factor
from tests.deltas import full, low_rank
from tests.engine.test_kernel import step, stored
from tests.small import noise

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")


def deltas(folder: Path) -> tuple[Delta, ...]:
    up, down = stored(folder / "up", noise(300, 3).bfloat16()), stored(folder / "down", noise(3, 40, seed=1))
    return low_rank(up, down, 0.5), full(stored(folder / "diff", noise(300, 40, seed=2)), -0.25)


@pytest.mark.parametrize("stored_as", [torch.bfloat16, torch.float32, torch.float16])
def test_the_device_sums_as_the_cpu_does(tmp_path: Path, stored_as: torch.dtype) -> None:
    weight = noise(300, 40, seed=4).to(stored_as)
    what = step(weight, *deltas(tmp_path), dtype=torch.bfloat16)
    found, wanted = (torch.empty(300, 40, dtype=torch.bfloat16) for _ in range(2))
    losses = [
        kernel.load(what).rows(weight.clone(), out, 0, 300)
        for kernel, out in ((OnDevice(CPU), found), (FLOAT32, wanted))
    ]
    assert torch.equal(found, wanted)
    assert losses[0] == losses[1] != Lost()


def test_the_device_that_there_is_computes_what_the_cpu_does() -> None:
    assert sums_agree(choose_device("auto"))


def test_factors_of_fewer_bits_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """TF32 takes 10 of the 23 bits behind the point."""

    def coarse(values: torch.Tensor) -> torch.Tensor:
        return (values.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)

    def tf32(total: torch.Tensor, up: torch.Tensor, down: torch.Tensor, scale: float) -> None:
        SUMS.add_product(total, coarse(up), coarse(down), scale)

    monkeypatch.setattr(room, "FLOAT32", replace(SUMS, add_product=tf32))
    assert not sums_agree(CPU)


def test_a_difference_that_is_not_added_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "FLOAT32", replace(SUMS, add=lambda total, diff, scale: None))
    assert not sums_agree(CPU)


def test_a_device_that_cannot_compute_does_not_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(room, "FLOAT32", replace(SUMS, add_product=refuse))
    assert not sums_agree(CPU)


def test_rows_after_the_first_take_their_own_factors(tmp_path: Path) -> None:
    weight = noise(300, 40, seed=4)
    loaded = OnDevice(CPU).load(step(weight, *deltas(tmp_path)))
    whole, part = torch.empty(300, 40), torch.empty(100, 40)
    loaded.rows(weight.clone(), whole, 0, 300)
    assert loaded.rows(weight[200:].clone(), part, 200, 300) == Lost()
    assert torch.allclose(part, whole[200:], atol=1e-6)


def test_cpu_and_auto_and_what_is_not_there() -> None:
    assert choose_device("cpu") == CPU
    assert choose_device("auto").type in ("cpu", "cuda", "xpu", "mps", "npu")
    with pytest.raises(InputError, match="--device toaster: is no device that torch knows"):
        choose_device("toaster")


@pytest.mark.parametrize("name", ["cuda:99", "ipu", "meta"])
def test_an_absent_device_is_refused_with_what_there_is(name: str) -> None:
    with pytest.raises(InputError, match=f"--device {name}: torch sees") as caught:
        choose_device(name)
    assert caught.value.facts["device"] == name
    assert caught.value.hint


def test_auto_takes_the_accelerator_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_accelerator", lambda: torch.device("xpu"))
    assert choose_device("auto") == torch.device("xpu")


class Backend:
    """What torch.cuda answers, for a card of 1 GiB."""

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        del device
        return 1 << 30, 2 << 30

    def get_device_name(self, device: torch.device) -> str:
        return f"Card {device.index}"


def request(**options: Any) -> Request:
    return Request(base="b", loras=(), **options)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A card that is there as far as anybody asks."""
    monkeypatch.setattr(room, "_backend", lambda device: Backend())
    monkeypatch.setattr(room, "_refuse_absent", lambda device: None)
    monkeypatch.setattr("fuselora.engine.means.pinned_memory", own_memory)
    monkeypatch.setattr("fuselora.engine.means.sums_agree", lambda device: True)
    return torch.device("cuda:0")


def test_a_card_computes_everything_and_is_named(card: torch.device) -> None:
    means = choose_means(request(device="cuda:0", jobs=2), [])
    assert means.device == device_name(card) == "cuda: Card 0"
    assert means.kernels.choices == (OnDevice(card),)
    assert means.notices == ()


def test_with_too_little_memory_the_cpu_computes_and_a_notice_says_so(
    card: torch.device, tmp_path: Path
) -> None:
    up, down = (Factor(tmp_path, "f", "BF16", (1 << 14, 1 << 13), 0, 1 << 28) for _ in range(2))
    large = replace(step(noise(4, 4)), deltas=(low_rank(up, down, 1.0),))
    means = choose_means(request(device="cuda:0", jobs=2), [large])
    assert means.device == "cpu"
    assert means.kernels == choose("auto")
    (notice,) = means.notices
    assert notice.message.startswith("--device cuda:0: 1024 MiB are free, 1088 MiB are needed: the CPU")


def test_where_sums_do_not_agree_the_cpu_computes_and_a_notice_says_so(
    card: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr("fuselora.engine.means.sums_agree", asked.append)
    means = choose_means(request(device="cuda:0", jobs=2), [])
    assert asked == [card]
    assert replace(means, notices=()) == Means(choose("auto"), 2)
    (notice,) = means.notices
    assert (notice.code, notice.facts) == ("device_sums", {"device": "cuda:0"})


def test_the_reference_computes_on_the_cpu(card: torch.device) -> None:
    with pytest.raises(UsageError, match="--kernel reference computes on the CPU"):
        choose_means(request(device="cuda:0", kernel="reference"), [])


@pytest.mark.parametrize("name", ["cpu", "cpu:0"])
def test_without_an_accelerator_the_cpu_computes(name: str) -> None:
    assert choose_means(request(device=name, jobs=3), []) == Means(choose("auto"), 3)
    assert choose_means(request(device=name, kernel="reference"), []).kernels == choose("reference")


def test_the_cpu_has_no_memory_of_its_own() -> None:
    assert free_bytes(CPU) is None
    assert device_name(CPU) == "cpu"


def test_needed_memory_follows_workers_chunks_and_factors(tmp_path: Path) -> None:
    what = step(noise(300, 40), *deltas(tmp_path))
    cut = replace(what, chunks=((0, 64), (64, 300)))
    factors = 4 * (300 * 3 + 3 * 40)
    chunk = 236 * 40 * room.CHUNK_ITEM_BYTES
    assert needed_bytes([cut], 2) == 2 * (chunk + room.WORKSPACE_BYTES) + factors
    assert needed_bytes([], 1) == room.WORKSPACE_BYTES


def test_of_many_factors_only_those_held_are_counted(tmp_path: Path) -> None:
    up, down = (Factor(tmp_path, "f", "BF16", (1 << 10, 1 << 10), 0, 1 << 21) for _ in range(2))
    small = replace(step(noise(4, 4)), deltas=(low_rank(up, down, 1.0),), chunks=())
    assert needed_bytes([small] * 1000, 1) == room.WORKSPACE_BYTES + 4 * FACTOR_ELEMENTS
    large = replace(small, deltas=small.deltas * 16)
    assert needed_bytes([large] * 1000, 1) == room.WORKSPACE_BYTES + 4 * (2 * 16 << 21)


def test_memory_that_runs_out_for_the_factors_names_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def give_out(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("no more")

    what = step(noise(300, 40), *deltas(tmp_path))
    monkeypatch.setattr("fuselora.engine.factors.read_factor", give_out)
    with pytest.raises(NumericError, match="--device cpu: ran out of memory: no more") as caught:
        OnDevice(CPU).load(what)
    assert caught.value.hint == room.HINT


def test_memory_that_cannot_be_pinned_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def give_out(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("no more")

    monkeypatch.setattr(torch, "empty", give_out)
    with pytest.raises(NumericError, match=r"4096 bytes of memory could not be pinned .*: no more") as caught:
        pinned_memory(4096)
    assert caught.value.hint == room.HINT


def test_a_device_that_cannot_be_used_is_an_error(
    card: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(backend: Backend, device: torch.device) -> None:
        raise RuntimeError("all devices are busy")

    monkeypatch.setattr(Backend, "mem_get_info", busy)
    with pytest.raises(InputError, match="--device cuda:0: all devices are busy") as caught:
        choose_means(request(device="cuda:0"), [])
    assert caught.value.hint == room.HINT


def test_memory_that_runs_out_on_the_way_names_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def give_out(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr(room, "FLOAT32", replace(SUMS, add_product=give_out))
    weight = noise(300, 40)
    loaded = OnDevice(CPU).load(step(weight, *deltas(tmp_path)))
    with pytest.raises(NumericError, match="--device cpu: ran out of memory: no more"):
        loaded.rows(weight, torch.empty(300, 40), 0, 300)
