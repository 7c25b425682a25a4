"""The training loop: step, validate, evaluate, save, stop.

Reading order of training: `training/train.py` prepares, `build.py` builds the run, this file repeats `step.py`.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from titanlite.checkpoint.background import Background
from titanlite.checkpoint.collective import on_all_ranks, on_rank_0
from titanlite.checkpoint.optimizer_state import optimizer_identity
from titanlite.checkpoint.publish import step_of
from titanlite.checkpoint.resume import identity_of, nothing_to_do
from titanlite.checkpoint.saved_state import SavedState
from titanlite.checkpoint.state import Checkpoints
from titanlite.config.check import last_step
from titanlite.config.held_out import validation_losses
from titanlite.data.batches import Batch
from titanlite.errors import NoMoreDataError
from titanlite.evaluation.score import Evaluator
from titanlite.float8.numerics import float8_numerics
from titanlite.observe.observer import Sample
from titanlite.observe.peak_flops import mean_attended, windows_of
from titanlite.observe.profiler import Profiler, span
from titanlite.observe.step_profile import EVALUATION, NUMERICS, SAVING, VALIDATION
from titanlite.observe.watchdog import Watchdog
from titanlite.preflight.run_folder import RunFolder
from titanlite.training.build import Run
from titanlite.training.data import HeldOut
from titanlite.training.feed import Feed, StopAskedError
from titanlite.training.receipt import complete_receipt
from titanlite.training.report import InFlight, Report
from titanlite.training.samples import Sampler
from titanlite.training.schedule import learning_rate
from titanlite.training.state import tensors_of
from titanlite.training.step import train_step, validation_loss


class _Due(NamedTuple):
    """The work that is due between a step and the next step."""

    measures: list[Callable[[int], None]]
    numerics: bool
    save: bool
    trace: Literal["begin", "end"] | None


@dataclass(kw_only=True)
class Loop:
    """The training loop of a run, with the objects that it calls."""

    run: Run
    feed: Feed
    validation: dict[str, HeldOut]  # by name of the source, "" for `validation.source`
    sampler: Sampler | None
    evaluation: tuple[Evaluator, int] | None  # the evaluator, and the steps between two evaluations
    checkpoints: Checkpoints
    background: Background | None  # writes checkpoints while training goes on
    report: Report
    profiler: Profiler
    watchdog: Watchdog
    folder: RunFolder
    identity_of_data: Mapping[str, Any]  # hashes of the data, for checkpoints
    measured: Mapping[str, Any]  # what the losses of validation are measured on, for checkpoints
    measures_due: bool = False  # whether the measurements after the newest step are left to the next start
    losses: tuple[int, dict[str, float]] = (0, {})  # of the newest validation: its step, and its finite losses by key

    def train(self, start: int) -> int:
        """Train the steps after `start` until the last step, `job.stop_after`, a signal or the end of the data.

        Returns:
            The last step taken.

        Raises:
            NoMoreDataError: on all ranks, there is no more data; the steps that were taken are saved.
        """
        config, report, feed, comm = self.run.config, self.report, self.feed, self.run.config.comm
        windows = windows_of(self.run.model)
        last = last_step(config)  # of this start: `training.steps`, or an earlier `job.stop_after`
        new_shapes = {start + 1, *report.table.first_steps}  # steps whose batches have a new shape
        in_flight = deque[InFlight]()
        stopping, step, done = False, start, start  # `done`: the last step taken
        end_of_data: NoMoreDataError | None = None
        if idle := nothing_to_do(config, start):
            report.console.notice(idle)
        report.restart_clock()
        for step in range(start + 1, last + 1):
            # Queue the step. A step with a new shape may compile, so the watchdog gets a longer limit.
            if may_compile := step in new_shapes:
                self.watchdog.set_timeout(comm.init_timeout_seconds)
            self.watchdog.progress(step, "step")
            self.profiler.begin(step)
            micro_batches = feed.next(step)
            in_flight.append(self._queue(step, micro_batches, windows))
            self.profiler.end(step)

            # Read results one step late, while the device works; at once before a pause, a stop or the end. `stopping`
            # may change in this loop: then the newest step is read, too. All ranks read equal numbers and stop alike.
            due = self._due(step, last)
            pauses = any(due) or may_compile  # the host waits for this step; then clock and time limit start anew
            while in_flight and (len(in_flight) > 1 or pauses or stopping or step == last):
                outcome = in_flight.popleft().read()
                if outcome.stop_asked:
                    stopping = True
                    end_of_data = feed.check.tell() or end_of_data
                if not outcome.lacked_data:
                    report.step(outcome)
                    done = outcome.step
            feed.wait.tell_of_ends()
            if stopping and done < step:  # all results have been read: some rank had no data for the steps after `done`
                break

            # Do the work that is due. If a run stops before `training.steps`, it validates and evaluates when resumed.
            if due.trace != "begin":  # a trace ends before the work below; one that begins waits until after it
                self._profile(step)
            if step == start + 1:
                complete_receipt(self.run, self.folder, report.console, feed.batches.is_masked)
            if due.numerics:
                self.float8_numerics(step, micro_batches[0])
            postpones = stopping and step < config.training.steps
            self.measures_due = bool(due.measures) and (postpones or not self.measure(step))
            stopping = stopping or self.measures_due
            if due.save or (stopping and config.checkpoint.enable):
                self._save(step, validation_due=self.measures_due)
            if due.trace == "begin":
                self._profile(step)
            if self.background is not None:
                self._say_saved(self.background.written())
            if stopping:  # the checkpoint is saved, above
                break
            if pauses:
                self.watchdog.set_timeout(comm.train_timeout_seconds)
                report.restart_clock()
        feed.wait.close()
        data_ended = start < done < step  # before the last step that was queued; save the steps since a checkpoint
        self._end(done, save=data_ended and done % config.checkpoint.interval > 0)
        if end_of_data is not None and done < last:
            raise end_of_data
        return done

    def _queue(self, step: int, micro_batches: list[Batch], windows: list[int]) -> InFlight:
        """Queue a step on the device, and the copy of its results to the host."""
        run, batches, is_due = self.run, self.feed.batches, self.report.is_due(step)
        lr = learning_rate(step, run.config, self.report.table)
        asks, attended = self.feed.asks_to_stop, mean_attended(windows, batches.lengths)
        result = train_step(run, micro_batches, lr, asks, attended, batches.names, self.feed.is_empty, logged=is_due)
        return InFlight(step, lr, result, batches.wait_seconds, run.routers if is_due else None)

    def _due(self, step: int, last: int) -> _Due:
        config = self.run.config
        freq, checkpoint = config.metrics.float8_numerics_freq, config.checkpoint
        return _Due(
            measures=self.measures(step),
            numerics=freq > 0 and step % freq == 0,
            save=checkpoint.enable and (step % checkpoint.interval == 0 or step == last),
            trace=self.profiler.edge(step),
        )

    def _end(self, done: int, save: bool) -> None:
        """Save a checkpoint of the step `done` if `save` is true; wait until all checkpoints are written."""
        if save and self.run.config.checkpoint.enable:
            self._save(done, validation_due=False, went_on=True)
        if self.background is not None:
            with self._phase(done, "checkpoint", SAVING):
                self._say_saved(self.background.wait())
        on_rank_0(self.folder.require_ours)  # raises if another job has taken the folder

    def measures(self, step: int) -> list[Callable[[int], None]]:
        """Return the measurements that are due after a step (validation, evaluation), as functions of the step."""
        config, is_last = self.run.config, step == self.run.config.training.steps
        found: list[Callable[[int], None]] = []
        if self.validation and (is_last or step % config.validation.freq == 0):
            found.append(self.validate)
        if self.evaluation is not None and (is_last or step % self.evaluation[1] == 0):
            found.append(self.evaluate)
        return found

    def measure(self, step: int) -> bool:
        """Make the measurements that are due after a step; return False if a signal left some to the next start."""
        try:
            for measure in self.measures(step):
                measure(step)
        except StopAskedError:
            return False
        return True

    def evaluate(self, step: int) -> None:
        """Evaluate the model, and log its accuracy in each task, the same on every rank."""
        assert self.evaluation is not None  # noqa: S101
        (evaluator, freq), run, began = self.evaluation, self.run, time.monotonic()
        with self._phase(step, "evaluation", EVALUATION, freq):
            scores = evaluator.score(run.model, run.mesh, lambda: self.feed.measuring(step, "evaluation"))
        self.report.evaluation(step, scores, time.monotonic() - began, freq)

    def validate(self, step: int) -> None:
        """Log the mean loss over all targets of each held-out source, and the samples, which all ranks have alike."""
        numbers, samples = dict[str, float](), list[Sample]()
        asked, average = self.run.config.validation.weights, self.run.average
        self.run.model.eval()
        with self._phase(step, "validation", VALIDATION, self.run.config.validation.freq):
            if asked != "ema":
                numbers |= self._losses(step)
                samples = self._samples(step)
            if asked != "model" and average is not None:
                left: StopAskedError | None = None
                with average.in_place_of_weights(self.run.model):
                    try:
                        numbers |= self._losses(step, "_ema")
                        samples = samples or self._samples(step)
                    except StopAskedError as stop:  # on all ranks: the weights come back before they are saved
                        left = stop
                if left is not None:
                    raise left
        self.run.model.train()
        self.feed.check.tell()
        self.report.log(step, numbers)
        keys = validation_losses(self.run.config)
        self.losses = step, {key: numbers[key] for key in keys if math.isfinite(numbers.get(key, math.nan))}
        if samples:
            self.report.samples(step, samples)

    def _samples(self, step: int) -> list[Sample]:
        """Continue the texts of `validation.samples`, if there are any."""
        if self.sampler is None:
            return []
        return self.sampler.samples(lambda _: self.feed.measuring(step, "validation"))

    def _losses(self, step: int, of: str = "") -> dict[str, float]:
        """Return the validation metrics of each held-out source. `of` ends their keys: "_ema" for averaged weights."""
        numbers: dict[str, float] = {}
        for name, source in self.validation.items():
            total, targets = validation_loss(self.run, self.feed.held_out(source.batches, step)).tolist()
            if targets:
                numbers |= source.numbers(name, total / targets, of)
            else:
                what = f"validation.sources.{name}" if name else "validation.source"
                self.report.console.warning(f"step {step}: no target of {what} was read, so its loss is left out")
        return numbers

    def float8_numerics(self, step: int, batch: Batch) -> None:
        """Measure float8 numerics in each layer on one micro-batch per rank, and log them. Training is not changed."""
        with self._phase(step, "float8 numerics", NUMERICS):
            given = batch.tokens, self.run.mesh.fsdp, batch.sequences, batch.is_counted
            self.report.log(step, float8_numerics(self.run.model, *given))

    def _profile(self, step: int) -> None:
        """Call the profiler. All ranks begin or write a trace together, so that none waits for another in a step."""
        if self.profiler.edge(step) is None:
            self.profiler.step(step)
            return
        with self._phase(step, "profile"):
            on_all_ranks(lambda: self.profiler.step(step))

    def _save(self, step: int, validation_due: bool, went_on: bool = False) -> None:
        """Save a checkpoint.

        Args:
            step: the last step done.
            validation_due: whether the measurements after this step are still to be made.
            went_on: whether later steps were begun and discarded, so that the routers' counts include their tokens.
        """
        with self._phase(step, "checkpoint", SAVING, self.run.config.checkpoint.interval):
            if (routers := self.run.routers) is not None and not (went_on or self.report.is_due(step)):
                tokens = routers.read(routers.seen().tolist()).tokens
                self.report.experts(step, tokens)  # a resumed run counts from this step on
            on_rank_0(self._sync)
            self.feed.wait.check_ranks()
            state, tensors = self._state(step, validation_due), tensors_of(self.run)
            if self.background is None:
                self._say_saved(self.checkpoints.save(step, tensors, state))
            else:
                self._say_saved(self.background.wait())  # also raises an error of the last save
                self.background.save(step, tensors, state)

    def _state(self, step: int, validation_due: bool) -> SavedState:
        """Return the state that a checkpoint has besides its tensors."""
        table, config, optimizer = self.report.table, self.run.config, self.run.optimizer
        return SavedState(
            samples=table.samples(step),
            sequences_per_step=table.row(step).asked.sequences,
            stages=table.past(step),
            unit_len=self.feed.batches.mixture.unit_len,
            losses=self.losses[1] if self.losses[0] == step else {},
            validation_due=validation_due,
            skipped_in_a_row=self.report.skipped_in_a_row,
            learning_rate=learning_rate(step, config, table),
            ema_decay=config.optimizer.ema_decay,
            optimizer=optimizer_identity(optimizer.config, optimizer.rules_by_name, optimizer.recipe.own_rules),
            optimizer_file=optimizer.sha256_of_file,
            **self.measured,
            **self.identity_of_data,
            **identity_of(config, self.run.dims),
        )

    def _sync(self) -> None:
        """Flush the files of metrics to disk. Called on rank 0, which alone has them open."""
        self.folder.require_ours()
        with self.folder.write_errors_explained():
            for observer in self.report.observers:
                observer.sync()

    def _say_saved(self, checkpoint: Path | None) -> None:
        if checkpoint is not None:
            self.report.console.notice(f"saved {checkpoint}{self._best_in_words(step_of(checkpoint))}")

    def _best_in_words(self, saved: int | None) -> str:
        """Return which checkpoint `checkpoint.keep_best` keeps, for the line that tells of a saved one; "": none."""
        best, key = self.checkpoints.best, self.checkpoints.keep_best
        if not key:
            return ""
        if best is None:
            return f"; no checkpoint has a {key} yet"
        whose = "its" if best[0] == saved else f"the best is that of step {best[0]}, whose"
        return f"; {whose} {key} {best[1]:.4f} is the lowest"

    @contextmanager
    def _phase(self, step: int, phase: str, mark: str | None = None, every: int = 0) -> Iterator[None]:
        """Announce work between two steps to the watchdog, with its longer limit, and mark it in the trace.

        If it is due each `every` steps, the console counts its time in the time left.
        """
        began = time.monotonic()
        self.watchdog.progress(step, phase)
        self.watchdog.set_timeout(self.run.config.comm.init_timeout_seconds)
        with span(mark) if mark else nullcontext():
            yield
        if every:
            self.report.console.took(phase, time.monotonic() - began, every)
