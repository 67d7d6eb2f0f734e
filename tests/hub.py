"""A hub of models on this machine: the routes by which `huggingface_hub` lists and gets files."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_reads_everything"


@dataclass(frozen=True)
class Repository:
    """Files by name, in revisions: the name of each to its commit. gated: files need TOKEN."""

    files: Mapping[str, bytes]
    gated: bool = False
    revisions: tuple[str, ...] = ("main",)

    def commit(self, revision: str) -> str | None:
        """Return the commit that a branch, a tag or itself names."""
        known = {name: hashlib.sha1(name.encode()).hexdigest() for name in self.revisions}
        return known.get(revision, revision if revision in known.values() else None)


def read_folder(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder by their names in it."""
    files = (file for file in folder.rglob("*") if file.is_file())
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


@dataclass
class Hub:
    """What a running hub has, and which files were fetched of it, as `org/name/file`."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    fetched: list[str] = field(default_factory=list)
    url: str = ""

    def take(self) -> list[str]:
        """Return what was fetched since the last call, sorted."""
        taken, self.fetched[:] = sorted(self.fetched), []
        return taken


@contextmanager
def run_hub(**repositories: Repository) -> Iterator[Hub]:
    """Run a hub with these repositories, whose names have `__` for the slash."""
    hub = Hub({name.replace("__", "/"): found for name, found in repositories.items()})
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield hub
        server.shutdown()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self) -> None:
        match [unquote(part) for part in urlsplit(self.path).path.lstrip("/").split("/")]:
            case ["api", "models", organisation, name, *rest]:
                self._tell(f"{organisation}/{name}", rest[1] if rest else "main")
            case [organisation, name, "resolve", revision, *file]:
                self._give(f"{organisation}/{name}", revision, "/".join(file))
            case _:
                self._refuse(404, "RepoNotFound")

    def _tell(self, name: str, revision: str) -> None:
        found = self._find(name, revision)
        if found is None:
            return
        repository, commit = found
        files = [{"rfilename": n, "size": len(d)} for n, d in repository.files.items()]
        content = {"id": name, "sha": commit, "siblings": files}
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _give(self, name: str, revision: str, file: str) -> None:
        found = self._find(name, revision)
        if found is None:
            return
        repository, commit = found
        data = repository.files.get(file)
        if repository.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._refuse(403, "GatedRepo")
        elif data is None:
            self._refuse(404, "EntryNotFound", commit)
        else:
            if self.command == "GET":
                self.hub.fetched.append(f"{name}/{file}")
            etag = hashlib.sha256(data).hexdigest()
            self._send(200, data, {"X-Repo-Commit": commit, "ETag": f'"{etag}"'})

    def _find(self, name: str, revision: str) -> tuple[Repository, str] | None:
        repository = self.hub.repositories.get(name)
        if repository is None:
            self._refuse(401, "RepoNotFound")
            return None
        commit = repository.commit(revision)
        if commit is None:
            self._refuse(404, "RevisionNotFound")
            return None
        return repository, commit

    def _refuse(self, status: int, code: str, commit: str = "") -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Repo-Commit": commit})

    def _send(self, status: int, data: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)
