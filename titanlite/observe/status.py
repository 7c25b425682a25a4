"""status.json: whether a run is running, finished, stopped or failed, for schedulers, scripts and people.

The file is replaced as a whole, so a reader never sees half of it. A process that is killed outright cannot say so:
`running` with an old `updated` (it is renewed every ten seconds while steps are made) means that it is gone.
"""

import json
import os
import socket
import time
from datetime import UTC, datetime
from pathlib import Path

from titanlite.redact import redact

_RENEW_S = 10.0  # seldom enough to cost nothing on a network disk


class Status:
    """The state of this run. Rank 0 owns it."""

    def __init__(self, path: Path, step: int = 0) -> None:
        """Write that the run is running.

        Args:
            path: the file; its folder exists.
            step: the step from which training starts.
        """
        self._path = path
        self._step = step
        self._started = _now()
        self._write("running")

    def progress(self, step: int) -> None:
        """Note that `step` is done. Cheap: the file is written every ten seconds at most."""
        self._step = step
        if time.monotonic() - self._written >= _RENEW_S:
            self._write("running")

    def finished(self, step: int) -> None:
        """Write that all steps are done."""
        self._step = step
        self._write("finished")

    def stopped(self, step: int, by: str) -> None:
        """Write that the run was asked to end early and did so cleanly.

        Args:
            step: last step done, and saved if checkpoints are on.
            by: the cause, as "SIGTERM" or "job.stop_after".
        """
        self._step = step
        self._write("stopped", by=by)

    def failed(self, error: BaseException) -> None:
        """Write that the run ended with an error, after the last step noted."""
        self._write("failed", error={"type": type(error).__name__, "message": redact(str(error))})

    def _write(self, state: str, **more: object) -> None:
        self._written = time.monotonic()
        content = {
            "state": state,
            "step": self._step,
            **more,
            "started": self._started,
            "updated": _now(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        beside = self._path.with_name(self._path.name + ".tmp")
        beside.write_text(json.dumps(content, indent=2) + "\n")
        beside.replace(self._path)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
