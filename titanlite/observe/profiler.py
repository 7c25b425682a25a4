"""A torch profiler trace of a few steps on every rank, as `titanlite explain` and a person read it.

Each rank writes `rank<i>.json`, a summary (`step_profile.py`); rank 0 also its trace, `rank0.json.gz` (open it in
https://ui.perfetto.dev), and `kernels.txt`. All ranks record, as only all of them know who waited for whom.

`profiling.start_step` counts the steps of the run, not of the process: a run that resumes after it warns that there is
no trace. Steps outside the window are not recorded and not marked, so they cost nothing.
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

_ROWS, _NAME = 40, 110  # of kernels.txt, and characters of a name


def span(name: str) -> contextlib.AbstractContextManager[object]:
    """Mark what follows with a name in the trace, while there is one; else do nothing."""
    if torch.autograd.profiler._is_profiler_enabled:
        return record_function(name)
    return contextlib.nullcontext()


class Profiler:
    """Traces the steps that `[profiling]` names. Use as a context manager around the training loop."""

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
        self._edges: dict[int, Literal["begin", "end"]] = {}  # by the step that is done by then
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
        """Write what there is if training ended within the window; nothing if it failed."""
        if self._trace is not None and error is None and self._step >= self._start_step:
            self._write(self._trace)
        elif self._trace is not None:
            with contextlib.suppress(RuntimeError):  # of a device that failed: the error under way matters more
                self._trace.stop()

    def edge(self, step: int) -> Literal["begin", "end"] | None:
        """Say whether reporting `step` begins or writes the trace, which takes time; the same on every rank."""
        return self._edges.get(step)

    def begin(self, step: int) -> None:
        """Mark in the trace, if there is one, that a step begins; it ends with the beginning of the next one."""
        if self._trace is None:
            return
        if step == self._start_step:
            self._began = time.perf_counter()
        self._end_mark()
        self._mark = record_function(f"{STEP}{step}")
        self._mark.__enter__()

    def end(self, step: int) -> None:
        """Close the window after its last step, once the device has done it: what follows is of no step."""
        if self._trace is not None and step == self._last_step:
            self._close()

    def step(self, step: int) -> None:
        """Report that `step` is done. Starts the trace after the step before the window, writes it after the last."""
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
        """Let the device finish, so that the trace holds whole steps."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
