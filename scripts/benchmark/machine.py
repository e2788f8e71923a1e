"""What figures depend on: processor, memory, file system, versions, and how files are read and written."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from fuselora import __version__
from fuselora.engine.sink import created
from fuselora.engine.source import opened
from fuselora.header import PAGE

PACKAGES = ("torch", "safetensors", "diffusers", "peft", "transformers")
GROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, slots=True)
class Machine:
    """``load``: processes that wanted a core in the last minute, before the bench began."""

    cores: int
    cpu: str
    memory_bytes: int
    system: str
    file_system: str
    load: float
    python: str
    fuselora: str
    versions: dict[str, str | None]


def machine(folder: Path) -> Machine:
    """The facts of this machine, and of the file system that holds ``folder``."""
    return Machine(
        cores=cores(),
        cpu=_cpu(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        file_system=file_system(folder),
        load=os.getloadavg()[0],
        python=platform.python_version(),
        fuselora=__version__,
        versions={name: version(name) for name in PACKAGES},
    )


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def version(package: str) -> str | None:
    """None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def file_system(folder: Path) -> str:
    """``ext4 on /dev/vda`` from Linux's table of mounts, the deepest one that holds ``folder``."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    found = "unknown", 0
    for line in lines:
        before, _, after = line.partition(" - ")
        point = before.split()[4].encode().decode("unicode_escape")
        kind, source, *_ = after.split()
        if folder.resolve().is_relative_to(point) and len(point) >= found[1]:
            found = f"{kind} on {source}", len(point)
    return found[0]


def free_memory() -> int:
    """Bytes that a new process could take without swapping, as far as the system tells."""
    free = _memory("MemAvailable")
    if free is None:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if GROUP_LIMIT.exists() and (limit := GROUP_LIMIT.read_text().strip()) != "max":
        free = min(free, int(limit))
    return free


def unused_memory() -> int:
    """Bytes that hold nothing, not even cached files; 0 where the system does not tell."""
    return _memory("MemFree") or 0


def free_disk(folder: Path) -> int:
    """Bytes."""
    return shutil.disk_usage(folder).free


def io_path(base: Path, folder: Path) -> dict[str, str]:
    """How the engine reads ``base`` in the cache state of this moment, and writes into ``folder``."""
    probe = folder / ".probe"
    with opened(base, direct=True) as source, created(probe, PAGE, 0o600, direct=True) as sink:
        found = {"read": source.direct, "write": sink.direct}
    probe.unlink()
    return {way: "direct" if direct else "buffered" for way, direct in found.items()}


def _memory(name: str) -> int | None:
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    except OSError:
        return None
    return int(lines[name].split()[0]) * 1024


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
