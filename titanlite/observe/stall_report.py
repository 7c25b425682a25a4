"""Report where each rank is when a run makes no progress. This shows the rank that all other ranks wait for.

When a collective hangs, the watchdogs of the ranks in it end the run. Their stacks name the collective, but not the
rank that has not entered it. Before that, each rank without progress for long writes the position of its main thread to
the job's store. Rank 0 reads these positions and prints them with the ranks at each position:

    watchdog: rank 0 made no progress for 90 s at step 58; where each rank is:
        step 58, in step, titanlite/training/report.py:72 in read: ranks 0-2, 4-7
        step 57, in step, titanlite/data/batches.py:120 in next: rank 3 (host c12, process 4711)

If the store does not answer, all ranks wait for its host, and no rank learns the position of another.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")

_PACKAGE = Path(__file__).parents[1]
_SILENT = "no answer, so stopped, in native code that keeps the interpreter, or still at work"


class StallReport:
    """One rank's side of the report, with a connection to the job's store."""

    def __init__(self, store: "dist.Store", rank: int, world: int) -> None:
        # A connection besides that of the main thread, which is blocked while NCCL, say, waits on it for a peer.
        self._store, self._rank, self._world = store.clone(), rank, world  # type: ignore[attr-defined]
        self._store.set(self._key(rank, "process"), f"host {socket.gethostname()}, process {os.getpid()}")

    def hold(self, where: str, wait_s: float) -> str | None:
        """Store this rank's position `where` (step, phase, line), and poll the other ranks' for `wait_s` seconds.

        Returns:
            On rank 0, or on rank 1 if rank 0 or the store does not answer: one line per position, with its ranks; the
            positions with the fewest ranks come last. None on other ranks.
        """

        def store_place() -> bool:
            self._store.set(self._key(self._rank), f"{time.time()} {where}")
            self._store.check([self._key(self._rank)])  # `set` does not wait for an answer
            return True

        if not answer_of(store_place, wait_s):
            return f"    {where}: rank {self._rank}\n    {_store_host()}" if self._rank == 1 else None
        if self._rank > 1 or (self._rank == 1 and self._poll([0], wait_s)):
            return None
        polled = self._poll(range(self._world), wait_s)
        places: dict[str, list[int]] = {}
        for rank in range(self._world):
            places.setdefault(polled.get(rank, _SILENT), []).append(rank)
        of_most_first = sorted(places.items(), key=lambda place: -len(place[1]))
        return "\n".join(f"    {place}: {self._who(ranks)}" for place, ranks in of_most_first)

    def _who(self, ranks: list[int]) -> str:
        words, process = _rank_spans(ranks), self._key(ranks[0], "process")
        if len(ranks) > 1 or not self._store.check([process]):
            return words
        return f"{words} ({self._store.get(process).decode()})"

    def _poll(self, ranks: Iterable[int], wait_s: float) -> dict[int, str]:
        """Return the positions that `ranks` store within `wait_s` seconds, by rank, without those of earlier stalls."""
        polled: dict[int, str] = {}
        missing, end, since = set(ranks), time.monotonic() + wait_s, time.time() - 2 * wait_s
        while missing:
            for rank in sorted(missing):
                if self._store.check([self._key(rank)]):
                    at, _, where = self._store.get(self._key(rank)).decode().partition(" ")
                    if float(at) >= since:
                        polled[rank] = where
            missing -= polled.keys()
            if time.monotonic() >= end:
                break
            time.sleep(wait_s / 20)
        return polled

    def _key(self, rank: int, what: str = "place") -> str:
        return f"titanlite/stall_report/{rank}/{what}"


def answer_of(ask: Callable[[], T], wait_s: float) -> T | None:
    """Call `ask` in a new thread and return its result; None if it takes more than `wait_s` or raises RuntimeError."""
    found: list[T] = []

    def listen() -> None:
        with suppress(RuntimeError):
            found.append(ask())

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    thread.join(wait_s)
    return found[0] if found else None


def _store_host() -> str:
    is_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    who = "torchrun, and perhaps ranks beside it" if is_agent else "rank 0"
    address = os.environ.get("MASTER_ADDR", "its host")
    return f"the job's store does not answer, so what hosts it is stopped, gone or cut off: {who}, on {address}"


def innermost_line(frame: FrameType | None) -> str:
    """Return file, line and function of the innermost frame in titanlite's code, or else of the innermost of all."""
    innermost = frame
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_PACKAGE):
            return f"{path.relative_to(_PACKAGE.parent)}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    if innermost is None:
        return "no line"
    return f"{innermost.f_code.co_filename}:{innermost.f_lineno} in {innermost.f_code.co_name}"


def _rank_spans(ranks: list[int]) -> str:
    """Format ascending ranks as a text: [0, 1, 2, 4] → "ranks 0-2, 4"."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return f"rank{'s' if len(ranks) > 1 else ''} " + ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
