"""The plugin without its engine: what it reads of a configuration, and what it does where it has no place.

``tests/vllm_omni/test_guard.py`` tests it in the engine.
"""

from __future__ import annotations

import logging
import shutil
import sys
from enum import Enum
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fuselora.errors import AlreadyFused, HubError, MarkerError
from fuselora.marker import FILE_NAME, JOURNAL_NAME
from fuselora.serving import vllm_omni as plugin
from tests.fused_pair import Pair, rewritten, write_high, write_pair
from tests.test_light_imports import foreign, modules_after

FAST_H3 = {"format": "fastvideo-lora-v2", "finetuned_model": "FastVideo/FastH3-preview"}


class Backend(str, Enum):
    """As the engine spells them."""

    PEFT = "peft"
    DISTILL = "distill"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A class that stands where the engine's loader does."""

    class Loader:
        def __init__(self, **asked: object) -> None:
            self.od_config, self.load_config = SimpleNamespace(**asked), SimpleNamespace(download_dir=None)

        def load_model(self, load_device: str, *, load_format: str = "default") -> tuple[str, str]:
            """The engine's."""
            return load_device, load_format

    module = ModuleType(plugin.LOADER_MODULE)
    monkeypatch.setattr(module, plugin.LOADER_CLASS, Loader, raising=False)
    parts = plugin.LOADER_MODULE.split(".")
    for end in range(1, len(parts)):
        package = ModuleType(".".join(parts[:end]))
        package.__path__ = []
        monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, plugin.LOADER_MODULE, module)
    return Loader


@pytest.mark.parametrize("module", ["fuselora.serving.guard", "fuselora.serving.vllm_omni"])
def test_importing_it_can_hardly_fail(module: str) -> None:
    assert not foreign(modules_after(f"import {module}"))


def test_it_is_announced_to_the_engine() -> None:
    (found,) = entry_points(group="vllm_omni.general_plugins", name="fuselora_guard")
    assert found.load() is plugin.install


def test_the_loader_is_wrapped_once_and_works_as_before(loader: Any, pair: Pair) -> None:
    original = loader.load_model
    plugin.install()
    guarded = loader.load_model
    plugin.install()
    assert loader.load_model is guarded
    assert guarded.__wrapped__ is original
    assert guarded.__doc__ == "The engine's."
    assert loader(model=str(pair.out)).load_model("cpu", load_format="diffusers") == ("cpu", "diffusers")
    asked = loader(model=str(pair.out), lora_path=[str(pair.high)], lora_backend="distill")
    with pytest.raises(AlreadyFused):
        asked.load_model("cpu")


