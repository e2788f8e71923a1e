"""A LoRA that is fused already is not fused again by the engine: without the guard it is, in silence."""

from __future__ import annotations

import json
import logging
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
import vllm.lora.lora_model
import vllm.transformers_utils.repo_utils
import vllm_omni.plugins
import vllm_omni.transformers_utils.repo_utils
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor
from vllm.lora.request import LoRARequest
from vllm_omni.diffusion.lora.manager import DiffusionLoRAManager, LoRABackend
from vllm_omni.diffusion.model_loader.diffusers_loader import DiffusersPipelineLoader
from vllm_omni.diffusion.model_loader.host_weight_plan import HostWeightPlan
from vllm_omni.diffusion.worker.diffusion_worker import DiffusionWorker

from fuselora import merge
from fuselora.errors import AlreadyFused, HubError, MarkerError
from fuselora.marker import FILE_NAME, JOURNAL_NAME
from fuselora.serving import vllm_omni as plugin
from fuselora.synth import base_tensors, write_lora
from tests.fused_pair import edit_marker
from tests.hub_server import HubServer
from tests.oracle import definition
from tests.vllm_omni import engine, rounding
from tests.vllm_omni.bases import SHARD_BYTES, WAN, write_wan
from tests.vllm_omni.names import in_checkpoint_names
from tests.vllm_omni.ranks import Ranks

EXPERTS = ("transformer", "transformer_2")
GROUP, NAME = "vllm_omni.general_plugins", "fuselora_guard"
REPO = "org/Wan"
HELD = "it holds high.safetensors on transformer, strength 1; low.safetensors on transformer_2, strength 1"
TO_Q = "blocks.0.attn2.to_q"


@dataclass(frozen=True)
class Folders:
    base: Path
    loras: tuple[Path, Path]
    other: tuple[Path, Path]
    out: Path

    def copy(self, to: Path) -> Path:
        return Path(shutil.copytree(self.out, to))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A base, its LoRAs, LoRAs that it is not fused with, and OUT."""
    folder = tmp_path_factory.mktemp("guard")
    base = write_wan(folder / "base", experts=True, shard_bytes=SHARD_BYTES)
    names = ("high", "low", "other", "another")
    high, low, other, another = (
        write_lora(folder / f"{name}.safetensors", WAN, rank=8, alpha=4, seed=seed)
        for seed, name in enumerate(names, start=2)
    )
    out = merge(base, [f"{high},{low}"], folder / "out").out
    return Folders(base, (high, low), (other, another), out)


@contextmanager
def guard_installed(install: Callable[[], None] = plugin.install) -> Iterator[None]:
    unguarded = DiffusersPipelineLoader.load_model
    install()
    try:
        yield
    finally:
        DiffusersPipelineLoader.load_model = unguarded


@pytest.fixture
def guarded() -> Iterator[None]:
    """The guard, put in place as the engine does it."""
    found = vllm_omni.plugins.load_omni_plugins_by_group(GROUP)
    with guard_installed(found[NAME]):
        yield


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[logging.LogRecord]]:
    """What the engine and the guard log."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", records.append)
    logger = logging.getLogger("vllm_omni")
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)


def ours(logged: list[logging.LogRecord]) -> list[tuple[str, str]]:
    """Level and text of what the guard logged."""
    mine = (record for record in logged if record.name == plugin.logger.name)
    return [(record.levelname, record.getMessage()) for record in mine]


def deltas(lora: Path) -> dict[str, torch.Tensor]:
    """What the LoRA means, in float64, by diffusers' names."""
    native = [spec.name for spec in base_tensors(WAN)]
    return definition.in_diffusers_names(definition.deltas(load_file(lora), None, native))


def worker_of(pipeline: nn.Module | None, od_config: Any) -> DiffusionWorker:
    """The engine's worker at the moment when its pipeline is loaded."""
    worker = object.__new__(DiffusionWorker)
    worker.model_runner = SimpleNamespace(pipeline=pipeline)
    worker.od_config, worker.device, worker.lora_manager = od_config, engine.CPU, None
    worker.init_lora_manager()
    return worker


