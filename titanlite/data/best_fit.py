"""Pack documents into bins of S tokens: best-fit decreasing, in windows of the source.

A document of at most S tokens is never cut. A longer document is cut into pieces of S tokens, which fill a bin each;
the rest is packed like a document. Items are placed from the longest to the shortest, each in the bin where it leaves
the least room. If it fits into no bin, a new bin is opened. Items of equal length are placed together: each bin of the
least sufficient room r takes r // length of them, with the same result as one by one. So the loop over a window takes
one step for each length and for each amount of room that is used up, not for each item.

A window ends after about a million items, so that memory is bounded and a corpus is packed in one pass. The trade-off
is unused room in the last bins of each window: a few bins of hundreds of thousands. The bins of a window are sorted by
their first tokens, which is close to the order of the source.

Source: Ding et al., "Fewer Truncations Improve Language Modeling", 2024 (arXiv:2404.10830), section 3.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

_WINDOW_ITEMS = 1 << 20


SPAN = np.dtype([("start", "<i8"), ("length", "<i4")])
"""A piece, which is a document or a part of one: position of its first token in the source, and length (1 … S)."""


@dataclass
class DocumentCuts:
    """Cuts documents into pieces of at most S tokens, and counts the documents."""

    seq_len: int  # S
    documents: int = 0  # documents that have ended so far
    longer: int = 0  # ended documents of more than S tokens
    crossing: int = 0  # ended documents of at most S tokens that `concat` packing would cut
    _begin: int = 0  # first token of the document that has not ended yet
    _taken: int = 0  # end of the pieces that were returned

    def cut(self, ends: np.ndarray, until: int) -> np.ndarray:
        """Return the pieces of the next part of the source, [N] SPAN.

        Args:
            ends: [D] int64, ascending, the end (last token + 1) of each of the D documents that end up to `until`.
            until: end of the part; of a document that continues after it, only pieces of S tokens are returned.
        """
        s = self.seq_len
        begins = np.concatenate(([self._begin], ends[:-1])).astype(np.int64)[: len(ends)]
        lengths = ends - begins
        fits = lengths <= s
        self.documents += len(ends)
        self.longer += int(np.count_nonzero(~fits))
        self.crossing += int(np.count_nonzero(fits & (begins // s != (ends - 1) // s)))
        first = begins.copy()  # of each document, the first token not returned yet
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
    """Pack `pieces`, arrays [N] of SPAN in the order of the source, into bins of S tokens, `window` or more at once.

    Yields:
        The pieces of a window, bin by bin, sorted by start within a bin; and the number of pieces of each bin, [bins].
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
    rank = np.empty(len(first), np.int64)  # position of each bin in the order of first tokens
    rank[np.argsort(first)] = np.arange(len(first))
    ranked = rank[bins]
    return spans[np.argsort(ranked, kind="stable")], np.bincount(ranked)


def best_fit_decreasing(lengths: np.ndarray, seq_len: int) -> np.ndarray:
    """Return the bin of each item, [N] int64. Items are placed longest first, each where it leaves the least room.

    lengths: [N] integers, the tokens of each item, 1 … S. An empty bin has room for S tokens.
    """
    bins = np.empty(len(lengths), np.int64)
    order = np.argsort(-lengths, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(lengths[order])) + 1) if len(order) else []
    n_bins, open_bins = 0, dict[int, list[int]]()  # open_bins: the numbers of open bins, by free room
    rooms: list[int] = []  # the different amounts of free room in open bins, ascending
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
            n_last = len(placed) - each * (len(taken) - 1)  # items placed in the last bin
            for left, used in ((room - each * length, taken[:-1]), (room - n_last * length, taken[-1:])):
                if left and used:
                    if not open_bins.setdefault(left, []):
                        insort(rooms, left)
                    open_bins[left] += used
    return bins
