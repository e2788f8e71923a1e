"""What the files of a run are written with, chosen once, before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fuselora.engine.buffers import Memory, transfer_memory
from fuselora.engine.device import (
    OnDevice,
    choose_device,
    device_name,
    free_bytes,
    needed_bytes,
    pinned_memory,
    sums_agree,
)
from fuselora.engine.kernel import Kernels, choose
from fuselora.engine.threads import blocks_under_way, cores, workers
from fuselora.errors import Notice, UsageError

if TYPE_CHECKING:
    import torch

    from fuselora.specs import Request
    from fuselora.steps import Fuse


@dataclass(frozen=True, slots=True)
class Means:
    """Kernels, threads that compute, digests, direct I/O where it works, and where buffers come from."""

    kernels: Kernels
    jobs: int
    digest: bool = True
    direct: bool = True
    device: str = "cpu"
    allocate: Callable[[int], Memory] = transfer_memory
    notices: tuple[Notice, ...] = ()

    @property
    def workers(self) -> int:
        return workers(self.jobs)

    @property
    def n_buffers(self) -> int:
        """Blocks under way at once."""
        return blocks_under_way(self.jobs)


def choose_means(request: Request, steps: Sequence[Fuse]) -> Means:
    """The means for ``steps``. Raises ``InputError`` for a device that is not there, or ``UsageError``.

    A device with too little free memory, or whose sums are not the CPU's, is left alone: the CPU computes,
    and a notice says so.
    """
    jobs = request.jobs or cores()
    on_cpu = Means(choose(request.kernel), jobs, request.digest)
    device = choose_device(request.device)
    if device.type == "cpu":
        return on_cpu
    if request.kernel == "reference":
        raise UsageError("--kernel reference computes on the CPU", hint="Leave out --device.")
    needed, free = needed_bytes(steps, workers(jobs)), free_bytes(device)
    if free is not None and free < needed:
        return replace(on_cpu, notices=(_short(device, needed, free),))
    if not sums_agree(device):
        return replace(on_cpu, notices=(_wrong(device),))
    kernels = Kernels((OnDevice(device),))
    allocate = pinned_memory if device.type == "cuda" else transfer_memory
    return Means(kernels, jobs, request.digest, device=device_name(device), allocate=allocate)


def _short(device: torch.device, needed: int, free: int) -> Notice:
    text = f"--device {device}: {free >> 20} MiB are free, {needed >> 20} MiB are needed: the CPU computes"
    return Notice("device_memory", text, {"device": str(device), "needed": needed, "available": free})


def _wrong(device: torch.device) -> Notice:
    text = f"--device {device}: its float32 sums are not those of the CPU: the CPU computes"
    return Notice("device_sums", text, {"device": str(device)})