def held(pipeline: nn.Module, component: str) -> dict[str, torch.Tensor]:
    return in_checkpoint_names(engine.weights(pipeline, component))


def assert_added(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor], lora: Path) -> None:
    """``after`` is ``before`` plus the LoRA's deltas and nothing else, but for the engine's two roundings."""
    added = deltas(lora)
    assert {name for name in before if not torch.equal(before[name], after[name])} == added.keys()
    for name, delta in added.items():
        error = (after[name].double() - before[name].double() - delta).abs()
        assert (error <= rounding.twice(before[name], delta, torch.bfloat16)).all(), name
        assert (after[name] - before[name]).abs().max() > 0.5 * delta.abs().max(), name


@pytest.mark.parametrize("hsdp", [False, True])
def test_without_the_guard_a_lora_is_fused_twice_in_silence(
    folders: Folders, logged: list[logging.LogRecord], hsdp: bool
) -> None:
    once = engine.load(folders.out, hsdp=hsdp)
    twice = engine.load(folders.out, loras=folders.loras, hsdp=hsdp)
    for component, lora in zip(EXPERTS, folders.loras, strict=True):
        assert_added(held(once, component), held(twice, component), lora)
    assert not [record for record in logged if record.levelno >= logging.WARNING]


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("hsdp", [False, True])
def test_a_lora_that_is_fused_is_refused_before_anything_is_made(
    folders: Folders, logged: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch, hsdp: bool
) -> None:
    made: list[str] = []
    monkeypatch.setattr(
        DiffusersPipelineLoader, "_init_from_load_format", lambda *_, **__: made.append("pipeline")
    )
    own = engine.loader(folders.out, loras=folders.loras, hsdp=hsdp)
    with pytest.raises(AlreadyFused) as refused:
        engine.load_with(own)
    high, low = folders.loras
    options = "--lora-backend distill and --lora-path"
    assert str(refused.value).splitlines() == [
        f"{folders.out}: is fused already; {options} would add a LoRA that it holds a second time:",
        f"  - {high} is high.safetensors on transformer, strength 1",
        f"  - {low} is low.safetensors on transformer_2, strength 1",
        f"Serve it as it is: leave out {options}.",
    ]
    assert ours(logged) == [("ERROR", f"fuselora: {refused.value}\n{refused.value.hint}")]
    assert not made


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("hsdp", [False, True])
def test_a_fused_folder_is_served_and_one_line_says_what_is_in_it(
    folders: Folders, logged: list[logging.LogRecord], hsdp: bool
) -> None:
    pipeline = engine.load(folders.out, hsdp=hsdp)
    assert ours(logged) == [("INFO", f"fuselora: {folders.out} is fused: {HELD}; no LoRA is added")]
    for component in EXPERTS:
        found = held(pipeline, component)
        for name, value in definition.weights(folders.out / component).items():
            assert torch.equal(found[name], value.to(found[name].dtype)), name
    assert pipeline.lora_is_fused is False


def test_the_lines_reach_the_handlers_of_the_engine() -> None:
    logger: logging.Logger | None = plugin.logger
    assert plugin.logger.isEnabledFor(logging.INFO)
    while logger is not None and logger is not logging.getLogger("vllm"):
        logger = logger.parent if logger.propagate else None
    assert logger is not None
    assert logger.handlers


@pytest.mark.usefixtures("guarded")
def test_copies_under_other_names_and_saved_again_are_recognised(folders: Folders, tmp_path: Path) -> None:
    renamed = Path(shutil.copy(folders.loras[0], tmp_path / "mine.safetensors"))
    saved = tmp_path / "saved.safetensors"
    save_file(dict(reversed(list(load_file(folders.loras[1]).items()))), saved, {"by": "me"})
    assert saved.read_bytes() != folders.loras[1].read_bytes()
    with pytest.raises(AlreadyFused) as refused:
        engine.load(folders.out, loras=(renamed, saved))
    assert f"{renamed} is high.safetensors on transformer" in refused.value.message
    assert f"{saved} is low.safetensors on transformer_2" in refused.value.message


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("backend", [LoRABackend.DISTILL, LoRABackend.PEFT, "distill", "peft", "new"])
@pytest.mark.parametrize("as_list", [True, False])
def test_however_it_is_asked_for(folders: Folders, backend: str, as_list: bool) -> None:
    own = engine.loader(folders.out)
    own.od_config.lora_backend = backend
    lora = str(folders.loras[0])
    own.od_config.lora_path = [lora] if as_list else lora
    with pytest.raises(AlreadyFused, match="a second time"):
        engine.load_with(own)


