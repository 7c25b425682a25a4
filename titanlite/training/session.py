"""Manage a process's log, status, guard and signals, and report how its run ended.

If a rank cannot report its end itself, another module does: the watchdog if the rank hangs, or the guard process beside
it (`guard.py`) if it was killed. `exit_code.py` turns errors into exit codes.
"""

import math
import os
import re
import signal
import time
from contextlib import suppress

from titanlite.checkpoint.publish import complete_steps
from titanlite.config.check import last_step
from titanlite.config.hugging_face import can_export
from titanlite.data.stages import StageTable
from titanlite.errors import FolderLostError
from titanlite.kernels.device.channel import peer_failure
from titanlite.models.mistakes import blamed
from titanlite.observe.console import Console
from titanlite.observe.guard import Guard
from titanlite.observe.status import Status
from titanlite.preflight.checked_run import CheckedRun
from titanlite.preflight.launcher import Launcher
from titanlite.preflight.run_folder import RunFolder
from titanlite.training.stop import StopSignals
from titanlite.training.summary import last_lines

_PEER_ENDED = "another rank has ended, or the connection to it broke: its log or the launcher's output says why"
# Phrases in messages of gloo and NCCL.
_NAMES_A_PEER = re.compile("connection (closed|reset) by peer|remote process exiting", re.IGNORECASE)
_A_MODEL = "a model that runs: tokens [M] to logits [M, V], and [M, D] between its modules"
_A_RULE = "an update rule that runs: gradients, parameters and state [n] to directions [n]"


class Session:
    """Log, status, guard and signals of this process in a run. Arguments are as in `train`."""

    def __init__(self, asked: CheckedRun, folder: RunFolder, console: Console, launcher: Launcher | None) -> None:
        self.asked, self.folder, self.console = asked, folder, console
        self.began = time.monotonic()
        self.rank, self.local_rank = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
        saved = complete_steps(folder.checkpoints)
        self.guard = Guard(folder.status, self.rank)
        step = saved[-1] if saved else 0
        self.status = Status(folder.status, step, self.rank)
        if self.rank == 0:
            self.guard.runs(math.inf)  # guards of other ranks start once status.json is this run's
        self.stop = StopSignals(asked.config.checkpoint.enable, self._end_at_once, launcher=launcher)

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Report an error that ended the run, before the cleanup, which may hang."""
        try:
            if isinstance(error, KeyboardInterrupt):
                with suppress(OSError):
                    self.interrupted()
            elif error is not None and (cause := self.failed(error)) is not error:
                raise cause from error
        finally:
            self.guard.close()

    def ended(self, start: int, last: int, table: StageTable, measures_due: bool) -> None:
        """Report that the run is finished, or what stopped it. Without a step to train, an earlier report remains.

        Args:
            start: the last step of earlier starts.
            last: the last step done.
            table: the run's stages.
            measures_due: whether the measurements after the last step are left to the next start.
        """
        config, console = self.asked.config, self.console
        console.show_newest()
        is_idle, is_finished = start >= last_step(config), last >= config.training.steps and not measures_due
        if is_idle and self.status.idle(is_finished):
            return
        if is_finished:
            self.status.finished(last)
        else:
            at_limit = 0 < config.job.stop_after <= last
            by = self.stop.received or ("job.stop_after" if at_limit else self.stop.of_another)
            if not is_idle:
                console.notice(f"stopped by {by} after step {last}")
            self.status.stopped(last, by)
        if self.rank == 0 and not is_idle:
            took, is_told = time.monotonic() - self.began, can_export(config.model, self.asked.dims)
            for line in last_lines(config, self.folder, last, took, is_told, table):
                console.notice(line)

    def interrupted(self) -> None:
        """Report that a signal ended the run at once, before its steps or during them."""
        by, status, console = self.stop.received or signal.SIGINT.name, self.status, self.console
        if not self.stop.is_in_steps:
            status.stopped(status.step, by)
            console.notice(f"stopped by {by} before step {status.step + 1}")
            if by == signal.SIGTERM.name and int(os.environ.get("WORLD_SIZE", "1")) > 1:
                console.notice("torchrun sends it, too, when another process has ended: its output says which")
            return
        by, saved = f"a second signal, {by}", complete_steps(self.folder.checkpoints)
        status.stopped(status.step, by)
        console.show_newest()
        kept = f"the newest checkpoint is of step {saved[-1]}" if saved else "there is no checkpoint"
        console.notice(f"stopped at once by {by}, after step {status.step}; {kept}")

    def failed(self, error: BaseException) -> BaseException:
        """Report that the run has failed; return the cause: `error`, or an error of another rank or a user's file."""
        peer = peer_failure()
        if self.status.stall and isinstance(error, RuntimeError):  # a rank was ended by its watchdog
            peer = peer or TimeoutError(self.status.stall)
        if isinstance(error, RuntimeError) and _NAMES_A_PEER.search(str(error)):
            peer = peer or ConnectionError(_PEER_ENDED)
        config, log, mistake = self.asked.config, self.folder.logs / f"rank{self.rank}.log", None
        for file, want in {config.model.file: _A_MODEL, config.optimizer.file: _A_RULE}.items():
            if file and not peer:
                mistake = mistake or blamed(error, os.path.abspath(file), log, want)
        with suppress(OSError):  # the disk may be full, which may be the error itself
            self.console.failed(peer or error)  # with the traceback
        cause = peer or mistake or error
        if not isinstance(error, FolderLostError):  # the folder's status is another job's now
            with suppress(OSError):
                self.status.failed(cause)
        return cause

    def _end_at_once(self) -> None:
        self.interrupted()
        self.guard.close()
