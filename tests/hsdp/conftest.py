"""The ranks run once in a session, for all its pytest processes; the tests read what they noted."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from fuselora import merge
from fuselora.synth import tiny, write_lora, write_pipeline
from tests.hsdp.cases import EXPERTS, FOLDERS, FUSED, SIZES
from tests.hsdp.worlds import launch

SHARD_BYTES = 60_000
LIMIT = 120  # seconds a rank may take; it takes about ten


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the ranks of all worlds worked in."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder, printed = shared / "hsdp", shared / "hsdp.txt"
    with locked(shared / "hsdp.lock"):
        if not printed.exists():
            write_fused(folder / FUSED)
            ended = launch("tests.hsdp.rank", folder, SIZES, limit=LIMIT)
            printed.write_text(f"{ended.printed}\nended with {ended.code}" if ended.code else "")
    failure = printed.read_text()
    assert not failure, f"the ranks failed:\n{failure}"
    return folder


@contextmanager
def locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_fused(to: Path) -> None:
    """Each folder of ``FOLDERS``, every tensor of both experts fused. No base and no LoRA stays on disk."""
    size = tiny("wan2.2-t2v-a14b")
    with TemporaryDirectory() as name:
        inputs = Path(name)
        base = write_pipeline(inputs / "base", size, experts=True, shard_bytes=SHARD_BYTES)
        loras = [
            write_lora(inputs / f"{expert}_lora.safetensors", size, style="extractor", seed=seed)
            for seed, expert in enumerate(EXPERTS)
        ]
        for kind, options in FOLDERS.items():
            merge(base, [",".join(map(str, loras))], to / kind, **options)
