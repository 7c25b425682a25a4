"""Cut a source into samples of S tokens, from which batches are made, and find the documents in each sample."""

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
    """A document in a sample, or the part of a document that is in the sample."""

    at: int  # position of its first token in the sample
    length: int  # number of its tokens in the sample, with the separator
    start: int  # position of its first token in the source
    begins: bool  # the beginning of the document is in the sample
    ends: bool  # the separator of the document is in the sample


class Samples:
    """The samples of a source without packing: sample i is tokens i·S … i·S + S - 1 (S = seq_len). For any thread.

    The target of a token is the next token, so the last target of a sample is the first token of the next sample. If
    the source is incomplete at first, `wait` calls `check` as soon as the source is complete.
    """

    def __init__(self, shards: Corpus, seq_len: int, check: Callable[[], object] = lambda: None) -> None:
        self.shards, self.seq_len = shards, seq_len
        self._check, self._is_checked = check, shards.is_whole

    @property
    def n(self) -> int | None:
        """Return the number of samples; None while the source is incomplete."""
        return max(0, (self.shards.tokens - 1) // self.seq_len) if self.shards.is_whole else None

    def require(self, least: int, key: str) -> None:
        """Raise a DataError if a complete source has fewer than `least` samples; `key` is its config key."""
        if self.shards.is_whole:
            meta = self.shards.meta
            sample_count(meta.source, meta.tokens, self.seq_len, least, key, meta.max_tokens)

    def in_order(self, places: np.ndarray, seed: int, window: int) -> np.ndarray:
        """Return the samples at `places` of the source's order, as `samples_at` does; wait until they can be read.

        Raises:
            NoMoreDataError: the samples will not come, or the source has too few samples for the run.
        """
        self.wait((int(np.max(places)) // window + 1) * window if window else 0)
        return samples_at(places, self.n, seed, window)

    def wait(self, samples: int) -> None:
        """Wait until `samples` samples can be read or the source is complete; raises as `in_order`."""
        if not self._is_checked and self.shards.wait(samples * self.seq_len + 1) is not None:
            try:
                self._check()  # raises if the complete source is too short
            except DataError as e:
                raise NoMoreDataError(*e.args) from e
            self._is_checked = True

    def read(self, sample: int) -> np.ndarray:
        """Read the sample with the number `sample`, 0 … n - 1.

        Returns:
            [2, S] int64: the tokens of the sample, and the target of each.

        Raises:
            DataError: a shard has changed, or cannot be read any more.
        """
        tokens = self.shards.read(sample * self.seq_len, self.seq_len + 1)
        return np.stack((tokens[:-1], tokens[1:]))

    def spans(self, sample: int) -> list[tuple[int, int]]:
        """Return (start, length) of each piece of a sample, in order; `start` is a position in the source."""
        return [(sample * self.seq_len, self.seq_len)]

    def documents(self, sample: int, first: int = 0, count: int | None = None) -> list[SampleDocument]:
        """Return the documents in `count` tokens of a sample (None: all) from `first` on, in order, without padding.

        If the source's separator is not known, each piece is one document.
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
        """Cut the tokens `start` … `end - 1` of the source after each separator; token `start` gets position `at`."""
        separator, before = self.shards.separator, max(0, start - 1)
        if separator is None:
            return [SampleDocument(at, end - start, start, start == 0, False)]
        row = self.shards.read(before, end - before)
        starts = document_starts(row[None, start - before :], np.array([separator]))
        borders = start + np.append(0, document_lengths(starts).cumsum())
        is_end = (row == separator).tolist()  # begins with the token before `start`
        return [
            SampleDocument(at + a - start, b - a, a, a == 0 or a > start or is_end[0], is_end[b - 1 - before])
            for a, b in pairwise(borders.tolist())
        ]


class SampleCounts(Mapping[str, int | None]):
    """The number of samples of each source, by name. It is computed at each access, as it may become known later."""

    def __init__(self, sources: Mapping[str, Samples]) -> None:
        self._sources = sources

    def __getitem__(self, name: str) -> int | None:
        return self._sources[name].n

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)
