from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import torch

from fuselora.engine.settings import exact_settings, one_thread

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


def test_settings_hold_inside_and_come_back() -> None:
    with exact_settings():
        assert settings() == (1, "highest")
    assert settings() == (2, "medium")


def test_settings_within_settings() -> None:
    with exact_settings():
        with exact_settings():
            assert settings() == (1, "highest")
        assert settings() == (1, "highest")
    assert settings() == (2, "medium")


def test_each_thread_is_told_for_itself() -> None:
    """torch may keep the number for each thread, and a lane starts with the caller's."""
    found: list[tuple[int, int]] = []

    def look() -> None:
        torch.set_num_threads(2)
        before = torch.get_num_threads()
        one_thread()
        found.append((before, torch.get_num_threads()))

    for _ in range(2):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join(60)
    assert found == [(2, 1), (2, 1)]


def test_settings_come_back_after_an_error() -> None:
    with pytest.raises(KeyError), exact_settings():
        raise KeyError
    assert settings() == (2, "medium")


def test_a_precision_that_torch_cannot_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> str:
        raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", refuse)
    with exact_settings():
        monkeypatch.undo()
        assert settings() == (1, "highest")
    assert settings() == (2, "highest")
