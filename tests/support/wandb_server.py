"""A server that wandb takes for Weights & Biases, on loopback: it keeps the rows of each run as wandb sends them.

What it assumes of the real one: `file_stream` writes the lines of a chunk from its offset on, over what is there; a run
whose id exists is gone on with, by `UpsertBucket`, and `RunResumeStatus` counts its lines for who asks to resume. Where
a run is begun again that asked for nothing, some servers may drop its lines instead: `rows(..., is_emptied=True)`.
"""

import gzip
import http.server
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any


class Server(http.server.ThreadingHTTPServer):
    """Serves until it is closed.

    `up` is whether it works; while it does not, it answers with the status `outage`, or never if that is None. `sent`
    is every run's lines as they came, `files` what else was stored, by the run's name for it.
    """

    daemon_threads = True

    def __init__(self) -> None:
        self.up = True
        self.outage: int | None = 503
        self.files: dict[str, bytes] = {}
        self.said: dict[str, dict[str, Any]] = {}  # of each run: config as JSON, groupName, displayName, tags, …
        self.exits: dict[str, int] = {}  # of runs that have ended, their exit codes
        self.summaries: list[tuple[str, dict[str, Any]]] = []  # written to runs that have ended, with their names
        self.sent: dict[str, list[tuple[int, list[str]] | None]] = {}  # offset and lines; None where a run begins
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.server_port}"

    def lines(self, run: str, is_emptied: bool = False) -> list[dict[str, Any]]:
        """What the history of a run is by now.

        Args:
            run: its id.
            is_emptied: by each start that does not resume.
        """
        lines: dict[int, str] = {}
        for chunk in self.sent[run]:
            if chunk is not None:
                lines.update(enumerate(chunk[1], chunk[0]))
            elif is_emptied:
                lines.clear()
        assert sorted(lines) == list(range(len(lines))), "a gap"
        return [json.loads(lines[at]) for at in range(len(lines))]

    def environment(self, home: Path) -> dict[str, str]:
        """That of a user of it, who can import titanlite."""
        clean = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
        own = {"WANDB_BASE_URL": self.url, "WANDB_API_KEY": "deadbeef" * 5, "HOME": str(home)}
        return {**clean, **own, "PYTHONPATH": str(Path(__file__).parents[2])}

    def sync(self, home: Path, *folders: Path) -> None:
        """Run `wandb sync` on folders of wandb's, one after the other."""
        asked = ["-m", "wandb", "sync", "--yes", "--include-synced", "--include-online"]
        done = subprocess.run(
            [sys.executable, *asked, *map(str, folders)],
            env=self.environment(home), cwd=home, capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Of a client that was killed, or that does not wait for the answer."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer({}, self.server.files.get(self.path.removeprefix("/storage/")))

    def do_PUT(self) -> None:
        body = self._body()
        if self.server.up:
            self.server.files[self.path.removeprefix("/storage/")] = body
        self._answer({})

    def do_POST(self) -> None:
        body = self._body()
        if self.path == "/graphql":
            asked = json.loads(body)
            name = re.search(r"(?:query|mutation)\s+(\w+)", asked["query"])
            self._answer({"data": self._data(name[1] if name else "", asked.get("variables") or {})})
            return
        if self.path.endswith("/file_stream") and self.server.up:
            said = json.loads(body)
            files = said.get("files") or {}
            if said.get("complete"):
                self.server.exits[self.path.split("/")[4]] = said["exitcode"]
            if history := files.get("wandb-history.jsonl"):
                self.server.sent[self.path.split("/")[4]].append((history["offset"], history["content"]))
        self._answer({})

    def _data(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        project = {"id": "P", "name": "proj", "entity": {"id": "E", "name": "me"}}
        if name in ("Viewer", "GetDefaultEntity"):
            return {"viewer": {"id": "U", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}}
        if name == "UpsertBucket" and "name" not in given:  # a word on a run that has ended
            self.server.summaries.append((given["id"], json.loads(given["summaryMetrics"])))
            return {"upsertBucket": {"bucket": {"id": "B"}, "inserted": False}}
        if name == "UpsertBucket" and self.server.up:
            is_new = given["name"] not in self.server.sent
            sent = self.server.sent.setdefault(given["name"], [])
            said = self.server.said.setdefault(given["name"], {"config": "{}"})
            said |= {key: value for key, value in given.items() if value is not None}
            if given.get("host") and not given.get("id"):  # a start, not a word about one that goes on
                sent.append(None)
            bucket = {"id": "B", "name": given["name"], "displayName": given["name"], "project": project}
            return {"upsertBucket": {"bucket": bucket, "inserted": is_new}}
        if name == "RunResumeStatus":
            bucket = None
            if given["name"] in self.server.sent:
                lines = self.server.lines(given["name"])
                tail = json.dumps([json.dumps(line) for line in lines[-1:]])
                bucket = {
                    "id": "B", "name": given["name"], "displayName": "x", "summaryMetrics": "{}", "config": "{}",
                    "logLineCount": 0, "historyLineCount": len(lines), "eventsLineCount": 0, "historyTail": tail,
                    "eventsTail": "[]", "tags": [], "wandbConfig": '{"t": 1}',
                }  # fmt: skip
            return {"model": {**project, "bucket": bucket}}
        if name == "RunHistoryKeys":
            lines = self.server.lines(given["name"])
            return {"project": {"run": {"historyKeys": {"lastStep": len(lines) - 1, "keys": {}, "sets": []}}}}
        if name == "RunParquetHistory":
            live = self.server.lines(given["runName"])
            return {"project": {"run": {"parquetHistory": {"parquetUrls": [], "liveData": live}}}}
        if name == "HistoryPage":
            page = self.server.lines(given["run"])[given["minStep"] : given["maxStep"]]
            return {"project": {"run": {"history": [json.dumps(line) for line in page]}}}
        if name == "Run" and given["name"] in self.server.sent:
            return {"project": {**project, "run": self._run(given["name"])}}
        if name == "Runs":
            group = json.loads(given["filters"])["group"]
            found = [run for run in self.server.sent if self.server.said.get(run, {}).get("groupName") == group]
            edges = [{"node": self._run(run), "cursor": run} for run in found]
            runs = {"edges": edges, "pageInfo": {"endCursor": None, "hasNextPage": False}}
            return {"project": {"internalId": "1", "runCount": len(found), "readOnly": False, "runs": runs}}
        if name == "RunFiles":
            there = [file for file in given["fileNames"] if file in self.server.files]
            edges = [{"cursor": file, "node": self._node(file)} for file in there]
            files = {"edges": edges, "pageInfo": {"endCursor": None, "hasNextPage": False}}
            return {"project": {"internalId": "1", "run": {"fileCount": len(there), "files": files}}}
        if name == "CreateRunFiles":
            url = f"{self.server.url}/storage"
            files = [{"name": file, "uploadUrl": f"{url}/{file}"} for file in given["files"]]
            return {"createRunFiles": {"runID": "B", "uploadHeaders": [], "files": files}}
        return {}

    def _run(self, run: str) -> dict[str, Any]:
        lines, said = self.server.lines(run), self.server.said.get(run, {"config": "{}"})
        keys = {"lastStep": len(lines) - 1, "keys": {}, "sets": []}
        return {
            "id": run, "projectId": "1", "name": run, "displayName": "mine", "state": "finished", "tags": [],
            "sweepName": None, "group": said.get("groupName"), "jobType": None, "commit": None, "readOnly": False,
            "createdAt": "2026-01-01T00:00:00", "heartbeatAt": "2026-01-01T00:00:00", "description": None,
            "notes": None, "systemMetrics": "{}", "summaryMetrics": "{}", "historyLineCount": len(lines),
            "user": {"name": "me", "username": "me"}, "historyKeys": keys, "config": said["config"],
        }  # fmt: skip

    def _node(self, file: str) -> dict[str, Any]:
        url, size = f"{self.server.url}/storage/{file}", len(self.server.files[file])
        return {
            "id": file, "name": file, "url": url, "directUrl": url, "sizeBytes": size, "mimetype": "", "md5": "",
            "updatedAt": "2026-01-01T00:00:00",
        }  # fmt: skip

    def _body(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _answer(self, content: dict[str, Any], file: bytes | None = None) -> None:
        while not self.server.up and self.server.outage is None:
            time.sleep(0.05)
            self.close_connection = True  # whoever still waits begins anew
        body = json.dumps(content).encode() if file is None else file
        self.send_response(200 if self.server.up else self.server.outage or 503)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
