"""The Hugging Face Hub: the one module that touches the network, through huggingface_hub alone.

That library is imported when something is first asked of the Hub. Its cache (``HF_HOME``), offline
switch (``HF_HUB_OFFLINE``), login and progress bars are used as they are. Works with 1.x and 2.x.
"""

from __future__ import annotations

import atexit
import difflib
import glob
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from fuselora import __version__
from fuselora.errors import FormatError, FuseloraError, HubError
from fuselora.header import CONVERT, MAX_HEADER_BYTES, PICKLED_SUFFIXES
from fuselora.selection import (
    ADAPTER_CONFIG,
    CONFIGURED,
    absent_files,
    adapter_weights,
    model_files,
    needed_files,
    skeleton_files,
    variants,
)
from fuselora.shards import is_index, shard_names
from fuselora.specs import HUB, SHORT_NAMES, HubAddress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from huggingface_hub import HfApi

TIMEOUT_S = 10.0
SMALL_BYTES = 32 << 20  # what a plan still downloads whole: configurations, tokenizers
FIRST_READ_BYTES = 64 << 10  # most headers fit
LOGIN = "Check the name; for a private or gated repository log in with 'hf auth login'."
# Whose exceptions are about the Hub and not about us; the names differ between huggingface_hub 1.x and 2.x.
FOREIGN = ("huggingface_hub", "httpx", "httpx2", "hf_xet")
FOREIGN_KINDS = (OSError, ValueError, RuntimeError)
# Other tools leave these out of the Hub's cache; a base is whole without them.
DECORATION = ("", ".md", ".png", ".jpg", ".jpeg", ".gif", ".webp", ".svg", ".mp4", ".wav", ".mp3", ".pdf")


def fetch_base(
    address: HubAddress, *, asked: str, variant: str | None, headers_only: bool, model_only: bool = False
) -> tuple[Path, str]:
    """The needed files of a base as a folder or file, and the commit they are from.

    ``asked`` is what the user typed, for messages. ``headers_only`` and ``model_only`` as in
    ``resolve_base``. Raises ``HubError``.
    """
    listing = _list_repo(address, asked)
    needed = (address.path,) if address.path in listing.files else _needed(listing, variant)
    needed = model_files(needed) if model_only else needed
    folder = _headers(listing, needed) if headers_only else _fetch(listing, needed)
    return folder / address.path, listing.commit


def fetch_skeleton(address: HubAddress, *, asked: str, headers_only: bool) -> tuple[Path, str]:
    """A pipeline's folder without its transformers' weights, and the commit. Raises ``HubError``."""
    listing = _list_repo(address, asked)
    names = skeleton_files(listing.inside(address.path))
    needed = [f"{address.path}/{name}" if address.path else name for name in names]
    folder = _headers(listing, needed) if headers_only else _fetch(listing, needed)
    return folder / address.path, listing.commit


def fetch_lora(address: HubAddress, *, asked: str) -> tuple[Path, Path | None]:
    """A LoRA's weights in the Hub's cache, and the ``adapter_config.json`` that belongs to them.

    Of a LoRA in several files it is the index, and they are there beside it. Raises ``HubError``, and as
    ``adapter_weights`` does for an adapter folder, as ``shard_names`` for an index.
    """
    listing = _list_repo(address, asked)
    name, is_adapter = address.path, address.path not in listing.files
    if is_adapter:
        name = str(PurePosixPath(name, _adapter_on_hub(listing)))
    if name.endswith(PICKLED_SUFFIXES):
        raise FormatError(f"{asked}: is not safetensors", hint=CONVERT, path=asked)
    config = str(PurePosixPath(name).with_name(ADAPTER_CONFIG))
    has_config = config in listing.files and (is_adapter or PurePosixPath(name).name in CONFIGURED)
    shards = _shards_of(listing, name) if is_index(PurePosixPath(name)) else []
    folder = _fetch(listing, [name, *shards, *([config] if has_config else [])])
    return folder / name, folder / config if has_config else None


