"""Stop all ranks after the same step: a signal sets a flag, which the step's reduction shares.

Before the steps there is nothing to save, and a signal raises KeyboardInterrupt, so that cleanup runs. A process that
waits for other ranks in native code may never handle the signal. A thread, which gets it, too, then ends the process.

During steps the handler notes the signal and reports it. The next step carries the flag, and is read while one more
step runs: at most two steps follow the current one. The signal may arrive at any ranks, in a step, in validation or
while compiling. A rank that waits for data that is still being made learns of a signal to another rank by
`tell_others`, and takes part with padding in a step that all ranks discard (`feed.py`).

One request may arrive several times: Slurm signals every process of a job, and torchrun passes signals on. The end of
the launcher counts as SIGTERM.
"""

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from titanlite.observe.stall_report import answer_of
from titanlite.preflight.launcher import Launcher

_ONE_REQUEST_S = 1.0  # signals within this time are one request: launchers repeat them
_TAKEN_UP_S = 5.0  # limit for the main thread; torchrun kills after 30 s
_CLOSED = 0  # ends the thread; no signal has this number
_LOOK_S = 1.0  # between checks of the launcher
_LAUNCHER_GONE = "the end of its launcher (job.stop_with_launcher)"


class StopSignals:
    """Notes SIGTERM, SIGINT, SIGUSR1 and SIGHUP within its context, and the end of the launcher as a SIGTERM.

    Before `begin_steps` a signal raises KeyboardInterrupt with its number. Afterwards its name is in `received`, and a
    second request calls `last_words` and ends the process at once. `saves`: whether a stop saves a checkpoint.
    """

    def __init__(self, saves: bool, last_words: Callable[[], object], launcher: Launcher | None = None) -> None:
        self._does = "will save and stop" if saves else "will stop without saving (checkpoint.enable = false)"
        self._last_words = last_words
        self._launcher, self._launcher_is_gone = launcher, False
        self.tell_others: Callable[[], object] = lambda: None  # called in a thread at the first signal
        self.received: str | None = None  # name of the first signal, or the launcher's end
        self.received_at = 0.0  # when it came, by time.monotonic()
        self.is_in_steps = False
        self._before: dict[int, object] = {}
        self._taken_up = threading.Event()
        self._watcher: threading.Thread | None = None

    def __enter__(self) -> "StopSignals":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # under nohup
            self._before[number] = signal.signal(number, self._note)
        global _entered
        _entered = self
        self._numbers, self._numbers_in = os.pipe()
        os.set_blocking(self._numbers_in, False)
        signal.set_wakeup_fd(self._numbers_in, warn_on_full_buffer=False)
        self._watcher = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def begin_steps(self) -> None:
        """From now on, let a signal stop the run after a step, and not at once."""
        self.is_in_steps = True

    def close(self) -> None:
        """End the thread, and restore the earlier handlers."""
        global _entered
        _entered = None
        if self._watcher is not None:
            signal.set_wakeup_fd(-1)
            os.write(self._numbers_in, bytes([_CLOSED]))
            self._watcher.join()
            self._watcher = None
            os.close(self._numbers)
            os.close(self._numbers_in)
        self._restore()

    def _restore(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)  # type: ignore[arg-type]

    @property
    def of_another(self) -> str:
        """Return what stopped the run if this rank received no signal: its launcher's end, or another rank's signal."""
        return _LAUNCHER_GONE if self._launcher and self._launcher.is_gone() else "a signal to another rank"

    @property
    def numbers(self) -> frozenset[int]:
        """Return the numbers of the signals that this object handles."""
        return frozenset(self._before)

    def forget(self) -> None:
        """Restore the earlier handlers in a forked child, which must not note signals for this process."""
        signal.set_wakeup_fd(-1)
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._taken_up.set()
        if self.received is None:
            self.received, self.received_at = self._name(number), time.monotonic()
            if not self.is_in_steps:
                raise KeyboardInterrupt(number)
            if os.environ.get("LOCAL_RANK", "0") == "0":
                effect = f"{self._does} at most two steps after the one at hand"
                again = "a second signal, a second or more later, ends the run at once, without saving"
                with contextlib.suppress(OSError):  # the terminal may have hung up
                    os.write(2, f"{self.received}: {effect}; {again}\n".encode())

    def _watch(self) -> None:
        """Read signals; end the process at once if the main thread does not stop or a request is repeated."""
        first: float | None = None
        while (number := self._next()) != _CLOSED:
            if number not in self._before:
                continue
            is_again = first is not None and time.monotonic() - first > _ONE_REQUEST_S
            if first is None:
                threading.Thread(target=self.tell_others, daemon=True).start()  # it may block
            first = time.monotonic() if first is None else first
            if is_again or not (self.is_in_steps or self._taken_up.wait(_TAKEN_UP_S)):
                self.received = self._name(number)
                answer_of(self._last_words, _TAKEN_UP_S)  # with a limit, as the disk may hang
                os._exit(128 + number)

    def _next(self) -> int:
        """Wait for the next signal and return its number; send SIGTERM to this process if the launcher is gone."""
        while self._launcher and not self.received and not select.select([self._numbers], [], [], _LOOK_S)[0]:
            if self._launcher.is_gone():
                self._launcher_is_gone, self._launcher = True, None
                os.kill(os.getpid(), signal.SIGTERM)
        return os.read(self._numbers, 1)[0]

    def _name(self, number: int) -> str:
        return _LAUNCHER_GONE if self._launcher_is_gone else signal.Signals(number).name


_entered: StopSignals | None = None


def _hold() -> None:
    """Block signals before a fork until the child has restored its handlers."""
    if _entered is not None:
        signal.pthread_sigmask(signal.SIG_BLOCK, _entered.numbers)


def _release_after_fork() -> None:
    if _entered is not None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _entered.numbers)


def _release_in_child() -> None:
    if _entered is not None:
        numbers = _entered.numbers
        _entered.forget()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


os.register_at_fork(before=_hold, after_in_parent=_release_after_fork, after_in_child=_release_in_child)
