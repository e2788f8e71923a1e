from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.crash.nursery import Nursery
from tests.crash.trial import Scene


@pytest.fixture(scope="package")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("crash")
    with Nursery(folder / "said") as nursery:
        yield Scene(folder, nursery)
