"""Let all ranks know that one of them waits for data that is still being made: who waits for it in turn does not hang.

A rank that has its batch enters the step, and is in a collective until the last one has its own. It cannot know why; so
the rank that waits says in the job's store, each time that its data has come closer, that it is alive, and a watchdog
looks there before it ends a run. A request to stop goes by the store, too: the rank that waits is in no collective.
"""

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from titanlite.observe.stall_report import answer_of

if TYPE_CHECKING:
    import torch.distributed as dist

_KEY, _STOP = "titanlite/shared_wait", "titanlite/stop"
_ANSWER_S = 5.0  # for the store, whose host may be gone


class SharedWait:
    """Tell of a wait and of a request to stop by the job's store, and look for them."""

    def __init__(self, store: "dist.Store") -> None:
        # Of a thread each: who waits for data, the watchdog, and who takes signals.
        self._teller, self._asker, self._stopper = store.clone(), store.clone(), store.clone()  # type: ignore[attr-defined]

    def tell(self) -> None:
        """Say that this rank waits, and that what it waits for comes closer."""
        with suppress(RuntimeError):  # the store's host has ended
            self._teller.set(_KEY, f"{time.time()}")

    def stop(self) -> None:
        """Say that this rank is asked to stop."""
        with suppress(RuntimeError):
            self._stopper.set(_STOP, "")

    def is_stopped(self) -> bool:
        """Return whether a rank is asked to stop; for the thread that tells."""
        with suppress(RuntimeError):
            return self._teller.check([_STOP])
        return False

    def is_on(self, within_s: float) -> bool:
        """Return whether a rank has told so in the last seconds, by the clocks of both hosts."""
        told = answer_of(lambda: self._asker.get(_KEY) if self._asker.check([_KEY]) else None, _ANSWER_S)
        return told is not None and time.time() - float(told) < within_s
