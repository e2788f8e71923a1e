from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from fuselora.content import LoraContent, read_content
from fuselora.engine.settings import exact_settings, flushes, one_thread
from tests.small import lora, noise, pair, planned, write

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


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


@pytest.mark.parametrize("flushed", [False, True])
def test_subnormals_count_inside_whatever_the_caller_does_with_them(flushed: bool) -> None:
    torch.set_flush_denormal(flushed)
    seen: list[bool] = []

    def lane() -> None:
        one_thread()
        seen.append(flushes())

    try:
        with exact_settings():
            assert not flushes()
        assert flushes() == flushed
        thread = threading.Thread(target=lane)
        thread.start()
        thread.join()
    finally:
        torch.set_flush_denormal(False)
    assert seen == [False]


def test_two_merges_at_once() -> None:
    """The first one in is the first one out, while the other one still computes."""
    meeting = threading.Barrier(2, timeout=60)
    found: dict[str, tuple[int, str]] = {}

    def first() -> None:
        with exact_settings():
            meeting.wait()
            meeting.wait()
        found["first out"] = settings()
        meeting.wait()

    def second() -> None:
        meeting.wait()
        with exact_settings():
            meeting.wait()
            meeting.wait()
            found["second inside"] = settings()
        found["second out"] = settings()

    threads = [threading.Thread(target=act) for act in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {
        "first out": (2, "highest"),
        "second inside": (1, "highest"),
        "second out": (2, "medium"),
    }
    assert settings() == (2, "medium")


def test_the_data_of_loras_is_looked_at_in_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []

    def looked(*arguments: Any, **options: Any) -> LoraContent:
        found.append(torch.get_num_threads())
        return read_content(*arguments, **options)

    monkeypatch.setattr("fuselora.content.read_content", looked)
    base = write(tmp_path / "base.safetensors", {"m.weight": noise(8, 6)})
    planned(base, [lora(tmp_path / "lora.safetensors", pair("m", noise(8, 2), noise(2, 6)))])
    assert found == [1]
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
    """It comes back for each backend: no one name says what was set."""
    cuda, mkldnn = (SimpleNamespace(matmul=SimpleNamespace(fp32_precision=p)) for p in ("tf32", "bf16"))
    monkeypatch.setattr(torch.backends, "cuda", cuda)
    monkeypatch.setattr(torch.backends, "mkldnn", mkldnn)

    def refuse() -> str:
        raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", refuse)
    with exact_settings():
        cuda.matmul.fp32_precision = mkldnn.matmul.fp32_precision = "ieee"
    assert (cuda.matmul.fp32_precision, mkldnn.matmul.fp32_precision) == ("tf32", "bf16")
    monkeypatch.undo()
    assert settings() == (2, "highest")
