"""Have each complete checkpoint of a run copied to its mirror (`checkpoint.mirror`), while training goes on.

A process of its own copies (`mirror_process.py`): hashing, encryption and the back ends' Python code would take the
interpreter from the training step, and a request that hangs can be ended only with its process. Training talks to it
through pipes and never waits: at each step it looks for an answer and, if the process is idle, asks for the newest
checkpoint that the mirror lacks and would keep. A failure is one warning until the mirror works again; the copy is
tried again with growing pauses. Only `wait`, at the end of the run, waits, for a limited time.
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
from titanlite.checkpoint.saved_state import best_of, losses_of
from titanlite.config.schema import Checkpoint
from titanlite.errors import CheckpointError
from titanlite.json_file import parse_json
from titanlite.observe.console import Console
from titanlite.observe.observer import Observer
from titanlite.redact import redact_urls

STOP_S = 20.0
"""Seconds from a signal, or a failure, until the wait for the mirror ends: torchrun kills 30 s after a signal."""
_PAUSES_S = (5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0)  # after failures in a row; the last one again and again
_LOOK_S = 0.1  # at the end, between looks at the process
_ROOT = Path(__file__).parents[2]  # the folder from which the process imports titanlite
_PROCESS = "import sys; sys.path.insert(0, sys.argv[1]); from titanlite.checkpoint.mirror_process import main; main()"


class Mirror(Observer):
    """Copies the checkpoints of the run in `folder`, as the start that `claim` names. Made on rank 0."""

    def __init__(self, config: Checkpoint, folder: Path, claim: Claim, console: Console) -> None:
        self._root, self._console, self._best_by = folder / "checkpoints", console, config.keep_best
        own = config.mirror_keep_latest_k
        self._keep = config.keep_latest_k if own is None else own
        self._name = f"the mirror {redact_urls(config.mirror)}"
        self._work = {
            "url": config.mirror,
            "folder": str(folder.resolve()),
            "claim": asdict(claim),
            "may_claim": True,  # until it has: another process must not take the mirror back from a later start
            "keep": self._keep,
            "best_by": config.keep_best,
            "trainer": os.getpid(),
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._heard = b""  # start of an incomplete report
        self._asked_at = 0.0
        self._lock = threading.Lock()  # held while the step to copy is chosen, and while checkpoints are deleted
        self._doing: int | None = None  # the step that is being copied; 0: none, the mirror is made this start's
        self._waiting, self._is_due = set[int](), True  # steps that the mirror lacks, and whether to look for them anew
        self._done = set[int]()  # steps that the mirror has, or that are damaged
        self._old = {*complete_steps(self._root)}  # an earlier start may have copied them
        self._losses: dict[int, float | None] = {}  # by step, of checkpoints of the folder
        self._failures, self._not_before = 0, 0.0
        self._is_lost = self._has_told = False  # the mirror; and that a checkpoint was deleted before it was copied

    @contextmanager
    def held(self) -> Generator[int | None]:
        """Yield the step being copied; no copy begins inside the block, where checkpoints are deleted."""
        with self._lock:
            yield self._doing
            self._is_due = True
        waited = self._waiting - self._done - self._old
        lost = {step for step in waited if not step_folder(self._root, step).is_dir()}
        if lost and not self._has_told:
            self._has_told = True
            why = "were deleted here before they were copied: saves are faster than the store. Told once"
            self._console.warning(f"{self._name}: {_names_of_steps(lost)} {why}")

    def progress(self, step: int) -> None:
        """Look for answers, and begin the next copy. Never waits."""
        self._turn()

    def wait(self, limit_s: float) -> None:
        """Wait until the mirror has what it lacks, at most `limit_s` seconds or until a signal. End the process."""
        self._is_due, self._not_before, end = True, 0.0, time.monotonic() + limit_s
        signals, before = list[int](), dict[int, Any]()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                before[number] = signal.signal(number, lambda got, _: signals.append(got))
        try:
            self._turn()
            if self._waiting and not self._is_lost and limit_s > 0:
                names = _names_of_steps(self._waiting)
                self._console.notice(f"waits at most {limit_s:.0f} s until {self._name} has {names}")
            while self._waiting and not (self._is_lost or signals) and time.monotonic() < end:
                time.sleep(_LOOK_S)
                self._turn()
            if self._waiting and not self._is_lost:
                names = _names_of_steps(self._waiting)
                self._console.warning(f"{self._name} lacks {names}: the next start of the run copies them")
        finally:
            self._end_process()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _turn(self) -> None:
        self._hear()
        if self._is_lost or time.monotonic() < self._not_before or not self._lock.acquire(blocking=False):
            return
        try:
            if self._is_due:
                self._waiting, self._is_due = self._lacks(), False
            if self._doing is None and (self._waiting or self._work["may_claim"]):
                self._ask(max(self._waiting, default=0))  # the newest first: it is the one to go on from
        except (CheckpointError, OSError) as error:  # the run's folder cannot be read, or the process not started
            self._fail(" ".join(str(error).split()))
        finally:
            self._lock.release()

    def _lacks(self) -> set[int]:
        """Return the steps that the folder has and the mirror would keep, but does not have."""
        steps = complete_steps(self._root)
        kept = {*(steps[-self._keep :] if self._keep else steps)}
        if self._best_by:
            kept |= losses_of(self._root, self._best_by, self._losses).keys()  # one of these may be the best
            if (best := best_of(self._losses)) is not None:
                kept.add(best)
        return kept - self._done

    def _ask(self, step: int) -> None:
        """Ask the process for a step; start it if there is none."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROCESS, str(_ROOT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,  # so that Ctrl-C reaches training alone
            )
            assert self._process.stdout is not None  # noqa: S101
            os.set_blocking(self._process.stdout.fileno(), False)
            self._tell(json.dumps(self._work))
        self._doing, self._asked_at = step, time.monotonic()
        self._tell(str(step))

    def _tell(self, line: str) -> None:
        assert self._process is not None and self._process.stdin is not None  # noqa: S101, PT018
        with suppress(BrokenPipeError):  # it has ended, which `_hear` finds
            self._process.stdin.write(line.encode() + b"\n")

    def _hear(self) -> None:
        """Handle the new reports of the process, and its end."""
        if (process := self._process) is None or process.stdout is None:
            return
        code = process.poll()
        while more := process.stdout.read(65536):  # None if there is nothing to read
            self._heard += more
        *reports, self._heard = self._heard.split(b"\n")
        for report in reports:
            self._take(parse_json(report))
        if code is not None or self._is_lost:
            self._end_process()
        if code is not None and not self._is_lost:
            self._fail(f"its process ended with {code}")

    def _take(self, report: Mapping[str, Any]) -> None:
        if "claimed" in report:
            self._work["may_claim"] = False
            return
        step, self._doing, self._is_due = self._doing, None, True
        names = _names_of_steps({step or 0})
        if "failed" in report:
            self._fail(report["failed"])
        elif "lost" in report:
            self._is_lost = True
            self._console.warning(f"{self._name} takes no more checkpoints of this start: {report['lost']}")
        elif "damaged" in report and step:
            self._done.add(step)
            self._console.warning(f"{names} is not copied to {self._name}: {report['damaged']}")
        else:
            self._done.add(report["copied"])
            if self._failures:
                self._console.notice(f"{self._name} works again")
            self._failures = 0
            if report["is_new"]:
                took = time.monotonic() - self._asked_at
                self._console.notice(f"{self._name} has {names}, after {took:.1f} s")

    def _fail(self, why: str) -> None:
        pause = _PAUSES_S[min(self._failures, len(_PAUSES_S) - 1)]
        self._is_due, self._not_before = True, time.monotonic() + pause
        self._failures += 1
        if self._failures == 1:
            what = "takes no checkpoints"
            self._console.warning(f"{self._name} {what} ({why[:300]}); training goes on, and the copy is tried again")

    def _end_process(self) -> None:
        """Kill the process. What it was copying has no manifest."""
        process, self._process, self._heard, self._doing = self._process, None, b"", None
        if process is None:
            return
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # even a killed process may wait for a dead disk
            process.wait(1.0)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _names_of_steps(steps: set[int]) -> str:
    return ", ".join(step_folder(Path(), step).name for step in sorted(steps))
