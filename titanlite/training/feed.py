"""Give each step the batches of this rank, or padding if the rank has no data.

With padding a rank without data can take part in a step. In this step every rank learns that some rank lacked data, and
all discard it. The reason, damage or the end of the data, is exchanged afterwards (`data_check.py`).
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


class StopAskedError(Exception):
    """The run was asked to stop while this rank waits for data, or while all ranks measure."""


@dataclass
class Feed:
    """Gives the training loop the batches of a run."""

    batches: TrainBatches
    check: DataCheck
    wait: DataWait
    context: DeviceMesh | None  # of the ranks that split sequences with this rank; None: sequences are not split
    watchdog: Watchdog
    stops: Callable[[], bool]  # whether this rank is asked to stop, as by a signal
    saves: bool = True  # whether a stop saves a checkpoint, so that a measurement can be made later
    is_empty: bool = False  # whether this rank has run out of data, and gives padding

    @property
    def asks_to_stop(self) -> bool:
        """Return whether this rank is asked to stop, has no more data or has found damaged data."""
        return self.stops() or self.is_empty or self.check.found is not None

    def next(self, step: int) -> list[Batch]:
        """Return the micro-batches of a step. From the first step without data on they are padding."""
        found: list[Batch] = []
        if not self.is_empty:
            try:
                with span(DATA_WAIT):
                    found = self.batches.next(self._while_waiting)
            except StopAskedError:
                pass
            except DataError as damage:
                self.check.met = damage
            self.is_empty = self._one_lacks(not found)
        return self.batches.padding(step) if self.is_empty else found

    def held_out(self, batches: ValidationBatches, step: int) -> Iterator[Batch]:
        """Yield the batches of a validation; padding in place of the first damaged batch and all later batches.

        Raises:
            StopAskedError: as `measuring`.
        """
        found, is_damaged = iter(batches), False
        for _ in range(len(batches)):
            self.measuring(step, "validation")
            batch = None
            if not is_damaged:
                try:
                    batch = next(found)
                except DataError as damage:
                    self.check.met = damage
                is_damaged = self._one_lacks(batch is None)
            yield batches.padding() if is_damaged or batch is None else batch

    def measuring(self, step: int, what: str) -> None:
        """Begin the next batch or token of a validation or evaluation, whose time limit is that of a step. Collective.

        Raises:
            StopAskedError: on every rank, if any is asked to stop. The measurement is to be made again.
        """
        self.watchdog.progress(step, what)
        if self.saves and _on_any(self.stops()):
            raise StopAskedError

    def _one_lacks(self, lacks: bool) -> bool:
        """Return whether a rank of `context`, or this rank, lacks a batch: then all ranks of `context` use padding."""
        if self.context is None:
            return lacks
        with span(DATA_WAIT):
            return _on_any(lacks, self.context.get_group())

    def _while_waiting(self, seconds: float) -> None:
        if self.asks_to_stop or self.wait.others_stop():
            raise StopAskedError
        self.wait.wait(seconds, lambda: self.watchdog.progress(self.batches.step + 1, "data"))


def _on_any(is_so: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether something is so on any rank of a group; None: of the run. Collective."""
    of_any = torch.tensor(int(is_so))
    dist.all_reduce(of_any, dist.ReduceOp.MAX, group)
    return bool(of_any)
