"""Split the tokens of a micro-batch over context-parallel ranks, with equal attention work and equally many tokens.

The N tokens are cut into chunks of C tokens. Each rank begins with consecutive chunks, so that few documents lie on
several ranks. While the work is uneven, the busiest rank swaps a chunk with the least busy one: a late chunk of a long
document, which has many keys, for a chunk with few keys. The split depends on the documents alone, so all ranks of a
group compute the same split.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from titanlite.config.check_mesh import RUN
from titanlite.data.document_starts import bounds_of_run, room_of_run

_MOST_CHUNKS = 64  # per rank: with more, the split takes longer and is not more even
_FEWEST_CHUNKS = 16  # per rank, if its tokens suffice: with fewer, swaps cannot even out the work
_EVEN = 0.01  # accepted difference between the busiest and the least busy rank, as a fraction of the mean


class ContextGroup(NamedTuple):
    """The context-parallel ranks that share the tokens of a micro-batch, and the number of this rank among them."""

    name: str
    size: int
    rank: int
    windows: tuple[int, ...] = (0,)  # the different attention windows of the model's layers; 0: no window


class Share(NamedTuple):
    """A rank's tokens of a micro-batch, and the chunks of keys to send (0) and receive (1); P ranks, n chunks each."""

    columns: np.ndarray  # [M] int64, positions of the rank's M tokens among the N, ascending
    length: int  # C, tokens of a chunk
    chunks: np.ndarray  # [windows, 2, (P - 1)·n] int64, chunks to exchange, see `titanlite.kernels.context_attention`
    counts: np.ndarray  # [windows, 2, P] int64, how many chunks go to, and come from, each rank
    bounds: np.ndarray  # [windows, 2, …] int32, `at` of `titanlite.kernels.attention.Bounds`
    runs: np.ndarray  # [windows, n, 5] int64, `runs` of `Bounds`


def share_of_rank(starts: np.ndarray, seq_len: int, group: ContextGroup) -> Share:
    """Split a micro-batch of N tokens over the ranks of `group`; return this rank's share.

    starts: [N] int32, where the document of each token begins. N is a multiple of `seq_len`, and `seq_len` of `RUN`.
    """
    C = chunk_length(len(starts), seq_len, group.size)
    owner = split_by_work(starts, C, group.size)
    of_rank = [np.flatnonzero(owner == rank) for rank in range(group.size)]
    n, P = len(of_rank[0]), group.size
    chunks = np.zeros((len(group.windows), 2, (P - 1) * n), np.int64)
    counts = np.zeros((len(group.windows), 2, P), np.int64)
    for w, window in enumerate(group.windows):
        seen = [seen_chunks(starts, C, own, window) for own in of_rank]
        others = [rank for rank in range(P) if rank != group.rank]
        own = of_rank[group.rank]
        sent = {rank: np.flatnonzero(seen[rank][own]) for rank in others}
        got = {rank: of_rank[rank][seen[group.rank][of_rank[rank]]] for rank in others}
        for side, lists in enumerate((sent, got)):
            joined = np.concatenate([lists[rank] for rank in others])
            chunks[w, side, : len(joined)] = joined
            for rank in others:
                counts[w, side, rank] = len(lists[rank])
    columns = (of_rank[group.rank][:, None] * C + np.arange(C)).ravel()
    seen_by = [_rank_runs(starts, columns, window, n) for window in group.windows]
    bounds, runs = (np.stack(of) for of in zip(*seen_by, strict=True))
    return Share(columns, C, chunks, counts, bounds, runs)


