"""A Hugging Face hub on loopback: models with branches, and what `huggingface_hub` asks of one to fetch and to push.

Its models are dicts: {commit: {file: content}} for each, and {branch: commit}. What it assumes of the real one is in
the answers of `_Handler`: their headers X-Repo-Commit, ETag and X-Error-Code, and the JSON of its API.
"""

import base64
import hashlib
import http.server
import json
import re
import threading
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import huggingface_hub.constants
import pytest

TOKEN = "hf_oauth_" + "secret_of_this_user"  # which no pattern of `redact` knows


class Server(http.server.ThreadingHTTPServer):
    """Serves until it is closed. `gated` and `refused` models answer with 403, `cut` files break off after that many
    bytes, as often as said; while it is not `up` it answers with 503.
    """

    daemon_threads = True

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, dict[str, bytes]]] = {}
        self.branches: dict[str, dict[str, str]] = {}
        self.private: dict[str, bool] = {}
        self.gated: set[str] = set()
        self.refused: set[str] = set()
        self.cut: dict[str, list[int]] = {}
        self.stored: dict[str, bytes] = {}  # large files, by hash
        self.asked: list[str] = []  # "METHOD path", and " from N" of a range
        self.up = True
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def publish(self, model: str, files: dict[str, bytes], branch: str = "main") -> str:
        """Move a branch of a model, which may be new, to a commit with these files; return the commit."""
        commit = hashlib.sha1(repr((model, sorted(files.items()))).encode()).hexdigest()
        self.commits.setdefault(model, {})[commit] = files
        self.branches.setdefault(model, {})[branch] = commit
        return commit

    def got(self, file: str) -> list[str]:
        """The GET requests of a file."""
        return [line for line in self.asked if line.startswith("GET") and line.split(" from ")[0].endswith(f"/{file}")]


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def _answer(self) -> None:
        start = self.headers.get("Range", "").removeprefix("bytes=").partition("-")[0]
        self.server.asked.append(f"{self.command} {self.path}" + f" from {start}" * bool(start))
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        path = unquote(self.path.partition("?")[0])
        if not self.server.up:
            return self._send(503)
        if path == "/api/whoami-v2":
            is_known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
            return self._send(200, {"name": "me"}) if is_known else self._send(401)
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return self._send(200, {"errors": [], "warnings": []})
        if put := re.fullmatch("/stored/(.*)", path):
            self.server.stored[put[1]] = body
            return self._send(200)
        if lfs := re.fullmatch("/(.*).git/info/lfs/objects/batch", path):
            return self._batch(lfs[1], json.loads(body)["objects"])
        api = re.fullmatch("/api/models/([^/]*/[^/]*)(?:/(revision|tree|preupload|commit)/(.*))?", path)
        file = re.fullmatch("/([^/]*/[^/]*)/resolve/([^/]*)/(.*)", path)
        model = api[1] if api else file[1] if file else ""
        if model in self.server.gated:
            return self._send(403, code="GatedRepo")
        if model not in self.server.commits:
            return self._send(401, code="RepoNotFound")
        if self.command == "POST" and api:
            return self._refuse_or(model, lambda: self._upload(model, api[2], body))
        branches, commits = self.server.branches[model], self.server.commits[model]
        revision = (api[3] or "main") if api else file[2] if file else ""
        if api and api[2] == "tree" and "/" in revision:  # a folder in it
            return self._send(404, code="EntryNotFound")
        commit = branches.get(revision, revision)
        if commit not in commits:
            return self._send(404, code="RevisionNotFound")
        files = commits[commit]
        if file:
            return self._send_file(commit, files.get(file[3]), file[3], start)
        if api and api[2] == "tree":
            return self._send(
                200, [{"type": "file", "path": n, "size": len(b), "oid": _id(b)} for n, b in files.items()]
            )
        return self._send(200, {"id": model, "sha": commit, "siblings": [{"rfilename": name} for name in files]})

    def _send_file(self, commit: str, content: bytes | None, name: str, start: str) -> None:
        if content is None:
            self._send(404, code="EntryNotFound", commit=commit)
            return
        part, total = content[int(start or 0) :], len(content)
        self.send_response(206 if start else 200)
        for key, value in (("X-Repo-Commit", commit), ("ETag", f'"{_id(content)}"'), ("Content-Length", len(part))):
            self.send_header(key, str(value))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
        self.end_headers()
        if self.command == "GET":
            cut = self.server.cut.get(name)
            self.wfile.write(part[: cut.pop(0)] if cut else part)
            self.close_connection = True

    def _create(self, said: dict[str, Any]) -> None:
        model = f"{said['organization']}/{said['name']}"
        if model in self.server.commits:
            return self._send(409, {"url": f"{self.server.url}/{model}"})
        self.server.private[model] = said.get("visibility") == "private"
        self.server.publish(model, {".gitattributes": b""})
        return self._refuse_or(model, lambda: self._send(200, {"url": f"{self.server.url}/{model}"}))

    def _refuse_or(self, model: str, action: Any) -> None:
        return self._send(403, {"error": "no"}) if model in self.server.refused else action()

    def _batch(self, model: str, objects: list[dict[str, Any]]) -> None:
        actions = [{**o, "actions": {"upload": {"href": f"{self.server.url}/stored/{o['oid']}"}}} for o in objects]
        self._send(200, {"transfer": "basic", "objects": actions})

    def _upload(self, model: str, what: str, body: bytes) -> None:
        if what == "preupload":
            modes = [
                {
                    "path": each["path"],
                    "uploadMode": "lfs" if each["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for each in json.loads(body)["files"]
            ]
            return self._send(200, {"files": modes})
        files = dict(self.server.commits[model][self.server.branches[model]["main"]])
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.stored[value["oid"]]
        commit = self.server.publish(model, files)
        url = f"{self.server.url}/{model}/commit/{commit}"
        return self._send(200, {"success": True, "commitOid": commit, "commitUrl": url})

    def _send(self, status: int, content: Any = None, code: str = "", commit: str = "") -> None:
        body = b"" if self.command == "HEAD" else json.dumps(content or {}).encode()
        self.send_response(status)
        for key, value in (("X-Error-Code", code), ("X-Repo-Commit", commit), ("Content-Length", str(len(body)))):
            if value:
                self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)


def _id(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def use(patch: pytest.MonkeyPatch, server: Server, home: Path, *, offline: bool = False) -> None:
    """Let `huggingface_hub`, here and in processes started from here, use a server and a cache below `home`."""
    constants = huggingface_hub.constants
    patch.setattr(constants, "ENDPOINT", server.url)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}")
    patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    patch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    patch.setattr(constants, "HF_HUB_OFFLINE", offline)
    for name, value in {
        "HF_ENDPOINT": server.url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": str(int(offline)),
    }.items():
        patch.setenv(name, value)
