from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from fuselora.engine.settings import exact_settings

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(2)
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)


def settings() -> tuple[int, str]:
    return torch.get_num_threads(), torch.get_float32_matmul_precision()


@pytest.mark.parametrize(("jobs", "inside"), [(1, 1), (3, 3), (None, 2)])
def test_settings_hold_inside_and_come_back(jobs: int | None, inside: int) -> None:
    with exact_settings(jobs):
        assert settings() == (inside, "highest")
    assert settings() == (2, "medium")


def test_settings_come_back_after_an_error() -> None:
    with pytest.raises(KeyError), exact_settings(1):
        raise KeyError
    assert settings() == (2, "medium")


def test_a_precision_that_torch_cannot_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> str:
        raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", refuse)
    with exact_settings(None):
        monkeypatch.undo()
        assert settings() == (2, "highest")
    assert settings() == (2, "highest")
