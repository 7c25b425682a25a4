"""Run a guard process beside each rank. It reports the end of the rank when the rank itself cannot.

A crash in native code, an abort in a library or a lack of memory ends a rank before it can report anything. Native code
that never releases the interpreter lock even keeps the watchdog's thread from running. The guard process then kills the
rank if it still exists, and writes to `status.json` that the run has failed.

The watchdog sends the guard process a sign of life every second, with the longest time to wait for the next. Time in
which the rank is suspended, as by a scheduler, does not count; a timer inside the rank, such as that of `faulthandler`,
could not leave it out.
"""

import faulthandler
import math
import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from titanlite.observe.status import now, one_writer, read_status, write_status

_LOOK_S = 1.0
_STACKS_S = 10.0  # time for the rank to write its stacks, perhaps to the disk on which it hangs
_CLOSED = b"closed"


class Guard:
    """Starts this rank's guard process. It reports on the run that `status.json` names at the first call of `runs`."""

    def __init__(self, status: Path, rank: int) -> None:
        import subprocess  # imported here, as the guard process does not need it

        start = f"import sys; sys.path.append({str(Path(__file__).parents[2])!r}); from titanlite.observe import guard"
        self._process = subprocess.Popen(  # in a new session, so that Ctrl-C reaches the rank alone
            [sys.executable, "-SPc", f"{start}; guard.main()", str(status), str(rank), str(os.getpid())],
            stdin=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdin is not None  # noqa: S101
        self._pipe = self._process.stdin
        os.set_blocking(self._pipe.fileno(), False)
        if not faulthandler.is_enabled() and sys.__stderr__ is not None:
            faulthandler.enable(sys.__stderr__)  # prints the stacks at the guard's SIGABRT

    def runs(self, limit_s: float, step: int = 0) -> None:
        """Report to the guard process that this rank is alive, and has done `step`. It kills a rank that is silent for
        `limit_s` seconds."""
        with suppress(OSError, ValueError):  # the guard process has ended, or does not read
            self._pipe.write(f"{limit_s} {step}\n".encode())

    def close(self) -> None:
        """Make the guard process exit without a report, because `status.json` records the end of the run."""
        with suppress(OSError, ValueError):
            self._pipe.write(_CLOSED)
        self._pipe.close()
        self._process.wait()


def main() -> None:
    """Watch a rank until it ends, in the guard process. sys.argv: path of status.json, rank, the rank's process id."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # exit only when the rank does
    status, rank, process = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    limit_s, idle_s, step = math.inf, 0.0, 0
    run: dict[str, Any] = {}
    while True:
        if select.select([0], [], [], _LOOK_S)[0]:  # read the rank's messages, even if it has ended since
            if not (received := os.read(0, 1 << 16)):
                break
            if received.endswith(_CLOSED):
                return
            *_, limit, newest = received.split()
            limit_s, idle_s, step = float(limit), 0.0, int(newest)
            run = run or _run_of(status)
        elif os.getppid() != process:
            break
        elif not _is_stopped(process):
            idle_s += _LOOK_S
        if idle_s > limit_s:
            text = f"rank {rank} made no progress for {idle_s:.0f} s, in native code that keeps the interpreter"
            _say_failed(status, run, rank, "TimeoutError", text, step)
            _end_process(process, text)
            return
    text = f"rank {rank} (process {process}) ended without a word: it was killed, for want of memory say, or crashed"
    _say_failed(status, run, rank, "ChildProcessError", text, step)


def _run_of(status: Path) -> dict[str, Any]:
    """Return start time, host and process id, which identify a run in its status.json; {} if it cannot be read."""
    with suppress(OSError, ValueError):
        content = read_status(status)
        return {key: content.get(key) for key in ("started", "host", "pid")}
    return {}


def _is_stopped(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:  # the process has just ended, or the system is not Linux
        return False


def _say_failed(status: Path, run: dict[str, Any], rank: int, kind: str, message: str, step: int = 0) -> None:
    """Write the failure to status.json, unless this file is of another run, or already records the end of this run.

    `step`: the newest one done; 0: as the file says. A recorded ConnectionError is replaced, since a rank only fails
    with it after another rank has ended.
    """
    with suppress(OSError, ValueError), one_writer(status):
        content = read_status(status)
        is_open = content["state"] == "running" or content.get("error", {}).get("type") == "ConnectionError"
        if is_open and run.items() <= content.items() and run:
            error = {"type": kind, "message": message, "rank": rank}
            newest = {"step": step} if step else {}  # of the last seconds: the file may be ten seconds old
            failed = {"state": "failed", **newest, "error": error, "updated": now()}
            write_status(status, content | failed, rank)


def _end_process(process: int, text: str) -> None:
    with suppress(OSError):
        os.write(2, f"watchdog: {text}; stacks of all threads follow\n".encode())
    for number in (signal.SIGABRT, signal.SIGKILL):  # at SIGABRT faulthandler writes the stacks
        if os.getppid() == process:
            os.kill(process, number)
            end = time.monotonic() + _STACKS_S
            while os.getppid() == process and time.monotonic() < end:
                time.sleep(0.05)
