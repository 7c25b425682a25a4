"""Let all ranks know that one of them waits for data that is still being made: who waits for it in turn does not hang.

A rank that has its batch enters the step, and stays in a collective until the last one has its own. It cannot know why;
so the one that waits says in the job's store, each time that its data has come closer, that it is alive, and a watchdog
looks there before it ends a run. Nor can it tell the one that waits, in the step, that it was asked to stop: this, too,
goes by the store.
"""

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

_KEY, _STOP = "titanlite/shared_wait", "titanlite/stop"
_ANSWER_S = 5.0  # for the store, whose host may be gone


class SharedWait:
    """Tell of a wait and of a request to stop, and look for them.

    Args:
        store: of all ranks of the job.
    """

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
        found: list[float] = []

        def ask() -> None:
            with suppress(RuntimeError):  # the store's host has ended
                if self._asker.check([_KEY]):
                    found.append(float(self._asker.get(_KEY)))

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(_ANSWER_S)
        return bool(found) and time.time() - found[0] < within_s
