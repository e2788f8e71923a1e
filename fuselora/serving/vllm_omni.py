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
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Protocol

from fuselora.errors import AlreadyFused, FuseloraError, HubError, InputError
from fuselora.escape import one_line
from fuselora.header import read_header
from fuselora.marker import FILE_NAME, FINGERPRINT_KEY
from fuselora.serving.guard import (
    Admission,
    AskedLora,
    Found,
    StartUp,
    decide,
    decide_lost,
    look,
)

LOADER_MODULE, LOADER_CLASS = "vllm_omni.diffusion.model_loader.diffusers_loader", "DiffusersPipelineLoader"
GUARDED = "__fuselora_guarded__"  # on the function: it outlives a second import of this module
ADAPTER_WEIGHTS = "adapter_model.safetensors"
# What the PEFT backend reads where that is not there. Pickles are never compared, which is a warning.
ADAPTER_PICKLES = ("adapter_model.bin", "adapter_model.pt")
HEADERS_AT_ONCE = 8
# What the engine tells a FastH3 release by: it goes into the weights whatever the LoRA backend.
FAST_H3_FORMAT, FAST_H3_MODEL = "fastvideo-lora-v2", ("fastvideo/", "fasth3")
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
    ``MarkerError`` as ``look`` and ``decide_lost`` do, and ``HubError`` if a LoRA is asked for and it
    cannot be told whether the checkpoint is fused.
    """
    try:
        admissions = _admissions(od_config, cache_dir)
    except FuseloraError as error:
        logger.error("fuselora: %s", _in_log(error))
        raise
    for admission in admissions:
        logger.log(logging.WARNING if admission.warning else logging.INFO, "fuselora: %s", admission.line)


def _in_log(error: FuseloraError) -> str:
    """With its hint. ``AlreadyFused`` has lines of its own; in the others a line end is part of a name."""
    message = error.message if isinstance(error, AlreadyFused) else one_line(error.message)
    return "\n".join([message, one_line(error.hint)] if error.hint else [message])


def _guarded(load_model: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(load_model)
    def load_model_if_not_fused_twice(self: _Loader, *args: object, **kwargs: object) -> object:
        guard(self.od_config, getattr(self.load_config, "download_dir", None))
        return load_model(self, *args, **kwargs)

    setattr(load_model_if_not_fused_twice, GUARDED, True)
    return load_model_if_not_fused_twice


def _admissions(od_config: object, cache_dir: str | None) -> list[Admission]:
    name, loras = str(getattr(od_config, "model", None) or ""), _lora_names(od_config)
    if not name:
        return []
    try:
        found = _found(name, getattr(od_config, "revision", None), cache_dir, adds=bool(loras))
    except HubError as error:
        if loras:
            raise
        line = one_line(f"{error.message}. No LoRA is asked for, so it is served.")
        return [Admission(line, warning=True)]
    markers = {marker.fingerprint: marker for one in found for marker in one.markers}
    start = _start_up(name, loras, od_config) if markers else StartUp(name)
    lost = [decide_lost(name, one.lost, adds=bool(loras)) for one in found if one.lost]
    return [decide(marker, start) for marker in markers.values()] + lost


def _lora_names(od_config: object) -> tuple[str, ...]:
    given = getattr(od_config, "lora_path", None) or ()
    names = [given] if isinstance(given, (str, os.PathLike)) else given
    return tuple(str(name) for name in names if name)


def _start_up(name: str, loras: tuple[str, ...], od_config: object) -> StartUp:
    backend = getattr(od_config, "lora_backend", None) or "peft"
    fuses = backend != "peft"  # an enum of texts, equal to them; whatever is new is taken to fuse
    options = "--lora-backend distill and --lora-path" if fuses else "--lora-path"
    asked = tuple(AskedLora(lora, _weights(lora, fuses=fuses)) for lora in loras)
    return StartUp(name, asked, fuses or any(map(_is_fast_h3, asked)), options)


def _is_fast_h3(lora: AskedLora) -> bool:
    start, within = FAST_H3_MODEL
    for path in lora.files:
        try:
            metadata = read_header(path).metadata
        except InputError:
            continue
        model = metadata.get("finetuned_model", "").lower()
        if metadata.get("format") == FAST_H3_FORMAT and model.startswith(start) and within in model:
            return True
    return False


def _weights(lora: str, *, fuses: bool) -> tuple[Path, ...]:
    """The files that the engine would read for one ``--lora-path``, and what lies beside a pickle of it.

    Only its PEFT backend takes a Hub id, and downloads all of that repository, as it does here.
    """
    path = Path(lora) if fuses else _adapter(lora)
    if not path.is_dir():
        return (path,) if path.exists() else ()
    own = path / ADAPTER_WEIGHTS
    if own.is_file():
        return (own,)
    pickled = [] if fuses else [path / name for name in ADAPTER_PICKLES if (path / name).is_file()]
    return (*pickled, *sorted(path.glob("*.safetensors")))


def _adapter(lora: str) -> Path:
    local = Path(lora).expanduser()
    if local.exists():
        return local
    try:
        from vllm.lora.utils import get_adapter_absolute_path

        return Path(get_adapter_absolute_path(lora))
    except Exception as error:
        raise HubError(f"{lora}: this LoRA cannot be fetched: {error}", path=lora) from error


def _found(name: str, revision: str | None, cache_dir: str | None, *, adds: bool) -> list[Found]:
    """What is fused, at each revision that the engine may read. Raises ``HubError`` if it cannot be told.

    Most of its pipelines read weights at the default revision, whichever is asked for.
    """
    if Path(name).exists():
        return [look(Path(name))]
    asked = revision or None
    revisions = dict.fromkeys((asked, None) if adds else (asked,))
    try:
        return [_on_hub(name, at, cache_dir, wanted=at == asked, adds=adds) for at in revisions]
    except FuseloraError:
        raise
    except Exception as error:  # of the Hub, the network, ModelScope's package: each has its own kinds
        what = f"{name}: cannot tell whether it is fused: {FILE_NAME} or its shards cannot be fetched"
        raise HubError(f"{what}: {error}", hint=UNKNOWN_HINT, path=name) from error


def _on_hub(repo: str, revision: str | None, cache_dir: str | None, *, wanted: bool, adds: bool) -> Found:
    """As the loader finds an index: its ModelScope switch, client, token, cache and offline mode.

    Offline, a revision that is ``wanted`` has to be in the cache. Shards that are not in it are looked at
    only where a LoRA is asked for: that takes a request for each.
    """
    from huggingface_hub import constants
    from vllm.model_executor.model_loader.weight_utils import maybe_download_from_modelscope

    downloaded = maybe_download_from_modelscope(repo, revision)
    if downloaded is not None:
        return look(Path(downloaded))
    path = _snapshot(repo, revision, cache_dir, wanted=wanted)
    found = look(path) if path else Found()
    if adds and found == Found() and not constants.HF_HUB_OFFLINE:
        return Found(lost=_lost_on_hub(repo, revision, path))
    return found


def _snapshot(repo: str, revision: str | None, cache_dir: str | None, *, wanted: bool) -> Path | None:
    """The repository's folder in the cache, its marker fetched if it has one; None if there is neither."""
    from huggingface_hub import constants
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
    from vllm_omni.transformers_utils.repo_utils import hf_api

    where = {"revision": revision, "cache_dir": cache_dir}
    if not constants.HF_HUB_OFFLINE:
        try:
            return Path(hf_api().hf_hub_download(repo, FILE_NAME, **where)).parent
        except LocalEntryNotFoundError:  # the Hub is out of reach
            raise
        except EntryNotFoundError:
            pass
    try:  # as vLLM asks for it: shards there tell of a marker that was lost
        return Path(hf_api().snapshot_download(repo, ignore_patterns="*", local_files_only=True, **where))
    except LocalEntryNotFoundError:
        if constants.HF_HUB_OFFLINE and wanted:
            raise
        return None


def _lost_on_hub(repo: str, revision: str | None, cached: Path | None) -> str | None:
    """What shows that a repository without a marker is fused: headers of shards not yet in the cache."""
    from vllm_omni.transformers_utils.repo_utils import hf_api

    names = [name for name in hf_api().list_repo_files(repo, revision=revision) if _is_shard(name)]
    away = [name for name in sorted(names) if cached is None or not (cached / name).exists()]
    with ThreadPoolExecutor(HEADERS_AT_ONCE) as pool:
        carry = pool.map(partial(_carries_on_hub, repo, revision), away)
        name = next((name for name, carries in zip(away, carry, strict=True) if carries), None)
    return name and f"{name} carries the fingerprint of a fusion, and {FILE_NAME} is not there"


def _is_shard(name: str) -> bool:
    return name.endswith(".safetensors") and name.count("/") < 2


def _carries_on_hub(repo: str, revision: str | None, name: str) -> bool:
    from huggingface_hub.errors import SafetensorsParsingError
    from vllm_omni.transformers_utils.repo_utils import hf_api

    try:
        header = hf_api().parse_safetensors_file_metadata(repo, name, revision=revision)
    except SafetensorsParsingError:
        return False
    return FINGERPRINT_KEY in header.metadata
