"""Report waits for data that is still being tokenized, and keep the watchdog quiet while tokenization progresses."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from titanlite.data.prepare import data_warnings
from titanlite.observe.console import Console
from titanlite.observe.shared_wait import SharedWait
from titanlite.receipt import Receipt
from titanlite.training.data import Corpora, data_entry, require_same_data

_TELL_SECONDS, _TELL_AGAIN_SECONDS = 3.0, 60.0  # until the first report of a wait; between two reports


@dataclass
class DataWait:
    """Reports waits of one rank for the tokenization, and the end of the tokenization."""

    data: Corpora
    vocab_size: int
    receipt: Receipt
    console: Console
    is_first: bool  # rank 0, which warns
    shared: SharedWait | None  # tells other ranks of a wait; None: there are no other ranks
    _activity: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    _ended: set[str] = field(default_factory=set[str])  # keys of corpora whose end is reported
    _told: float = 0.0

    def wait(self, seconds: float, alive: Callable[[], object]) -> None:
        """Report that a batch has been waited for during `seconds`; called about once a second. If tokenization has
        progressed since the last call, call `alive`, which resets the watchdog.
        """
        growing = {key: shards for key, shards in self.data.growing.items() if not shards.is_whole}
        activity = {key: shards.activity for key, shards in growing.items()}
        if activity != self._activity:
            self._activity = activity
            alive()
            if self.shared is not None:
                self.shared.tell()
        if growing and seconds >= _TELL_SECONDS and time.monotonic() - self._told >= _TELL_AGAIN_SECONDS:
            self._told = time.monotonic()
            each = (f"{key}: {s.tokens:,} tokens are there, {s.wanted:,} are needed" for key, s in growing.items())
            self.console.notice(f"training has caught up with the tokenization, and waits for it: {'; '.join(each)}")

    def tell_of_ends(self) -> None:
        """Report each corpus whose tokenization has ended, once."""
        for key, shards in self.data.growing.items():
            if not shards.is_whole or key in self._ended:
                continue
            self._ended.add(key)
            meta = shards.meta
            self.console.notice(f"{key} is tokenized to its end: {meta.tokens:,} tokens, {meta.documents:,} documents")
            self.receipt.replace(data_entry(key, shards, grew=True))
            for text in data_warnings(key, meta, self.vocab_size) if self.is_first else ():
                self.console.warning(text)

    def close(self) -> None:
        """At the end of a run, report how far each corpus is tokenized; an incomplete corpus only in the receipt."""
        self.tell_of_ends()
        for key, shards in self.data.growing.items():
            if not shards.is_whole:
                self.receipt.replace(data_entry(key, shards, grew=True))

    def others_stop(self) -> bool:
        """Return whether another rank was asked to stop. It may then be waiting for this rank in a step."""
        return self.shared is not None and self.shared.is_stopped()

    def check_ranks(self) -> None:
        """Raise on every rank if hosts have made different tokens so far. Collective."""
        if self.data.growing:
            require_same_data(self.data)
