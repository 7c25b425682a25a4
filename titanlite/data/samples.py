"""Cut a source into samples: what a batch is made of, read one by one."""

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import numpy as np

from titanlite.data.corpus import Corpus
from titanlite.data.shards import sample_count
from titanlite.data.windows import units_at, units_needed
from titanlite.errors import DataError, NoMoreDataError


class Samples(Protocol):
    """The samples of a source, of S tokens each, as batches ask for them; from any thread."""

    seq_len: int  # S

    @property
    def n(self) -> int | None:
        """Return how many there are; None while more are still being made."""
        ...

    def require(self, least: int, key: str) -> None:
        """Raise if there are fewer than a run needs, as far as that is known; `key` is that of the source."""
        ...

    def wait(self, samples: int) -> None:
        """Wait until so many are there, or until it is known how many there are.

        Raises:
            NoMoreDataError: they will not come, or are too few for the run.
        """
        ...

    def read(self, sample: int) -> np.ndarray:
        """Read a sample, 0 … n - 1.

        Returns:
            [2, S] int64: its tokens, and the target of each.

        Raises:
            DataError: a shard has changed, or cannot be read any more.
        """
        ...

    def spans(self, sample: int) -> list[tuple[int, int]]:
        """Return (start, length) in the row of tokens of each piece of a sample, in its order."""
        ...


class ConcatenatedSamples:
    """The samples of a source whose documents are one long row: sample i is tokens i·S … i·S + S - 1.

    The target of a token is the one after it, so that the last target is the first token of the next sample. `check` is
    called once by `wait` of a source that was not whole, when it is known how many samples there are.
    """

    def __init__(self, shards: Corpus, seq_len: int, check: Callable[[], object] = lambda: None) -> None:
        self.seq_len = seq_len
        self._shards, self._check = shards, check
        self._is_checked = shards.is_whole

    @property
    def n(self) -> int | None:
        """Return how many there are; see `Samples.n`."""
        return max(0, (self._shards.tokens - 1) // self.seq_len) if self._shards.is_whole else None

    def require(self, least: int, key: str) -> None:
        """Raise if there are fewer than a run needs; see `Samples.require`."""
        if self._shards.is_whole:
            meta = self._shards.meta
            sample_count(meta.source, meta.tokens, self.seq_len, least, key, meta.max_tokens)

    def wait(self, samples: int) -> None:
        """Wait for samples; see `Samples.wait`."""
        if not self._is_checked and self._shards.wait(samples * self.seq_len + 1) is not None:
            try:
                self._check()  # whoever has found the end
            except DataError as e:
                raise NoMoreDataError(*e.args) from e
            self._is_checked = True

    def read(self, sample: int) -> np.ndarray:
        """Read a sample; see `Samples.read`."""
        tokens = self._shards.read(sample * self.seq_len, self.seq_len + 1)
        return np.stack((tokens[:-1], tokens[1:]))

    def spans(self, sample: int) -> list[tuple[int, int]]:
        """Return the one piece of a sample; see `Samples.spans`."""
        return [(sample * self.seq_len, self.seq_len)]


class SampleCounts(Mapping[str, int | None]):
    """The number of samples of each source, looked up each time: it may become known later."""

    def __init__(self, sources: Mapping[str, Samples]) -> None:
        self._sources = sources

    def __getitem__(self, name: str) -> int | None:
        return self._sources[name].n

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


def samples_in_order(source: Samples, places: np.ndarray, seed: int, window: int) -> np.ndarray:
    """Return the samples of a source at some positions of its order, as `units_at`; wait until they are known."""
    source.wait(units_needed(places, window) if window else 0)
    return units_at(places, source.n, seed, window)