def _shards_of(listing: _Listing, index: str) -> list[str]:
    """The files of the repository that an index names, which is fetched for it."""
    path = _fetch(listing, [index]) / index
    shards = [str(PurePosixPath(index).with_name(name)) for name in shard_names(path)]
    for shard in shards:
        if shard not in listing.files:
            repo = listing.address.repo
            raise HubError(f"{listing.asked}: {index} names {shard}, which {repo} does not have", path=shard)
    return shards


@dataclass(frozen=True, slots=True)
class _Listing:
    """A repository at one commit: its files with their sizes in bytes.

    ``asked`` is what the user typed. ``snapshot`` is the folder in the cache that has to do when the
    Hub is out of reach.
    """

    address: HubAddress
    asked: str
    commit: str
    files: Mapping[str, int | None]
    snapshot: Path | None = None

    def inside(self, folder: str) -> list[str]:
        """The files under ``folder``, named from there; refuses a folder that is not in the repository."""
        prefix = f"{folder}/" if folder else ""
        names = [name[len(prefix) :] for name in self.files if name.startswith(prefix)]
        if not names:
            close = difflib.get_close_matches(folder, self.files)
            hint = f"Did you mean {' or '.join(close)}?" if close else None
            raise HubError(f"{self.asked}: {self.address.repo} has no {folder!r}", hint=hint, path=folder)
        return names


def _needed(listing: _Listing, variant: str | None) -> tuple[str, ...]:
    folder = listing.address.path
    names = listing.inside(folder)
    offered, needed = variants(names), needed_files(names, variant)
    listed = ", ".join(offered)
    if variant is not None and variant not in offered:
        hint = f"It has {listed}." if offered else "Leave --variant out."
        raise HubError(f"{listing.asked}: {listing.address.source} has no {variant} weights", hint=hint)
    if not any(name.endswith(".safetensors") for name in needed):
        hint = f"Say which variant with --variant: {listed}." if offered else CONVERT
        raise HubError(f"{listing.asked}: {listing.address.source} holds no plain safetensors", hint=hint)
    return tuple(f"{folder}/{name}" if folder else name for name in needed)


def _adapter_on_hub(listing: _Listing) -> str:
    names = listing.inside(listing.address.path)
    deeper = [name for name in names if "/" in name and name.endswith(".safetensors")]
    here = [name for name in names if "/" not in name]
    if deeper and not any(name.endswith(".safetensors") for name in here):
        some = ", ".join(deeper[:3])
        hint = f"Name the file to fuse; there is {some}{' ...' if len(deeper) > 3 else ''}."
        raise HubError(f"{listing.asked}: is no adapter folder", hint=hint)
    return adapter_weights(here, listing.asked)


def _client() -> HfApi:
    from huggingface_hub import HfApi

    return HfApi(library_name="fuselora", library_version=__version__)


def _list_repo(address: HubAddress, asked: str) -> _Listing:
    """One request, without retries: it finds at once whether the Hub can be reached and what it has."""
    with hub_errors(address, asked):
        try:
            info = _client().model_info(
                address.repo, revision=address.revision, timeout=TIMEOUT_S, files_metadata=True
            )
        except Exception as error:
            if not _out_of_reach(error):
                raise
            return _list_cache(address, asked, error)
        files = {file.rfilename: file.size for file in info.siblings or ()}
        return _Listing(address, asked, info.sha or "", _relative(files, asked))


def _relative(files: Mapping[str, int | None], asked: str) -> Mapping[str, int | None]:
    for name in files:
        if name.startswith("/") or ".." in name.split("/"):
            raise HubError(f"{asked}: the repository lists a file outside itself, {name!r}", path=name)
    return files