@pytest.mark.usefixtures("guarded")
def test_another_lora_is_fused_only_where_the_policy_allows_it(
    folders: Folders, logged: list[logging.LogRecord], tmp_path: Path
) -> None:
    out = folders.copy(tmp_path / "out")
    with pytest.raises(AlreadyFused, match="distill_lora in the policy of its marker is 'refuse'"):
        engine.load(out, loras=folders.other)
    edit_marker(out, lambda document: document["policy"].update(distill_lora="allow"))
    before = engine.load(out)
    logged.clear()
    after = engine.load(out, loras=folders.other)
    for component, lora in zip(EXPERTS, folders.other, strict=True):
        assert_added(held(before, component), held(after, component), lora)
    names = ", ".join(map(str, folders.other))
    assert ours(logged) == [("INFO", f"fuselora: {out} is fused: {HELD}; its policy lets {names} be added")]


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("hsdp", [False, True])
def test_an_unmarked_folder_is_left_alone(
    folders: Folders, logged: list[logging.LogRecord], hsdp: bool
) -> None:
    before = engine.load(folders.base, hsdp=hsdp)
    after = engine.load(folders.base, loras=folders.loras, hsdp=hsdp)
    for component, lora in zip(EXPERTS, folders.loras, strict=True):
        assert_added(held(before, component), held(after, component), lora)
    assert after.lora_is_fused is True
    assert not ours(logged)


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("loras", [True, False])
@pytest.mark.parametrize("damage", ["broken", "unfinished"])
def test_a_broken_marker_or_an_unfinished_folder_is_an_error(
    folders: Folders, tmp_path: Path, damage: str, loras: bool
) -> None:
    out = folders.copy(tmp_path / "out")
    if damage == "broken":
        (out / FILE_NAME).write_text("{}", encoding="utf-8")
    else:
        (out / FILE_NAME).rename(out / JOURNAL_NAME)
    with pytest.raises(MarkerError):
        engine.load(out, loras=folders.loras if loras else ())


@pytest.mark.usefixtures("guarded")
def test_a_lost_marker_is_an_error_where_a_lora_is_asked_for_and_else_a_warning(
    folders: Folders, logged: list[logging.LogRecord], tmp_path: Path
) -> None:
    out = folders.copy(tmp_path / "out")
    (out / FILE_NAME).unlink()
    with pytest.raises(MarkerError, match="carries the fingerprint of a fusion"):
        engine.load(out, loras=folders.loras)
    logged.clear()
    assert not engine.load(out).lora_is_fused
    ((level, line),) = ours(logged)
    assert level == "WARNING"
    assert line.startswith(f"fuselora: {out}: {FILE_NAME} was removed: transformer/")


