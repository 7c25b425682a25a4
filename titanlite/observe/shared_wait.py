"""Tell all ranks that one rank waits for data in preparation, so that no watchdog ends the run because of the wait.

A rank that has its batch enters the step and waits in a collective until the last rank has its batch, too. It cannot
see the reason. So a rank without a batch writes the time to the job's store whenever the preparation of its data makes
progress, and a watchdog reads this time before it ends a run. A request to stop is also sent through the store, because
a rank without a batch takes part in no collective.
"""

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from titanlite.observe.stall_report import answer_of

if TYPE_CHECKING:
    import torch.distributed as dist

_KEY, _STOP = "titanlite/shared_wait", "titanlite/stop"
_ANSWER_S = 5.0  # longest wait for the store, whose host may be gone


class SharedWait:
    """Records in the job's store that this rank waits for data or was asked to stop; reads the records of all ranks."""

    def __init__(self, store: "dist.Store") -> None:
        # One connection per thread: the one that waits for data, the watchdog's, and the one that handles signals.
        self._teller, self._asker, self._stopper = store.clone(), store.clone(), store.clone()  # type: ignore[attr-defined]

    def tell(self) -> None:
        """Record that this rank waits for data, and that the preparation of the data makes progress."""
        with suppress(RuntimeError):  # the store's host has ended
            self._teller.set(_KEY, f"{time.time()}")

    def stop(self) -> None:
        """Record that this rank was asked to stop."""
        with suppress(RuntimeError):
            self._stopper.set(_STOP, "")

    def is_stopped(self) -> bool:
        """Return whether any rank was asked to stop. For the thread that calls `tell`."""
        with suppress(RuntimeError):
            return self._teller.check([_STOP])
        return False

    def is_on(self, within_s: float) -> bool:
        """Return whether a rank called `tell` in the last `within_s` seconds. Compares the clocks of two hosts."""
        told = answer_of(lambda: self._asker.get(_KEY) if self._asker.check([_KEY]) else None, _ANSWER_S)
        return told is not None and time.time() - float(told) < within_s
