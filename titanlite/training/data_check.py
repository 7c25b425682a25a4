"""Hold the token shards against their hashes once per start, while training goes on.

A thread checks this rank's share of the blocks, those of a host being shared out among its ranks; a block that this
rank is to read and has not checked, `Corpus.read` checks first. So the first step waits for a few blocks, and not
for the corpus. Ranks tell each other nothing: one that has found damage asks all to stop as a signal does, and where
they then meet, all raise what it found. A rank that has no batch for it takes part in the steps until there with
padding; nothing of them is kept. That nobody makes a corpus any more that is still being made is found here too: it
ends the run as well, but what was trained on was right, and is saved before.
"""

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from titanlite.checkpoint.collective import on_all_ranks
from titanlite.data.corpus import Corpus
from titanlite.errors import DataError, NoMoreDataError

_LOOK_SECONDS = 0.5  # between looks at what is still being made


class DataCheck:
    """Check a run's corpora, on one rank.

    Args:
        corpora: in the order in which they are checked.
    """

    def __init__(self, corpora: Sequence[Corpus]) -> None:
        self.met: DataError | None = None  # in place of a batch, for the loop to set
        self._corpora, self._closing = corpora, threading.Event()
        self._thread = ThreadPoolExecutor(1, "data_check")
        self._checking = self._thread.submit(self._check)

    @property
    def found(self) -> BaseException | None:
        """Return what this rank has found by now: a shard has changed or cannot be read."""
        return self.met or (self._checking.exception() if self._checking.done() else None)

    def tell(self) -> NoMoreDataError | None:
        """Tell every rank what one has found. Collective.

        Returns:
            That there will be no more data; None if nothing is wrong.

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
        """End the thread."""
        self._closing.set()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _check(self) -> None:
        n_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        place = int(os.environ.get("LOCAL_RANK", "0")) % n_ranks  # by launcher, whose ranks see the same files
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
        while growing := [corpus for corpus in growing if not corpus.is_whole]:  # just written, in this run
            for corpus in growing:
                corpus.poll()
            if self._closing.wait(_LOOK_SECONDS):
                return