class WarmRestore:
    """Host weights that are restored in place of the loader's own reading and fusing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = 0

        def resolve(own: DiffusersPipelineLoader, model: nn.Module, *_: Any, **__: Any) -> dict[str, Any]:
            self.asked += 1
            own.load_weights(model)
            prefixes = frozenset(f"{component}." for component in EXPERTS)
            return {"plan": HostWeightPlan("host_weight_runtime", {}, prefixes)}

        monkeypatch.setattr(DiffusersPipelineLoader, "_resolve_hwr", resolve)


def test_after_a_warm_restore_the_worker_fuses_what_the_loader_did_not(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = engine.load(folders.out)
    restore = WarmRestore(monkeypatch)
    own = engine.loader(folders.out, loras=folders.loras)
    twice = engine.load_with(own)
    assert restore.asked == 1
    assert own.host_weight_plan is not None
    assert twice.lora_is_fused is False
    assert worker_of(twice, own.od_config).lora_manager is None
    for component, lora in zip(EXPERTS, folders.loras, strict=True):
        assert_added(held(once, component), held(twice, component), lora)


@pytest.mark.usefixtures("guarded")
def test_the_guard_comes_before_a_warm_restore(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    restore = WarmRestore(monkeypatch)
    own = engine.loader(folders.out, loras=folders.loras)
    with pytest.raises(AlreadyFused):
        engine.load_with(own)
    assert restore.asked == 0
    assert not engine.load(folders.out).lora_is_fused
    assert restore.asked == 1


def test_the_guard_comes_before_the_fresh_load_after_a_failed_restore(folders: Folders) -> None:
    own = engine.loader(folders.out, loras=folders.loras)
    engine.load_with(own)
    with guard_installed(), pytest.raises(AlreadyFused):
        own.load_fresh_canonical_model()


def test_a_worker_without_a_pipeline_fuses_nothing(folders: Folders) -> None:
    """So ``load_model`` comes first wherever it fuses."""
    od_config = engine.config(folders.out, loras=folders.loras)
    worker = worker_of(None, od_config)
    assert worker.lora_manager is None


@dataclass(frozen=True)
class Broadcast:
    """What a rank that broadcasts weights met: refused, served without a LoRA, fused without the guard."""

    refusal: str
    kinds: tuple[str, ...]
    fused_twice: bool


def broadcast(out: Path, loras: tuple[Path, Path]) -> Broadcast:
    options: dict[str, Any] = {"hsdp": True, "world_size": 2, "enable_broadcast_weight_load": True}
    with guard_installed():
        with pytest.raises(AlreadyFused) as refused:
            engine.load(out, loras=loras, **options)
        once = engine.load(out, **options)
    twice = engine.load(out, loras=loras, **options)
    held_once, held_twice = (engine.weights(pipeline, "transformer") for pipeline in (once, twice))
    kinds = {type(value).__name__ for value in once.transformer.parameters()}
    same = all(torch.equal(value, held_twice[name]) for name, value in held_once.items())
    return Broadcast(refused.value.message.splitlines()[1], tuple(kinds), not same)


def test_every_rank_refuses_where_weights_are_broadcast(folders: Folders, two: Ranks) -> None:
    refusal = f"  - {folders.loras[0]} is high.safetensors on transformer, strength 1"
    expected = Broadcast(refusal, (DTensor.__name__,), True)
    assert two.run(broadcast, folders.out, folders.loras) == [expected] * 2


def test_the_engine_finds_and_installs_the_plugin_once(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = entry_points(group=GROUP, name=NAME)
    assert found.load() is plugin.install
    unguarded = DiffusersPipelineLoader.load_model
    assert not hasattr(unguarded, plugin.GUARDED)

    def as_the_engine_does() -> None:
        monkeypatch.setattr(vllm_omni.plugins, "omni_plugins_loaded", False)
        vllm_omni.plugins.load_omni_general_plugins()

    with guard_installed(as_the_engine_does):
        guarded = DiffusersPipelineLoader.load_model
        assert guarded.__wrapped__ is unguarded
        as_the_engine_does()
        plugin.install()
        second_import().install()
        assert DiffusersPipelineLoader.load_model is guarded


def second_import() -> Any:
    """The plugin's module, executed again under another name."""
    spec = spec_from_file_location("fuselora_guard_again", plugin.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    assert module.install is not plugin.install
    return module


def test_plugins_that_are_chosen_without_it_leave_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "something_else")
    assert NAME not in vllm_omni.plugins.load_omni_plugins_by_group(GROUP)
    monkeypatch.setenv("VLLM_PLUGINS", f"something_else,{NAME}")
    assert vllm_omni.plugins.load_omni_plugins_by_group(GROUP)[NAME] is plugin.install


