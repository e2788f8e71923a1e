"""From texts to files: local ones without a network, and the Hub's through a server on this machine.

What touches the Hub runs in a process of its own, as huggingface_hub reads its settings when imported.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from fuselora.errors import FormatError, InputError, UsageError
from fuselora.header import TensorInfo, encode_header, read_header
from fuselora.hub import hub_errors
from fuselora.resolve import LoraLocation, resolve_base, resolve_lora, resolve_skeleton
from fuselora.shards import open_files
from fuselora.specs import HubAddress, LoraSpec, parse_lora
from tests.hub_server import HubServer
from tests.inputs import shard_name, sharded, tensor

BIG_BYTES = 24 << 20
REPO = "Wan-AI/tiny"


def write_safetensors(path: Path, n_bytes: int = 8, *, metadata: dict[str, str] | None = None) -> None:
    """One tensor of ``n_bytes`` zeros, sparse on disk."""
    header = encode_header([TensorInfo("w", "U8", (n_bytes,), 0, n_bytes)], metadata or {})
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as stream:
        stream.write(header)
        stream.truncate(len(header) + n_bytes)


def write_files(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f'{{"is": "{name}"}}')


# Local files: no network, whatever happens


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    tried = []

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        tried.append(args)
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    yield
    assert not tried


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_network: None) -> Path:
    """The current folder, empty, without a network."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_B52_a_local_base_needs_no_network(here: Path) -> None:  # noqa: N802
    (here / "org" / "name").mkdir(parents=True)
    for text in ("org/name", "./org/name", str(here / "org" / "name"), "org/../org/name/"):
        found = resolve_base(text)
        assert found.path.samefile(here / "org" / "name")
        assert (found.source, found.revision) == ("name", None)


def test_B52_a_missing_path_like_a_hub_id_fails_at_once(here: Path) -> None:  # noqa: N802
    (here / "org").mkdir()
    with pytest.raises(InputError, match=r"^org/name: no such file or folder$"):
        resolve_base("org/name")


@pytest.mark.parametrize(
    "text",
    [
        "./org/name",
        "/org/name",
        "~/no-such/x",
        "a/b/c",
        "org/x.safetensors",
        "no-such",
        "org/",
        "../x",
        "ö/x",
    ],
)
def test_B52_what_can_only_be_a_path_never_reaches_the_network(text: str, here: Path) -> None:  # noqa: N802
    with pytest.raises(InputError, match=f"^{re.escape(text)}: no such file or folder$"):
        resolve_base(text)


def test_B52_nothing_is_imported_for_local_files(tmp_path: Path) -> None:  # noqa: N802
    write_safetensors(tmp_path / "x.safetensors")
    code = (
        "import sys; from fuselora.resolve import resolve_base, resolve_lora\n"
        "from fuselora.specs import LoraSpec\n"
        "resolve_base(sys.argv[1]); resolve_lora(LoraSpec(sys.argv[1]))\n"
        "print(*{name.split('.')[0] for name in sys.modules})"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "x.safetensors")],
        check=True,
        capture_output=True,
        text=True,
    )
    assert not set(run.stdout.split()) & {"huggingface_hub", "torch", "httpx", "httpx2", "requests"}


def test_a_local_folder_beats_a_short_name(here: Path) -> None:
    (here / "Wan2.2").mkdir()
    assert resolve_base("Wan2.2").source == "Wan2.2"


def test_a_base_is_named_by_itself_alone(here: Path) -> None:
    write_safetensors(here / "deep" / "base.safetensors")
    assert resolve_base(str(here / "deep" / "base.safetensors")).source == "base.safetensors"
    assert resolve_base(".").source == here.name
    assert resolve_base("deep/..").source == here.name


def test_a_snapshot_in_a_hub_cache_keeps_its_repository(here: Path) -> None:
    folder = here / "models--Wan-AI--tiny.x" / "snapshots" / ("ab" * 20)
    folder.mkdir(parents=True)
    found = resolve_base(str(folder))
    assert (found.path, found.source, found.revision) == (folder, "Wan-AI/tiny.x", "ab" * 20)


