"""Write status.json: whether a run is running, finished, stopped or failed, for schedulers, scripts and people.

The file is replaced by a rename, so a reader never sees half of it. Only on a full disk is a final state written over
the old content. Rank 0 writes the file. A rank that fails also writes its failure, for rank 0 may wait for it until it
is killed itself. For a rank that is killed or crashes in native code, its guard process writes the failure
(`guard.py`). If both are killed, or the host is lost, the state remains `running`. The time `updated`, renewed every
ten seconds while steps are made, is then old. A job writes no more once a job that began later has written the file.
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

_RENEW_S = 10.0  # interval of renewals: rare enough to cost nothing on a network disk
_WAIT_S = 2.0  # longest wait for the lock, which a process holds for milliseconds


class Status(Observer):
    """Writes the state of this run, "running" at first. `step`: the last step done before training starts. Ranks other
    than 0 only write failures and stalls.
    """

    def __init__(self, path: Path, step: int = 0, rank: int = 0) -> None:
        self._path, self._rank, self._written = path, rank, 0.0
        self.step = step  # the last step done
        self.stall: str | None = None  # last report of where each rank is; None if a step was done since
        self._started = now()
        self._began = ""  # start time of the run, as rank 0 wrote it
        self._end = ""  # the final state, once it is written
        self._before = self._content() if rank == 0 else {}
        self._lock = threading.Lock()  # at a second signal another thread writes, too
        if rank == 0:
            self._write("running")
            self._began = self._started

    def progress(self, step: int) -> None:
        """Record that `step` is done. Cheap: the file is written every ten seconds at most."""
        self.step, self.stall = step, None
        self._began = self._began or self._content().get("started", "")
        if self._rank == 0 and time.monotonic() - self._written >= _RENEW_S:
            self._write_running()

    def stalled(self, text: str) -> None:
        """Write that the run makes no progress. `text`: the report of where each rank is; a later `failed` keeps it."""
        self.stall = text
        self._write_running(stalled=text)

    def idle(self, is_last: bool) -> bool:
        """Restore the final state that the file had before a start without steps to do; return whether it had one.

        `is_last`: all steps of the run are done. Then "stopped" is not restored, as the run is finished now.
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
        """Write that the run ended early, after `step`. `by`: the cause, such as "SIGTERM" or "job.stop_after"."""
        self.step = step
        if self._rank == 0:
            self._write("stopped", by=by)

    def failed(self, error: BaseException) -> None:
        """Write that the run ended with an error, after the last step recorded.

        If another rank has already written its end, this rank fails only in consequence, and writes nothing. Only a
        TitanliteError of rank 0, a mistake that all ranks share, is written even then. The text of a stall is kept.
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
        """Return whether the file says that another rank failed, or that rank 0 was stopped."""
        content = self._content()
        # Older content is of an earlier process in this folder.
        if not content or content["updated"] < self._started:
            return False
        if content["state"] == "failed":
            return content.get("error", {}).get("rank") != self._rank
        return content["state"] == "stopped" and self._rank != 0

    def _content(self) -> dict[str, Any]:
        try:
            return read_status(self._path)
        except (OSError, ValueError):  # the file is missing, or incomplete after a crash of the host
            return {}

    def _is_lost(self) -> bool:
        """Return whether a job that began later has written the file."""
        return bool(self._began) and self._content().get("started", "") > self._began

    def _write(self, state: str, **more: object) -> None:
        self._written = time.monotonic()
        run: dict[str, object] = {"started": self._started, "host": os.uname().nodename, "pid": os.getpid()}
        if self._rank:  # rank 0's process identifies the run
            before = self._content()
            run |= {key: before[key] for key in run if key in before}
        content = {"state": state, "step": self.step, **more, **run, "updated": now()}
        with self._lock:
            # A late report of a stall does not replace a final state, nor a failure in consequence of a stop "stopped".
            if (self._end and (state == "running" or (self._end, state) == ("stopped", "failed"))) or self._is_lost():
                return
            write_status(self._path, content, self._rank)
            self._end = "" if state == "running" else state


@contextmanager
def one_writer(path: Path) -> Iterator[None]:
    """Lock a `status.json` against other processes of this host, while the caller reads it and then writes it.

    The lock is on the folder, since the file itself is replaced. If the folder cannot be locked within `_WAIT_S`
    seconds, the caller goes on without a lock, and the last writer wins.
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
    """Read a `status.json`. It has "state" and "updated"; "started" is a string and "error" a dict, if present.

    Raises:
        OSError: the file is missing, cannot be read, or is not a plain file.
        ValueError: the content is not such a JSON object.
    """
    content = parse_json(read_plain(path))
    kinds = {"state": str, "updated": str, "started": str, "error": dict}
    is_one = isinstance(content, dict) and {"state", "updated"} <= content.keys()
    if not is_one or not all(isinstance(content.get(key, of()), of) for key, of in kinds.items()):
        raise ValueError("no JSON object with a state")
    return content


def write_status(path: Path, content: dict[str, Any], rank: int) -> None:
    """Replace a `status.json`; on a full disk, write a final state over it. The temporary file's name has `rank`."""
    text = json.dumps(redact_tree(content), indent=2) + "\n"
    try:
        write_durably(path, text, by=f".{rank}", on_disk=False)
    except OSError:  # perhaps the disk is full: the old file has room
        if content["state"] == "running":
            raise
        with open(open_plain(path, os.O_RDWR), "r+", encoding="utf-8") as file:
            file.write(text)
            file.truncate()
        with suppress(OSError):
            path.with_name(f"{path.name}.{rank}.tmp").unlink()


def now() -> str:
    """Return the present time, UTC, in the format of `status.json`."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
