"""Report each step: copy its results from the device, check them, and log them as rows.

The results of a step are copied and read while the device computes the next step. So every step is checked, and the
device is never idle for it.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from titanlite.config.schema import Config
from titanlite.config.stages import SOLE
from titanlite.data.mixture import Mixture
from titanlite.errors import StepError
from titanlite.evaluation.score import Score
from titanlite.observe.console import Console
from titanlite.observe.memory import memory_gib
from titanlite.observe.metrics import Row
from titanlite.observe.observer import Observer, Sample
from titanlite.observe.peak_flops import TokenFlops, peak_flops
from titanlite.redact import redact
from titanlite.training.routers import Routers, SeenRouting
from titanlite.training.step import NONE

MAX_SKIPPED_IN_A_ROW = 10


class Moment:
    """The time on the device at which all work queued so far is done; on a CPU, now.

    The host's clock would not do: the host runs ahead of the device, and sometimes waits for room in the queue.
    """

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self._time = time.monotonic()
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Wait until the device has done the work that was queued before this moment."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: "Moment") -> float:
        """Return the seconds from an earlier moment to this one; both must have passed."""
        if self._event is None or earlier._event is None:
            return self._time - earlier._time
        return earlier._event.elapsed_time(self._event) / 1e3


class InFlight:
    """The results of `train_step` while they are copied to the host. With `routers`, statistics of their routing are
    added, which is collective.
    """

    def __init__(
        self,
        step: int,
        lr: float,
        result: Mapping[str, Tensor],
        data_wait_s: float,
        routers: Routers | None = None,
    ) -> None:
        self.step, self.lr, self.data_wait_s, self.routers = step, lr, data_wait_s, routers
        self._names, packed = [*result], torch.stack([*result.values()])
        if routers is not None:
            packed = torch.cat((packed, routers.seen()))
        self._host = packed
        if packed.is_cuda:
            self._host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
        self._done = Moment(packed.device)

    def read(self) -> "Outcome":
        """Wait until the step is done on the device, and return its results."""
        self._done.wait()
        values = self._host.tolist()
        found = dict(zip(self._names, values, strict=False))
        routing = self.routers.read(values[len(found) :]) if self.routers else SeenRouting()
        flags = {name: found.pop(name) > 0 for name in ("skipped", "stop_asked", "lacked_data")}
        attended, targets = found.pop("attended"), found.pop("targets")
        numbers = {key: number for key, number in found.items() if number != NONE} if targets else {"targets": 0}
        return Outcome(
            step=self.step,
            lr=self.lr,
            numbers=numbers,
            attended=attended,
            data_wait_s=self.data_wait_s,
            done=self._done,
            routing=routing,
            **flags,
        )


@dataclass(frozen=True)
class Outcome:
    """The results of one step, on the host."""

    step: int
    lr: float
    numbers: Mapping[str, float]  # by key of metrics.jsonl; {"targets": 0} for a step without targets
    skipped: bool  # the update was skipped
    stop_asked: bool  # some rank asks: a signal, a failed save, no more data
    lacked_data: bool  # some rank had no data, so the step was not taken
    attended: float  # mean over all ranks, as `mean_attended` counts
    data_wait_s: float
    done: Moment
    routing: SeenRouting = field(default_factory=SeenRouting)  # since the last logged step


def epoch(mixture: Mixture, step: int) -> float:
    """Return the epochs up to a step, over all sources of a mixture; NaN while the length of a source is unknown."""
    if SOLE in mixture.units:
        return mixture.epochs(step)[SOLE]
    total = sum(math.nan if count is None else count for count in mixture.units.values())
    return mixture.table.tokens(step) / (total * mixture.unit_len)


def _of_sources(mixture: Mixture, step: int) -> dict[str, float]:
    """Return metrics by key: epochs of each source of a mixture up to a step, and its share of the tokens."""
    if SOLE in mixture.units:
        return {}
    tokens, epochs = mixture.tokens(step), mixture.epochs(step)
    shares = {f"share.{name}": tokens[name] / mixture.table.tokens(step) for name in epochs}
    return {f"epoch.{name}": epoch for name, epoch in epochs.items()} | shares


class Report:
    """Checks and logs the steps of one rank."""

    def __init__(
        self,
        config: Config,
        mixture: Mixture,
        world: int,
        flops: TokenFlops,
        device: torch.device,
        console: Console,
        observers: Sequence[Observer],
    ) -> None:
        self.config, self.mixture, self.table, self._world = config, mixture, mixture.table, world
        self.device, self.console, self.observers, self._flops = device, console, observers, flops
        dtype = getattr(torch, config.training.mixed_precision_param)
        self._peak, how = peak_flops(device, dtype)
        tflops = self._peak / 1e12
        console.notice(f"MFU is relative to {tflops:{',.0f' if tflops >= 100 else '.3g'}} TFLOP/s ({how})")
        self._step_s, self._told_share = 0.0, False  # mean seconds of a step, by the last logged row
        self._told_of_no_targets = False
        self.skipped_in_a_row = 0  # saved in checkpoints, so that a restarted run still reaches the limit
        self.restart_clock()

    def restart_clock(self) -> None:
        """Begin to measure speed anew, without start-up, validation and checkpoints."""
        self._start_clock(Moment(self.device))

    def _start_clock(self, since: Moment) -> None:
        self._since, self._steps, self._waited, self._tokens, self._flops_done = since, 0, 0.0, 0, 0.0

    def step(self, outcome: Outcome) -> None:
        """Check one step and, if it is due, log it.

        Raises:
            StepError: the loss or a gradient was not finite, and `training.on_nonfinite` does not skip this step.
        """
        step, numbers = outcome.step, outcome.numbers
        asked = self.table.row(step).asked
        self._steps += 1
        self._tokens += asked.tokens_per_step
        self._flops_done += asked.tokens_per_step * self._flops.total(outcome.attended)
        self._waited += outcome.data_wait_s
        self._check_finite(outcome)
        for observer in self.observers:
            observer.progress(step)
        if not self.is_due(step):
            return
        elapsed = outcome.done.seconds_since(self._since)
        self._step_s = seconds = elapsed / self._steps
        flops = self._flops_done / elapsed / self._world
        reserved, allocated = memory_gib(self.device)
        row = {
            "step": step,
            **{key: numbers[key] for key in ("loss", "grad_norm") if key in numbers},  # the file's first columns
            "lr": outcome.lr,
            "tokens": self.table.tokens(step),
            "epoch": epoch(self.mixture, step),
            "tokens_per_second_per_gpu": self._tokens / elapsed / self._world,
            "tflops_per_gpu": flops / 1e12,
            "mfu": flops / self._peak,
            "memory_gib": reserved,
            "memory_allocated_gib": allocated,
            "seconds": seconds,
            "data_wait_seconds": self._waited / self._steps,
            **outcome.routing.numbers,
            **_of_sources(self.mixture, step),
            **numbers,
        }
        self._start_clock(outcome.done)
        self._write(row)
        self.experts(step, outcome.routing.tokens)

    def is_due(self, step: int) -> bool:
        """Return whether a step is logged."""
        return step % self.config.metrics.log_freq == 0 or step == self.config.training.steps

    def experts(self, step: int, tokens: Mapping[str, Sequence[int]]) -> None:
        """Record the tokens of each expert, by layer, since the last call. Called for each step that is logged or
        saved.
        """
        for observer in self.observers:
            observer.experts(step, self.table.tokens(step), tokens)

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Record the samples after a step, without secrets."""
        samples = [Sample(*map(redact, sample)) for sample in samples]
        for observer in self.observers:
            observer.samples(step, self.table.tokens(step), samples)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log measurements after a step, by key of metrics.jsonl, in a separate row, if there are any."""
        if numbers:
            self._write({"step": step, "tokens": self.table.tokens(step), **numbers})

    def evaluation(self, step: int, scores: Sequence[Score], seconds: float, freq: int) -> None:
        """Log one evaluation. After the first evaluation that follows a logged step, report its share of the time."""
        found = {"evaluation_seconds": seconds}
        for score in scores:
            found |= {f"accuracy.{score.task}": score.accuracy, f"accuracy_norm.{score.task}": score.accuracy_norm}
        self.log(step, found)
        if self._step_s and not self._told_share:
            self._told_share = True
            share = seconds / (seconds + freq * self._step_s)
            less = f"; evaluation.freq = {math.ceil(99 * seconds / self._step_s)} makes it 1 %" * (share > 0.01)
            n = sum(score.questions for score in scores)
            self.console.notice(
                f"{n:,} questions took {seconds:.2f} s: {share:.2%} of the time at evaluation.freq = {freq}{less}"
            )

    def _write(self, row: Row) -> None:
        for observer in self.observers:
            observer.write(row)

    def _check_finite(self, outcome: Outcome) -> None:
        if "loss" not in outcome.numbers:
            if not self._told_of_no_targets:
                self._told_of_no_targets = True
                what = "no token of it has a target, so it changed nothing"
                self.console.warning(f"step {outcome.step}: {what}. Rows of such steps have targets = 0 and no loss")
            return
        if not outcome.skipped:
            self.skipped_in_a_row = 0
            return
        self.skipped_in_a_row += 1
        first, end = (self.table.samples(step) for step in (outcome.step - 1, outcome.step))
        loss, norm = outcome.numbers["loss"], outcome.numbers["grad_norm"]
        seen = (
            f"step {outcome.step}: loss {loss}, gradient norm {norm}, on samples {first} to {end - 1} of the data order"
        )
        skips = self.config.training.on_nonfinite == "skip"
        if skips and self.skipped_in_a_row < MAX_SKIPPED_IN_A_ROW:
            self.console.warning(f"{seen}; not finite, so this update was skipped")
            return
        source = "the loss" if not math.isfinite(loss) else "a gradient"
        fix = "inspect that data, lower optimizer.lr or raise lr_scheduler.warmup_steps"
        if skips:
            seen += f", the {self.skipped_in_a_row}th such step in a row"
        else:
            fix += f'; training.on_nonfinite = "skip" skips up to {MAX_SKIPPED_IN_A_ROW - 1} such steps in a row'
        raise StepError(
            f"{seen}\n    want: finite numbers; {source} is not finite. Nothing of this step reached the weights\n"
            f"    fix:  {fix}"
        )
