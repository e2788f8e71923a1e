from __future__ import annotations

import ctypes
import errno
from pathlib import Path
from types import SimpleNamespace

import pytest

from fuselora.output.exchange import exchange


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_exchange_swaps_two_folders(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    swapped = exchange(tmp_path / "a", tmp_path / "b")
    # Where the file system cannot, nothing moves.
    assert names(tmp_path / "a") == (["b"] if swapped else ["a"])
    assert names(tmp_path / "b") == (["a"] if swapped else ["b"])


def test_exchange_with_nothing_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(FileNotFoundError) as caught:
        if not exchange(tmp_path / "a", tmp_path / "b"):
            (tmp_path / "b").stat()
    assert caught.value.errno == errno.ENOENT


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, None])
def test_a_system_without_it_says_so_and_moves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int | None
) -> None:
    """``None`` stands for a C library that does not have the function."""
    library = SimpleNamespace() if code is None else SimpleNamespace(renameat2=lambda *_: -1)
    monkeypatch.setattr(ctypes, "CDLL", lambda name, use_errno: library)
    monkeypatch.setattr(ctypes, "get_errno", lambda: code)
    assert not exchange(tmp_path / "a", tmp_path / "b")
