"""Tokens of a micro-batch over ranks: every one has one, the work is even, and what is exchanged is what is seen."""

import numpy as np
import pytest

from titanlite.data.context_split import (
    ContextGroup,
    Share,
    chunk_length,
    documents_of_samples,
    load_of_split,
    share_of_rank,
    split_by_work,
)

N, S = 8192, 4096
WINDOWS = (0, 200)
C = 128  # of any of these splits


def starts_of(lengths: list[int]) -> np.ndarray:
    """Where the document of each token begins; documents end at a sample's end, too."""
    starts = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)[:N]
    return np.maximum(starts, documents_of_samples(N, S)).astype(np.int32)


def of_random_length(seed: int) -> list[int]:
    random = np.random.default_rng(seed)
    return [*(2 ** random.uniform(0, 12, 200)).astype(int).tolist(), N]


DOCUMENTS = {
    "samples": [N],
    "of random length": of_random_length(0),
    "others of random length": of_random_length(1),
    "one token each": [1] * N,
    "that end at a chunk's end": [C, 2 * C, 3 * C] * (N // (6 * C)) + [N],
    "one long among tokens": [1] * (S + 100) + [N],
}


def shares(starts: np.ndarray, ranks: int) -> list[Share]:
    return [share_of_rank(starts, S, ContextGroup("", ranks, rank, WINDOWS)) for rank in range(ranks)]


def lists(share: Share, window: int, side: int) -> list[list[int]]:
    """The chunks for each rank, or from it."""
    ends = share.counts[window, side].cumsum()
    assert len(share.chunks[window, side]) >= ends[-1]
    return [of.tolist() for of in np.split(share.chunks[window, side, : ends[-1]], ends[:-1])]


def seen_by(starts: np.ndarray, columns: np.ndarray, window: int) -> set[int]:
    """The chunks that have a key of one of these tokens, token by token."""
    first = starts[columns].astype(int)
    if window:
        first = np.maximum(first, columns - window + 1)
    return {chunk for a, b in zip(first, columns, strict=True) for chunk in range(a // C, b // C + 1)}


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_each_token_is_of_one_rank_in_runs_and_each_rank_has_as_many(documents: str, ranks: int) -> None:
    of_rank = [share.columns for share in shares(starts_of(DOCUMENTS[documents]), ranks)]
    assert chunk_length(N, S, ranks) == C
    assert {len(columns) for columns in of_rank} == {N // ranks}
    assert sorted(np.concatenate(of_rank).tolist()) == list(range(N))
    for columns in of_rank:
        runs = columns.reshape(-1, C)
        assert (runs[:, 0] % C == 0).all()
        assert np.array_equal(runs, runs[:, :1] + np.arange(C))
        assert (np.diff(columns) > 0).all()


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_work_is_even_where_swaps_can_make_it_so(documents: str, ranks: int) -> None:
    """Within a hundredth, or no swap of a chunk of the rank with most and one of that with least brings them nearer."""
    starts = starts_of(DOCUMENTS[documents])
    work = (np.arange(N) - starts + 1).reshape(-1, C).sum(1)
    owner = split_by_work(starts, C, ranks)
    loads = np.array([work[owner == rank].sum() for rank in range(ranks)])
    gap = loads.max() - loads.min()
    if gap > 0.01 * loads.mean():
        most, least = work[owner == loads.argmax()], work[owner == loads.argmin()]
        assert (np.abs(gap - 2 * (most[:, None] - least)) >= gap).all()
    if documents.endswith("random length"):
        assert gap <= 0.02 * loads.mean()
        in_runs = work.reshape(ranks, -1).sum(1)
        assert np.ptp(in_runs) > 5 * gap  # of those it begins with


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_ranks_exchange_what_their_tokens_see_and_no_more(documents: str, ranks: int) -> None:
    starts = starts_of(DOCUMENTS[documents])
    of_rank = shares(starts, ranks)
    own = [share.columns[::C] // C for share in of_rank]
    for w, window in enumerate(WINDOWS):
        sent, got = ([lists(share, w, side) for share in of_rank] for side in (0, 1))
        for rank in range(ranks):
            for other in range(ranks):
                assert own[other][sent[other][rank]].tolist() == got[rank][other]
            arrived = [chunk for chunks in got[rank] for chunk in chunks]
            assert len(arrived) == len(set(arrived))
            seen = seen_by(starts, of_rank[rank].columns, window)
            assert set(arrived) == seen - set(own[rank].tolist())


def test_the_load_of_a_split_is_that_of_the_lists() -> None:
    starts = starts_of(DOCUMENTS["of random length"])
    of_rank, load = shares(starts, 4), load_of_split(starts, S, 4, WINDOWS)
    for w in range(len(WINDOWS)):
        sent, got = (np.array([share.counts[w, side].sum() for share in of_rank]) / (N // C) for side in (0, 1))
        assert load.most[w] == pytest.approx(max(got.max(), sent.max()))
    assert 0 < load.most[1] < load.most[0] < 1
    work = np.array([(share.columns - starts[share.columns] + 1).sum() for share in of_rank])
    assert load.attention == pytest.approx(work.max() / work.mean())
    assert 1 <= load.attention <= 1.02


def test_a_length_of_few_divisors_is_split_as_evenly() -> None:
    starts = documents_of_samples(1024 * 127, 1024 * 127)
    assert load_of_split(starts, len(starts), 8, (0,)).attention < 1.01


def test_nothing_travels_where_documents_end_with_the_ranks_tokens() -> None:
    for share in shares(starts_of([N // 4] * 4), 4):
        assert not share.counts.any()


@pytest.mark.parametrize(
    ("tokens", "seq_len", "ranks", "length"),
    [
        (256, 256, 2, 128),  # a chunk each
        (2**20, 2**20, 2, 8192),  # 64 each
        (2**20, 2**20, 8, 2048),
        (3 * 2048, 2048, 3, 128),
        (128 * 67 * 2, 128 * 67, 2, 128),  # a prime: one chunk would be too few
    ],
)
def test_chunks_are_as_short_as_tiles_are_or_as_few(tokens: int, seq_len: int, ranks: int, length: int) -> None:
    assert chunk_length(tokens, seq_len, ranks) == length
