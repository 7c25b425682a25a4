"""Show the rows of metrics.jsonl on a page of Weights & Biases. It can never end or delay a run.

wandb runs in a process of its own (`wandb_process.py`), which follows metrics.jsonl. So the file is the queue: nothing
of wandb's (its import, its start, a service that hangs) happens in the process that trains, and if that process alone
is killed the run is still finished. The first failure becomes one warning, and from then on nothing more is sent. If
the server cannot be reached at the start, the run is recorded offline instead, and `wandb sync` sends it later. Only
the end is waited for, and not for long.

A run that is restarted keeps its id (`wandb/run_id` in the run's folder), and each start sends all rows of the file
again: wandb shows what is recorded.
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

_INIT_TIMEOUT_S = 30.0  # then the run is recorded offline
_FINISH_TIMEOUT_S = 60.0  # the rest is on disk
_END_S = {"offline": 15.0, "online": _FINISH_TIMEOUT_S + 15.0}  # then its process is killed
_HOSTS = "api.wandb.ai", "api.forge.coreweave.com"  # of its own server, by version
_ROOT = Path(__file__).parents[2]  # where titanlite is, of which the process imports little
_PROCESS = "import sys; sys.path.insert(0, sys.argv[1]); from titanlite.observe.wandb_process import main; main()"


class WandbRun(Observer):
    """This run in Weights & Biases. Rank 0 owns it; made only when `metrics.wandb` is not "off". `warn` is called with
    one text at the first failure; the facts are beside the sections of the config in wandb's.
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
        self._heard = b""  # of a report that is not complete
        self._process: subprocess.Popen[bytes] | None = None
        try:
            own = folder / "wandb"
            own.mkdir(parents=True, exist_ok=True)  # or wandb writes to a temporary folder
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
                start_new_session=True,  # Ctrl-C is for the process that trains
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
        """Count a row, which its process takes from metrics.jsonl; warn of what has failed meanwhile. Never waits."""
        self._rows += 1
        if self._process is not None and not self._failed:
            self._hear(self._process.poll())

    def close(self, has_failed: bool = False) -> None:
        """Have what is left sent, and end; waits 15 seconds at most, and 75 online, and 30 more if it still starts."""
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
            with suppress(subprocess.TimeoutExpired):  # not even that ends a process that waits for a dead disk
                process.wait(1.0)
        self._commands.close()
        self._reports.close()

    def _tell(self, line: str) -> None:
        with suppress(BrokenPipeError):  # it has ended, and its reports say of what
            self._commands.write(line.encode() + b"\n")

    def _hear(self, ended: int | None) -> None:
        """Take up what its process has reported; `ended` with which exit code, None if it goes on."""
        while more := self._reports.read(65536):  # None where there is nothing now
            self._heard += more
        *reports, self._heard = self._heard.split(b"\n")
        for report in (json.loads(line) for line in reports if line.startswith(b"{")):  # anything may print to it
            self._started = self._started or "started" in report
            self._taken = report.get("taken", self._taken)
            if why := report.get("online_failed"):
                self._say(f"online failed ({_brief(why)}); recording offline, send it later with `wandb sync`")
            if failed := report.get("failed"):
                self._fail(*failed)
        if ended:
            self._fail("go on", f"its process ended with {ended}")

    def _fail(self, what: str, why: str) -> None:
        """Say so once."""
        if self._failed:
            return
        self._failed = True
        taken = f"it took {self._taken} of {self._rows} rows{', and may not have sent them all' * (self._taken > 0)}"
        self._say(f"cannot {what} ({_brief(why)}); {taken}; metrics.jsonl has every row")

    def _say(self, text: str) -> None:
        """Warn, unless the disk that the log is on has no room for it."""
        with suppress(OSError):
            self._warn(f"wandb: {text}")


def has_login() -> bool:
    """Return whether wandb finds a key for its server where it looks for one: the environment, netrc, its settings."""
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
    """Return this run's id: made at its first start, and again where it was cut off or what was sent is not known."""
    path = folder / "run_id"
    known = ""
    with suppress(FileNotFoundError):
        os.close(open_plain(folder / "lines", os.O_RDWR))  # as the process does
        known = read_plain(path).decode(errors="replace").strip()
    if not re.fullmatch("[0-9a-f]{8}", known):
        known = secrets.token_hex(4)
        write_durably(path, known + "\n")
    return known


def _brief(text: str) -> str:
    """Return the start of another's message, redacted."""
    return redact(text)[:200]
