"""Hold the token shards against their hashes once per start, while training goes on.

A thread checks this rank's share of the blocks, those of a host being shared out among its ranks; what a step is to
read and nobody has checked yet, `TokenShards.read` checks first. So the first step waits for a few blocks, and not for
the corpus. Before each step, until all is checked, ranks tell each other how far they are and what they have found: a
damaged shard ends all of them with one message, before its tokens are used by any.
"""

import platform
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from titanlite.checkpoint.collective import on_all_ranks, rank
from titanlite.data.shards import TokenShards


class DataCheck:
    """Check a run's corpora. All ranks make one, and call its methods alike.

    Args:
        corpora: in the order in which they are checked.
    """

    def __init__(self, corpora: Sequence[TokenShards]) -> None:
        hosts = on_all_ranks(platform.node)
        self._peers = [peer for peer, host in enumerate(hosts) if host == hosts[rank()]]  # ranks of this host
        self._corpora, self._done = corpora, [0] * len(corpora)
        self._is_over = self._is_closed = False
        self._thread = ThreadPoolExecutor(1, "data_check")
        self._checks = [self._thread.submit(self._check, i) for i in range(len(corpora))]

    def before(self, ready: Callable[[], object]) -> None:
        """Raise on every rank what one has found. Collective, until all is checked.

        Args:
            ready: waits until this rank has read what comes next.

        Raises:
            DataError: on all ranks, a shard has changed or cannot be read.
        """
        if self._is_over:
            return

        def look() -> tuple[list[int], bool]:
            ready()
            ended = [check for check in self._checks if check.done()]
            for check in ended:
                check.result()
            return list(self._done), len(ended) == len(self._checks)

        everywhere = on_all_ranks(look)
        for place, peer in enumerate(self._peers):
            for i, n_done in enumerate(everywhere[peer][0]):
                first = self._share(i, place).start
                self._corpora[i].checked[first : first + n_done] = True
        self._is_over = all(is_over for _, is_over in everywhere)

    def finish(self, corpus: int) -> None:
        """Wait until a corpus is checked. Collective, until all is checked; raises as `before`."""
        self.before(self._checks[corpus].result)

    def close(self) -> None:
        """End the thread."""
        self._is_closed = True
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _share(self, corpus: int, place: int) -> range:
        """Return the blocks that one of the host's ranks checks."""
        n_blocks, n_ranks = len(self._corpora[corpus].checked), len(self._peers)
        return range(place * n_blocks // n_ranks, (place + 1) * n_blocks // n_ranks)

    def _check(self, corpus: int) -> None:
        for block in self._share(corpus, self._peers.index(rank())):
            if self._is_closed:
                return
            self._corpora[corpus].check(block)
            self._done[corpus] += 1