def test_a_revision_of_a_local_base_is_refused(here: Path) -> None:
    with pytest.raises(UsageError, match="'v1'"):
        resolve_base(".", revision="v1")


@pytest.mark.parametrize("text", ["./wan-2.2/transformer", "wan-2.1", "wan-2.2/transformer/x.safetensors"])
def test_close_names_are_suggested(text: str, here: Path) -> None:
    write_files(here / "wan-2.2-base" / "transformer", "config.json")
    write_files(here / "unlike", "config.json")
    with pytest.raises(InputError) as caught:
        resolve_base(text)
    assert "Did you mean wan-2.2-base?" in str(caught.value.hint)
    assert "unlike" not in str(caught.value.hint)


def test_short_names_are_suggested_for_a_bare_word(here: Path) -> None:
    with pytest.raises(InputError) as caught:
        resolve_base("Wan2.3")
    assert "Wan2.2-I2V" in str(caught.value.hint)


def test_a_dangling_link_and_a_name_too_long_say_so(here: Path) -> None:
    (here / "link.safetensors").symlink_to("gone")
    with pytest.raises(InputError, match="a link to something that does not exist"):
        resolve_base("link.safetensors")
    with pytest.raises(InputError, match="File name too long"):
        resolve_lora(LoraSpec("x" * 400))


def test_a_pipe_is_no_input(here: Path) -> None:
    os.mkfifo(here / "pipe")
    with pytest.raises(InputError, match="neither a file nor a folder"):
        resolve_base("pipe")


def test_an_empty_text_names_nothing(here: Path) -> None:
    with pytest.raises(UsageError):
        resolve_base("")


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt", "x.bin", "x.pkl"])
def test_a_lora_file_is_only_located(name: str, here: Path) -> None:
    (here / name).touch()
    (here / "adapter_config.json").touch()
    spec = LoraSpec(name, 0.5, "all")
    assert resolve_lora(spec) == LoraLocation(spec, Path(name), name, None)


def test_a_folder_called_as_the_owner_says_how_the_hub_is_meant(here: Path) -> None:
    (here / "owner").mkdir()
    with pytest.raises(InputError) as caught:
        resolve_base("owner/name")
    wanted = "There is a folder owner: the repository on the Hub is written hf://owner/name."
    assert caught.value.hint == wanted


def test_a_home_folder_is_expanded(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(here))
    (here / "x.safetensors").touch()
    assert resolve_lora(LoraSpec("~/x.safetensors")).path == here / "x.safetensors"


@pytest.mark.parametrize("given", ["adapter", "adapter/adapter_model.safetensors.index.json"])
def test_the_index_of_an_adapter_folder_brings_its_configuration(given: str, here: Path) -> None:
    name = "adapter_model.safetensors.index.json"
    write_files(here / "adapter", name, shard_name(1, 2), shard_name(2, 2), "adapter_config.json")
    found = resolve_lora(LoraSpec(given))
    assert (found.path, found.name) == (Path("adapter") / name, name)
    assert found.config == Path("adapter/adapter_config.json")


@pytest.mark.parametrize("given", ["adapter", "adapter/", "adapter/adapter_model.safetensors"])
def test_an_adapter_folder_brings_its_configuration(given: str, here: Path) -> None:
    write_files(here / "adapter", "adapter_model.safetensors", "adapter_config.json", "x.safetensors")
    found = resolve_lora(LoraSpec(given))
    assert found.path == Path("adapter/adapter_model.safetensors")
    assert (found.name, found.config) == ("adapter_model.safetensors", Path("adapter/adapter_config.json"))


def test_an_adapter_folder_without_a_configuration(here: Path) -> None:
    write_files(here / "adapter", "pytorch_lora_weights.safetensors", "x.safetensors")
    found = resolve_lora(LoraSpec("adapter"))
    assert (found.name, found.config) == ("pytorch_lora_weights.safetensors", None)


