"""Write status.json: whether a run is running, finished, stopped or failed, for schedulers, scripts and people.

The file is replaced as a whole, so a reader never sees half of it; only on a full disk an end is written over the old
one. Rank 0 writes it; a rank that fails says so itself, for rank 0 may then wait for it until it is killed. For a
rank that is killed or crashes in native code the process beside it says so (`guard.py`). Only where both are killed, or
the host is gone, `running` stays, with an old `updated`: while steps are made it is renewed every ten seconds. Once a
job that began later has written there, the folder is that one's, and this one writes no more.
"""

import fcntl
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from titanlite.durable import open_plain, read_plain, write_durably
from titanlite.errors import TitanliteError
from titanlite.json_file import parse_json
from titanlite.observe.observer import Observer
from titanlite.redact import redact_tree

_RENEW_S = 10.0  # seldom enough to cost nothing on a network disk
_WAIT_S = 2.0  # for another process's word, which takes milliseconds


class Status(Observer):
    """The state of this run, "running" from now on, after the step from which training starts. Ranks other than 0 write
    `failed` and `stalled` alone.
    """

    def __init__(self, path: Path, step: int = 0, rank: int = 0) -> None:
        self._path, self._rank, self._written = path, rank, 0.0
        self.step = step  # the last one done
        self.stall: str | None = None  # where each rank was when this one last asked, if there was no step since
        self._started = now()
        self._began = ""  # when the run did, as rank 0 has written it
        self._end = ""  # once it has been written
        self._before = self._content() if rank == 0 else {}
        self._lock = threading.Lock()  # a second signal is noted by a thread of its own
        if rank == 0:
            self._write("running")
            self._began = self._started

    def progress(self, step: int) -> None:
        """Note that `step` is done. Cheap: the file is written every ten seconds at most."""
        self.step, self.stall = step, None
        self._began = self._began or self._content().get("started", "")
        if self._rank == 0 and time.monotonic() - self._written >= _RENEW_S:
            self._write_running()

    def stalled(self, text: str) -> None:
        """Note that no step is made, and where each rank is: `failed` keeps it, should the run end so."""
        self.stall = text
        self._write_running(stalled=text)

    def idle(self, is_last: bool) -> bool:
        """Write what was there before a start that had nothing to do, if that was an end; return whether it was.

        With all steps done, a run that was stopped is finished now.
        """
        if self._before.get("state") not in (("finished",) if is_last else ("finished", "stopped")):
            return False
        with self._lock:
            if self._is_lost():
                return False
            write_status(self._path, self._before, self._rank)
            self._end = self._before["state"]
        return True

    def finished(self, step: int) -> None:
        """Write that all steps are done."""
        self.step = step
        if self._rank == 0:
            self._write("finished")

    def stopped(self, step: int, by: str) -> None:
        """Write that the run was asked to end early, by "SIGTERM" or "job.stop_after", say, and did so after a step."""
        self.step = step
        if self._rank == 0:
            self._write("stopped", by=by)

    def failed(self, error: BaseException) -> None:
        """Write that the run ended with an error, after the last step noted.

        If another rank has written its end, this one fails because that one is gone, and writes nothing; only a mistake
        of all ranks, which rank 0 tells, replaces it. The text of a stall is kept.
        """
        with one_writer(self._path):
            if self._another_ended() and not (self._rank == 0 and isinstance(error, TitanliteError)):
                return
            stalled = {key: text for key, text in self._content().items() if key == "stalled"}
            kind, message = type(error).__name__, str(error)
            self._write("failed", error={"type": kind, "message": message, "rank": self._rank}, **stalled)

    def _write_running(self, **more: str) -> None:
        with one_writer(self._path):
            if not self._another_ended():
                self._write("running", **more)

    def _another_ended(self) -> bool:
        """Return whether another rank failed, or rank 0 was stopped."""
        content = self._content()
        # What an earlier process of this folder wrote is older, or rank 0 has replaced it by now.
        if not content or content["updated"] < self._started:
            return False
        if content["state"] == "failed":
            return content.get("error", {}).get("rank") != self._rank
        return content["state"] == "stopped" and self._rank != 0

    def _content(self) -> dict[str, Any]:
        try:
            return read_status(self._path)
        except (OSError, ValueError):  # there is none, or the host went down while it was written
            return {}

    def _is_lost(self) -> bool:
        """Return whether another job, which began later, has the folder by now."""
        return bool(self._began) and self._content().get("started", "") > self._began

    def _write(self, state: str, **more: object) -> None:
        self._written = time.monotonic()
        run: dict[str, object] = {"started": self._started, "host": os.uname().nodename, "pid": os.getpid()}
        if self._rank:  # a run is known by its rank 0
            before = self._content()
            run |= {key: before[key] for key in run if key in before}
        content = {"state": state, "step": self.step, **more, **run, "updated": now()}
        with self._lock:
            # A thread that asked where all ranks are may be late; and who was stopped fails of what follows.
            if (self._end and (state == "running" or (self._end, state) == ("stopped", "failed"))) or self._is_lost():
                return
            write_status(self._path, content, self._rank)
            self._end = "" if state == "running" else state


@contextmanager
def one_writer(path: Path) -> Iterator[None]:
    """Let no other process of this host write a `status.json` between what this one reads there and writes.

    The file is replaced, so it is its folder that is locked. Where that cannot be, or its holder is stopped, this goes
    on without a lock: then the last word counts.
    """
    with ExitStack() as held:
        with suppress(OSError):
            folder = os.open(path.parent, os.O_RDONLY)
            held.callback(os.close, folder)
            until = time.monotonic() + _WAIT_S
            while not _has_locked(folder) and time.monotonic() < until:
                time.sleep(0.01)
        yield


def _has_locked(folder: int) -> bool:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read_status(path: Path) -> dict[str, Any]:
    """Read a `status.json`: at least "state" and "updated"; "started" is a text and "error" a table, where they are.

    Raises:
        OSError: there is none, it cannot be read, or is no plain file.
        ValueError: it does not say that.
    """
    content = parse_json(read_plain(path))
    kinds = {"state": str, "updated": str, "started": str, "error": dict}
    is_one = isinstance(content, dict) and {"state", "updated"} <= content.keys()
    if not is_one or not all(isinstance(content.get(key, of()), of) for key, of in kinds.items()):
        raise ValueError("no JSON object with a state")
    return content


def write_status(path: Path, content: dict[str, Any], rank: int) -> None:
    """Write a `status.json`; on a full disk, an end over the old one."""
    text = json.dumps(redact_tree(content), indent=2) + "\n"
    try:
        write_durably(path, text, by=f".{rank}", on_disk=False)
    except OSError:  # the run may end because the disk is full: the old file has room
        if content["state"] == "running":
            raise
        with open(open_plain(path, os.O_RDWR), "r+", encoding="utf-8") as file:
            file.write(text)
            file.truncate()
        with suppress(OSError):
            path.with_name(f"{path.name}.{rank}.tmp").unlink()


def now() -> str:
    """Return the time as `status.json` has it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
