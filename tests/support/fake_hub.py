"""A small Hugging Face hub over real HTTP: what huggingface_hub asks of one to download models.

Files of git are sent by the hub itself, those of LFS by another host, to which it redirects, as
huggingface.co does. A test adds repositories, says what shall go wrong, and reads what was asked.
"""

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

LFS = (".safetensors", ".gguf", ".bin")


@dataclass
class Repo:
    """A model. ``commits`` are by hash, ``branches`` name them."""

    name: str
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    readers: set[str] | None = None  # tokens that may read it; None: everybody may

    def commit(self, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Add a commit with these files and move the branch there; its hash."""
        text = "".join(f"{n} {hashlib.sha1(d).hexdigest()}\n" for n, d in sorted(files.items()))
        commit = hashlib.sha1(f"{self.name}\n{text}".encode()).hexdigest()
        self.commits[commit], self.branches[branch] = dict(files), commit
        return commit


@dataclass(frozen=True)
class Asked:
    """A request that has come in."""

    method: str
    path: str
    token: str
    first_byte: int


class FakeHub(ThreadingHTTPServer):
    """Serves until its ``with`` block ends."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, Repo] = {}
        self.asked: list[Asked] = []
        self.out_of_order = False
        self.cuts: dict[str, list[int]] = {}  # by file: bytes after which its next answers end
        self.damaged: set[str] = set()  # files whose last byte is sent wrong

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def add(self, name: str, files: Mapping[str, bytes]) -> Repo:
        """A repository with one commit on main."""
        repo = self.repos[name] = Repo(name)
        repo.commit(files)
        return repo

    def content(self, repo: str) -> list[str]:
        """Names of the files of ``repo`` that were sent since the last call, without the rest."""
        sent = [
            unquote(asked.path.rpartition("/")[2])
            for asked in self.asked
            if asked.method == "GET" and f"/{repo}/" in asked.path and "/api/" not in asked.path
        ]
        self.asked.clear()
        return sorted(sent)


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """A hub on a port of its own."""
    with FakeHub() as hub:
        thread = threading.Thread(target=hub.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeHub

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self) -> None:
        path = urlsplit(self.path).path
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        span = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
        self.first_byte = int(span[1]) if span else 0
        self.server.asked.append(Asked(self.command, path, token, self.first_byte))
        if self.server.out_of_order:
            return self._send(503)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
            return self._model(match[1], unquote(match[2] or "main"), token)
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([0-9a-f]{40})/(.+)", path):
            return self._file(match[1], match[2], unquote(match[3]), token)
        if match := re.fullmatch(r"/cdn/([^/]+/[^/]+)/([0-9a-f]{40})/(.+)", path):
            return self._content(*match.groups())
        return self._send(404)

    def _model(self, name: str, revision: str, token: str) -> None:
        repo = self.server.repos.get(name)
        if repo is None:  # the hub does not say whether it is private
            return self._send(404 if token else 401, {"X-Error-Code": "RepoNotFound"})
        commit = repo.branches.get(revision, revision)
        if commit not in repo.commits:
            return self._send(404, {"X-Error-Code": "RevisionNotFound"})
        siblings = [
            {"rfilename": file, "size": len(data), "blobId": git_hash(data)}
            | ({"lfs": {"sha256": sha256(data), "size": len(data), "pointerSize": 134}})
            if file.endswith(LFS)
            else {"rfilename": file, "size": len(data), "blobId": git_hash(data)}
            for file, data in repo.commits[commit].items()
        ]
        body = {"id": name, "sha": commit, "siblings": siblings, "tags": [], "private": False}
        return self._send(200, {"Content-Type": "application/json"}, json.dumps(body).encode())

    def _file(self, name: str, commit: str, file: str, token: str) -> None:
        repo = self.server.repos[name]
        if repo.readers is not None and token not in repo.readers:
            return self._send(403 if token else 401, {"X-Error-Code": "GatedRepo"})
        if file not in repo.commits[commit]:
            return self._send(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        data = repo.commits[commit][file]
        if not file.endswith(LFS):
            return self._content(name, commit, file, {"ETag": f'"{git_hash(data)}"'})
        headers = {
            # another host by its name, so that the token does not go there
            "Location": f"http://localhost:{self.server.server_port}/cdn/{name}/{commit}/{file}",
            "X-Linked-Etag": f'"{sha256(data)}"',
            "X-Linked-Size": str(len(data)),
            "X-Repo-Commit": commit,
        }
        return self._send(302, headers)

    def _content(
        self, name: str, commit: str, file: str, headers: dict[str, str] | None = None
    ) -> None:
        data = self.server.repos[name].commits[commit][file]
        if file in self.server.damaged:
            data = data[:-1] + bytes([data[-1] ^ 1])
        status, headers = 200, {**(headers or {}), "X-Repo-Commit": commit}
        if self.first_byte:
            status, size = 206, len(data)
            headers["Content-Range"] = f"bytes {self.first_byte}-{size - 1}/{size}"
            data = data[self.first_byte :]
        cuts = self.server.cuts.get(file)
        keep = cuts.pop(0) if cuts and self.command == "GET" else len(data)
        self._send(status, headers, data, keep)

    def _send(
        self,
        status: int,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        keep: int | None = None,
    ) -> None:
        """Answer; with ``keep`` less than the body's length the connection ends inside of it."""
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:keep])
            self.close_connection = self.close_connection or len(body[:keep]) < len(body)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def git_hash(data: bytes) -> str:
    """As ``git hash-object`` has it."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
