"""Record a torch.profiler trace of a few steps on every rank, for `titanlite explain` and for people.

Each rank writes a summary, `rank<i>.json` (`step_profile.py`). Rank 0 also writes its trace, `rank0.json.gz` (open it
in https://ui.perfetto.dev), and `kernels.txt`. All ranks record, to show which rank waited for which.

`profiling.start_step` counts the steps of the run, not of the process: a run that resumes after this step warns that it
records no trace. Other steps are neither recorded nor marked, so the profiler costs them nothing.
"""

import contextlib
import gzip
import json
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from titanlite.config.schema import Profiling
from titanlite.durable import open_plain, write_durably
from titanlite.observe.console import Console
from titanlite.observe.trace_spans import STEP, ProfiledRun, summarise

_ROWS, _NAME = 40, 110  # rows of kernels.txt, and characters of a kernel's name


def span(name: str) -> contextlib.AbstractContextManager[object]:
    """Return a context manager that marks its body in the trace by a name, or does nothing if none is recorded."""
    if torch.autograd.profiler._is_profiler_enabled:
        return record_function(name)
    return contextlib.nullcontext()


class Profiler:
    """Traces the steps that the config section `[profiling]` sets. A context manager around the training loop."""

    def __init__(
        self,
        config: Profiling,
        folder: Path,
        run: ProfiledRun,
        device: torch.device,
        first_step: int,
        console: Console,
    ) -> None:
        self._folder, self._run, self._device, self._console = folder, run, device, console
        self._start_step, self._last_step = config.start_step, config.start_step + config.steps - 1
        self._edges: dict[int, Literal["begin", "end"]] = {}  # whether the trace begins or ends after a step
        self._trace: profile | None = None
        self._mark: record_function | None = None
        if config.enable and config.start_step >= first_step:
            self._edges = {self._start_step - 1: "begin", self._last_step: "end"}
        elif config.enable and run.rank == 0:
            console.warning(
                f"profiling.start_step = {config.start_step} is before step {first_step}, where training begins: "
                f"no trace; give a step from {first_step} on"
            )
        self.step(first_step - 1)

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Write the trace so far if training ended within the traced steps; discard it if training failed."""
        if self._trace is not None and error is None and self._step >= self._start_step:
            self._write(self._trace)
        elif self._trace is not None:
            with contextlib.suppress(RuntimeError):  # a failed device: keep the error under way
                self._trace.stop()

    def edge(self, step: int) -> Literal["begin", "end"] | None:
        """Return whether the call `step(step)` begins or ends the trace, which takes time; the same on every rank."""
        return self._edges.get(step)

    def begin(self, step: int) -> None:
        """Mark the beginning of a step in the trace, if one is recorded. The mark lasts until the next step begins."""
        if self._trace is None:
            return
        if step == self._start_step:
            self._began = time.perf_counter()
        self._end_mark()
        self._mark = record_function(f"{STEP}{step}")
        self._mark.__enter__()

    def end(self, step: int) -> None:
        """End the mark of the last traced step once the device has finished the step, so that later work is outside."""
        if self._trace is not None and step == self._last_step:
            self._close()

    def step(self, step: int) -> None:
        """Report that `step` is done. Starts the trace just before the first traced step; writes it after the last."""
        self._step = step
        if self._trace is not None and step == self._last_step:
            self._write(self._trace)
        elif self._edges.get(step) == "begin":
            self._synchronize()
            activities = [ProfilerActivity.CPU]
            if self._device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
                held = {**self._run.held, "before": torch.cuda.memory_allocated(self._device)}
                self._run = replace(self._run, held=held)
            self._trace = profile(activities=activities, profile_memory=True, acc_events=True)
            self._trace.start()

    def _write(self, trace: profile) -> None:
        self._close()
        self._trace = None
        trace.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            raw = Path(folder) / "trace.json"
            trace.export_chrome_trace(str(raw))
            content = raw.read_bytes()
        parsed, rank = json.loads(content), self._run.rank
        reserved = torch.cuda.max_memory_reserved(self._device) if self._device.type == "cuda" else 0
        summary = summarise(parsed, self._run, self._clock_us, reserved)
        write_durably(self._folder / f"rank{rank}.json", summary.to_json())
        if rank == 0:
            path, kernels = self._folder / "rank0.json.gz", self._folder / "kernels.txt"
            with open(open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
                file.write(gzip.compress(content))
            steps = self._step - self._start_step + 1
            by_time = f"self_{'cuda' if self._device.type == 'cuda' else 'cpu'}_time_total"
            table = trace.key_averages().table(sort_by=by_time, row_limit=_ROWS, max_name_column_width=_NAME)
            write_durably(kernels, f"{steps} steps\n{table}")
            self._console.notice(f"profile of {steps} steps: {path}, {kernels}")
            self._console.notice(f"what they did with their time: titanlite explain {self._folder.parent}")

    def _close(self) -> None:
        if self._mark is not None:
            self._synchronize()
            self._end_mark()
            self._clock_us = (time.perf_counter() - self._began) * 1e6

    def _end_mark(self) -> None:
        if self._mark is not None:
            self._mark.__exit__(None, None, None)
        self._mark = None

    def _synchronize(self) -> None:
        """Wait until the device has finished all work, so that the trace holds complete steps."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