def _list_cache(address: HubAddress, asked: str, reason: Exception) -> _Listing:
    """What the cache knows of a repository that cannot be asked for; ``reason`` says why."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        found = _client().snapshot_download(
            address.repo, revision=address.revision, local_files_only=True, allow_patterns=[]
        )
    except LocalEntryNotFoundError:
        raise reason from None
    folder = Path(found)
    files = _cached_tree(address.repo, folder.name) or {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file()
    }
    return _Listing(address, asked, folder.name, files, folder)


def _cached_tree(repo: str, commit: str) -> Mapping[str, int | None] | None:
    """All files of a commit, if the cache remembers; huggingface_hub 1.0 does not."""
    try:
        from huggingface_hub import get_cached_repo_tree
        from huggingface_hub.errors import CachedRepoTreeNotFoundError
    except ImportError:
        return None
    try:
        return {file.path: file.size for file in get_cached_repo_tree(repo, revision=commit)}
    except CachedRepoTreeNotFoundError:
        return None


def _fetch(listing: _Listing, names: Sequence[str]) -> Path:
    """The snapshot folder in the Hub's cache, with all of ``names`` in it."""
    if listing.snapshot is not None:
        return _complete(listing, listing.snapshot, names)
    address, patterns = listing.address, [glob.escape(name) for name in names]
    with hub_errors(address, listing.asked):
        folder = _client().snapshot_download(address.repo, revision=address.revision, allow_patterns=patterns)
    return _complete(listing, Path(folder), names)


def _complete(listing: _Listing, folder: Path, names: Sequence[str]) -> Path:
    absent = [name for name in names if not (folder / name).is_file()]
    if listing.snapshot is not None:
        absent = [name for name in absent if PurePosixPath(name).suffix not in DECORATION]
        absent = absent or list(absent_files(folder, names))
    if absent or folder.name != listing.commit:
        moved = folder.name != listing.commit
        what = "changed while it was fetched" if moved else "is only partly in the Hub's cache"
        some = f"; missing are {', '.join(absent[:3])}" if absent else ""
        more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
        message = f"{listing.asked}: {listing.address.repo} {what}{some}{more}"
        raise HubError(message, hint="Run it again with the Hub in reach.", absent=absent)
    return folder


# Headers without the data behind them


def _headers(listing: _Listing, names: Sequence[str]) -> Path:
    """A folder to plan from: the cache if it holds all of ``names``, else a temporary sparse copy."""
    if listing.snapshot is not None or all(_cached_file(listing, name) for name in names):
        return _fetch(listing, names)
    large = [name for name in names if name.endswith(".safetensors") or _size(listing, name) > SMALL_BYTES]
    small = [name for name in names if name not in large]
    with hub_errors(listing.address, listing.asked), ThreadPoolExecutor(8) as pool:
        snapshot = _fetch(listing, small) if small else Path()
        folder = _temporary(names)
        for name in small:
            shutil.copyfile(snapshot / name, folder / name)
        list(pool.map(partial(_write_sparse, listing, folder), large))
    return folder


