"""End a run that hangs, and report where it hung.

A collective that one rank never enters, a dead disk or a deadlock makes a run hang without a message. The training loop
reports its progress, and a watchdog thread watches the time since the last report. When this time exceeds the limit,
the thread writes the stacks of all Python threads, with step and phase, to stderr and to the rank's log. Then it ends
the process with code 1, so that the launcher ends or restarts all ranks.

After half of the limit, unless steps take that long, all ranks report where they are (`stall_report.py`).

The watchdog's clock stops while the process is suspended; those of NCCL and gloo do not, so their timeouts are not
used. A job that a scheduler suspends for an hour does not hang, but the timers of a library would expire.

If C++ code hangs, the stack ends at the Python line that called it, which names the collective. If native code never
releases the interpreter lock, the watchdog thread cannot run either. Then the guard process (`guard.py`) receives no
sign of life and kills the rank. The watchdog uses `os._exit`, as a regular exit would wait for the thread that hangs.
"""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn

from titanlite.durable import append_plain
from titanlite.observe.guard import Guard
from titanlite.observe.stall_report import StallReport, answer_of, innermost_line
from titanlite.observe.status import Status
from titanlite.redact import redact

STALL_REPORT_SHARE = 0.5
"""Share of the limit after which ranks report where they are: early enough for all answers before the run ends."""
_LOOK_S = 1.0
_LAST_WORDS_S = 10.0  # for writing the status, perhaps to the disk on which the run hangs


class _Seen(NamedTuple):
    """The last progress report and the limit, in one tuple, so that the watchdog thread reads both consistently."""

    since: float  # time of the last report
    limited: float  # time at which the limit was set
    timeout_s: float
    step: int
    phase: str


class _Clock:
    """Measures the time since the last progress report, without intervals in which the process was suspended (SIGSTOP).

    Only the watchdog thread calls it, at each check. When a suspended process continues, it may report progress before
    that thread has measured how long it was suspended.
    """

    def __init__(self, seen: _Seen, now: float) -> None:
        self._last, self._looked = seen, now
        self._still_s = 0.0  # seconds of suspension since the last report
        self.longest_s = 0.0  # longest time between two reports under this limit; may include one interval of checks

    def idle_s(self, seen: _Seen, now: float) -> float:
        """Return the time from the last report, in `seen`, until `now`, without suspensions of the process."""
        # If this thread had to wait for more than twice its interval, the process was suspended.
        stopped_s = max(0.0, now - self._looked - 2 * _LOOK_S)
        is_before = now - seen.since < stopped_s  # the suspension preceded the last report
        if seen.since != self._last.since:
            spent_s = seen.since - self._last.since - self._still_s - is_before * stopped_s
            self.longest_s, self._still_s = max(self.longest_s, spent_s), 0.0
        if seen.limited != self._last.limited:
            self.longest_s = 0.0
        self._still_s += 0.0 if is_before else stopped_s
        self._last, self._looked = seen, now
        return now - seen.since - self._still_s


class Watchdog:
    """Ends the process of a rank that makes no progress. Use as a context manager around the training loop.

    Before it ends the process it calls `is_excused` with the limit in seconds. If the result is True, the process
    continues, as another rank waits for data in preparation. `guard` ends the process if the watchdog cannot.
    """

    def __init__(
        self,
        timeout_s: float,
        log: Path,
        rank: int,
        status: Status | None = None,
        stall_report: StallReport | None = None,
        guard: Guard | None = None,
        is_excused: Callable[[float], bool] | None = None,
    ) -> None:
        self._log, self._rank, self._status = append_plain(log), rank, status
        self._stall_report, self._guard, self._is_excused = stall_report, guard, is_excused
        self._main = threading.get_ident()
        now = time.monotonic()
        self._seen = _Seen(now, now, timeout_s, 0, "start-up")
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Watchdog":
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()
        self._log.close()

    def progress(self, step: int, phase: str) -> None:
        """Report progress: a phase of a step begins, such as "data". Takes next to no time."""
        self._seen = self._seen._replace(since=time.monotonic(), step=step, phase=phase)

    def set_timeout(self, seconds: float) -> None:
        """Set the longest time without progress. After half of it, but no less than twice the longest time between two
        reports so far, ranks report where they are.
        """
        now = time.monotonic()
        self._seen = self._seen._replace(since=now, limited=now, timeout_s=seconds)

    def _watch(self) -> None:
        asked_since, clock = 0.0, _Clock(self._seen, time.monotonic())
        while True:
            seen = self._seen
            timeout_s, idle = seen.timeout_s, clock.idle_s(seen, time.monotonic())
            ask_s = STALL_REPORT_SHARE * timeout_s
            if idle >= timeout_s:
                if self._is_excused is None or not self._is_excused(timeout_s):
                    self._end(idle, seen.step, seen.phase)
                self._seen = self._seen._replace(since=time.monotonic())
                continue
            if self._stall_report and asked_since != seen.since and idle >= max(ask_s, 2 * clock.longest_s):
                asked_since = seen.since
                threading.Thread(target=self._ask, args=(self._stall_report, seen, idle), daemon=True).start()
            if self._guard:
                self._guard.runs(timeout_s + _LAST_WORDS_S, self._status.step if self._status else 0)
            if self._closed.wait(min(_LOOK_S, ask_s / 8, timeout_s - idle)):
                return

    def _ask(self, stall_report: StallReport, seen: _Seen, idle: float) -> None:
        line = innermost_line(sys._current_frames().get(self._main))
        with contextlib.suppress(RuntimeError, OSError):  # the store is gone, or the disk is full
            places = stall_report.hold(
                f"step {seen.step}, in {seen.phase}, {line}", wait_s=STALL_REPORT_SHARE * seen.timeout_s / 4
            )
            if places and self._seen.since == seen.since:
                start = f"rank {self._rank} made no progress for {idle:.0f} s at step {seen.step}"
                text = f"{start}; where each rank is:\n{places}"
                self._write(text)
                if self._status:
                    self._status.stalled(text)

    def _write(self, text: str, stacks: bool = False) -> None:
        """Write to stderr and to the rank's log, to each even if the other fails. `stacks`: add all threads' stacks."""
        for file in (sys.__stderr__, self._log):
            with contextlib.suppress(OSError, ValueError):
                if file is not None:
                    file.write(redact(f"watchdog: {text}\n"))
                    file.flush()
                    if stacks:
                        faulthandler.dump_traceback(file, all_threads=True)

    def _end(self, idle: float, step: int, phase: str) -> NoReturn:
        text = f"rank {self._rank} made no progress for {idle:.0f} s at step {step}, in {phase}"
        self._write(f"{text}; stacks of all threads follow", stacks=True)
        if self._status:
            answer_of(partial(self._status.failed, TimeoutError(text)), _LAST_WORDS_S)
        os._exit(1)
