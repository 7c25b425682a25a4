"""Run a process beside each rank, which reports the rank's end where the rank itself cannot.

A crash in native code, a library that aborts and a host without memory end a rank before it can say so; native code
that never gives the interpreter back keeps even the watchdog's thread from running. Then this process ends the rank,
if it is still there, and writes in `status.json` that the run has failed.

The watchdog tells it every second that it runs, and how long it may fail to. Time in which the rank is stopped, as when
a scheduler suspends a job, does not count: a timer inside the rank, such as `faulthandler` has, could not know.
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
_STACKS_S = 10.0  # for the rank to write them to a disk that may be what it hangs on
_CLOSED = b"closed"


class Guard:
    """Start the process beside this rank. It speaks of the run that is running at the first limit that it is given."""

    def __init__(self, status: Path, rank: int) -> None:
        import subprocess  # which the process itself has no use for

        start = f"import sys; sys.path.append({str(Path(__file__).parents[2])!r}); from titanlite.observe import guard"
        self._process = subprocess.Popen(  # a session of its own: Ctrl-C is for the rank
            [sys.executable, "-SPc", f"{start}; guard.main()", str(status), str(rank), str(os.getpid())],
            stdin=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdin is not None  # noqa: S101
        self._pipe = self._process.stdin
        os.set_blocking(self._pipe.fileno(), False)
        if not faulthandler.is_enabled() and sys.__stderr__ is not None:
            faulthandler.enable(sys.__stderr__)  # for the stacks of a rank that it ends

    def runs(self, limit_s: float) -> None:
        """Say that this rank runs, and how long it may fail to say so, while it is not stopped, before it is ended."""
        with suppress(OSError, ValueError):  # it is gone, has not read for long, or has ended
            self._pipe.write(f"{limit_s}\n".encode())

    def close(self) -> None:
        """Let it end without a word: `status.json` has the end."""
        with suppress(OSError, ValueError):
            self._pipe.write(_CLOSED)
        self._pipe.close()
        self._process.wait()


def main() -> None:
    """Watch a rank until it ends; the process of `Guard`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # it ends with the rank
    status, rank, process = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    limit_s, idle_s = math.inf, 0.0
    run: dict[str, Any] = {}
    while True:
        if select.select([0], [], [], _LOOK_S)[0]:  # what the rank has said counts, though it may be gone by now
            if not (received := os.read(0, 1 << 16)):
                break
            if received.endswith(_CLOSED):
                return
            limit_s, idle_s = float(received.split()[-1]), 0.0
            run = run or _run_of(status)
        elif os.getppid() != process:
            break
        elif not _is_stopped(process):
            idle_s += _LOOK_S
        if idle_s > limit_s:
            text = f"rank {rank} made no progress for {idle_s:.0f} s, in native code that keeps the interpreter"
            _say_failed(status, run, rank, "TimeoutError", text)
            _end_process(process, text)
            return
    text = f"rank {rank} (process {process}) ended without a word: it was killed, for want of memory say, or crashed"
    _say_failed(status, run, rank, "ChildProcessError", text)


def _run_of(status: Path) -> dict[str, Any]:
    """Return what identifies the run; nothing if the file does not say."""
    with suppress(OSError, ValueError):
        content = read_status(status)
        return {key: content.get(key) for key in ("started", "host", "pid")}
    return {}


def _is_stopped(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:  # it has just ended, or this is no Linux
        return False


def _say_failed(status: Path, run: dict[str, Any], rank: int, kind: str, message: str) -> None:
    """Write that the run failed, unless its end is written (not only that another rank did) or another has begun."""
    with suppress(OSError, ValueError), one_writer(status):
        content = read_status(status)
        is_open = content["state"] == "running" or content.get("error", {}).get("type") == "ConnectionError"
        if is_open and run.items() <= content.items() and run:
            error = {"type": kind, "message": message, "rank": rank}
            write_status(status, content | {"state": "failed", "error": error, "updated": now()}, rank)


def _end_process(process: int, text: str) -> None:
    with suppress(OSError):
        os.write(2, f"watchdog: {text}; stacks of all threads follow\n".encode())
    for number in (signal.SIGABRT, signal.SIGKILL):  # faulthandler writes the stacks at the first
        if os.getppid() == process:
            os.kill(process, number)
            end = time.monotonic() + _STACKS_S
            while os.getppid() == process and time.monotonic() < end:
                time.sleep(0.05)
