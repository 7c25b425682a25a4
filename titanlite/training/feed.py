"""Give each step the batches of this rank; padding, if it has none in time.

A rank without data takes part with padding in a step that no rank keeps, in which every rank learns that one lacked
data. Its reason, damage or the end of the data, is exchanged afterwards (`data_check.py`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from titanlite.data.batches import Batch, TrainBatches, ValidationBatches
from titanlite.errors import DataError
from titanlite.observe.profiler import span
from titanlite.observe.step_profile import DATA_WAIT
from titanlite.observe.watchdog import Watchdog
from titanlite.training.data_check import DataCheck
from titanlite.training.data_wait import DataWait


class _StopAskedError(Exception):
    """This run is asked to stop, and waits for data."""


@dataclass
class Feed:
    """The data of a run, as the loop takes it."""

    batches: TrainBatches
    check: DataCheck
    wait: DataWait
    context: DeviceMesh | None  # of the ranks that share this rank's tokens; None: it has all of them
    watchdog: Watchdog
    stops: Callable[[], bool]  # whether this rank is asked to stop, as by a signal
    is_empty: bool = False  # from now on this rank has padding

    @property
    def asks_to_stop(self) -> bool:
        """Return whether this rank is asked to stop, or has no more data."""
        return self.stops() or self.is_empty or self.check.found is not None

    def next(self, step: int) -> list[Batch]:
        """Return the micro-batches of a step; padding in the first one without data, and in all steps after it."""
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
        """Iterate over the batches of a validation; padding from the first damaged one on."""
        found, is_damaged = iter(batches), False
        for _ in range(len(batches)):
            self.watchdog.progress(step, "validation")  # the limit is of one batch
            batch = None
            if not is_damaged:
                try:
                    batch = next(found)
                except DataError as damage:
                    self.check.met = damage
                is_damaged = self._one_lacks(batch is None)
            yield batches.padding() if is_damaged or batch is None else batch

    def _one_lacks(self, lacks: bool) -> bool:
        """Return whether one of the ranks that share tokens lacks a batch: then all of them take padding."""
        if self.context is None:
            return lacks
        of_any = torch.tensor(int(lacks))
        with span(DATA_WAIT):
            dist.all_reduce(of_any, dist.ReduceOp.MAX, self.context.get_group())
        return bool(of_any)

    def _while_waiting(self, seconds: float) -> None:
        if self.asks_to_stop or self.wait.others_stop():
            raise _StopAskedError
        self.wait.wait(seconds, lambda: self.watchdog.progress(self.batches.step + 1, "data"))
