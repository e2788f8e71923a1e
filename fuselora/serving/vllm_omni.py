"""The vLLM-Omni plugin that refuses to fuse a LoRA into a checkpoint that holds it already.

vLLM-Omni calls ``install`` in each of its processes (entry-point group ``vllm_omni.general_plugins``). It
puts a check before ``DiffusersPipelineLoader.load_model``: before a pipeline is made, before a warm
restore of host weights, and on every rank, sharded or not. Nothing else of the engine is touched:
``lora_is_fused`` stays as it is, so LoRAs of single requests work as before.

That one place is enough. A worker's other site of fusion, ``DiffusionWorker.init_lora_manager``, does
nothing until there is a pipeline, and every pipeline of a worker comes from that ``load_model``.

The engine goes on without a plugin that fails to import, and without one that ``VLLM_PLUGINS`` leaves
out. ``fuselora check`` is the preflight that cannot vanish so.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Protocol

from fuselora.errors import FuseloraError, HubError
from fuselora.marker import FILE_NAME
from fuselora.serving.guard import (
    Admission,
    AskedLora,
    StartUp,
    decide,
    find_marker,
    refuse_lost_marker,
)

LOADER_MODULE, LOADER_CLASS = "vllm_omni.diffusion.model_loader.diffusers_loader", "DiffusersPipelineLoader"
GUARDED = "__fuselora_guarded__"  # on the function: it outlives a second import of this module
ADAPTER_WEIGHTS = "adapter_model.safetensors"
logger = logging.getLogger("vllm_omni.fuselora")  # below the engine's own: its handlers and level
UNKNOWN_HINT = (
    "Try again when the Hub answers, serve the cache with HF_HUB_OFFLINE=1, or name a local folder."
)


class _Loader(Protocol):
    """What is used of vLLM-Omni's loader."""

    od_config: object
    load_config: object


def install() -> None:
    """Put the check before the loader's ``load_model``, once however often this is called.

    In an engine without that loader it logs a warning and does nothing.
    """
    try:
        loader = getattr(import_module(LOADER_MODULE), LOADER_CLASS)
        load_model = loader.load_model
    except Exception as error:  # an exception from a plugin would end servers that have no use for it
        logger.warning(
            "fuselora: fused checkpoints are NOT guarded against a second fusion: "
            "this vLLM-Omni has no %s.load_model (%s). Run `fuselora check` before it.",
            LOADER_CLASS,
            error,
        )
        return
    if not hasattr(load_model, GUARDED):
        loader.load_model = _guarded(load_model)


def guard(od_config: object, cache_dir: str | None = None) -> None:
    """Logs what ``od_config.model`` is fused with, nothing if it is not fused.

    ``cache_dir`` is the engine's download folder. Raises ``AlreadyFused`` as ``decide`` does,
    ``MarkerError`` for a broken marker, an unfinished folder, or a lost marker where a LoRA is asked for,
    and ``HubError`` if a LoRA is asked for and it cannot be told whether the checkpoint is fused.
    """
    try:
        admission = _admission(od_config, cache_dir)
    except FuseloraError as error:
        logger.error("fuselora: %s", "\n".join(text for text in (error.message, error.hint) if text))
        raise
    if admission is not None:
        logger.log(logging.WARNING if admission.warning else logging.INFO, "fuselora: %s", admission.line)


def _guarded(load_model: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(load_model)
    def load_model_if_not_fused_twice(self: _Loader, *args: object, **kwargs: object) -> object:
        guard(self.od_config, getattr(self.load_config, "download_dir", None))
        return load_model(self, *args, **kwargs)

    setattr(load_model_if_not_fused_twice, GUARDED, True)
    return load_model_if_not_fused_twice


def _admission(od_config: object, cache_dir: str | None) -> Admission | None:
    name, loras = str(getattr(od_config, "model", None) or ""), _lora_names(od_config)
    if not name:
        return None
    try:
        path = _local_path(name, getattr(od_config, "revision", None), cache_dir)
    except HubError as error:
        if loras:
            raise
        return Admission(f"{error.message}. No LoRA is asked for, so it is served.", warning=True)
    marker = find_marker(path) if path else None
    if marker is not None:
        return decide(marker, _start_up(name, loras, od_config))
    if path is not None and loras:
        refuse_lost_marker(name, path)
    return None


def _lora_names(od_config: object) -> tuple[str, ...]:
    given = getattr(od_config, "lora_path", None) or ()
    names = [given] if isinstance(given, (str, os.PathLike)) else given
    return tuple(str(name) for name in names if name)


def _start_up(name: str, loras: tuple[str, ...], od_config: object) -> StartUp:
    backend = getattr(od_config, "lora_backend", None) or "peft"
    fuses = backend != "peft"  # an enum of texts, equal to them; whatever is new is taken to fuse
    options = "--lora-backend distill and --lora-path" if fuses else "--lora-path"
    asked = tuple(AskedLora(lora, _weights(lora, fuses=fuses)) for lora in loras)
    return StartUp(name, asked, fuses, options)


def _weights(lora: str, *, fuses: bool) -> tuple[Path, ...]:
    """The safetensors files that the engine would read for one ``--lora-path``.

    Only its PEFT backend takes a Hub id, and downloads all of that repository, as it does here.
    """
    path = Path(lora) if fuses else _adapter(lora)
    if not path.is_dir():
        return (path,) if path.exists() else ()
    own = path / ADAPTER_WEIGHTS
    return (own,) if own.is_file() else tuple(sorted(path.glob("*.safetensors")))


def _adapter(lora: str) -> Path:
    local = Path(lora).expanduser()
    if local.exists():
        return local
    try:
        from vllm.lora.utils import get_adapter_absolute_path

        return Path(get_adapter_absolute_path(lora))
    except Exception as error:
        raise HubError(f"{lora}: this LoRA cannot be fetched: {error}", path=lora) from error


def _local_path(name: str, revision: str | None, cache_dir: str | None) -> Path | None:
    """Where the files of a checkpoint lie, or those of them that tell whether it is fused.

    None for a repository that has no marker and is not in the cache. Raises ``HubError`` if that cannot
    be told.
    """
    if Path(name).exists():
        return Path(name)
    try:
        return _from_hub(name, revision, cache_dir)
    except Exception as error:  # of the Hub, the network, ModelScope's package: each has its own kinds
        what = f"{name}: cannot tell whether it is fused: {FILE_NAME} cannot be fetched"
        raise HubError(f"{what}: {error}", hint=UNKNOWN_HINT, path=name) from error


def _from_hub(repo: str, revision: str | None, cache_dir: str | None) -> Path | None:
    """As the loader finds an index: its ModelScope switch, client, token, cache and offline mode."""
    from huggingface_hub import constants
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
    from vllm.model_executor.model_loader.weight_utils import maybe_download_from_modelscope
    from vllm_omni.transformers_utils.repo_utils import hf_api

    downloaded = maybe_download_from_modelscope(repo, revision)
    if downloaded is not None:
        return Path(downloaded)
    where = {"revision": revision, "cache_dir": cache_dir}
    if not constants.HF_HUB_OFFLINE:
        try:
            return Path(hf_api().hf_hub_download(repo, FILE_NAME, **where)).parent
        except LocalEntryNotFoundError:  # the Hub is out of reach
            raise
        except EntryNotFoundError:
            pass
    try:  # its folder in the cache, as vLLM asks for it: shards there tell of a marker that was lost
        return Path(hf_api().snapshot_download(repo, ignore_patterns="*", local_files_only=True, **where))
    except LocalEntryNotFoundError:
        if constants.HF_HUB_OFFLINE:
            raise
        return None
