"""Find the documents of a sample: where each begins and ends, in the sample and in the row of tokens of its source.

For people who look at data, and for forecasts; training finds documents in whole batches (`document_starts.py`).
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from titanlite.data.samples import Samples
from titanlite.data.shards import TokenShards


@dataclass(frozen=True)
class SampleDocument:
    """A document of a sample, or the part of it that is there.

    Attributes:
        at: place of its first token in the sample.
        length: tokens there, its separator counted.
        start: place of its first token in the source.
        begins: whether the document begins there.
        ends: whether it ends there, with its separator.
    """

    at: int
    length: int
    start: int
    begins: bool
    ends: bool


def documents_of(
    samples: Samples, shards: TokenShards, sample: int, first: int = 0, count: int | None = None
) -> list[SampleDocument]:
    """Return the documents of a sample, in order; padding is none.

    Args:
        samples: of the source.
        shards: the source.
        sample: which of them.
        first: token of the sample from which on they are asked for.
        count: tokens that are asked for; None: up to the end.
    """
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
    ends = np.array([], np.int64) if separator is None else np.flatnonzero(tokens == separator) + 1
    borders = [0, *ends.tolist()]
    if borders[-1] < len(tokens):
        borders.append(len(tokens))
    n_ended = len(ends)
    return [
        SampleDocument(at + a, b - a, start + a, bool(a or not start or before == separator), n < n_ended)
        for n, (a, b) in enumerate(pairwise(borders))
    ]
