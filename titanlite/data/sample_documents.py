"""Find the documents of a sample: where each begins and ends, in the sample and in the row of tokens of its source."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from titanlite.data.corpus import Corpus
from titanlite.data.document_starts import NO_SEPARATOR, document_lengths, document_starts
from titanlite.data.samples import Samples


@dataclass(frozen=True)
class SampleDocument:
    """A document of a sample, or the part of it that the sample has."""

    at: int  # place of its first token in the sample
    length: int  # tokens in the sample, with the separator
    start: int  # place of its first token in the source
    begins: bool  # the sample has its beginning
    ends: bool  # the sample has its separator


def documents_of(
    samples: Samples, shards: Corpus, sample: int, first: int = 0, count: int | None = None
) -> list[SampleDocument]:
    """Return the documents among `count` tokens (None: all) of a sample from `first` on, in order, without padding."""
    found: list[SampleDocument] = []
    last = samples.seq_len if count is None else first + count
    at = 0
    for start, length in samples.spans(sample):
        skipped, until = max(0, first - at), min(length, last - at)
        if skipped < until:
            before = max(0, start + skipped - 1)
            row = shards.read(before, start + until - before)
            found += _cut(
                row[start + skipped - before :], at + skipped - first, start + skipped, shards.separator, row[0]
            )
        at += length
    return found


def _cut(tokens: np.ndarray, at: int, start: int, separator: int | None, before: int) -> list[SampleDocument]:
    """Cut a run of tokens behind each separator; `before` is the token in front of it, if it has one."""
    starts = document_starts(tokens[None], np.array([NO_SEPARATOR if separator is None else separator]))
    borders = np.append(0, document_lengths(starts).cumsum()).tolist()
    ended = [int(tokens[b - 1]) == separator for b in borders[1:]]
    return [
        SampleDocument(at + a, b - a, start + a, bool(a or not start or before == separator), ends)
        for (a, b), ends in zip(pairwise(borders), ended, strict=True)
    ]
