"""Stopping together: a signal sets a flag, the step shares it, and all ranks save and leave after the same step.

The handler does nothing but note the signal and say so. It may arrive at one rank or at all of them, in a step, in
validation or while compiling; the flag travels with the step's own reduction, so that no rank waits for another that
has left.

One request may arrive more than once: Slurm signals every process of a job, and torchrun passes on what it receives.
"""

import contextlib
import os
import signal
import time
from types import FrameType

_ONE_REQUEST_S = 1.0


class StopSignals:
    """Notes SIGTERM, SIGINT and SIGUSR1 while it is entered; a second request ends the process at once.

    Args:
        saves: whether a checkpoint is saved before the run stops; that is what the user is told.
    """

    def __init__(self, saves: bool) -> None:
        self._does = "saving and stopping" if saves else "stopping, and nothing is saved (checkpoint.enable = false),"
        self.received: str | None = None  # name of the first signal
        self._at = 0.0
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopSignals":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # under nohup
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self._at = signal.Signals(number).name, time.monotonic()
            if os.environ.get("LOCAL_RANK", "0") == "0":
                with contextlib.suppress(OSError):  # the terminal that hung up is the one to tell
                    os.write(2, f"{self.received}: {self._does} after this step; again ends at once\n".encode())
        elif time.monotonic() - self._at > _ONE_REQUEST_S:
            os._exit(128 + number)