@pytest.fixture
def adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PEFT adapter of one linear."""
    monkeypatch.setattr(vllm.lora.lora_model, "PIN_MEMORY", False)  # there is no accelerator to pin it for
    folder = tmp_path / "adapter"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    module, dim = f"base_model.model.transformer.{TO_Q}", WAN.dim
    factors = {"lora_A": (4, dim), "lora_B": (dim, 4)}
    tensors = {
        f"{module}.{part}.weight": torch.randn(shape, generator=generator) for part, shape in factors.items()
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"r": 4, "lora_alpha": 4, "target_modules": ["to_q"], "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def to_q(pipeline: Any) -> torch.Tensor:
    """What the adapter's linear makes of fixed inputs."""
    inputs = torch.randn(2, WAN.dim, generator=torch.Generator().manual_seed(1)).bfloat16()
    made = pipeline.transformer.get_submodule(TO_Q)(inputs)
    value: torch.Tensor = made[0] if isinstance(made, tuple) else made
    return value


@pytest.mark.usefixtures("guarded")
def test_loras_of_single_requests_work_on_a_fused_folder(folders: Folders, adapter: Path) -> None:
    own = engine.loader(folders.out)
    pipeline = engine.load_with(own)
    manager = worker_of(pipeline, own.od_config).lora_manager
    assert isinstance(manager, DiffusionLoRAManager)
    assert pipeline.lora_is_fused is False
    before = to_q(pipeline)
    manager.set_active_adapter(LoRARequest("mine", 1, str(adapter)))
    assert not torch.allclose(to_q(pipeline), before, atol=1.0)
    manager.set_active_adapter(None)
    assert torch.equal(to_q(pipeline), before)
    assert pipeline.lora_is_fused is False


@pytest.mark.usefixtures("guarded")
def test_a_peft_lora_at_startup_passes_unless_it_is_fused_already(
    folders: Folders, adapter: Path, logged: list[logging.LogRecord], tmp_path: Path
) -> None:
    own = engine.loader(folders.out, loras=(adapter,), backend="peft")
    pipeline = engine.load_with(own)
    assert ours(logged)[0][1].endswith(f"its policy lets {adapter} be added")
    manager = worker_of(pipeline, own.od_config).lora_manager
    assert isinstance(manager, DiffusionLoRAManager)
    assert manager.list_adapters()
    out = merge(folders.base, [f"transformer={adapter}"], tmp_path / "out").out
    for lora in (adapter, adapter / "adapter_model.safetensors"):
        with pytest.raises(AlreadyFused, match="--lora-path would add a LoRA that it holds a second time"):
            engine.load(out, loras=(lora,), backend="peft")


@pytest.mark.usefixtures("guarded")
def test_a_peft_lora_that_is_read_from_a_pickle_was_not_compared(
    folders: Folders, adapter: Path, logged: list[logging.LogRecord]
) -> None:
    weights = adapter / "adapter_model.safetensors"
    torch.save(load_file(weights), adapter / "adapter_model.bin")
    weights.unlink()
    save_file({"step": torch.ones(1)}, adapter / "training_state.safetensors")
    own = engine.loader(folders.out, loras=(adapter,), backend="peft")
    manager = worker_of(engine.load_with(own), own.od_config).lora_manager
    assert isinstance(manager, DiffusionLoRAManager)
    assert manager.list_adapters()
    ((level, line),) = ours(logged)
    assert level == "WARNING"
    assert f"{adapter} was not compared: {adapter / 'adapter_model.bin'}: " in line


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A Hub of the engine's own, and an empty cache."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    with HubServer() as server:
        ask(server.url, monkeypatch)
        yield server


