"""Which experts of a rank are in which window of rows."""

import random
from itertools import accumulate

import pytest
import torch

from titanlite.kernels.expert_windows import Window, first_window, window_rows, windows
from titanlite.kernels.token_exchange import Dispatch


@pytest.mark.parametrize(
    ("counts", "n", "wanted"),
    [
        ([3, 2, 5, 2, 1], 7, [(0, 2), (2, 4), (4, 5)]),
        ([7, 7, 7], 7, [(0, 1), (1, 2), (2, 3)]),
        ([0, 0, 7, 0, 7, 0], 7, [(0, 4), (4, 6)]),
        ([1, 1, 1], 7, [(0, 3)]),
        ([0, 0], 7, [(0, 2)]),
    ],
)
def test_experts_fill_windows_in_order(counts: list[int], n: int, wanted: list[tuple[int, int]]) -> None:
    ends = [0, *accumulate(counts)]
    assert [*windows(torch.tensor(ends, dtype=torch.int32), n)] == [
        Window(first, last, ends[first], ends[last]) for first, last in wanted
    ]


@pytest.mark.parametrize(
    ("ranks", "tokens", "top_k", "n_experts", "rows"),
    [
        (8, 8 * 1024, 8, 16, 12 * 1024),  # 1.5 times the mean of 8,192
        (2, 2 * 1024, 8, 64, 12 * 1024),
        (8, 8 * 1024, 2, 1, 8 * 1024),  # an expert may have all tokens, and no rank more than that
        (4, 4 * 1024, 2, 2, 4 * 1024),
        (1, 1024, 8, 128, 8 * 1024),  # all
    ],
)
def test_a_window_has_room_for_half_more_than_the_mean_and_for_any_expert(
    ranks: int, tokens: int, top_k: int, n_experts: int, rows: int
) -> None:
    assert window_rows(ranks, tokens, top_k, n_experts) == rows


def test_windows_have_each_row_once_and_the_first_is_found_without_waiting() -> None:
    draw = random.Random(0)
    for _ in range(200):
        ranks, K = draw.choice([2, 4, 8]), draw.randint(1, 4)
        E, tokens = ranks * draw.randint(K, 5), ranks * draw.randint(1, 12)
        scores = torch.rand(tokens, E, generator=torch.Generator().manual_seed(draw.randrange(10**6)))
        scores[:, : draw.randint(0, E)] += draw.choice([0, 1])
        rank, count = draw.randrange(ranks), E // ranks
        to = Dispatch("g", ranks, rank)
        routing = to.routing(scores.topk(K, dim=1).indices.int(), count)
        first, has_later = first_window(routing, to, count)
        found, slots = [*windows(routing.offsets, len(first.slots))], list[int]()
        assert len(found) == 1 or has_later
        for window in found:
            own, ends = window.of(routing.slots, routing.offsets, len(first.slots))
            before, of_window, after = ends.diff().tensor_split((window.first, window.last))
            assert torch.equal(of_window, routing.offsets.diff()[window.first : window.last])
            assert before.sum() == after.sum() == 0
            slots += own[: ends[-1]].tolist()
            assert (own[ends[-1] :] == -1).all()
            if window.begin == 0:
                assert torch.equal(own, first.slots)
                assert torch.equal(ends, first.offsets)
        assert slots == routing.slots[: routing.offsets[-1]].tolist()
