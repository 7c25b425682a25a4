"""Have each complete checkpoint of a run copied to its mirror (`checkpoint.mirror`), while training goes on.

A process of its own copies each (`mirror_process.py`): hashing, encryption and the back ends' code would take Python's
interpreter from the training step, and a request that hangs can be ended only with its process. Training never waits:
at each step it looks whether the process has ended, and if there is none, starts one for the newest checkpoint that the
mirror lacks and would keep. A failure is one warning until the mirror works again; the copy is tried again with growing
pauses. Only `wait`, at the end of the run, waits, for a limited time.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from titanlite.checkpoint.mirror_store import Claim
from titanlite.checkpoint.publish import complete_steps, step_folder
from titanlite.checkpoint.saved_state import RankedLoss, best_of, losses_of
from titanlite.config.schema import Checkpoint
from titanlite.errors import CheckpointError
from titanlite.json_file import MALFORMED, parse_json
from titanlite.observe.console import Console
from titanlite.observe.observer import Observer
from titanlite.redact import redact_urls

STOP_S = 20.0
"""Seconds from a signal, or a failure, until the wait for the mirror ends: torchrun kills 30 s after a signal."""
_PAUSES_S = (5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0)  # after failures in a row; the last one again and again
_LOOK_S = 0.1  # at the end, between looks at the process
_OUTCOMES = {"is_new", "damaged", "lost", "failed"}  # one of these keys is in what the process says
_ROOT = Path(__file__).parents[2]  # the folder from which the process imports titanlite
_PROCESS = "import sys; sys.path.insert(0, sys.argv[1]); from titanlite.checkpoint.mirror_process import main; main()"


class Mirror(Observer):
    """Copies the checkpoints of the run in `folder`, as the start that `claim` names. Made on rank 0."""

    def __init__(self, config: Checkpoint, folder: Path, claim: Claim, console: Console) -> None:
        self._root, self._console = folder / "checkpoints", console
        own = config.mirror_keep_latest_k
        self._keep = config.keep_latest_k if own is None else own
        self._name = f"the mirror {redact_urls(config.mirror)}"
        self._task = {
            "url": config.mirror,
            "folder": str(folder.resolve()),
            "claim": asdict(claim),
            "keep": self._keep,
            "best_by": config.keep_best,
            "trainer": os.getpid(),
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._asked_at = 0.0
        self._lock = threading.Lock()  # held while the step to copy is chosen, and while checkpoints are deleted
        self._doing: int | None = None  # the step that is being copied; 0: none, the mirror is made this start's
        self._waiting, self._is_due = set[int](), True  # steps that the mirror lacks, and whether to look for them anew
        self._done = set[int]()  # steps that the mirror has, or that are damaged; with 0, the mirror is this start's
        self._old = {*complete_steps(self._root)}  # an earlier start may have copied them
        self._newest = 0  # the newest step ever seen in the folder
        self._best_by, self._losses = config.keep_best, dict[int, RankedLoss | None]()
        self._failures, self._not_before = 0, 0.0
        self._is_lost = False  # the mirror is another's
        self._told = set[str]()  # of what is told once

    @contextmanager
    def held(self) -> Generator[int | None]:
        """Yield the step being copied; no copy begins inside the block, where checkpoints are deleted."""
        with self._lock:
            yield self._doing
            self._is_due = True
        waited = self._waiting - self._done - self._old
        if lost := {step for step in waited if not step_folder(self._root, step).is_dir()}:
            why = "were deleted here before they were copied: saves are faster than the store"
            self._warn_once("lost", f"{_folders(lost)} {why}")

    def progress(self, step: int) -> None:
        """Look for answers, and begin the next copy. Never waits."""
        self._turn()

    def wait(self, limit_s: float) -> None:
        """Wait until the mirror has what it lacks, at most `limit_s` seconds or until a signal. End the process."""
        self._is_due, self._not_before, end = True, 0.0, time.monotonic() + limit_s
        signals, numbers = list[int](), (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
        taken = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores SIGHUP
        before = [signal.signal(number, lambda got, _: signals.append(got)) for number in taken]
        try:
            self._turn()
            if self._waiting and not self._is_lost and limit_s > 0:
                names = _folders(self._waiting)
                what = f"waits at most {limit_s:.0f} s until {self._name} has {names}"
                if self._waiting <= self._old:  # of an earlier start, which has probably copied them
                    what = f"looks whether {self._name} has {names}, and copies the rest in at most {limit_s:.0f} s"
                self._console.notice(what)
            while self._waiting and not (self._is_lost or signals) and time.monotonic() < end:
                time.sleep(_LOOK_S)
                self._turn()
            if self._waiting and not self._is_lost:
                names = _folders(self._waiting)
                self._console.warning(f"{self._name} lacks {names}: the next start of the run copies them")
        finally:
            self._kill()
            for number, handler in zip(taken, before, strict=True):
                signal.signal(number, handler)

    def _turn(self) -> None:
        if (process := self._process) is not None and (code := process.poll()) is not None:
            assert process.stdout is not None  # noqa: S101
            with process.stdout as said:
                last_line = said.read().rpartition(b"\n")[2]  # Python's start may print, too
            self._process, outcome = None, {"failed": f"its process ended with {code}"}
            with suppress(*MALFORMED):
                read = parse_json(last_line)
                outcome = read if read.keys() & _OUTCOMES else outcome
            self._take(outcome)
        if self._is_lost or time.monotonic() < self._not_before or not self._lock.acquire(blocking=False):
            return
        try:
            if self._is_due:
                self._waiting, self._is_due = self._lacks(), False
            if self._process is None and (self._waiting or 0 not in self._done):
                self._start_process(max(self._waiting, default=0))  # the newest first: it is the one to go on from
        except (CheckpointError, OSError) as error:  # the run's folder cannot be read, or the process not started
            self._fail(" ".join(str(error).split()))
        finally:
            self._lock.release()

    def _lacks(self) -> set[int]:
        """Return the steps that the folder has and the mirror would keep, but does not have."""
        steps = complete_steps(self._root)
        self._newest = max(self._newest, *steps, 0)
        kept = {*steps[-self._keep :]}  # 0: all
        if self._keep and self._best_by:
            losses_of(self._root, self._best_by, self._losses)
            kept |= {*steps} & {best_of(self._losses)}
        return kept - self._done

    def _start_process(self, step: int) -> None:
        task = self._task | {"step": step, "newest": self._newest}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROCESS, str(_ROOT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that Ctrl-C reaches training alone
        )
        assert self._process.stdin is not None  # noqa: S101
        self._doing, self._asked_at = step, time.monotonic()
        with suppress(BrokenPipeError), self._process.stdin as task_of:  # if it has ended, `_turn` finds that
            task_of.write(json.dumps(task).encode())

    def _take(self, outcome: Mapping[str, Any]) -> None:
        step, self._doing, self._is_due = self._doing or 0, None, True
        if why := outcome.get("failed"):
            self._fail(why)
        elif why := outcome.get("lost"):
            self._is_lost = True
            self._console.warning(f"{self._name} takes no more checkpoints of this start: {why}")
        else:
            self._has_worked(step, outcome)

    def _has_worked(self, step: int, outcome: Mapping[str, Any]) -> None:
        self._done |= {0, step}
        if self._failures:
            self._console.notice(f"{self._name} works again")
        self._failures = 0
        if why := outcome.get("damaged"):
            self._console.warning(f"{_folders({step})} is not copied to {self._name}: {why}")
        elif outcome["is_new"]:
            took = time.monotonic() - self._asked_at
            self._console.notice(f"{self._name} has {_folders({step})}, after {took:.1f} s")
        if why := outcome.get("kept"):
            self._warn_once("kept", f"does not delete what it need not keep: {why}")

    def _fail(self, why: str) -> None:
        pause = _PAUSES_S[min(self._failures, len(_PAUSES_S) - 1)]
        self._is_due, self._not_before = True, time.monotonic() + pause
        self._failures += 1
        if self._failures == 1:
            but = "training goes on, and the copy is tried again"
            self._console.warning(f"{self._name} takes no checkpoints; {but}. {why}")

    def _warn_once(self, of: str, text: str) -> None:
        if of not in self._told:
            self._told.add(of)
            self._console.warning(f"{self._name}: {text}. Told once")

    def _kill(self) -> None:
        """End the process. What it was copying has no manifest."""
        if (process := self._process) is not None:
            process.kill()
            with suppress(subprocess.TimeoutExpired):  # even a killed process may wait for a dead disk
                process.wait(1.0)
            assert process.stdout is not None  # noqa: S101
            process.stdout.close()
            self._process = None


def _folders(steps: set[int]) -> str:
    return ", ".join(step_folder(Path(), step).name for step in sorted(steps))
