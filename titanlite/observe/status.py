"""status.json: whether a run is running, finished, stopped or failed, for schedulers, scripts and people.

The file is replaced as a whole, so a reader never sees half of it; only where a full disk has no room for another, an
end is written over what is there. Rank 0 writes it; a rank that fails says so itself, for rank 0 may then wait for it
until it is killed. Processes that are killed outright cannot say so: `running` with an old `updated` (it is renewed
every ten seconds while steps are made) means that they are gone.
"""

import json
import os
import socket
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from titanlite.errors import TitanliteError
from titanlite.redact import redact_tree

_RENEW_S = 10.0  # seldom enough to cost nothing on a network disk


class Status:
    """The state of this run. On ranks other than 0 all methods but `failed` and `stalled` do nothing."""

    def __init__(self, path: Path, step: int = 0, rank: int = 0) -> None:
        """Write that the run is running.

        Args:
            path: the file; its folder exists.
            step: the step from which training starts.
            rank: this process's.
        """
        self._path, self._rank, self._written = path, rank, 0.0
        self.step = step  # the last one done
        self.stall: str | None = None  # where each rank was when this one last asked, if there was no step since
        self._started = _now()
        self._has_stopped = False
        self._lock = threading.Lock()  # a second signal is noted by a thread of its own
        if rank == 0:
            self._write("running")

    def progress(self, step: int) -> None:
        """Note that `step` is done. Cheap: the file is written every ten seconds at most."""
        self.step, self.stall = step, None
        if self._rank == 0 and time.monotonic() - self._written >= _RENEW_S and not self._another_ended():
            self._write("running")

    def stalled(self, text: str) -> None:
        """Note that no step is made, and where each rank is: a run that NCCL then ends has no other last words."""
        self.stall = text
        if not self._another_ended():
            self._write("running", stalled=text)

    def finished(self, step: int) -> None:
        """Write that all steps are done."""
        self.step = step
        if self._rank == 0:
            self._write("finished")

    def stopped(self, step: int, by: str) -> None:
        """Write that the run was asked to end early and did so cleanly.

        Args:
            step: last step done; if checkpoints are on, it is saved, unless a second signal ended the run at once.
            by: the cause, as "SIGTERM" or "job.stop_after".
        """
        self.step = step
        if self._rank == 0:
            self._write("stopped", by=by)

    def failed(self, error: BaseException) -> None:
        """Write that the run ended with an error, after the last step noted.

        What has been said of another rank stays: this one mostly fails because that one is gone. A mistake is all
        ranks', and rank 0 speaks for them. So does it if it has been stopped, and fails because others were too.
        """
        if self._another_ended() and not (self._rank == 0 and isinstance(error, TitanliteError)):
            return
        self._write("failed", error={"type": type(error).__name__, "message": str(error), "rank": self._rank})

    def _another_ended(self) -> bool:
        """Whether another rank failed, or rank 0 was stopped."""
        try:
            said = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return False
        # What an earlier process of this folder said is older, or rank 0 has replaced it by now.
        if said["updated"] < self._started:
            return False
        if said["state"] == "failed":
            return said["error"].get("rank") != self._rank
        return said["state"] == "stopped" and self._rank != 0

    def _write(self, state: str, **more: object) -> None:
        self._written = time.monotonic()
        content = {
            "state": state,
            "step": self.step,
            **more,
            "started": self._started,
            "updated": _now(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        beside = self._path.with_name(f"{self._path.name}.{self._rank}.tmp")
        with self._lock:
            if self._has_stopped and state in ("running", "failed"):
                return
            self._has_stopped |= state == "stopped"
            text = json.dumps(redact_tree(content), indent=2) + "\n"
            try:
                beside.write_text(text)
                beside.replace(self._path)
            except OSError:  # of a full disk, which may be what the run ends of: what stands there has room
                if state == "running":
                    raise
                with self._path.open("r+") as file:
                    file.write(text)
                    file.truncate()
                with suppress(OSError):
                    beside.unlink()


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
