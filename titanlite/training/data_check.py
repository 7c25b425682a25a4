"""Check the hashes of token shards once per start, while training goes on.

A thread checks this rank's share of the blocks on its host. `Corpus.read` checks any other block before reading it, so
that the first step waits for a few blocks only. A rank that finds damage asks all ranks to stop, as a signal does.
Until they stop it takes part in steps with padding, and these steps are discarded. Then all ranks raise its error. If a
growing corpus is no longer being made, the run ends, too. Its tokens so far are valid, and the steps are saved first.
"""

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from titanlite.checkpoint.collective import on_all_ranks
from titanlite.data.corpus import Corpus
from titanlite.errors import DataError, NoMoreDataError

_LOOK_SECONDS = 0.5  # between looks at corpora that are still being made


class DataCheck:
    """Checks a run's corpora, one after another, on one rank."""

    def __init__(self, corpora: Sequence[Corpus]) -> None:
        self.met: DataError | None = None  # error in place of a batch; set by the feed
        self._corpora, self._closing = corpora, threading.Event()
        self._thread = ThreadPoolExecutor(1, "data_check")
        self._checking = self._thread.submit(self._check)

    @property
    def found(self) -> BaseException | None:
        """Return the error that this rank has found so far, e.g. that a shard has changed; None if there is none."""
        return self.met or (self._checking.exception() if self._checking.done() else None)

    def tell(self) -> NoMoreDataError | None:
        """Exchange the errors that ranks have found. Collective.

        Returns:
            The error that a source has no more data; None if nothing is wrong.

        Raises:
            DataError: on all ranks, a shard has changed or cannot be read.
        """

        def look() -> str:
            found = self.found
            if found is not None and not isinstance(found, NoMoreDataError):
                raise found
            return "" if found is None else str(found)

        said = [text for text in on_all_ranks(look) if text]
        return NoMoreDataError("\n".join(dict.fromkeys(said))) if said else None

    def close(self) -> None:
        """End the thread that checks blocks."""
        self._closing.set()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _check(self) -> None:
        n_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        place = int(os.environ.get("LOCAL_RANK", "0")) % n_ranks
        growing = [corpus for corpus in self._corpora if not corpus.is_whole]
        for corpus in (corpus for corpus in self._corpora if corpus not in growing):
            n_blocks = sum(1 for _ in corpus.blocks())
            own = islice(corpus.blocks(), place * n_blocks // n_ranks, (place + 1) * n_blocks // n_ranks)
            for file, block in own:
                if self._closing.is_set():
                    return
                corpus.check(file, block)
                for other in growing:
                    other.poll()
        while growing := [corpus for corpus in growing if not corpus.is_whole]:  # new tokens need no check of hashes
            for corpus in growing:
                corpus.poll()
            if self._closing.wait(_LOOK_SECONDS):
                return
