"""Give each step the batches of this rank; padding, if it has none in time, for other ranks cannot know.

A rank takes part with padding in a step that no rank keeps, and every rank learns there that one lacked data. What it
has found, damage or the end of the data, all ranks are told where they meet.
"""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from titanlite.data.batches import Batch, TrainBatches, ValidationBatches
from titanlite.errors import DataError
from titanlite.observe.profiler import span
from titanlite.observe.step_profile import DATA_WAIT
from titanlite.observe.watchdog import Watchdog
from titanlite.training.data_check import DataCheck
from titanlite.training.data_wait import DataWait


class _StopAskedError(Exception):
    """This run is asked to stop, and waits for data."""


class Feed:
    """The data of a run, as the loop takes it.

    Args:
        batches: of training.
        check: holds shards against their hashes meanwhile.
        wait: does what is to be done while data is still being made.
        sharing: the ranks that share this one's tokens; None: it has them alone.
        watchdog: of this rank.
        stops: whether a signal, say, asks this rank to stop.
    """

    def __init__(
        self,
        batches: TrainBatches,
        check: DataCheck,
        wait: DataWait,
        sharing: dist.ProcessGroup | None,
        watchdog: Watchdog,
        stops: Callable[[], bool],
    ) -> None:
        self.batches, self.check, self.wait = batches, check, wait
        self._sharing, self._watchdog, self._stops = sharing, watchdog, stops
        self.is_empty = False  # from some step on, for which this rank has padding

    @property
    def asks_to_stop(self) -> bool:
        """Return whether this rank is asked to stop, or lacks data for good."""
        return self._stops() or self.is_empty or self.check.found is not None

    def next(self, step: int) -> list[Batch]:
        """Return the micro-batches of a step; padding if there are none in time, and in all steps that follow."""
        found: list[Batch] = []
        if not self.is_empty:
            try:
                with span(DATA_WAIT):
                    found = self.batches.next(self._while_waiting)
            except _StopAskedError:
                pass
            except DataError as damage:
                self.check.met = damage
            self.is_empty = self._one_lacks(not found)
        return self.batches.padding(step) if self.is_empty else found

    def held_out(self, batches: ValidationBatches, step: int) -> Iterator[Batch]:
        """Iterate over the batches of a validation; padding from the first on that is damaged."""
        found, is_damaged = iter(batches), False
        for _ in range(len(batches)):
            self._watchdog.progress(step, "validation")  # it may take longer than any one batch is allowed to
            batch = None
            if not is_damaged:
                try:
                    batch = next(found)
                except DataError as damage:
                    self.check.met = damage
                is_damaged = self._one_lacks(batch is None)
            yield batches.padding() if is_damaged or batch is None else batch

    def _one_lacks(self, lacks: bool) -> bool:
        """Return whether one of the ranks that share tokens lacks a batch: what they exchange is the same on all."""
        if self._sharing is None:
            return lacks
        of_any = torch.tensor(int(lacks))
        with span(DATA_WAIT):
            dist.all_reduce(of_any, dist.ReduceOp.MAX, self._sharing)
        return bool(of_any)

    def _while_waiting(self, seconds: float) -> None:
        if self.asks_to_stop or self.wait.others_stop():
            raise _StopAskedError
        self.wait.wait(seconds, lambda: self._watchdog.progress(self.batches.step + 1, "data"))
