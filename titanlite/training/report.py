"""Report each step: results on their way from the device, and the rows they become.

A step's results are copied to the host while the next step is already queued, and read then. So the host runs one step
ahead of the device, every step is checked and can be logged, and the device is never idle for it.
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
from titanlite.data.stages import StageTable
from titanlite.errors import StepError
from titanlite.evaluation.score import Score
from titanlite.observe.console import Console
from titanlite.observe.memory import memory_gib
from titanlite.observe.metrics import Row
from titanlite.observe.observer import Observer
from titanlite.observe.peak_flops import TokenFlops, peak_flops
from titanlite.training.routers import Routers, SeenRouting
from titanlite.training.step import NONE

MAX_SKIPPED_IN_A_ROW = 10


class Moment:
    """A point in the device's own time: when all that is queued by now is done.

    The host's clock would not do: it runs ahead of the device, and now and then waits for room in the queue.

    Args:
        device: a CPU is done at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self._time = time.monotonic()
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Return once it has passed."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: "Moment") -> float:
        """Seconds from an earlier moment to this one; both have passed."""
        if self._event is None or earlier._event is None:
            return self._time - earlier._time
        return earlier._event.elapsed_time(self._event) / 1e3


class InFlight:
    """The results of one step, on their way to the host.

    Args:
        step: the step.
        lr: its learning rate.
        result: as `train_step` returns it; here alone its numbers have positions.
        data_wait_s: seconds that the host waited for its batches.
        routers: of a mixture of experts, where they are asked for what they have seen, which is collective.
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
        """Wait until the step is done on the device."""
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
    """One step, done."""

    step: int
    lr: float
    numbers: Mapping[str, float]  # by their keys in metrics.jsonl; of a step without a target, "targets": 0 alone
    skipped: bool  # the update was left out
    stop_asked: bool  # by some rank: a signal, a save that failed, no more data
    lacked_data: bool  # some rank had none: the step was not taken
    attended: float  # as `mean_attended` counts it, of all ranks
    data_wait_s: float
    done: Moment
    routing: SeenRouting = field(default_factory=SeenRouting)  # since the last step that is logged


@dataclass(frozen=True)
class Position:
    """How far training is at each step.

    Attributes:
        start: the last step that was done before this process.
        mixture: the sources, and the stages of the run.
        world: number of processes.
    """

    start: int
    mixture: Mixture
    world: int

    @property
    def table(self) -> StageTable:
        """Return the stages of the run."""
        return self.mixture.table

    def tokens(self, step: int) -> int:
        """Tokens trained on up to a step, over all ranks."""
        return self.table.tokens(step)

    def epoch(self, step: int) -> float:
        """Return how often the source was gone through up to a step; of a mixture, all of its sources together.

        NaN: it is not known yet how long a source is.
        """
        units = self.mixture.units
        if SOLE in units:
            return self.mixture.epochs(step)[SOLE]
        total = sum(math.nan if count is None else count for count in units.values())
        return self.tokens(step) / (total * self.mixture.unit_len)

    def of_sources(self, step: int) -> dict[str, float]:
        """Return the epochs of each source of a mixture up to a step, and its share of the tokens, by their keys."""
        if SOLE in self.mixture.units:
            return {}
        tokens, epochs = self.mixture.tokens(step), self.mixture.epochs(step)
        shares = {f"share.{name}": tokens[name] / self.tokens(step) for name in epochs}
        return {f"epoch.{name}": epoch for name, epoch in epochs.items()} | shares


class Report:
    """Checks and logs the steps of one rank.

    Args:
        config: the config.
        position: where training begins, and what a step adds.
        flops: of a token, as MFU counts them.
        device: this process's.
        console: of this rank, also for what is no row.
        observers: told of steps and rows.
    """

    def __init__(
        self,
        config: Config,
        position: Position,
        flops: TokenFlops,
        device: torch.device,
        console: Console,
        observers: Sequence[Observer],
    ) -> None:
        self.config, self.position, self.device = config, position, device
        self.console, self.observers, self._flops = console, observers, flops
        dtype = getattr(torch, config.training.mixed_precision_param)
        self._peak, how = peak_flops(device, dtype)
        tflops = self._peak / 1e12
        console.notice(f"MFU is relative to {tflops:{',.0f' if tflops >= 100 else '.3g'}} TFLOP/s ({how})")
        self._step_s, self._told_share = 0.0, False  # of the last row
        self._told_of_no_targets = False
        self.skipped_in_a_row = 0  # a checkpoint holds it, so that a run that restarts still ends
        self.restart_clock()

    def restart_clock(self) -> None:
        """Leave out of the speed what was not training: start-up, validation, checkpoints."""
        self._start_clock(Moment(self.device))

    def _start_clock(self, since: Moment) -> None:
        self._since, self._steps, self._waited, self._tokens, self._flops_done = since, 0, 0.0, 0, 0.0

    def step(self, outcome: Outcome) -> None:
        """Check one step and, if it is due, log it.

        Raises:
            StepError: the loss or a gradient was not finite, and `training.on_nonfinite` does not let that pass.
        """
        asked = self.position.table.row(outcome.step).asked
        self._steps += 1
        self._tokens += asked.tokens_per_step
        self._flops_done += asked.tokens_per_step * self._flops.total(outcome.attended)
        self._waited += outcome.data_wait_s
        self._check_finite(outcome)
        for observer in self.observers:
            observer.progress(outcome.step)
        if not self.is_due(outcome.step):
            return
        elapsed = outcome.done.seconds_since(self._since)
        at, step = self.position, outcome.step
        self._step_s = seconds = elapsed / self._steps
        flops = self._flops_done / elapsed / at.world
        reserved, allocated = memory_gib(self.device)
        numbers = outcome.numbers
        row = {
            "step": step,
            **{key: numbers[key] for key in ("loss", "grad_norm") if key in numbers},  # the file's first columns
            "lr": outcome.lr,
            "tokens": at.tokens(step),
            "epoch": at.epoch(step),
            "tokens_per_second_per_gpu": self._tokens / elapsed / at.world,
            "tflops_per_gpu": flops / 1e12,
            "mfu": flops / self._peak,
            "memory_gib": reserved,
            "memory_allocated_gib": allocated,
            "seconds": seconds,
            "data_wait_seconds": self._waited / self._steps,
            **outcome.routing.numbers,
            **at.of_sources(step),
            **numbers,
        }
        self._start_clock(outcome.done)
        self._write(row)
        self.experts(step, outcome.routing.tokens)

    def is_due(self, step: int) -> bool:
        """Check whether a step is to be logged."""
        return step % self.config.metrics.log_freq == 0 or step == self.config.training.steps

    def experts(self, step: int, tokens: Mapping[str, Sequence[int]]) -> None:
        """Keep the tokens of experts in the steps since the last call, at a step that is logged or saved.

        Args:
            step: the last of these.
            tokens: of each layer those of each expert.
        """
        for observer in self.observers:
            observer.experts(step, self.position.tokens(step), tokens)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log what was measured after a step in a row of its own, by keys of metrics.jsonl, if there is anything."""
        if numbers:
            self._write({"step": step, "tokens": self.position.tokens(step), **numbers})

    def evaluation(self, step: int, scores: Sequence[Score], seconds: float, freq: int) -> None:
        """Log one evaluation, and at the first one say what share of the time it takes."""
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
        first, end = (self.position.table.samples(step) for step in (outcome.step - 1, outcome.step))
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