def _rank_runs(starts: np.ndarray, columns: np.ndarray, window: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `Share.bounds` and `Share.runs` of a rank for one window; there are at most `most` runs.

    A run is a stretch of consecutive tokens; its pieces are the parts of documents in it. The keys of the pieces are
    consecutive, too: every piece except the first begins where its document begins.
    """
    at = np.zeros((2, room_of_run(len(columns)) + 16 * most), np.int32)
    runs, room, row = np.zeros((most, 5), np.int64), 0, 0
    for n, own in enumerate(np.split(columns, np.flatnonzero(np.diff(columns) != 1) + 1)):
        begins = np.flatnonzero(starts[own] == own)
        begins = begins if len(begins) and begins[0] == 0 else np.append(0, begins)
        first = int(max(starts[own[0]], own[0] - window + 1 if window else 0))
        before, bounds = int(own[0]) - first, bounds_of_run(len(begins))
        here = slice(room, room + bounds)
        at[0, here], at[1, here] = len(own), len(own) + before
        at[:, room : room + len(begins)] = begins, begins + before
        at[1, room] = 0
        runs[n] = row, first, own[-1] + 1, room, bounds
        room, row = room + room_of_run(len(begins)), row + len(own)
    return at, runs


def chunk_length(tokens: int, seq_len: int, ranks: int) -> int:
    """Return C, the tokens of a chunk: a multiple of `RUN` that divides a sample, with equally many chunks per rank.

    A rank gets at most `_MOST_CHUNKS` chunks, unless the next longer C would leave it fewer than `_FEWEST_CHUNKS`.
    """
    each = tokens // (RUN * ranks)
    runs = math.gcd(each, seq_len // RUN)
    lengths = [u for u in range(1, runs + 1) if runs % u == 0]
    even = [u for u in lengths if each >= u * _FEWEST_CHUNKS] or [1]
    return RUN * next((u for u in even if each <= u * _MOST_CHUNKS), even[-1])


def split_by_work(starts: np.ndarray, C: int, ranks: int) -> np.ndarray:
    """Return the rank of each chunk of C tokens, [N / C]; all ranks get equally many chunks.

    starts: [N] int32, where the document of each token begins.
    """
    work = _attention_of_chunks(starts, C)
    owner = np.repeat(np.arange(ranks), len(work) // ranks)
    loads = work.reshape(ranks, -1).sum(1)
    while True:
        most, least = int(loads.argmax()), int(loads.argmin())
        gap = loads[most] - loads[least]
        if gap <= _EVEN * loads.mean():
            return owner
        rich, poor = np.flatnonzero(owner == most), np.flatnonzero(owner == least)
        poor = poor[work[poor].argsort(kind="stable")]
        # For each chunk of the rich rank, the two chunks of the poor rank whose swap comes closest to closing the gap.
        at = np.searchsorted(work[poor], work[rich] - gap / 2)
        near = poor[np.stack((at - 1, at)).clip(0, len(poor) - 1)]
        moved = work[rich] - work[near]
        after = np.abs(gap - 2 * moved)
        side, a = np.unravel_index(int(after.argmin()), after.shape)
        if after[side, a] >= gap:  # no swap helps
            return owner
        owner[rich[a]], owner[near[side, a]] = least, most
        loads[most] -= moved[side, a]
        loads[least] += moved[side, a]


def _attention_of_chunks(starts: np.ndarray, C: int) -> np.ndarray:
    """Return the work of each chunk, [N / C] float64: the sum of the keys that its tokens attend to."""
    return (np.arange(len(starts)) - starts + 1.0).reshape(-1, C).sum(1)


def seen_chunks(starts: np.ndarray, C: int, own: np.ndarray, window: int) -> np.ndarray:
    """Return which chunks contain keys that the tokens of the chunks `own` attend to, [N / C] bool.

    starts: [N] int32, where a token's document begins. own: [n] numbers of chunks of C tokens. A token attends to the
    last `window` tokens of its document, itself included; 0: to all up to itself.
    """
    first = starts[own * C]
    if window:
        first = np.maximum(first, own * C - window + 1)
    seen = np.zeros(len(starts) // C + 1, np.int64)
    np.add.at(seen, first // C, 1)
    np.add.at(seen, own + 1, -1)
    return seen.cumsum()[:-1] > 0


def documents_of_samples(tokens: int, seq_len: int) -> np.ndarray:
    """Return where the document of each token begins if each sample is one document, [N] int32."""
    places = np.arange(tokens, dtype=np.int32)
    return places - places % seq_len


class SplitLoad(NamedTuple):
    """How evenly a split spreads attention and the exchange of keys over ranks."""

    attention: float  # work of the busiest rank divided by the mean, in layers without a window
    most: list[float]  # per window, the keys that the busiest rank receives or sends, as a fraction of all keys


def load_of_split(starts: np.ndarray, seq_len: int, ranks: int, windows: Sequence[int]) -> SplitLoad:
    """Return how even the split over `ranks` is; `starts`: [N] int32, where the document of each token begins."""
    C = chunk_length(len(starts), seq_len, ranks)
    owner = split_by_work(starts, C, ranks)
    work = np.bincount(owner, _attention_of_chunks(starts, C), ranks)
    of_rank = [np.flatnonzero(owner == rank) for rank in range(ranks)]
    most = list[float]()
    for window in windows:
        seen = np.stack([seen_chunks(starts, C, own, window) for own in of_rank])  # [P, N / C]
        got = seen.sum(1) - len(of_rank[0])
        sent = np.bincount(owner, seen.sum(0) - 1, ranks)  # minus 1: a chunk's owner needs no copy
        most.append(float(max(got.max(), sent.max())) / len(owner))
    return SplitLoad(float(work.max() / work.mean()), most)