def ask(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub is at ``url`` from now on."""
    constants = huggingface_hub.constants
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    for module in (vllm.transformers_utils.repo_utils, vllm_omni.transformers_utils.repo_utils):
        monkeypatch.setattr(module, "_hf_api", None)


@pytest.mark.usefixtures("guarded")
def test_a_hub_id_is_guarded_like_a_folder(
    folders: Folders, hub: HubServer, logged: list[logging.LogRecord]
) -> None:
    hub.add(REPO, folders.out)
    repo: Any = REPO
    own = engine.loader(repo, loras=folders.loras)
    assert own.od_config.model == REPO
    with pytest.raises(AlreadyFused, match=f"{REPO}: is fused already"):
        engine.load_with(own)
    assert not [path for path in hub.fetched(REPO) if path.endswith(".safetensors")]
    logged.clear()
    pipeline = engine.load(repo)
    assert ours(logged) == [("INFO", f"fuselora: {REPO} is fused: {HELD}; no LoRA is added")]
    assert not pipeline.lora_is_fused


@pytest.mark.usefixtures("guarded")
def test_a_repository_without_a_marker_is_left_alone(
    folders: Folders, hub: HubServer, logged: list[logging.LogRecord]
) -> None:
    hub.add(REPO, folders.base)
    repo: Any = REPO
    assert engine.load(repo, loras=folders.loras).lora_is_fused
    assert engine.load(repo, loras=folders.loras).lora_is_fused
    assert not ours(logged)


def asked_of(name: str, loras: tuple[Path, ...]) -> SimpleNamespace:
    paths = [str(path) for path in loras]
    return SimpleNamespace(model=name, revision=None, lora_path=paths, lora_backend="distill")


def test_the_marker_of_the_revision_that_is_asked_for(folders: Folders, hub: HubServer) -> None:
    hub.add(REPO, folders.out, tags=("v1",))
    asked = SimpleNamespace(
        model=REPO, revision="v1", lora_path=[str(folders.loras[0])], lora_backend="distill"
    )
    with pytest.raises(AlreadyFused):
        plugin.guard(asked)
    asked.revision = "v2"
    with pytest.raises(HubError, match="cannot tell whether it is fused"):
        plugin.guard(asked)


def add_revisions(hub: HubServer, main: Path, plain: Path) -> Any:
    """A repository, and its files at the revision "plain"."""
    hub.add(REPO, main)
    hub.add_branch(REPO, "plain", plain)
    return REPO


def test_without_the_guard_weights_of_the_default_revision_are_fused_twice(
    folders: Folders, hub: HubServer
) -> None:
    repo = add_revisions(hub, main=folders.out, plain=folders.base)
    once, twice = engine.load(folders.out), engine.load(repo, loras=folders.loras, revision="plain")
    for component, lora in zip(EXPERTS, folders.loras, strict=True):
        assert_added(held(once, component), held(twice, component), lora)


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("fused", ["main", "plain"])
def test_a_revision_is_guarded_and_the_default_one_too(folders: Folders, hub: HubServer, fused: str) -> None:
    main, plain = (folders.out, folders.base) if fused == "main" else (folders.base, folders.out)
    repo = add_revisions(hub, main, plain)
    with pytest.raises(AlreadyFused, match=f"{REPO}: is fused already"):
        engine.load(repo, loras=folders.loras, revision="plain")


def test_offline_a_revision_that_is_not_in_the_cache_cannot_be_loaded(
    folders: Folders, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_revisions(hub, main=folders.out, plain=folders.base)
    huggingface_hub.snapshot_download(REPO, revision="plain")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    asked = asked_of(REPO, folders.loras)
    with pytest.raises(HubError):
        plugin.guard(asked)
    asked.revision = "plain"
    plugin.guard(asked)


@pytest.mark.parametrize("fails", ["with 401", "with no answer"])
def test_a_hub_that_fails_lets_no_lora_be_fused_and_stops_no_other_server(
    folders: Folders,
    hub: HubServer,
    logged: list[logging.LogRecord],
    monkeypatch: pytest.MonkeyPatch,
    fails: str,
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between tries
    hub.add(REPO, folders.base)
    if fails == "with 401":
        hub.status = 401
    else:
        ask("http://127.0.0.1:9", monkeypatch)
    with pytest.raises(HubError, match="cannot tell whether it is fused") as refused:
        plugin.guard(asked_of(REPO, folders.loras))
    assert refused.value.hint is not None
    logged.clear()
    plugin.guard(asked_of(REPO, ()))
    ((level, line),) = ours(logged)
    assert level == "WARNING"
    assert line.endswith("No LoRA is asked for, so it is served.")


def test_offline_the_cache_says_what_is_served(
    folders: Folders, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, folder in ((REPO, folders.out), ("org/base", folders.base)):
        hub.add(name, folder)
        huggingface_hub.snapshot_download(name)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(AlreadyFused):
        plugin.guard(asked_of(REPO, folders.loras))
    plugin.guard(asked_of("org/base", folders.loras))
    with pytest.raises(HubError):
        plugin.guard(asked_of("org/unseen", folders.loras))
    repo: Any = REPO
    with guard_installed(), pytest.raises(AlreadyFused):
        engine.load(repo, loras=folders.loras)


def test_shards_in_the_cache_tell_of_a_marker_that_was_not_uploaded(
    folders: Folders, hub: HubServer, tmp_path: Path
) -> None:
    out = folders.copy(tmp_path / "out")
    (out / FILE_NAME).unlink()
    hub.add(REPO, out)
    huggingface_hub.snapshot_download(REPO)
    with pytest.raises(MarkerError, match="carries the fingerprint of a fusion"):
        plugin.guard(asked_of(REPO, folders.loras))


@pytest.mark.usefixtures("guarded")
def test_shards_on_the_hub_tell_of_a_marker_that_was_not_uploaded(
    folders: Folders, hub: HubServer, logged: list[logging.LogRecord], tmp_path: Path
) -> None:
    out = folders.copy(tmp_path / "out")
    (out / FILE_NAME).unlink()
    hub.add(REPO, out)
    repo: Any = REPO
    with pytest.raises(MarkerError, match=r"transformer/.*\.safetensors carries the fingerprint of a fusion"):
        engine.load(repo, loras=folders.loras)
    hub.seen.clear()
    logged.clear()
    plugin.guard(asked_of(REPO, ()))  # headers are fetched only where they can matter
    assert not [path for path in hub.fetched(REPO) if path.endswith(".safetensors")]
    assert not ours(logged)
    engine.load(repo)
    plugin.guard(asked_of(REPO, ()))
    ((level, line),) = ours(logged)
    assert level == "WARNING"
    assert line.startswith(f"fuselora: {REPO}: {FILE_NAME} was removed: transformer/")


def test_a_header_that_cannot_be_read_on_the_hub_is_no_fused_one(
    folders: Folders, hub: HubServer, tmp_path: Path
) -> None:
    base = Path(shutil.copytree(folders.base, tmp_path / "base"))
    (base / "broken.safetensors").write_bytes(b"\xff" * 100)
    hub.add(REPO, base)
    plugin.guard(asked_of(REPO, folders.loras))
    assert "broken.safetensors" in hub.fetched(REPO)


def test_modelscope_is_asked_where_the_engine_asks_it(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def snapshot_download(model_id: str, **_: object) -> str:
        asked.append(model_id)
        return str(folders.out)

    for name in ("modelscope", "modelscope.hub", "modelscope.hub.snapshot_download"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    download = sys.modules["modelscope.hub.snapshot_download"]
    monkeypatch.setattr(download, "snapshot_download", snapshot_download, raising=False)
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "true")
    with pytest.raises(AlreadyFused):
        plugin.guard(asked_of(REPO, folders.loras))
    assert asked == [REPO]


def test_a_lora_of_the_hub_is_compared_as_the_engine_fetches_it(
    folders: Folders, adapter: Path, hub: HubServer, tmp_path: Path
) -> None:
    out = merge(folders.base, [f"transformer={adapter}"], tmp_path / "out").out
    hub.add("org/adapter", adapter)
    asked = SimpleNamespace(model=str(out), lora_path="org/adapter", lora_backend="peft")
    with pytest.raises(AlreadyFused, match="org/adapter is adapter"):
        plugin.guard(asked)
    asked.lora_backend = "distill"  # takes files alone: nothing is downloaded
    hub.seen.clear()
    with pytest.raises(AlreadyFused, match="distill_lora in the policy"):
        plugin.guard(asked)
    assert not hub.seen
