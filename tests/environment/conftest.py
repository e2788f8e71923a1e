from __future__ import annotations

import pytest

from tests.environment.merges import Inputs, make


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return make(tmp_path_factory.mktemp("inputs"))
