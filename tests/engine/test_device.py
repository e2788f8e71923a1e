"""The path of an accelerator, on the CPU as torch's device; a real one where there is one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from fuselora.engine import device as room
from fuselora.engine.buffers import own_memory
from fuselora.engine.device import (
    OnDevice,
    choose_device,
    device_name,
    free_bytes,
    needed_bytes,
)
from fuselora.engine.kernel import FLOAT32, Lost, choose
from fuselora.engine.means import Means, choose_means
from fuselora.errors import InputError, NumericError, UsageError
from fuselora.planning import BLOCK_BYTES, Factor, Full, LowRank
from fuselora.specs import Request
from tests.engine.test_kernel import step, stored
from tests.small import noise

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")


def deltas(folder: Path) -> tuple[LowRank | Full, ...]:
    up, down = stored(folder / "up", noise(300, 3).bfloat16()), stored(folder / "down", noise(3, 40, seed=1))
    return LowRank(up, down, 0.5), Full(stored(folder / "diff", noise(300, 40, seed=2)), -0.25)


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


@pytest.mark.parametrize("name", ["cuda:99", "xpu", "meta"])
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
    large = replace(step(noise(4, 4)), deltas=(LowRank(up, down, 1.0),))
    means = choose_means(request(device="cuda:0", jobs=2), [large])
    assert means.device == "cpu"
    assert means.kernels == choose("auto")
    (notice,) = means.notices
    assert notice.message.startswith("--device cuda:0: 1024 MiB are free, 2112 MiB are needed: the CPU")


def test_the_reference_computes_on_the_cpu(card: torch.device) -> None:
    with pytest.raises(UsageError, match="--kernel reference computes on the CPU"):
        choose_means(request(device="cuda:0", kernel="reference"), [])


def test_without_a_device_the_cpu_computes() -> None:
    assert choose_means(request(jobs=3), []) == Means(choose("auto"), 3)


def test_the_cpu_has_no_memory_of_its_own() -> None:
    assert free_bytes(CPU) is None
    assert device_name(CPU) == "cpu"


def test_needed_memory_follows_workers_and_the_largest_factors(tmp_path: Path) -> None:
    what = step(noise(300, 40), *deltas(tmp_path))
    factors = 4 * (300 * 3 + 3 * 40)
    assert needed_bytes([what], 2) == 2 * room.HEADROOM * BLOCK_BYTES + 2 * factors
    assert needed_bytes([], 1) == room.HEADROOM * BLOCK_BYTES


def test_memory_that_runs_out_on_the_way_names_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr(room, "add_low_rank", full)
    weight = noise(300, 40)
    loaded = OnDevice(CPU).load(step(weight, *deltas(tmp_path)))
    with pytest.raises(NumericError, match="--device cpu: ran out of memory: no more"):
        loaded.rows(weight, torch.empty(300, 40), 0, 300)
