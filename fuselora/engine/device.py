"""Accelerators: the same sums on a device, blocks streamed through it from pinned buffers.

Each thread that computes has a stream of its own, so that copies in, sums and copies out overlap.
torch's device-generic API is used throughout: cuda, xpu, npu and mps go the same way.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_char
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fuselora.delta.adders import Adder
from fuselora.delta.sums import FLOAT32
from fuselora.engine.kernel import Lost, Sum, adders, count_lost
from fuselora.engine.settings import exact_settings
from fuselora.engine.threads import FACTOR_ELEMENTS
from fuselora.errors import InputError, NumericError
from fuselora.steps import UNIT_ROWS, Fuse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HINT = "Use --device cpu, which needs no accelerator and is bound by the disk all the same."
# of an element of a chunk: its base, its float32 sum, a difference, the result, and the sample that
# rounding is counted on, which may be all of a chunk
CHUNK_ITEM_BYTES = 32
WORKSPACE_BYTES = 32 << 20  # what cuBLAS holds for each stream on a Hopper card; elsewhere it is less


def choose_device(name: str) -> torch.device:
    """The device of ``--device``: ``cpu``, ``auto`` (the accelerator there is, or the CPU), or torch's name.

    Raises ``InputError`` when it is not there.
    """
    if name == "auto":
        return _accelerator() or torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(f"--device {name}: is no device that torch knows", hint=HINT, device=name) from error
    if device.type != "cpu":
        _refuse_absent(device)
    return device


def needed_bytes(steps: Sequence[Fuse], workers: int) -> int:
    """Bytes on the device at the peak: a chunk for each worker, and the factors held, in float32.

    Those are ``FACTOR_ELEMENTS`` at most, or those of one block, which may hold two large tensors' ends.
    """
    chunk = max((step.chunk_elements for step in steps), default=0)
    factors = [step.factor_elements for step in steps]
    held = min(sum(factors), max(FACTOR_ELEMENTS, 2 * max(factors, default=0)))
    return workers * (chunk * CHUNK_ITEM_BYTES + WORKSPACE_BYTES) + 4 * held


def free_bytes(device: torch.device) -> int | None:
    """None where the device cannot say. Raises ``InputError`` where it cannot be used."""
    backend = _backend(device)
    if not hasattr(backend, "mem_get_info"):
        return None
    try:
        return int(backend.mem_get_info(device)[0])
    except RuntimeError as error:
        raise InputError(f"--device {device}: {error}", hint=HINT, device=str(device)) from error


def sums_agree(device: torch.device) -> bool:
    """Whether small sums on the device are those in float32 on the CPU; with TF32 on, they are not."""
    random = torch.Generator().manual_seed(0)
    rows, columns, rank, scale = 2 * UNIT_ROWS, 320, 24, 0.3
    up, down, base, diff = (
        torch.randn(shape, generator=random, dtype=torch.float32, device="cpu")
        for shape in ((rows, rank), (rank, columns), (rows, columns), (rows, columns))
    )
    with exact_settings():
        wanted = torch.addmm(base, up, down, alpha=scale).add(diff, alpha=scale)
        size = torch.addmm(base.abs(), up.abs(), down.abs(), alpha=scale).add(diff.abs(), alpha=scale)
        try:
            total = base.to(device, copy=True)
            FLOAT32.add_product(total, up.to(device), down.to(device), scale)
            FLOAT32.add(total, diff.to(device), scale)
            found, narrow = total.cpu(), total.bfloat16().cpu()
        except RuntimeError:  # a build of torch without kernels for this device
            return False
    close = (found - wanted).abs() <= size * 2.0**-18
    return bool(close.all()) and torch.equal(narrow, found.bfloat16())


def device_name(device: torch.device) -> str:
    """For the marker: the kind of device and what its driver calls it."""
    backend = _backend(device)
    if device.type == "cpu" or not hasattr(backend, "get_device_name"):
        return device.type
    return f"{device.type}: {backend.get_device_name(device)}"


def pinned_memory(n_bytes: int) -> memoryview:
    """Memory that a device copies from and to by itself; it starts on a page. Raises ``NumericError``."""
    try:
        held = torch.empty(max(n_bytes, 1), dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        what = f"{n_bytes} bytes of memory could not be pinned for the device: {error}"
        raise NumericError(what, hint=HINT, needed=n_bytes) from error
    memory = (c_char * held.numel()).from_address(held.data_ptr())
    memory._held = held  # type: ignore[attr-defined]  # lives as long as the view of it
    return memoryview(memory).cast("B")


@dataclass(frozen=True, slots=True)
class OnDevice:
    """float32 sums on an accelerator, rounded once there; fits every step."""

    device: torch.device
    accumulate: str = "float32"

    @property
    def name(self) -> str:
        return f"{self.device.type}-float32"

    def fits(self, step: Fuse) -> bool:
        del step
        return True

    def load(self, step: Fuse) -> Sum:
        with _out_of_memory(self.device):
            return _DeviceSum(self.device, adders(step, FLOAT32, self.device))


@dataclass(frozen=True, slots=True)
class _DeviceSum:
    device: torch.device
    adders: tuple[Adder, ...]

    def rows(self, base: torch.Tensor, out: torch.Tensor, first: int, last: int) -> Lost:
        with _out_of_memory(self.device), _stream(self.device) as settle:
            there = base.to(self.device, non_blocking=True)
            total = there.to(torch.float32, copy=True)
            before = total[:UNIT_ROWS].clone() if first == 0 and self.adders else None
            for add in self.adders:
                add(total, there, first, last)
            narrow = total.to(out.dtype)
            out.copy_(narrow, non_blocking=True)
            lost = count_lost(before, total[:UNIT_ROWS], narrow[:UNIT_ROWS]) if before is not None else Lost()
            settle()
        return lost


_streams = threading.local()


@contextmanager
def _stream(device: torch.device) -> Iterator[Callable[[], None]]:
    """The calling thread's stream; what is yielded waits for it."""
    backend = _backend(device)
    if device.type == "cpu" or not hasattr(backend, "stream"):
        yield _settled(device)
        return
    if getattr(_streams, "device", None) != device:
        _streams.device, _streams.held = device, backend.Stream(device)
    with backend.stream(_streams.held):
        yield _streams.held.synchronize


def _settled(device: torch.device) -> Callable[[], None]:
    """Waits for everything on a device that has no streams of its own."""
    backend = _backend(device)
    synchronize: Callable[[], None] = getattr(backend, "synchronize", lambda: None)
    return synchronize


@contextmanager
def _out_of_memory(device: torch.device) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        what = f"--device {device}: ran out of memory: {error}"
        raise NumericError(what, hint=HINT, device=str(device)) from error


def _backend(device: torch.device) -> Any:  # noqa: ANN401
    """torch.cuda, torch.xpu, torch.npu ...: modules of one shape, which torch gives no type."""
    return getattr(torch, device.type, None)


def _accelerator() -> torch.device | None:
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is not None:
        return accelerator.current_accelerator() if accelerator.is_available() else None
    return torch.device("cuda") if torch.cuda.is_available() else None


def _refuse_absent(device: torch.device) -> None:
    backend = _backend(device)
    count = backend.device_count() if backend is not None and backend.is_available() else 0
    if (device.index or 0) < count:
        return
    there = _accelerator()
    what = f"--device {device}: torch sees {'none' if count == 0 else f'only {count}'} of that kind"
    hint = f"There is {there}." if there is not None and there.type != device.type else HINT
    raise InputError(what, hint=hint, device=str(device))
