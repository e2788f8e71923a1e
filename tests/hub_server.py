"""A Hugging Face Hub small enough for tests: it serves repositories and remembers what was asked.

It speaks what huggingface_hub 2.x needs for reading: model info with siblings, the tree, and HEAD and GET
of files with their commit, ETag and ranges; and it refuses as the Hub does.
"""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import TracebackType

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Repo:
    """One repository: ``files`` are served from disk, so a big one can be a sparse file."""

    repo_id: str
    files: Mapping[str, Path]
    gated: bool = False
    revisions: tuple[str, ...] = ("main",)

    @property
    def commit(self) -> str:
        branch = "" if "main" in self.revisions else self.revisions[0]
        return hashlib.sha1(f"{self.repo_id}{branch}".encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Seen:
    """One request and how much of a file was sent for it; ``path`` is the file's, or None."""

    method: str
    url: str
    repo_id: str | None
    path: str | None
    status: int
    n_bytes: int


@dataclass(slots=True)
class HubServer:
    """Use as a context manager; ``url`` is what ``HF_ENDPOINT`` has to be."""

    repos: dict[str, Repo] = field(default_factory=dict)
    branches: list[Repo] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    ignore_ranges: bool = False
    status: int = 200  # anything else is the answer to every request
    page: bytes = b""  # if set, the answer to every request, as from a network that wants a login
    _server: ThreadingHTTPServer | None = None

    def __enter__(self) -> HubServer:
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def add(self, repo_id: str, folder: Path, *, gated: bool = False, tags: tuple[str, ...] = ()) -> Repo:
        """Serve the files under ``folder`` as ``repo_id``, under "main", its commit and ``tags``."""
        self.repos[repo_id] = Repo(repo_id, _files(folder), gated, ("main", *tags))
        return self.repos[repo_id]

    def add_branch(self, repo_id: str, name: str, folder: Path) -> None:
        """Serve other files as the branch ``name`` of a repository."""
        self.branches.append(Repo(repo_id, _files(folder), revisions=(name,)))

    def fetched(self, repo_id: str) -> dict[str, int]:
        """The files of a repository of which bytes were sent, and how many."""
        sent: dict[str, int] = {}
        for request in self.seen:
            if request.repo_id == repo_id and request.path and request.method == "GET" and request.n_bytes:
                sent[request.path] = sent.get(request.path, 0) + request.n_bytes
        return sent


def _files(folder: Path) -> dict[str, Path]:
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path for path in found}


class RefusalError(Exception):
    """An answer that is an error; ``code`` is the Hub's name for it."""

    def __init__(self, status: int, code: str, repo_id: str | None = None, path: str | None = None) -> None:
        super().__init__(status, code)
        self.headers = {"X-Error-Code": code, "X-Error-Message": code}
        self.status, self.repo_id, self.path = status, repo_id, path


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing on stderr."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        try:
            if self.hub.status != 200:
                raise RefusalError(self.hub.status, "")
            if self.hub.page:
                self._send(200, {"Content-Type": "text/html"}, self.hub.page, None, None)
            elif parts[:2] == ["api", "models"]:
                self._api(parts[2:])
            elif parts[0] == "cdn":
                self._file(parts[1:], cdn=True)
            else:
                self._file(parts, cdn=False)
        except RefusalError as refusal:
            self._send(refusal.status, refusal.headers, b"", refusal.repo_id, refusal.path)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the client had enough

    def _repo(self, parts: list[str], revision: str | None) -> Repo:
        repo_id = "/".join(parts[:2])
        main = self.hub.repos.get(repo_id)
        if main is None:
            raise RefusalError(404, "RepoNotFound", repo_id)
        branches = (branch for branch in self.hub.branches if branch.repo_id == repo_id)
        for repo in (main, *branches):
            if revision is None or revision in (*repo.revisions, repo.commit):
                return repo
        raise RefusalError(404, "RevisionNotFound", repo_id)

    def _api(self, parts: list[str]) -> None:
        what, revision = (parts[2], parts[3]) if len(parts) > 3 else ("revision", None)
        repo = self._repo(parts, revision)
        document = _tree(repo) if what == "tree" else _info(repo)
        body = json.dumps(document).encode()
        self._send(200, {"Content-Type": "application/json"}, body, repo.repo_id, None)

    def _file(self, parts: list[str], cdn: bool) -> None:
        """A file; large ones are sent from elsewhere, as the Hub does."""
        if len(parts) < 5 or parts[2] != "resolve":
            raise RefusalError(404, "EntryNotFound")
        repo, name = self._repo(parts, parts[3]), "/".join(parts[4:])
        if name not in repo.files:
            raise RefusalError(404, "EntryNotFound", repo.repo_id, name)
        if repo.gated:
            raise RefusalError(401, "GatedRepo", repo.repo_id, name)
        if name.endswith(".safetensors") and not cdn:
            self._send(302, {"Location": quote(f"/cdn{self.path}", safe="/%")}, b"", repo.repo_id, name)
        else:
            self._send_file(repo, name)

    def _send_file(self, repo: Repo, name: str) -> None:
        path = repo.files[name]
        size = path.stat().st_size
        start, end, ranged = 0, size, self.headers.get("Range")
        if ranged and not self.hub.ignore_ranges:
            first, _, last = ranged.removeprefix("bytes=").partition("-")
            start, end = int(first), min(size, int(last) + 1) if last else size
        headers = {
            "X-Repo-Commit": repo.commit,
            "ETag": f'"{hashlib.sha1(f"{repo.commit}/{name}".encode()).hexdigest()}"',
            "Accept-Ranges": "bytes",
        }
        if (start, end) != (0, size):
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        with path.open("rb") as stream:
            stream.seek(start)
            body = stream.read(end - start) if self.command == "GET" else b""
        status = 206 if "Content-Range" in headers else 200
        self._send(status, headers, body, repo.repo_id, name, n_bytes=end - start)

    def _send(
        self,
        status: int,
        headers: Mapping[str, str],
        body: bytes,
        repo_id: str | None,
        path: str | None,
        n_bytes: int | None = None,
    ) -> None:
        sent = 0
        try:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body) if n_bytes is None else n_bytes))
            self.end_headers()
            while self.command == "GET" and sent < len(body):
                self.wfile.write(body[sent : sent + CHUNK_BYTES])
                sent = min(len(body), sent + CHUNK_BYTES)
        finally:
            self.hub.seen.append(Seen(self.command, self.path, repo_id, path, status, sent))


def _info(repo: Repo) -> dict[str, object]:
    siblings = [{"rfilename": name, "size": path.stat().st_size} for name, path in repo.files.items()]
    return {
        "id": repo.repo_id,
        "sha": repo.commit,
        "private": False,
        "gated": "manual" if repo.gated else False,
        "tags": [],
        "siblings": siblings,
    }


def _tree(repo: Repo) -> list[dict[str, object]]:
    return [
        {
            "type": "file",
            "path": name,
            "size": path.stat().st_size,
            "oid": hashlib.sha1(name.encode()).hexdigest(),
        }
        for name, path in repo.files.items()
    ]
