"""One process of the engine for a whole run, and two more that share out weights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.vllm_omni import INSTALLED
from tests.vllm_omni.ranks import Ranks

if not INSTALLED:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def _engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """This process is the one rank of an engine that may shard."""
    import torch

    from tests.vllm_omni.engine import running

    torch.set_num_threads(1)
    with running(0, 1, tmp_path_factory.mktemp("engine") / "meeting"):
        yield


@pytest.fixture(scope="session")
def two() -> Iterator[Ranks]:
    """Two processes of one engine, started when first asked for something."""
    ranks = Ranks(2)
    yield ranks
    ranks.close()
