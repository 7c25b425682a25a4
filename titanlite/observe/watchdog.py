"""End a run that hangs, and say where it hung.

A collective that one rank never enters, a dead disk or a deadlock leaves a run silent until somebody looks. The
training loop reports progress; a thread watches the time since the last report. When it exceeds the limit, the stack of
every Python thread goes to stderr and to the rank's log, with the step and phase, and the process ends with code 1, so
that the launcher ends the other ranks or restarts them all.

Stacks of a C++ hang end at the Python line that called into it, which names the collective. If native code never gives
the interpreter back, the thread itself cannot run; a timer of `faulthandler`, which needs no interpreter and is pushed
back by the thread each time it runs, then writes the stacks to stderr and ends the process. `os._exit` is used because
a regular exit would wait for the very thread that hangs.
"""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NoReturn

_LAST_WORDS_S = 10.0  # for `on_timeout`, which may hang on the same disk as the run


class Watchdog:
    """Watches one rank. Use as a context manager around the training loop."""

    def __init__(
        self, timeout_s: float, log: Path, rank: int, on_timeout: Callable[[Exception], object] | None = None
    ) -> None:
        """Start watching.

        Args:
            timeout_s: longest time without progress; see `set_timeout`.
            log: the rank's log file, to which the stacks are appended.
            rank: global rank, named in the message.
            on_timeout: called with a TimeoutError before the process ends, as `Status.failed` on rank 0.
        """
        self._log = log.open("a")
        self._rank = rank
        self._on_timeout = on_timeout
        # Time of the last report, limit, step, phase: one tuple, so that the thread sees a change as a whole.
        self._seen: tuple[float, float, int, str] = (time.monotonic(), timeout_s, 0, "start-up")
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Watchdog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def progress(self, step: int, phase: str) -> None:
        """Report that the run moves. Costs nothing; call it as often as there is something to say.

        Args:
            step: the step being made.
            phase: what is begun now, as "data", "step", "validation", "checkpoint".
        """
        self._seen = (time.monotonic(), self._seen[1], step, phase)

    def set_timeout(self, seconds: float) -> None:
        """Set the longest time without progress, from now on; long for the first step, which compiles."""
        _, _, step, phase = self._seen
        self._seen = (time.monotonic(), seconds, step, phase)

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        self._thread.join()
        self._log.close()

    def _watch(self) -> None:
        while True:
            since, timeout_s, step, phase = self._seen
            idle = time.monotonic() - since
            if idle >= timeout_s:
                self._end(idle, step, phase)
            # A copy of faulthandler's timer fires if this thread is kept from running for as long again.
            faulthandler.dump_traceback_later(timeout_s + _LAST_WORDS_S, exit=True, file=sys.__stderr__ or self._log)
            if self._closed.wait(min(1.0, timeout_s - idle)):
                faulthandler.cancel_dump_traceback_later()
                return

    def _end(self, idle: float, step: int, phase: str) -> NoReturn:
        text = f"rank {self._rank} made no progress for {idle:.0f} s at step {step}, in {phase}"
        for file in (sys.__stderr__, self._log):
            with contextlib.suppress(OSError, ValueError):
                if file is not None:
                    file.write(f"watchdog: {text}; stacks of all threads follow\n")
                    file.flush()
                    faulthandler.dump_traceback(file, all_threads=True)
        if self._on_timeout:
            last = threading.Thread(target=self._on_timeout, args=(TimeoutError(text),), daemon=True)
            last.start()
            last.join(_LAST_WORDS_S)
        os._exit(1)
