"""Bases of tiny width, written once for all tests that compare merges with other people's code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

from fuselora.synth import WanSize, tiny, write_native, write_pipeline
from tests.oracle.definition import Tensors, weights


@dataclass(frozen=True)
class Base:
    """One transformer in float32 with the same values in both layouts."""

    size: WanSize
    pipeline: Path
    native: Path
    state: Tensors
    native_state: Tensors


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tiny matrices: a second thread only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Base]:
    @cache
    def base(name: str) -> Base:
        folder, size = tmp_path_factory.mktemp(name), tiny(name)
        pipeline = write_pipeline(folder / "pipeline", size)
        native = write_native(folder / "native", size)
        return Base(size, pipeline, native, weights(pipeline / "transformer"), weights(native))

    return base