@pytest.mark.parametrize("missing", ["module", "class", "method"])
def test_an_engine_without_the_loader_gets_a_warning_and_no_exception(
    missing: str, loader: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if missing == "module":
        monkeypatch.setitem(sys.modules, plugin.LOADER_MODULE, None)
    elif missing == "class":
        monkeypatch.delattr(sys.modules[plugin.LOADER_MODULE], plugin.LOADER_CLASS)
    else:
        del loader.load_model
    with caplog.at_level(logging.WARNING):
        plugin.install()
    (record,) = caplog.records
    assert "NOT guarded" in record.getMessage()
    assert "fuselora check" in record.getMessage()


@pytest.mark.parametrize("as_list", [True, False])
@pytest.mark.parametrize("of_kind", [str, Path])
@pytest.mark.parametrize("backend", [*Backend, "distill", "peft", "of tomorrow", None])
def test_every_spelling_of_a_lora(
    pair: Pair, as_list: bool, of_kind: type[str] | type[Path], backend: str | None
) -> None:
    lora = of_kind(pair.high)
    asked = SimpleNamespace(model=str(pair.out), lora_path=[lora] if as_list else lora, lora_backend=backend)
    with pytest.raises(AlreadyFused) as refused:
        plugin.guard(asked)
    assert refused.value.facts["loras"] == [str(pair.high)]
    options = "--lora-path" if backend in ("peft", None) else "--lora-backend distill and --lora-path"
    assert refused.value.message.endswith(f"leave out {options}.")


@pytest.mark.parametrize("lora", [None, "", [], (), [""]])
@pytest.mark.parametrize("backend", ["distill", "peft", None])
def test_no_lora_in_every_spelling(
    pair: Pair, lora: object, backend: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        plugin.guard(SimpleNamespace(model=str(pair.out), lora_path=lora, lora_backend=backend))
    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert record.getMessage().startswith(f"fuselora: {pair.out} is fused: it holds high.safetensors on")


def test_a_configuration_that_names_no_model_is_not_ours(caplog: pytest.LogCaptureFixture) -> None:
    for asked in (SimpleNamespace(), SimpleNamespace(model=None, lora_path="a"), SimpleNamespace(model="")):
        plugin.guard(asked)
    assert not caplog.records


def test_a_folder_given_to_the_fusing_backend_is_compared_by_what_lies_in_it(
    pair: Pair, tmp_path: Path
) -> None:
    folder = tmp_path / "loras"
    folder.mkdir()
    asked = SimpleNamespace(model=pair.out, lora_path=str(folder), lora_backend="distill")
    with pytest.raises(AlreadyFused, match="distill_lora in the policy"):
        plugin.guard(asked)
    (folder / "b.safetensors").write_bytes(pair.high.read_bytes())
    with pytest.raises(AlreadyFused, match=r"is high\.safetensors on transformer"):
        plugin.guard(asked)
    write_high(folder / plugin.ADAPTER_WEIGHTS, seed=9)  # where there is one, no other file is read
    with pytest.raises(AlreadyFused, match="distill_lora in the policy"):
        plugin.guard(asked)
    (folder / plugin.ADAPTER_WEIGHTS).write_bytes(pair.low.read_bytes())
    with pytest.raises(AlreadyFused, match=r"is low\.safetensors on transformer_2"):
        plugin.guard(asked)


@pytest.mark.parametrize("pickle", plugin.ADAPTER_PICKLES)
def test_a_pickle_that_the_peft_backend_reads_is_not_compared(
    pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture, pickle: str
) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / pickle).write_bytes(b"PK\x03\x04" + bytes(9))
    write_high(folder / "training_state.safetensors", seed=9)
    asked = SimpleNamespace(model=str(pair.out), lora_path=str(folder), lora_backend="peft")
    plugin.guard(asked)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"{folder} was not compared: {folder / pickle}: is not safetensors" in record.getMessage()
    caplog.clear()
    write_high(folder / plugin.ADAPTER_WEIGHTS, seed=9)  # where there is one, the pickle is not read
    plugin.guard(asked)
    assert not caplog.records


def test_a_foreign_file_beside_a_plain_base_stops_no_server(
    pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = Path(shutil.copytree(pair.base, tmp_path / "wan"))
    (tmp_path / FILE_NAME).write_text('{"other": "tool"}', encoding="utf-8")
    for lora in (None, str(pair.low)):
        plugin.guard(SimpleNamespace(model=str(base), lora_path=lora, lora_backend="distill"))
    assert not caplog.records


@pytest.mark.parametrize("backend", ["peft", "distill"])
def test_fast_h3_is_fused_whatever_the_backend(pair: Pair, tmp_path: Path, backend: str) -> None:
    other = write_high(tmp_path / "other.safetensors", seed=9)
    lora = tmp_path / "fasth3.safetensors"
    asked = SimpleNamespace(model=str(pair.out), lora_path=str(lora), lora_backend=backend)
    rewritten(other, lora, FAST_H3)
    with pytest.raises(AlreadyFused, match="distill_lora in the policy"):
        plugin.guard(asked)


@pytest.mark.parametrize(
    "change", [{"finetuned_model": "me/fasth3"}, {"finetuned_model": "FastVideo/x"}, {"format": "v1"}]
)
def test_what_is_almost_fast_h3_is_kept_beside_the_weights(
    pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture, change: dict[str, str]
) -> None:
    lora = tmp_path / "mine.safetensors"
    rewritten(write_high(tmp_path / "other.safetensors", seed=9), lora, FAST_H3 | change)
    with caplog.at_level(logging.INFO):
        plugin.guard(SimpleNamespace(model=str(pair.out), lora_path=str(lora), lora_backend="peft"))
    assert caplog.messages[0].endswith(f"its policy lets {lora} be added")


def test_a_lost_marker_refuses_a_lora_and_is_a_warning_without_one(
    pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = pair.copy(tmp_path / "out")
    (out / FILE_NAME).unlink()
    with pytest.raises(MarkerError, match="carries the fingerprint of a fusion"):
        plugin.guard(SimpleNamespace(model=str(out), lora_path=str(pair.low), lora_backend="distill"))
    caplog.clear()
    plugin.guard(SimpleNamespace(model=str(out), lora_path=None))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith(f"fuselora: {out}: {FILE_NAME} was removed: transformer/")
    plugin.guard(SimpleNamespace(model=str(pair.base), lora_path=str(pair.low), lora_backend="distill"))


def test_a_link_to_a_fused_folder_is_one(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(pair.out)
    asked = SimpleNamespace(model=str(tmp_path / "model"), lora_path=str(pair.low), lora_backend="distill")
    with pytest.raises(AlreadyFused):
        plugin.guard(asked)


def test_what_is_refused_is_logged_with_its_hint(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    asked = SimpleNamespace(model=str(pair.out), lora_path=[str(pair.low)], lora_backend="distill")
    with pytest.raises(AlreadyFused) as refused:
        plugin.guard(asked)
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert record.getMessage() == f"fuselora: {refused.value.message}\n{refused.value.hint}"


def test_a_model_that_is_not_here_and_not_on_a_hub(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    """Here nothing can be fetched at all: there is no engine."""
    with pytest.raises(HubError, match="cannot tell whether it is fused"):
        plugin.guard(SimpleNamespace(model="org/name", lora_path=str(pair.high), lora_backend="distill"))
    caplog.clear()
    plugin.guard(SimpleNamespace(model="org/name"))
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_names_forge_no_lines_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plugin.guard(SimpleNamespace(model="org/a\nINFO forged"))
    with pytest.raises(HubError):
        plugin.guard(SimpleNamespace(model="org/a\nINFO forged", lora_path="a"))
    unfinished = tmp_path / "b\nINFO forged"
    unfinished.mkdir()
    (unfinished / JOURNAL_NAME).touch()
    with pytest.raises(MarkerError):
        plugin.guard(SimpleNamespace(model=str(unfinished)))
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR", "ERROR"]
    for message in caplog.messages:
        assert "\\nINFO forged" in message
        assert not any(line.startswith("INFO") for line in message.splitlines())
