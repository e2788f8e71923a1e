"""What becomes of a run whose inputs are moved, replaced or removed under it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fuselora.engine.sink import Sink
from fuselora.errors import ChangedError, FuseloraError, ReadError
from fuselora.pipeline import merge
from fuselora.synth import tiny, write_file, write_lora

SIZE = tiny("wan2.2-t2v-a14b", blocks=1)


def _replaced(path: Path) -> None:
    copy = path.with_name("copy")
    shutil.copy2(path, copy)
    copy.replace(path)


def _edited(path: Path) -> None:
    with path.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\1")


@pytest.mark.parametrize(
    ("change", "error"),
    [(_replaced, ChangedError), (_edited, ChangedError), (Path.unlink, ReadError)],
)
@pytest.mark.parametrize("which", ["base", "lora"])
def test_an_input_that_changes_under_the_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path], None],
    error: type[FuseloraError],
    which: str,
) -> None:
    inputs = {
        "base": write_file(tmp_path / "base.safetensors", SIZE, dtype="BF16"),
        "lora": write_lora(tmp_path / "l.safetensors", SIZE, style="lightning", alpha=2, dtype="F32", seed=1),
    }
    finish = Sink.finish

    def late(sink: Sink) -> None:
        change(inputs[which])
        finish(sink)

    monkeypatch.setattr(Sink, "finish", late)
    with pytest.raises(error, match=inputs[which].name):
        merge(inputs["base"], [inputs["lora"]], tmp_path / "out")
    assert not (tmp_path / "out").exists()
