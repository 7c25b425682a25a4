"""A torch profiler trace of a few steps, and a table of where their time went.

Writes `rank<r>.json.gz` (open it in https://ui.perfetto.dev) and `kernels.txt`. Made on rank 0 only: the others run
the same steps, and a profiler on each would slow the collectives that are to be measured.

The steps are those of the run, not of the process: a run that resumes after `profiling.start_step` has no steps left to
trace, and says so. Steps before the window are not recorded, so they cost nothing.
"""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from titanlite.observe.kernel_table import kernel_table


class Profiler:
    """Traces steps `start_step` to `start_step + steps - 1`."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        start_step: int,
        steps: int,
        first_step: int,
        device: torch.device,
        notice: Callable[[str], object],
        warn: Callable[[str], object],
    ) -> None:
        """Prepare, and start at once if the window begins with the first step.

        Args:
            folder: `profile/` of the run; created when there is something to write.
            rank: global rank, named in the file.
            start_step: first step of the trace.
            steps: steps in the trace.
            first_step: the first step that this process trains.
            device: where the model is.
            notice: called when the trace is written.
            warn: called if the window began before `first_step`.
        """
        self._folder = folder
        self._rank = rank
        self._start_step = start_step
        self._steps = steps
        self._device = device
        self._notice = notice
        self._profile: profile | None = None
        if start_step < first_step:
            warn(
                f"profiling.start_step = {start_step} is before step {first_step}, where training begins: no trace; "
                f"give a step from {first_step} on"
            )
        elif start_step == first_step:
            self._start()

    def step(self, step: int) -> None:
        """Report that `step` is done. Starts the trace after the step before the window, writes it after the last."""
        if self._profile is not None and step == self._start_step + self._steps - 1:
            self._write(self._profile, self._steps)
        elif self._profile is None and step == self._start_step - 1:
            self._start()

    def close(self, step: int) -> None:
        """Write what there is, if training ended at `step` within the window."""
        if self._profile is not None and step >= self._start_step:
            self._write(self._profile, step - self._start_step + 1)

    def _start(self) -> None:
        self._synchronize()
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities, acc_events=True)
        self._profile.start()

    def _write(self, trace: profile, steps: int) -> None:
        self._profile = None
        self._synchronize()
        trace.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"rank{self._rank}.json.gz"
        trace.export_chrome_trace(str(path))
        with gzip.open(path, "rt") as file:
            table = kernel_table(json.load(file), steps)
        (self._folder / "kernels.txt").write_text(table)
        self._notice(f"profile of {steps} steps: {path}, {self._folder / 'kernels.txt'}")

    def _synchronize(self) -> None:
        """Let the device finish, so that the trace holds whole steps."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
