"""Pack documents into bins of S tokens: best-fit decreasing, in windows of the source.

A document of at most S tokens is never cut. Of a longer one, pieces of S tokens are bins of their own, and its rest is
packed like a document. Each item, the longest first, goes where it leaves the least room; where it fits nowhere, a new
bin is opened. Items of one length are placed together: the bins of the least room r that they fit into take r // length
of them each, as if they were placed one by one. So a window costs a step per length and per room that is used up.

A window ends after about a million items, so that memory is bounded and a corpus is packed in one pass. The trade-off
is the room left in the last bins of each window, a few of hundreds of thousands. The bins of a window are in the order
of their first tokens, near the order of the source.

Source: Ding et al., "Fewer Truncations Improve Language Modeling", 2024 (arXiv:2404.10830), section 3.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

_WINDOW_ITEMS = 1 << 20


SPAN = np.dtype([("start", "<i8"), ("length", "<i4")])
"""A document, or a piece of one that fits into a bin: the place of its first token in the source, and 1 … S tokens."""


@dataclass
class DocumentCuts:
    """Cut documents, found by where they end, into pieces of at most S tokens, and count them."""

    seq_len: int  # S
    documents: int = 0  # that have ended so far
    longer: int = 0  # of more than S tokens
    crossing: int = 0  # of at most S tokens, that `concat` cuts
    _begin: int = 0  # of the document that has not ended
    _taken: int = 0  # end of its pieces that have been returned

    def cut(self, ends: np.ndarray, until: int) -> np.ndarray:
        """Return the next pieces, [N] SPAN.

        Args:
            ends: [D] int64, ascending, places behind the last token of each document that ends up to `until`.
            until: end of what has been read of the source; of a document that goes on, full pieces are returned.
        """
        s = self.seq_len
        begins = np.concatenate(([self._begin], ends[:-1])).astype(np.int64)[: len(ends)]
        lengths = ends - begins
        fits = lengths <= s
        self.documents += len(ends)
        self.longer += int(np.count_nonzero(~fits))
        self.crossing += int(np.count_nonzero(fits & (begins // s != (ends - 1) // s)))
        first = begins.copy()  # of what has not been returned
        first[:1] = self._taken
        self._begin = int(ends[-1]) if len(ends) else self._begin
        taken = self._begin if len(ends) else self._taken
        n_full = (until - taken) // s
        self._taken = taken + n_full * s
        first, last = np.append(first, taken), np.append(ends, self._taken)
        counts = -(-(last - first) // s)
        index = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        spans = np.empty(len(index), SPAN)
        spans["start"] = np.repeat(first, counts) + index * s
        spans["length"] = np.minimum(s, np.repeat(last, counts) - spans["start"])
        return spans


def packed_windows(
    pieces: Iterator[np.ndarray], seq_len: int, window: int = _WINDOW_ITEMS
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pack pieces, [N] SPAN in the order of the source, into bins of S tokens; `window` pieces or more at once.

    Yields:
        The pieces of a window, bin by bin and in a bin by their starts; and [bins] int64, how many each bin has.
    """
    held: list[np.ndarray] = []
    n_held = 0
    for some in pieces:
        held.append(some)
        n_held += len(some)
        if n_held >= window:
            yield _pack_window(np.concatenate(held), seq_len)
            held, n_held = [], 0
    if n_held:
        yield _pack_window(np.concatenate(held), seq_len)


def _pack_window(spans: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    bins = best_fit_decreasing(spans["length"], seq_len)
    _, first = np.unique(bins, return_index=True)
    rank = np.empty(len(first), np.int64)  # of each bin, by its first token
    rank[np.argsort(first)] = np.arange(len(first))
    ranked = rank[bins]
    return spans[np.argsort(ranked, kind="stable")], np.bincount(ranked)


def best_fit_decreasing(lengths: np.ndarray, seq_len: int) -> np.ndarray:
    """Return the bin of each item, [N] int64 from 0 on: the longest item first, each where it leaves the least room.

    `lengths` are [N] integers, 1 … S; an empty bin has room for S.
    """
    bins = np.empty(len(lengths), np.int64)
    order = np.argsort(-lengths, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(lengths[order])) + 1) if len(order) else []
    n_bins, open_bins = 0, dict[int, list[int]]()  # by their room
    rooms: list[int] = []  # that open bins have, ascending
    for items in groups:
        length, done = int(lengths[items[0]]), 0
        while done < len(items):
            least = bisect_left(rooms, length)
            room = rooms[least] if least < len(rooms) else seq_len
            each = room // length
            wanted = -(-(len(items) - done) // each)
            if least < len(rooms):
                taken = open_bins[room][-wanted:]
                del open_bins[room][-wanted:]
                if not open_bins[room]:
                    del rooms[least]
            else:
                taken = list(range(n_bins, n_bins + wanted))
                n_bins += wanted
            placed = np.repeat(taken, each)[: len(items) - done]
            bins[items[done : done + len(placed)]] = placed
            done += len(placed)
            n_last = len(placed) - each * (len(taken) - 1)  # items of the last bin
            for left, used in ((room - each * length, taken[:-1]), (room - n_last * length, taken[-1:])):
                if left and used:
                    if not open_bins.setdefault(left, []):
                        insort(rooms, left)
                    open_bins[left] += used
    return bins
