"""Wait for data that is still being tokenized: say so, and let no watchdog end the run for it while it goes on."""

import time
from collections.abc import Callable

from titanlite.data.corpus import Corpus
from titanlite.data.prepare import data_warnings
from titanlite.observe.console import Console
from titanlite.observe.shared_wait import SharedWait
from titanlite.receipt import Receipt
from titanlite.training.data import Corpora, data_entry, require_same_data

_TELL_SECONDS, _TELL_AGAIN_SECONDS = 3.0, 60.0  # of a wait, before it is told of; and between two lines of it


class DataWait:
    """Do what is to be done while training has caught up with the tokenization, and when that has come to its end.

    Args:
        data: the corpora.
        vocab_size: of the model.
        receipt: that has what came of each.
        console: of this rank.
        is_first: whether this is rank 0, which warns.
        shared: by which the other ranks learn of a wait; None: there are none.
    """

    def __init__(
        self,
        data: Corpora,
        vocab_size: int,
        receipt: Receipt,
        console: Console,
        is_first: bool,
        shared: SharedWait | None,
    ) -> None:
        self._shared, self._receipt = shared, receipt
        self._data, self._vocab_size, self._console, self._is_first = data, vocab_size, console, is_first
        self._activity: dict[str, tuple[int, int]] = {}
        self._ended: set[str] = set()  # keys of those that are told of
        self._told, self._since = 0.0, time.monotonic()

    def wait(self, seconds: float, alive: Callable[[], object]) -> None:
        """Do what is to be done about once a second while a batch is waited for.

        Args:
            seconds: since the wait began.
            alive: called if the tokenization has gone on since the last time.
        """
        growing = {key: shards for key, shards in self._data.growing.items() if not shards.is_whole}
        activity = {key: shards.activity for key, shards in growing.items()}
        if activity != self._activity:
            self._activity = activity
            alive()
            if self._shared is not None:
                self._shared.tell()
        if growing and seconds >= _TELL_SECONDS and time.monotonic() - self._told >= _TELL_AGAIN_SECONDS:
            self._told = time.monotonic()
            there = "; ".join(f"{key}: {_how_far(shards)}" for key, shards in growing.items())
            self._console.notice(f"training has caught up with the tokenization, and waits for it: {there}")

    def tell_of_ends(self) -> None:
        """Say of each corpus that is whole by now what came of it, once."""
        for key, shards in self._data.growing.items():
            if not shards.is_whole or key in self._ended:
                continue
            self._ended.add(key)
            meta = shards.meta
            self._console.notice(f"{key} is tokenized to its end: {meta.tokens:,} tokens, {meta.documents:,} documents")
            self._receipt.replace(data_entry(key, shards, grew=True))
            for text in data_warnings(key, meta, self._vocab_size):
                if self._is_first:
                    self._console.warning(text)

    def close(self) -> None:
        """Say at the end of a run how far each corpus is: in the receipt, of one that is not whole yet."""
        self.tell_of_ends()
        for key, shards in self._data.growing.items():
            if not shards.is_whole:
                self._receipt.replace(data_entry(key, shards, grew=True))

    def others_stop(self) -> bool:
        """Return whether a rank is asked to stop, which may have its data, and wait for this one in the step."""
        return self._shared is not None and self._shared.is_stopped()

    def check_ranks(self) -> None:
        """Raise on every rank if hosts have made different tokens, as far as these are known. Collective."""
        if self._data.growing:
            require_same_data(self._data)


def _how_far(shards: Corpus) -> str:
    return f"{shards.tokens:,} tokens are there, {shards.wanted:,} are needed"