def test_a_folder_that_cannot_be_read(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> NoReturn:
        raise PermissionError(13, "Permission denied")

    (here / "adapter").mkdir()
    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(InputError, match="adapter: cannot be read: Permission denied"):
        resolve_lora(LoraSpec("adapter"))


@pytest.mark.parametrize("suffix", ["bin", "pt", "pth", "ckpt", "pkl"])
def test_a_pickled_adapter_folder_is_refused(suffix: str, here: Path) -> None:
    write_files(here / "adapter", f"adapter_model.{suffix}", "adapter_config.json")
    with pytest.raises(FormatError, match=rf"adapter: holds adapter_model\.{suffix}"):
        resolve_lora(LoraSpec("adapter"))


def test_B53_a_comma_in_a_missing_name_is_explained(here: Path) -> None:  # noqa: N802
    (here / "a").touch()
    first, second = parse_lora("a,b.safetensors")
    assert resolve_lora(first).path == Path("a")
    with pytest.raises(InputError, match=r"^b\.safetensors: no such file") as caught:
        resolve_lora(second)
    assert "comma separates one file per expert" in str(caught.value.hint)
    assert "repeat --lora" in str(caught.value.hint)


def test_B53_the_name_for_the_marker_is_valid_utf8(here: Path) -> None:  # noqa: N802
    name = os.fsdecode(b"caf\xe9 \xc3\xbc.safetensors")
    (here / name).touch()
    found = resolve_lora(LoraSpec(name))
    assert found.path == Path(name)
    assert found.name == "caf\ufffd ü.safetensors"
    (here / os.fsdecode(b"caf\xe9")).mkdir()
    assert resolve_base(os.fsdecode(b"caf\xe9")).source == "caf\ufffd"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("a:0.8x", "A strength is a plain number"),
        ("hgih=a", "must be one of transformer, high"),
        ("owner/name/lora.safetensors", "hf://owner/name"),
        ("aa.safetensors", "Did you mean a.safetensors?"),
    ],
)
def test_a_missing_lora_says_what_may_have_been_meant(text: str, hint: str, here: Path) -> None:
    (here / "a.safetensors").touch()
    with pytest.raises(InputError, match="no such file or folder") as caught:
        resolve_lora(*parse_lora(text))
    assert hint in str(caught.value.hint)


# The Hub


DRIVER = """
import json, os, sys
from pathlib import Path
from fuselora.errors import FuseloraError
from fuselora.header import read_header
from fuselora.resolve import resolve_base, resolve_lora, resolve_skeleton
from fuselora.specs import parse_lora

text, options = sys.argv[1], json.loads(sys.argv[2])
try:
    if options.pop("lora", False):
        found = resolve_lora(*parse_lora(text), **options)
        answer = {"path": str(found.path), "name": found.name, "config": found.config and str(found.config)}
    else:
        resolve = resolve_skeleton if options.pop("skeleton", False) else resolve_base
        found = resolve(text, **options)
        answer = {"path": str(found.path), "source": found.source, "revision": found.revision}
    files = [path for path in found.path.rglob("*") if path.is_file()] or [found.path]
    root = found.path if found.path.is_dir() else found.path.parent
    answer["files"] = {path.relative_to(root).as_posix(): path.stat().st_size for path in files}
    answer["blocks"] = sum(path.stat().st_blocks * 512 for path in files)
    answer["headers"] = {
        path.relative_to(root).as_posix(): read_header(path).sha256
        for path in files
        if path.suffix == ".safetensors"
    }
except FuseloraError as error:
    answer = {"error": type(error).__name__, "message": error.message, "hint": error.hint or ""}
print(json.dumps(answer))
"""


