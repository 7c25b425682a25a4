"""Cut a source into samples: what a batch is made of, read one by one.

`Samples` says what batches ask of a source; how it is packed into samples is for the class that answers.
"""

from typing import Protocol

import numpy as np

from titanlite.data.shards import TokenShards


class Samples(Protocol):
    """The samples of a source, of S tokens each; from any thread.

    Attributes:
        n: how many there are.
        seq_len: tokens of each (S).
    """

    n: int
    seq_len: int

    def read(self, sample: int) -> np.ndarray:
        """Read a sample, 0 … n - 1.

        Returns:
            [2, S] int64: its tokens, and the target of each.

        Raises:
            DataError: a shard has changed, or cannot be read any more.
        """
        ...

    def spans(self, sample: int) -> list[tuple[int, int]]:
        """Return the start and length, in the row of tokens, of each piece that a sample is made of, in its order."""
        ...


class ConcatenatedSamples:
    """The samples of a source whose documents are one long row: sample i is tokens i·S … i·S + S - 1.

    The target of a token is the one after it, so that the last target is the first token of the next sample.

    Args:
        shards: the source.
        seq_len: tokens of a sample (S).
    """

    def __init__(self, shards: TokenShards, seq_len: int) -> None:
        self.n, self.seq_len = max(0, (shards.tokens - 1) // seq_len), seq_len
        self._shards = shards

    def read(self, sample: int) -> np.ndarray:
        """Read a sample; see `Samples.read`."""
        tokens = self._shards.read(sample * self.seq_len, self.seq_len + 1)
        return np.stack((tokens[:-1], tokens[1:]))

    def spans(self, sample: int) -> list[tuple[int, int]]:
        """Return the one piece of a sample; see `Samples.spans`."""
        return [(sample * self.seq_len, self.seq_len)]