def _temporary(names: Sequence[str]) -> Path:
    """A folder that goes with the process, ready for files of these names."""
    folder = Path(tempfile.mkdtemp(prefix="fuselora-headers-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
    return folder


def _write_sparse(listing: _Listing, folder: Path, name: str) -> None:
    n_bytes = _size(listing, name)
    cached = _cached_file(listing, name)
    read = partial(_start_of_file, cached) if cached else partial(_start_of_url, _url(listing, name))
    with (folder / name).open("wb") as stream:
        if name.endswith(".safetensors"):
            stream.write(_raw_header(read, n_bytes))
        stream.truncate(n_bytes)


def _raw_header(read: Callable[[int], bytes], n_bytes: int) -> bytes:
    """The bytes before the tensors' data; as many as were read if they claim an impossible header."""
    start = read(min(n_bytes, FIRST_READ_BYTES))
    end = 8 + int.from_bytes(start[:8], "little")
    if len(start) < end <= min(n_bytes, 8 + MAX_HEADER_BYTES):
        start = read(end)
    return start[:end]


def _start_of_file(path: Path, n_bytes: int) -> bytes:
    with path.open("rb") as stream:
        return stream.read(n_bytes)


def _start_of_url(url: str, n_bytes: int) -> bytes:
    """The first ``n_bytes`` of a file on the Hub, and no more, even from a server that knows no ranges."""
    from huggingface_hub import get_session, hf_raise_for_status
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # exported, but lazily

    if not n_bytes:
        return b""
    headers = build_hf_headers(library_name="fuselora", library_version=__version__)
    headers |= {"Range": f"bytes=0-{n_bytes - 1}", "Accept-Encoding": "identity"}
    start = bytearray()
    with get_session().stream("GET", url, headers=headers, timeout=TIMEOUT_S) as response:
        hf_raise_for_status(response)
        for chunk in response.iter_bytes(FIRST_READ_BYTES):
            start += chunk
            if len(start) >= n_bytes:
                break
    return bytes(start[:n_bytes])


def _url(listing: _Listing, name: str) -> str:
    from huggingface_hub import hf_hub_url

    return hf_hub_url(listing.address.repo, name, revision=listing.commit)


def _cached_file(listing: _Listing, name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(listing.address.repo, name, revision=listing.commit)
    return Path(found) if isinstance(found, str) else None


def _size(listing: _Listing, name: str) -> int:
    return listing.files[name] or 0


# What the Hub answers, in our words


@contextmanager
def hub_errors(address: HubAddress, asked: str) -> Iterator[None]:
    """Raise what the Hub or its library raises inside as ``HubError``, and anything else as it is."""
    try:
        yield
    except FuseloraError:
        raise
    except Exception as error:
        if not isinstance(error, FOREIGN_KINDS) and type(error).__module__.split(".")[0] not in FOREIGN:
            raise
        raise _hub_error(error, address, asked) from error


def _hub_error(error: Exception, address: HubAddress, asked: str) -> HubError:
    from huggingface_hub.errors import LocalEntryNotFoundError

    # "Not in the cache" is what the library makes of a Hub that did not answer; its cause says more.
    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    message, hint = _answer(error, address)
    named = asked.startswith(HUB) or asked in SHORT_NAMES
    local = "" if named else "there is no such file or folder here, and "
    return HubError(f"{asked}: {local}{message}", hint=hint, repo=address.repo, revision=address.revision)


def _answer(error: Exception, address: HubAddress) -> tuple[str, str]:
    """What went wrong and what to do about it."""
    from huggingface_hub import errors as hub

    repo, said = address.repo, " ".join(str(error).split())[:300] or type(error).__name__
    if isinstance(error, hub.GatedRepoError):
        hint = "Accept its licence on its page on the Hub, then log in with 'hf auth login'."
        return f"{repo} is gated, and you have no access to it", hint
    if isinstance(error, hub.RepositoryNotFoundError):
        return f"the Hub has no repository {repo} that you may see", LOGIN
    if isinstance(error, hub.RevisionNotFoundError):
        hint = "Name a branch, a tag or a commit."
        return f"{repo} has no revision {address.revision or 'main'!r}", hint
    if isinstance(error, hub.OfflineModeIsEnabled):
        hint = "Unset HF_HUB_OFFLINE, or fetch it first with 'hf download'."
        return f"{repo} is not in the Hub's cache, and HF_HUB_OFFLINE forbids asking the Hub", hint
    if _out_of_reach(error):
        return f"the Hub cannot be reached: {said}", "Check the path, or the network and HF_ENDPOINT."
    if isinstance(error, OSError) and error.errno is not None:
        hint = "HF_HOME says where the Hub's cache is, and TMPDIR where a plan keeps headers."
        return f"what the Hub sends cannot be written: {error.strerror}", hint
    if isinstance(error, ValueError):
        hint = "Check HF_ENDPOINT and the network; a login page may stand in between."
        return f"what answers is not the Hub: {said}", hint
    return f"the Hub refuses {repo}: {said}", LOGIN


def _out_of_reach(error: Exception) -> bool:
    """Whether the Hub never answered, or only that it cannot answer now."""
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in (408, 429) or error.response.status_code >= 500
    transport = HfHubHTTPError.__bases__[0]  # HTTPError of httpx in huggingface_hub 1.x, of httpx2 in 2.x
    return isinstance(error, (transport, ConnectionError, TimeoutError))
