"""The training loop: step, validate, evaluate, save, stop.

Reading order of training: `training/train.py` makes ready, `build.py` builds the run, this file repeats `step.py`.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from titanlite.checkpoint.background import Background
from titanlite.checkpoint.collective import on_all_ranks, on_rank_0
from titanlite.checkpoint.optimizer_state import optimizer_identity
from titanlite.checkpoint.resume import identity_of, nothing_to_do
from titanlite.checkpoint.saved_state import SavedState
from titanlite.checkpoint.state import Checkpoints
from titanlite.config.check import last_step
from titanlite.data.batches import Batch, TrainBatches, ValidationBatches
from titanlite.errors import DataError
from titanlite.evaluation.score import Evaluator
from titanlite.float8.numerics import float8_numerics
from titanlite.observe.metrics import MetricsFile
from titanlite.observe.peak_flops import mean_attended, windows_of
from titanlite.observe.profiler import Profiler, span
from titanlite.observe.step_profile import DATA_WAIT, EVALUATION, NUMERICS, SAVING, VALIDATION
from titanlite.observe.watchdog import Watchdog
from titanlite.preflight.run_folder import RunFolder
from titanlite.training.build import Run
from titanlite.training.data import Corpora, HeldOut
from titanlite.training.data_check import DataCheck
from titanlite.training.data_wait import DataWait
from titanlite.training.receipt import complete_receipt
from titanlite.training.report import InFlight, Report
from titanlite.training.schedule import learning_rate
from titanlite.training.state import tensors_of
from titanlite.training.step import train_step, validation_loss
from titanlite.training.stop import StopSignals

STALL_REPORT_SHARE = 0.5
"""Share of the limit after which ranks say where they are: their answers must be there before it ends them."""


class _StopAskedError(Exception):
    """This run is asked to stop, and waits for data."""


@dataclass(kw_only=True)
class Loop:
    """One run with everything around it."""

    run: Run
    batches: TrainBatches
    validation: dict[str, HeldOut]  # by the name of the source; "" is the first one's
    evaluation: Evaluator | None
    evaluation_freq: int  # steps between two
    checkpoints: Checkpoints
    background: Background | None  # what writes them, if training does not wait for it
    report: Report
    files: Sequence[MetricsFile]  # of rows, on rank 0
    profiler: Profiler
    watchdog: Watchdog
    stop: StopSignals
    folder: RunFolder
    data_check: DataCheck
    data: Corpora
    data_wait: DataWait
    _lacks_data: bool = False  # from some step on, in which this rank has padding

    def train(self, start: int) -> int:
        """Take the steps after `start` until the last one, `job.stop_after`, a signal or the end of the data.

        Args:
            start: the last step done.

        Returns:
            The last step taken.

        Raises:
            NoMoreDataError: on all ranks, there is no more data; the steps that were taken are saved.
        """
        run, config, report = self.run, self.run.config, self.report
        last, table = last_step(config), report.position.table
        in_flight: deque[InFlight] = deque()
        windows = windows_of(run.model)
        stopping, step, done, no_more = False, start, start, None
        if idle := nothing_to_do(config, start):
            report.console.notice(idle)
        self._limit(config.comm.init_timeout_seconds)
        report.restart_clock()
        for step in range(start + 1, last + 1):
            begins = step == start + 1 or step in table.first_steps  # the compiler has a new shape
            if begins and step > start + 1:
                self._limit(config.comm.init_timeout_seconds)
            self.watchdog.progress(step, "step")
            self.profiler.begin(step)
            micro_batches, lr = self._next_batches(step), learning_rate(step, config, table)
            asks, attended = self._asks_to_stop(), mean_attended(windows, self.batches.lengths)
            is_due, given = report.is_due(step), (attended, self.batches.names, self._lacks_data)
            result = train_step(run, micro_batches, lr, asks, *given, logged=is_due)
            routers = run.routers if is_due else None
            in_flight.append(InFlight(step, lr, result, self.batches.wait_seconds, routers))
            self.profiler.end(step)

            measures = self.measures(step)
            look = config.metrics.float8_numerics_freq > 0 and step % config.metrics.float8_numerics_freq == 0
            save = config.checkpoint.enable and (step % config.checkpoint.interval == 0 or step == last)
            trace = self.profiler.edge(step)
            # Steps are read one step late, but before anything that relies on them. All ranks read the same numbers.
            pause = measures or look or save or trace
            while len(in_flight) > (0 if pause or stopping or begins or step == last else 1):
                outcome = in_flight.popleft().read()
                stopping |= outcome.stop_asked
                if outcome.stop_asked:
                    no_more = self.data_check.tell() or no_more
                if not outcome.lacked_data:
                    report.step(outcome)
                    done = outcome.step
            self.data_wait.tell_of_ends()
            if stopping and done < step:  # the steps after `done` were not taken: some rank had no data
                break
            if trace != "begin":
                self._profile(step)
            if step == start + 1:
                complete_receipt(run, self.folder, report.console, self.batches.is_masked)
            if look:
                self.float8_numerics(step, micro_batches[0])
            # Nothing goes on after the last one.
            postpone = bool(measures) and stopping and step < config.training.steps
            if not postpone:
                for measure in measures:
                    measure(step)
            if save or (stopping and config.checkpoint.enable):
                self._save(step, validation_due=postpone)
            if trace == "begin":  # after what is not of a step
                self._profile(step)
            if pause or begins:
                self._limit(config.comm.train_timeout_seconds)
                report.restart_clock()
            if self.background is not None:
                self._say_saved(self.background.written())
            if stopping:  # and saved, above
                break
        self.data_wait.close()
        # What a lack of data cut off before it was due is saved now.
        self._end(done, save=start < done < step and done % config.checkpoint.interval > 0)
        if no_more is not None and done < last:
            raise no_more
        return done

    def _end(self, done: int, save: bool) -> None:
        """Wait until all is written; save the last step that was done before, if it is not saved yet."""
        config = self.run.config
        if save and config.checkpoint.enable:
            self._save(done, validation_due=False, went_on=True)
        if self.background is not None:
            self.watchdog.progress(done, "checkpoint")
            self._limit(config.comm.init_timeout_seconds)
            self._say_saved(self.background.wait())
        on_rank_0(self.folder.require_ours)  # who has lost it has no last word there

    def measures(self, step: int) -> list[Callable[[int], None]]:
        """Return what is to be measured after a step: the loss on held-out text, the accuracy in tasks."""
        config, is_last = self.run.config, step == self.run.config.training.steps
        found: list[Callable[[int], None]] = []
        if self.validation and (is_last or step % config.validation.freq == 0):
            found.append(self.validate)
        if self.evaluation is not None and (is_last or step % self.evaluation_freq == 0):
            found.append(self.evaluate)
        return found

    def evaluate(self, step: int) -> None:
        """Log the accuracy in each task: the same on every rank."""
        assert self.evaluation is not None  # noqa: S101
        self._limit(self.run.config.comm.init_timeout_seconds)
        began = time.monotonic()
        with span(EVALUATION):
            scores = self.evaluation.score(
                self.run.model, self.run.mesh, lambda: self.watchdog.progress(step, "evaluation")
            )
        self.report.evaluation(step, scores, time.monotonic() - began, self.evaluation_freq)

    def validate(self, step: int) -> None:
        """Log the mean loss over all targets of each held-out source: the same on every rank, under any layout."""
        self._limit(self.run.config.comm.init_timeout_seconds)
        self.run.model.eval()
        numbers: dict[str, float] = {}
        asked, average = self.run.config.validation.weights, self.run.average
        with span(VALIDATION):
            if asked != "ema":
                numbers |= self._losses(step)
            if asked != "model" and average is not None:
                with average.in_place_of_weights(self.run.model):
                    numbers |= self._losses(step, "_ema")
        self.run.model.train()
        self.data_check.tell()
        self.report.log(step, numbers)

    def _losses(self, step: int, of: str = "") -> dict[str, float]:
        """Return the metrics of each held-out source, by keys that say whose weights they are of."""
        numbers: dict[str, float] = {}
        for name, source in self.validation.items():
            total, targets = validation_loss(self.run, self._watched(source.batches, step)).tolist()
            if targets:
                numbers |= source.numbers(name, total / targets, of)
            else:
                what = f"validation.sources.{name}" if name else "validation.source"
                self.report.console.warning(f"step {step}: no target of {what} was read, so its loss is left out")
        return numbers

    def float8_numerics(self, step: int, batch: Batch) -> None:
        """Log what float8 does to each layer, on a batch of each rank's; training goes on as if it had not been."""
        self.watchdog.progress(step, "float8 numerics")
        self._limit(self.run.config.comm.init_timeout_seconds)
        with span(NUMERICS):
            given = batch.tokens, self.run.mesh.fsdp, batch.sequences, batch.is_counted
            self.report.log(step, float8_numerics(self.run.model, *given))

    def _next_batches(self, step: int) -> list[Batch]:
        """Return those of a step; padding if there are none in time, and in all that follow: the others do not know."""
        found: list[Batch] = []
        if not self._lacks_data:
            try:
                with span(DATA_WAIT):
                    found = self.batches.next(self._while_waiting)
            except _StopAskedError:
                pass
            except DataError as damage:
                self.data_check.met = damage
            self._lacks_data = self._one_lacks(not found)
        return self.batches.padding(step) if self._lacks_data else found

    def _one_lacks(self, lacks: bool) -> bool:
        """Return whether one of the ranks that share tokens lacks a batch: what they exchange is the same on all."""
        context = self.run.mesh.context
        if context is None:
            return lacks
        of_any = torch.tensor(int(lacks))
        with span(DATA_WAIT):
            dist.all_reduce(of_any, dist.ReduceOp.MAX, context.get_group())
        return bool(of_any)

    def _while_waiting(self, seconds: float) -> None:
        if self._asks_to_stop() or self.data_wait.others_stop():
            raise _StopAskedError
        self.data_wait.wait(seconds, lambda: self.watchdog.progress(self.batches.step + 1, "data"))

    def _asks_to_stop(self) -> bool:
        """Return whether this rank is asked to stop, or has found what ends the run."""
        cannot_save = self.background is not None and self.background.has_failed
        is_asked = self.stop.received is not None or cannot_save
        return is_asked or self._lacks_data or self.data_check.found is not None

    def _watched(self, batches: ValidationBatches, step: int) -> Iterator[Batch]:
        found, is_damaged = iter(batches), False
        for _ in range(len(batches)):
            self.watchdog.progress(step, "validation")  # it may take longer than any one batch is allowed to
            batch = None
            if not is_damaged:
                try:
                    batch = next(found)
                except DataError as damage:
                    self.data_check.met = damage
                is_damaged = self._one_lacks(batch is None)
            yield batches.padding() if is_damaged or batch is None else batch

    def _profile(self, step: int) -> None:
        """Tell the profiler. All ranks begin and write at once: who is done waits here, not in its next step."""
        if self.profiler.edge(step) is None:
            self.profiler.step(step)
            return
        self.watchdog.progress(step, "profile")
        self._limit(self.run.config.comm.init_timeout_seconds)
        on_all_ranks(lambda: self.profiler.step(step))

    def _save(self, step: int, validation_due: bool, went_on: bool = False) -> None:
        """Publish a checkpoint.

        Args:
            step: the last one done.
            validation_due: a signal came between this step and what is measured after it.
            went_on: others have begun since, which were not taken: routers have seen more than what is saved.
        """
        with span(SAVING):
            self._save_at(step, validation_due, went_on)

    def _save_at(self, step: int, validation_due: bool, went_on: bool) -> None:
        self.watchdog.progress(step, "checkpoint")
        self._limit(self.run.config.comm.init_timeout_seconds)
        if (routers := self.run.routers) is not None and not (went_on or self.report.is_due(step)):
            self.report.experts(step, routers.read(routers.seen().tolist()).tokens)  # who resumes counts from here
        on_rank_0(self._sync)
        self.data_wait.check_ranks()
        table = self.report.position.table
        config, optimizer = self.run.config, self.run.optimizer
        state = SavedState(
            samples=table.samples(step),
            sequences_per_step=table.row(step).asked.sequences,
            stages=table.past(step),
            unit_len=self.batches.mixture.unit_len,
            validation_due=validation_due,
            skipped_in_a_row=self.report.skipped_in_a_row,
            learning_rate=learning_rate(step, config, table),
            ema_decay=config.optimizer.ema_decay,
            optimizer=optimizer_identity(optimizer.config, optimizer.rules_by_name, optimizer.recipe.own_rules),
            optimizer_file=optimizer.sha256_of_file,
            **self.data.identity,
            **identity_of(config, self.run.dims),
        )
        if self.background is None:
            self._say_saved(self.checkpoints.save(step, tensors_of(self.run), state))
        else:
            self._say_saved(self.background.wait())  # also for what it failed of
            self.background.save(step, tensors_of(self.run), state)

    def _sync(self) -> None:
        """Flush the rows to disk on rank 0, which alone has the files, and may find the disk full."""
        self.folder.require_ours()
        with self.folder.write_errors_explained():
            for file in self.files:
                file.sync()

    def _say_saved(self, checkpoint: Path | None) -> None:
        if checkpoint is not None:
            self.report.console.notice(f"saved {checkpoint}")

    def _limit(self, seconds: float) -> None:
        """Set how long a phase may make no progress: short in a step, long where a disk or a compiler works."""
        self.watchdog.set_timeout(seconds, ask_s=STALL_REPORT_SHARE * seconds)
