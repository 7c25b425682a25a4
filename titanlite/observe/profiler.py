"""A torch profiler trace of a few steps, and a table of where their time went.

Writes `rank0.json.gz` (open it in https://ui.perfetto.dev) and `kernels.txt`. Only rank 0 records: the others run the
same steps, and a profiler on each would slow the collectives that are to be measured.

`profiling.start_step` counts the steps of the run, not of the process: a run that resumes after it has no such step
left, and says so. Steps outside the window are not recorded, so they cost nothing.
"""

import contextlib
import gzip
import json
import os
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Literal

import torch
from torch.profiler import ProfilerActivity, profile

from titanlite.config.schema import Profiling
from titanlite.durable import open_plain, write_durably
from titanlite.observe.console import Console
from titanlite.observe.kernel_table import kernel_table


class Profiler:
    """Traces the steps that `[profiling]` names. Use as a context manager around the training loop."""

    def __init__(
        self, config: Profiling, folder: Path, rank: int, device: torch.device, first_step: int, console: Console
    ) -> None:
        """Prepare, and start at once if the window begins with the first step.

        Args:
            config: the window, and whether to trace at all.
            folder: `profile/` of the run; created when there is something to write.
            rank: global rank; on any other than 0 this does nothing.
            device: where the model is.
            first_step: the first step that this process trains.
            console: told when the trace is written, or that it will not be.
        """
        self._folder, self._rank, self._device, self._console = folder, rank, device, console
        self._start_step, self._last_step = config.start_step, config.start_step + config.steps - 1
        self._in_reach = config.enable and config.start_step >= first_step
        self._on = self._in_reach and rank == 0
        self._trace: profile | None = None
        if config.enable and rank == 0 and not self._in_reach:
            console.warning(
                f"profiling.start_step = {config.start_step} is before step {first_step}, where training begins: "
                f"no trace; give a step from {first_step} on"
            )
        self.step(first_step - 1)

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write what there is if training ended within the window; nothing if it failed."""
        if self._trace is not None and error is None and self._step >= self._start_step:
            self._write(self._trace)
        elif self._trace is not None:
            with contextlib.suppress(RuntimeError):  # of a device that failed: the error under way matters more
                self._trace.stop()

    def edge(self, step: int) -> Literal["begin", "end"] | None:
        """Say whether reporting `step` begins or writes the trace, which takes time; the same on every rank."""
        if self._in_reach and step == self._start_step - 1:
            return "begin"
        return "end" if self._in_reach and step == self._last_step else None

    def step(self, step: int) -> None:
        """Report that `step` is done. Starts the trace after the step before the window, writes it after the last."""
        self._step = step
        if self._trace is not None and step == self._last_step:
            self._write(self._trace)
        elif self._on and step == self._start_step - 1:
            self._synchronize()
            activities = [ProfilerActivity.CPU]
            if self._device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._trace = profile(activities=activities, acc_events=True)
            self._trace.start()

    def _write(self, trace: profile) -> None:
        self._trace = None
        self._synchronize()
        trace.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"rank{self._rank}.json.gz"
        with tempfile.TemporaryDirectory() as folder:
            raw = Path(folder) / "trace.json"
            trace.export_chrome_trace(str(raw))
            content = raw.read_bytes()
        with open(open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
            file.write(gzip.compress(content))
        steps = self._step - self._start_step + 1
        write_durably(self._folder / "kernels.txt", kernel_table(json.loads(content), steps))
        self._console.notice(f"profile of {steps} steps: {path}, {self._folder / 'kernels.txt'}")

    def _synchronize(self) -> None:
        """Let the device finish, so that the trace holds whole steps."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
