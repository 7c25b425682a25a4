"""Show the rows of metrics.jsonl on a page of Weights & Biases, without any risk that wandb ends or delays training.

wandb runs in a separate process (`wandb_process.py`), which reads new rows from metrics.jsonl. The training process
never imports wandb and never waits for its start or its service. If the training process alone is killed, wandb's
process still finishes the run on the page. The first failure becomes one warning, after which nothing more is sent. If
the server cannot be reached at the start, the run is recorded offline, and `wandb sync` can send it later. Only at its
end does training wait for wandb's process, for a limited time.

A restarted run keeps its id (`wandb/run_id` in the run's folder). Each start sends all rows of the file again, so that
the page shows exactly the rows of metrics.jsonl.
"""

import configparser
import json
import netrc
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import tomli_w

from titanlite.config.schema import Config
from titanlite.config.write import toml_table
from titanlite.durable import open_plain, read_plain, write_durably
from titanlite.observe.metrics import Row
from titanlite.observe.observer import Observer
from titanlite.redact import redact, redact_tree

_INIT_TIMEOUT_S = 30.0  # for reaching the server, else the run is recorded offline
_FINISH_TIMEOUT_S = 60.0  # for sending the last rows; unsent ones remain on disk
_END_S = {"offline": 15.0, "online": _FINISH_TIMEOUT_S + 15.0}  # wait for wandb's process to end before it is killed
_HOSTS = "api.wandb.ai", "api.forge.coreweave.com"  # of wandb's public server, by wandb's version
_ROOT = Path(__file__).parents[2]  # the folder from which wandb's process imports titanlite
_PROCESS = "import sys; sys.path.insert(0, sys.argv[1]); from titanlite.observe.wandb_process import main; main()"


class WandbRun(Observer):
    """Sends this run to Weights & Biases. Made on rank 0, unless `metrics.wandb` is "off". `warn` is called with a text
    at the first failure. `facts` go into wandb's config, beside the sections of titanlite's config.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        metrics: Path,
        warn: Callable[[str], object],
        *,
        facts: Mapping[str, Any] | None = None,
        tags: Sequence[str] = (),
    ) -> None:
        self._warn, self._mode = warn, config.metrics.wandb
        self._rows = self._taken = 0
        self._failed = self._started = False
        self._heard = b""  # start of an incomplete report
        self._process: subprocess.Popen[bytes] | None = None
        try:
            own = folder / "wandb"
            own.mkdir(parents=True, exist_ok=True)  # without it wandb uses a temporary folder
            work = {
                "id": _run_id(own),
                "folder": str(folder.resolve()),
                "config": redact_tree(asdict(config)) | dict(facts or {}),
                "config_toml": tomli_w.dumps(redact_tree(toml_table(config))),
                "tags": [redact(tag) for tag in tags],
                "metrics": str(metrics.resolve()),
                "kept_bytes": metrics.stat().st_size,
                "trainer": os.getpid(),
                "init_timeout_s": _INIT_TIMEOUT_S,
                "finish_timeout_s": _FINISH_TIMEOUT_S,
                "end_s": _END_S[self._mode],
            }
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROCESS, str(_ROOT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,  # so that Ctrl-C reaches training alone
            )
        except OSError as error:
            self._fail("start", str(error))
            return
        assert process.stdin is not None  # noqa: S101
        assert process.stdout is not None  # noqa: S101
        self._process, self._commands, self._reports = process, process.stdin, process.stdout
        os.set_blocking(self._reports.fileno(), False)
        self._tell(json.dumps(work))

    def write(self, row: Row) -> None:
        """Count a row, which wandb's process reads from metrics.jsonl, and warn of a failure. Never waits."""
        self._rows += 1
        if self._process is not None and not self._failed:
            self._hear(self._process.poll())

    def close(self, has_failed: bool = False) -> None:
        """Let wandb's process send the remaining rows and end. Waits at most 15 seconds offline and 75 online, and 30
        more if wandb is still starting. `has_failed`: training ended with an error.
        """
        process, self._process = self._process, None
        if process is None:
            return
        self._tell(str(int(has_failed)))
        self._hear(None)
        limit = _END_S[self._mode] + (0 if self._started else _INIT_TIMEOUT_S)
        try:
            self._hear(process.wait(limit))
        except subprocess.TimeoutExpired:
            self._hear(None)
            self._fail("finish", f"no end within {limit:g} s")
            process.kill()
            with suppress(subprocess.TimeoutExpired):  # even a killed process may wait for a dead disk
                process.wait(1.0)
        self._commands.close()
        self._reports.close()

    def _tell(self, line: str) -> None:
        with suppress(BrokenPipeError):  # wandb's process has ended, and has reported why
            self._commands.write(line.encode() + b"\n")

    def _hear(self, ended: int | None) -> None:
        """Handle the new reports of wandb's process. `ended`: its exit code, or None while it runs."""
        while more := self._reports.read(65536):  # None if there is nothing to read
            self._heard += more
        *reports, self._heard = self._heard.split(b"\n")
        for report in (json.loads(line) for line in reports if line.startswith(b"{")):  # skip other prints
            self._started = self._started or "started" in report
            self._taken = report.get("taken", self._taken)
            if why := report.get("online_failed"):
                self._say(f"online failed ({_brief(why)}); recording offline, send it later with `wandb sync`")
            if failed := report.get("failed"):
                self._fail(*failed)
        if ended:
            self._fail("go on", f"its process ended with {ended}")

    def _fail(self, what: str, why: str) -> None:
        """Warn of the first failure: `what` could not be done, for the reason `why`."""
        if self._failed:
            return
        self._failed = True
        taken = f"it took {self._taken} of {self._rows} rows{', and may not have sent them all' * (self._taken > 0)}"
        self._say(f"cannot {what} ({_brief(why)}); {taken}; metrics.jsonl has every row")

    def _say(self, text: str) -> None:
        """Call `warn` with a text; ignore an OSError, as from a log on a full disk."""
        with suppress(OSError):
            self._warn(f"wandb: {text}")


def has_login() -> bool:
    """Return whether a key for wandb's server is where wandb reads one: in the environment, netrc or its settings."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    own = configparser.ConfigParser(interpolation=None)
    with suppress(configparser.Error, OSError, UnicodeError):
        own.read(Path(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb").expanduser() / "settings")
    settings = dict(own["default"]) if "default" in own else {}
    server = os.environ.get("WANDB_BASE_URL") or settings.get("base_url", "")
    hosts = [urlsplit(server).netloc] if server else _HOSTS
    files = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for file in (Path(name).expanduser() for name in files):
        with suppress(netrc.NetrcParseError, OSError):
            if any(map(netrc.netrc(file).authenticators, hosts)):
                return True
    return bool(settings.get("api_key"))


def _run_id(folder: Path) -> str:
    """Return the run's id from its file. A new id is made if that is missing or damaged, or `lines` is missing."""
    path = folder / "run_id"
    known = ""
    with suppress(FileNotFoundError):
        os.close(open_plain(folder / "lines", os.O_RDWR))  # must open, as in wandb's process
        known = read_plain(path).decode(errors="replace").strip()
    if not re.fullmatch("[0-9a-f]{8}", known):
        known = secrets.token_hex(4)
        write_durably(path, known + "\n")
    return known


def _brief(text: str) -> str:
    """Return the first 200 characters of a message, with secrets redacted."""
    return redact(text)[:200]