class Client:
    """A user's shell: an empty folder, a Hub cache, and a Hub."""

    def __init__(self, folder: Path, hub: HubServer) -> None:
        self.hub, self.cache, self.here, self.tmp = hub, folder / "cache", folder / "here", folder / "tmp"
        for made in (self.here, self.tmp):
            made.mkdir()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        self.env = {
            **kept,
            "HF_HOME": str(self.cache),
            "HF_ENDPOINT": hub.url,
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "TMPDIR": str(self.tmp),
            "PYTHONPATH": str(Path(__file__).parents[1]),
            "NO_PROXY": "*",
        }

    def __call__(self, text: str, env: dict[str, str] | None = None, **options: object) -> dict[str, Any]:
        run = subprocess.run(
            [sys.executable, "-c", DRIVER, text, json.dumps(options)],
            cwd=self.here,
            env={**self.env, **(env or {})},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert run.returncode == 0, run.stderr
        answer: dict[str, Any] = json.loads(run.stdout)
        return answer

    def refused(self, text: str, env: dict[str, str] | None = None, **options: object) -> tuple[str, str]:
        """The message and the hint of a ``HubError``."""
        answer = self(text, env, **options)
        assert answer.get("error") == "HubError", answer
        return answer["message"], answer["hint"]


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


@pytest.fixture
def client(tmp_path: Path, hub: HubServer) -> Client:
    return Client(tmp_path, hub)


SMALL = ("model_index.json", "README.md", "transformer/config.json", "vae/config.json")
WEIGHTS = (
    "transformer/diffusion_pytorch_model-00001-of-00002.safetensors",
    "transformer/diffusion_pytorch_model-00002-of-00002.safetensors",
    "vae/diffusion_pytorch_model.safetensors",
)
UNNEEDED = (
    "transformer/diffusion_pytorch_model.bin",
    "transformer/model.onnx",
    "transformer/diffusion_pytorch_model.fp16.safetensors",
    "whole.safetensors",
)


@pytest.fixture
def pipeline(tmp_path: Path, hub: HubServer) -> Path:
    """A small pipeline as ``REPO`` on the Hub, with files that a base does not need."""
    folder = tmp_path / "served"
    write_files(folder, *SMALL, *UNNEEDED)
    components = {"vae": ["diffusers", "Vae"], "transformer": ["diffusers", "T"], "absent": [None, None]}
    (folder / "model_index.json").write_text(json.dumps(components))
    for name in (*WEIGHTS, UNNEEDED[2], UNNEEDED[3]):
        write_safetensors(folder / name, metadata={"is": name})
    hub.add(REPO, folder, tags=("v1",))
    return folder


def test_only_needed_files_are_fetched(client: Client, hub: HubServer, pipeline: Path) -> None:
    answer = client(REPO)
    assert answer["source"] == REPO
    assert answer["revision"] == hub.repos[REPO].commit
    assert set(answer["files"]) == set(hub.fetched(REPO)) == {*SMALL, *WEIGHTS}
    assert answer["headers"] == {name: read_header(pipeline / name).sha256 for name in WEIGHTS}


def test_a_second_call_works_offline_from_the_cache(client: Client, hub: HubServer, pipeline: Path) -> None:
    first = client(REPO)
    hub.seen.clear()
    assert client(REPO, {"HF_HUB_OFFLINE": "1"}) == first
    assert hub.seen == []
    hub.status = 503
    assert client(REPO) == first
    assert client(REPO, {"HF_ENDPOINT": "http://127.0.0.1:9"}, headers_only=True) == first


def test_a_variant_is_fetched_where_it_exists(client: Client, hub: HubServer, pipeline: Path) -> None:
    answer = client(REPO, variant="fp16")
    assert set(answer["headers"]) == {UNNEEDED[2], "vae/diffusion_pytorch_model.safetensors"}


def test_a_missing_variant_is_refused_before_anything_is_fetched(
    client: Client, hub: HubServer, pipeline: Path
) -> None:
    message, hint = client.refused(REPO, variant="fp8")
    assert "no fp8 weights" in message
    assert "fp16" in hint
    assert hub.fetched(REPO) == {}


def test_weights_in_a_variant_only_say_which(client: Client, hub: HubServer, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "served" / "diffusion_pytorch_model.fp16.safetensors")
    hub.add(REPO, tmp_path / "served")
    message, hint = client.refused(REPO)
    assert "holds no plain safetensors" in message
    assert "--variant: fp16" in hint


def test_a_repository_without_safetensors_is_refused(client: Client, hub: HubServer, tmp_path: Path) -> None:
    write_files(tmp_path / "served", "transformer/diffusion_pytorch_model.bin", "README.md")
    hub.add(REPO, tmp_path / "served")
    message, hint = client.refused(REPO)
    assert "holds no plain safetensors" in message
    assert "Convert" in hint
    assert hub.fetched(REPO) == {}


@pytest.mark.parametrize("text", [REPO, f"hf://{REPO}", f"hf://{REPO}@v1"])
def test_a_revision_is_asked_for_and_its_commit_recorded(
    text: str, client: Client, hub: HubServer, pipeline: Path
) -> None:
    answer = client(text, revision="v1")
    assert answer["revision"] == hub.repos[REPO].commit
    assert any(request.url.startswith(f"/api/models/{REPO}/revision/v1") for request in hub.seen)


def test_two_different_revisions_are_refused(client: Client) -> None:
    assert client(f"hf://{REPO}@v1", revision="v2")["error"] == "UsageError"


def test_a_folder_or_file_of_a_repository(client: Client, hub: HubServer, pipeline: Path) -> None:
    folder = client(f"hf://{REPO}/transformer")
    assert (folder["source"], Path(folder["path"]).name) == (f"{REPO}/transformer", "transformer")
    assert set(folder["headers"]) == {Path(name).name for name in WEIGHTS[:2]}
    file = client(f"hf://{REPO}/whole.safetensors@v1")
    assert set(file["headers"]) == {"whole.safetensors"}
    assert set(hub.fetched(REPO)) == {*WEIGHTS[:2], "transformer/config.json", "whole.safetensors"}


def test_a_skeleton_is_fetched_without_its_transformers_weights(
    client: Client, hub: HubServer, pipeline: Path
) -> None:
    first = client(f"hf://{REPO}@v1", skeleton=True)
    assert (first["source"], first["revision"]) == (REPO, hub.repos[REPO].commit)
    assert set(first["files"]) == set(hub.fetched(REPO)) == {*SMALL, WEIGHTS[2]}
    assert client(f"hf://{REPO}@v1", {"HF_HUB_OFFLINE": "1"}, skeleton=True) == first
    message, _ = client.refused("Wan2.2-I2V", skeleton=True)
    assert "no repository Wan-AI/Wan2.2-I2V-A14B-Diffusers" in message


def test_of_a_native_repository_only_the_models_are_fetched(
    client: Client, hub: HubServer, tmp_path: Path
) -> None:
    models = ("high_noise_model/model.safetensors", "low_noise_model/model.safetensors")
    for name in models:
        write_safetensors(tmp_path / "native" / name)
    write_files(tmp_path / "native", "high_noise_model/config.json", "t5.pth", "google/spiece.model")
    hub.add("Wan-AI/native", tmp_path / "native")
    wanted = {*models, "high_noise_model/config.json"}
    assert set(client("Wan-AI/native", model_only=True)["files"]) == wanted
    assert set(hub.fetched("Wan-AI/native")) == wanted
    assert set(client("Wan-AI/native", model_only=True, headers_only=True)["files"]) == wanted


def test_a_local_skeleton_needs_no_network(here: Path) -> None:
    (here / "org" / "name").mkdir(parents=True)
    found = resolve_skeleton("org/name")
    assert (found.path, found.source, found.revision) == (Path("org/name"), "name", None)
    with pytest.raises(InputError, match="no such file or folder"):
        resolve_skeleton("./org/nome")


def test_a_short_name_is_a_repository(client: Client) -> None:
    message, _ = client.refused("Wan2.2")
    assert message == "Wan2.2: the Hub has no repository Wan-AI/Wan2.2-T2V-A14B-Diffusers that you may see"


def test_a_missing_repository(client: Client) -> None:
    message, hint = client.refused("no/such")
    assert message.startswith("no/such: there is no such file or folder here, and the Hub has no repository")
    assert "hf auth login" in hint


def test_a_gated_repository(client: Client, hub: HubServer, pipeline: Path) -> None:
    hub.add(REPO, pipeline, gated=True)
    for headers_only in (False, True):
        message, hint = client.refused(f"hf://{REPO}", headers_only=headers_only)
        assert f"{REPO} is gated" in message
        assert "licence" in hint
        assert "hf auth login" in hint


def test_a_missing_revision(client: Client, pipeline: Path) -> None:
    message, _ = client.refused(REPO, revision="v9")
    assert f"{REPO} has no revision 'v9'" in message


def test_a_missing_file_suggests_a_close_one(client: Client, pipeline: Path) -> None:
    message, hint = client.refused(f"hf://{REPO}/whole2.safetensors", lora=True)
    assert f"{REPO} has no 'whole2.safetensors'" in message
    assert "Did you mean whole.safetensors?" in hint


def test_offline_and_not_in_the_cache(client: Client, hub: HubServer, pipeline: Path) -> None:
    message, hint = client.refused(REPO, {"HF_HUB_OFFLINE": "1"})
    assert "not in the Hub's cache, and HF_HUB_OFFLINE" in message
    assert "hf download" in hint
    assert hub.seen == []


def test_offline_and_only_partly_in_the_cache(client: Client, pipeline: Path) -> None:
    client(REPO)
    (snapshot,) = (client.cache / "hub").glob("models--*/snapshots/*")
    for name in ("README.md", "vae/config.json", *WEIGHTS[2:]):
        (snapshot / name).unlink()
    message, _ = client.refused(REPO, {"HF_HUB_OFFLINE": "1"})
    assert "only partly in the Hub's cache; missing are vae" in message
    assert "README" not in message


def test_offline_with_a_cache_that_does_not_know_the_whole_tree(client: Client, pipeline: Path) -> None:
    client(REPO)
    (cached,) = (client.cache / "hub").glob("models--*")
    shutil.rmtree(cached / "trees", ignore_errors=True)
    shutil.rmtree(next(cached.glob("snapshots/*/vae")))
    message, _ = client.refused(REPO, {"HF_HUB_OFFLINE": "1"})
    assert message.endswith("only partly in the Hub's cache; missing are vae")


def test_B52_without_a_network_a_hub_id_fails_at_once(client: Client) -> None:  # noqa: N802
    message, hint = client.refused("org/name", {"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert message.startswith("org/name: there is no such file or folder here, and the Hub cannot be reached")
    assert "Check the path" in hint
    message, _ = client.refused(
        "hf://org/name/x.safetensors", {"HF_ENDPOINT": "http://127.0.0.1:9"}, lora=True
    )
    assert message.startswith("hf://org/name/x.safetensors: the Hub cannot be reached")


@pytest.mark.parametrize("status", [503, 429])
def test_a_hub_that_is_down_is_asked_once(status: int, client: Client, hub: HubServer) -> None:
    hub.status = status
    message, _ = client.refused(REPO)
    assert "the Hub cannot be reached" in message
    assert len(hub.seen) == 1


def test_a_cache_that_cannot_be_written(client: Client, pipeline: Path) -> None:
    client.cache.write_text("in the way")
    message, hint = client.refused(REPO)
    assert "what the Hub sends cannot be written: Not a directory" in message
    assert "HF_HOME" in hint


def test_a_page_that_is_not_the_hub(client: Client, hub: HubServer) -> None:
    hub.page = b"<html>Please log in</html>"
    message, hint = client.refused(REPO)
    assert "what answers is not the Hub" in message
    assert "login page" in hint


def test_an_endpoint_that_is_no_address(client: Client) -> None:
    message, _ = client.refused(f"hf://{REPO}", {"HF_ENDPOINT": "nonsense"})
    assert "the Hub cannot be reached" in message


def test_our_own_mistakes_are_not_blamed_on_the_hub() -> None:
    with pytest.raises(TypeError), hub_errors(HubAddress(REPO), REPO):
        raise TypeError


def test_a_lora_file(client: Client, hub: HubServer, pipeline: Path) -> None:
    answer = client(f"high=hf://{REPO}/whole.safetensors@v1:0.5", lora=True)
    assert (answer["name"], answer["config"]) == ("whole.safetensors", None)
    assert set(hub.fetched(REPO)) == {"whole.safetensors"}
    hub.seen.clear()
    assert client(f"hf://{REPO}@v1/whole.safetensors", {"HF_HUB_OFFLINE": "1"}, lora=True) == answer


@pytest.mark.parametrize("place", ["", "/sub", "/sub/adapter_model.safetensors"])
def test_an_adapter_folder(place: str, client: Client, hub: HubServer, tmp_path: Path) -> None:
    for folder in (tmp_path / "served", tmp_path / "served" / "sub"):
        write_files(folder, "adapter_config.json", "README.md", "adapter_model.bin")
        write_safetensors(folder / "adapter_model.safetensors")
    hub.add(REPO, tmp_path / "served")
    answer = client(f"hf://{REPO}{place}", lora=True)
    prefix = "sub/" if place else ""
    assert answer["config"] == str(Path(answer["path"]).with_name("adapter_config.json"))
    assert set(hub.fetched(REPO)) == {f"{prefix}adapter_config.json", f"{prefix}adapter_model.safetensors"}


@pytest.mark.parametrize("place", ["", "/sub", "/sub/adapter_model.safetensors.index.json"])
def test_a_lora_in_several_files(place: str, client: Client, hub: HubServer, tmp_path: Path) -> None:
    for folder in (tmp_path / "served", tmp_path / "served" / "sub"):
        write_files(folder, "adapter_config.json", "other.safetensors")
        sharded(folder, [tensor("x", 2)], [tensor("y", 3)])
    hub.add(REPO, tmp_path / "served")
    answer = client(f"hf://{REPO}{place}", lora=True)
    prefix = "sub/" if place else ""
    assert answer["name"] == "adapter_model.safetensors.index.json"
    assert answer["config"] == str(Path(answer["path"]).with_name("adapter_config.json"))
    wanted = ["adapter_config.json", answer["name"], shard_name(1, 2), shard_name(2, 2)]
    assert set(hub.fetched(REPO)) == {prefix + name for name in wanted}
    assert [header.path.parent for header in open_files(Path(answer["path"]))] == [
        Path(answer["path"]).parent
    ] * 2
    assert client(f"hf://{REPO}{place}", {"HF_HUB_OFFLINE": "1"}, lora=True) == answer


def test_an_index_that_names_a_file_the_repository_lacks(
    client: Client, hub: HubServer, tmp_path: Path
) -> None:
    index = sharded(tmp_path / "served", [tensor("x", 2)], [tensor("y", 3)])
    (index.parent / shard_name(2, 2)).unlink()
    hub.add(REPO, index.parent)
    message, _ = client.refused(f"hf://{REPO}", lora=True)
    assert f"names {shard_name(2, 2)}, which {REPO} does not have" in message
    assert shard_name(1, 2) not in hub.fetched(REPO)


@pytest.mark.parametrize("outside", ["../../../secret", "/etc/passwd", "sub/x.safetensors"])
def test_an_index_that_names_a_file_outside(
    outside: str, client: Client, hub: HubServer, tmp_path: Path
) -> None:
    served = tmp_path / "served"
    index = sharded(served, [tensor("x", 2)])
    index.write_text(json.dumps({"weight_map": {"x": outside}}))
    hub.add(REPO, served)
    answer = client(f"hf://{REPO}", lora=True)
    assert answer["error"] == "CheckpointError"
    assert "no file name in this folder" in answer["message"]
    assert set(hub.fetched(REPO)) == {index.name}


def test_a_repository_of_many_loras_is_not_chosen_from(client: Client, pipeline: Path) -> None:
    (pipeline / "whole.safetensors").unlink()
    client.hub.add(REPO, pipeline)
    message, hint = client.refused(f"hf://{REPO}", lora=True)
    assert "is no adapter folder" in message
    assert WEIGHTS[0] in hint


def test_a_pickled_lora_is_refused_before_it_is_fetched(
    client: Client, hub: HubServer, pipeline: Path
) -> None:
    answer = client(f"hf://{REPO}/{UNNEEDED[0]}", lora=True)
    assert answer["error"] == "FormatError"
    assert "Convert it to safetensors" in answer["hint"]
    assert hub.fetched(REPO) == {}


# Headers only


@pytest.fixture
def big(pipeline: Path, hub: HubServer) -> Path:
    """The pipeline with one big shard and one big file that is not safetensors."""
    write_safetensors(pipeline / WEIGHTS[0], BIG_BYTES, metadata={"big": "yes"})
    with (pipeline / "t5.pth").open("wb") as stream:
        stream.truncate(40 << 20)
    hub.add(REPO, pipeline)
    return pipeline


@pytest.mark.parametrize("ignore_ranges", [False, True])
def test_headers_only_fetches_no_data(ignore_ranges: bool, client: Client, hub: HubServer, big: Path) -> None:
    hub.ignore_ranges = ignore_ranges
    answer = client(REPO, headers_only=True)
    assert set(answer["files"]) == {*SMALL, *WEIGHTS, "t5.pth"}
    assert answer["files"] == {name: (big / name).stat().st_size for name in answer["files"]}
    assert answer["headers"] == {name: read_header(big / name).sha256 for name in WEIGHTS}
    assert answer["blocks"] < 1 << 20
    assert (answer["source"], answer["revision"]) == (REPO, hub.repos[REPO].commit)
    assert "t5.pth" not in hub.fetched(REPO)
    if not ignore_ranges:
        assert hub.fetched(REPO)[WEIGHTS[0]] < BIG_BYTES // 100
    assert str(client.cache) not in answer["path"]
    assert list(client.tmp.iterdir()) == []  # gone with the process


def test_a_header_longer_than_the_first_read(client: Client, hub: HubServer, big: Path) -> None:
    write_safetensors(big / WEIGHTS[1], BIG_BYTES, metadata={"long": "x" * 100_000})
    answer = client(f"hf://{REPO}/transformer", headers_only=True)
    assert answer["headers"][Path(WEIGHTS[1]).name] == read_header(big / WEIGHTS[1]).sha256
    assert hub.fetched(REPO)[WEIGHTS[1]] < BIG_BYTES // 100


def test_headers_only_uses_what_the_cache_holds(client: Client, hub: HubServer, big: Path) -> None:
    client(f"hf://{REPO}/transformer")
    hub.seen.clear()
    assert str(client.cache) in client(f"hf://{REPO}/transformer", headers_only=True)["path"]
    assert hub.fetched(REPO) == {}
    answer = client(REPO, headers_only=True)
    assert answer["headers"] == {name: read_header(big / name).sha256 for name in WEIGHTS}
    assert set(hub.fetched(REPO)) == {"model_index.json", "README.md", "vae/config.json", WEIGHTS[2]}


def test_headers_only_takes_a_broken_file_as_it_is(client: Client, hub: HubServer, big: Path) -> None:
    (big / WEIGHTS[0]).write_bytes(b"\xff" * 100)
    (big / WEIGHTS[1]).write_bytes(b"")
    for name in WEIGHTS[:2]:
        answer = client(f"hf://{REPO}/{name}", headers_only=True)
        assert answer["error"] == "FormatError"
        assert Path(name).name in answer["message"]
