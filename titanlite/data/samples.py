"""Cut a source into samples: what a batch is made of, read one by one, and the documents that each holds."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from titanlite.data.corpus import Corpus
from titanlite.data.document_starts import document_lengths, document_starts
from titanlite.data.order import samples_at
from titanlite.data.shards import sample_count
from titanlite.errors import DataError, NoMoreDataError


@dataclass(frozen=True)
class SampleDocument:
    """A document of a sample, or the part of it that the sample has."""

    at: int  # place of its first token in the sample
    length: int  # tokens in the sample, with the separator
    start: int  # place of its first token in the source
    begins: bool  # the sample has its beginning
    ends: bool  # the sample has its separator


class Samples:
    """The samples of a source whose documents are one long row: sample i is tokens i·S … i·S + S - 1; for any thread.

    The target of a token is the one after it, so that the last target is the first token of the next sample. `check` is
    called once by `wait` of a source that was not whole, when it is known how many samples there are.
    """

    def __init__(self, shards: Corpus, seq_len: int, check: Callable[[], object] = lambda: None) -> None:
        self.shards, self.seq_len = shards, seq_len
        self._check, self._is_checked = check, shards.is_whole

    @property
    def n(self) -> int | None:
        """Return how many there are; None while more are still being made."""
        return max(0, (self.shards.tokens - 1) // self.seq_len) if self.shards.is_whole else None

    def require(self, least: int, key: str) -> None:
        """Raise if there are fewer than a run needs, as far as that is known; `key` is that of the source."""
        if self.shards.is_whole:
            meta = self.shards.meta
            sample_count(meta.source, meta.tokens, self.seq_len, least, key, meta.max_tokens)

    def in_order(self, places: np.ndarray, seed: int, window: int) -> np.ndarray:
        """Return the samples at some places, as `samples_at`; wait until they are known.

        Raises:
            NoMoreDataError: they will not come, or are too few for the run.
        """
        self.wait((int(np.max(places)) // window + 1) * window if window else 0)
        return samples_at(places, self.n, seed, window)

    def wait(self, samples: int) -> None:
        """Wait until so many are there, or until it is known how many there are; see `in_order`."""
        if not self._is_checked and self.shards.wait(samples * self.seq_len + 1) is not None:
            try:
                self._check()  # whoever has found the end
            except DataError as e:
                raise NoMoreDataError(*e.args) from e
            self._is_checked = True

    def read(self, sample: int) -> np.ndarray:
        """Read a sample, 0 … n - 1.

        Returns:
            [2, S] int64: its tokens, and the target of each.

        Raises:
            DataError: a shard has changed, or cannot be read any more.
        """
        tokens = self.shards.read(sample * self.seq_len, self.seq_len + 1)
        return np.stack((tokens[:-1], tokens[1:]))

    def spans(self, sample: int) -> list[tuple[int, int]]:
        """Return (start, length) in the row of tokens of each piece of a sample, in its order."""
        return [(sample * self.seq_len, self.seq_len)]

    def documents(self, sample: int, first: int = 0, count: int | None = None) -> list[SampleDocument]:
        """Return the documents among `count` tokens (None: all) of a sample from `first` on, in order, without padding.

        Where no separator is known, each piece is one document.
        """
        found: list[SampleDocument] = []
        last = self.seq_len if count is None else first + count
        at = 0
        for start, length in self.spans(sample):
            skipped, until = max(0, first - at), min(length, last - at)
            if skipped < until:
                found += self._cut(start + skipped, start + until, at + skipped - first)
            at += length
        return found

    def _cut(self, start: int, end: int, at: int) -> list[SampleDocument]:
        """Cut tokens of the source behind each separator; the first is token `at` of what is looked at."""
        separator, before = self.shards.separator, max(0, start - 1)
        if separator is None:
            return [SampleDocument(at, end - start, start, start == 0, False)]
        row = self.shards.read(before, end - before)
        starts = document_starts(row[None, start - before :], np.array([separator]))
        borders = start + np.append(0, document_lengths(starts).cumsum())
        is_end = (row == separator).tolist()  # of the token before the first one on
        return [
            SampleDocument(at + a - start, b - a, a, a == 0 or a > start or is_end[0], is_end[b - 1 - before])
            for a, b in pairwise(borders.tolist())
        ]


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
