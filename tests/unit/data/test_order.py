"""The global order: a permutation of each epoch, a pure function, without visible structure; whole or in windows."""

from types import SimpleNamespace

import numpy as np
import pytest

from titanlite.data.order import epochs, order_in_words, samples_at
from titanlite.data.samples import Samples
from titanlite.errors import DataError


@pytest.mark.parametrize("n", [*range(1, 40), 63, 64, 65, 1000, 4096, 99_991])
def test_each_sample_occurs_once_in_each_epoch(n: int) -> None:
    for epoch in (0, 1, 7):
        samples = samples_at(np.arange(epoch * n, (epoch + 1) * n), n, seed=3)
        assert np.array_equal(np.sort(samples), np.arange(n))


@pytest.mark.parametrize("n", [1, 6, 7, 8, 13, 14, 15, 100])
@pytest.mark.parametrize("window", [1, 2, 7, 200])
def test_each_window_has_its_samples_once_in_each_epoch(n: int, window: int) -> None:
    for epoch in samples_at(np.arange(3 * n), n, 3, window).reshape(3, n):
        for first in range(0, n, window):
            end = min(n, first + window)
            assert sorted(epoch[first:end].tolist()) == list(range(first, end))


def test_the_order_in_windows_does_not_depend_on_the_end_before_it_is_near() -> None:
    positions = np.arange(48)
    known = [samples_at(positions, n, 11, 16).tolist() for n in (48, 50, 10**12)]
    assert known == [samples_at(positions, None, 11, 16).tolist()] * 3


@pytest.mark.parametrize("window", [0, 16])
def test_positions_may_span_windows_and_epochs_and_come_in_any_order(window: int) -> None:
    positions = np.array([250, 3, 99, 100, 101, 16, 15, 3])
    assert samples_at(positions, 100, 5, window).tolist() == [
        samples_at(positions[i : i + 1], 100, 5, window).item() for i in range(len(positions))
    ]


def test_a_corpus_of_any_size_needs_no_table() -> None:
    n = 10**13
    samples = samples_at(np.arange(5 * n - 500, 5 * n + 500), n, 0)
    assert samples.min() >= 0
    assert samples.max() < n
    assert len(set(samples.tolist())) == 1000


@pytest.mark.parametrize("window", [0, 5000])
def test_seeds_epochs_and_windows_have_unrelated_orders(window: int) -> None:
    n, size = 10_000, window or 10_000
    orders = [
        samples_at(np.arange(first, first + size), n, seed, window) % size
        for seed in (0, 1, 2, -1)
        for first in range(0, 3 * n, size)
    ]
    for i, a in enumerate(orders):
        for b in orders[:i]:
            # Two independent permutations agree in a number of places that is Poisson of mean 1.
            assert (a == b).sum() < 12


@pytest.mark.parametrize("n", [1000, 4096, 100_000])
def test_no_visible_structure(n: int) -> None:
    place = np.arange(n)
    for seed in range(5):
        samples = samples_at(place, n, seed)
        sigma = 1 / np.sqrt(n)  # of the correlation of independent ranks
        for lag in (1, 2, 64):
            assert abs(np.corrcoef(samples[:-lag], samples[lag:])[0, 1]) < 5 * sigma
        assert abs(np.corrcoef(place, samples)[0, 1]) < 5 * sigma
        # A tenth of the positions spreads evenly over tenths of the corpus: hypergeometric, variance below n / 100.
        counts = np.bincount(samples[: n // 10] * 10 // n, minlength=10)
        assert np.abs(counts - n / 100).max() < 5 * np.sqrt(n / 100)
        # Neighbours stay neighbours in 2 of n cases.
        assert (np.abs(np.diff(samples)) == 1).sum() < 2 + 6 * np.sqrt(2)


def test_every_order_of_three_occurs_equally_often() -> None:
    orders = [tuple(samples_at(np.arange(3), 3, seed).tolist()) for seed in range(6000)]
    counts = np.array([orders.count(o) for o in sorted(set(orders))])
    assert len(counts) == 6
    assert np.abs(counts - 1000).max() < 5 * np.sqrt(1000)


def test_the_order_never_changes() -> None:
    """Old runs resume: these values are part of the format of a checkpoint."""
    assert [samples_at(np.arange(n), n, 0).tolist() for n in (2, 5)] == [[1, 0], [2, 4, 3, 0, 1]]
    assert samples_at(np.arange(8), 8, 0).tolist() == [2, 6, 3, 5, 7, 0, 4, 1]
    assert samples_at(np.arange(12), 10, 0, 4).tolist() == [1, 3, 2, 0, 7, 6, 4, 5, 9, 8, 1, 2]
    assert samples_at(np.arange(2_000_000, 2_000_006), 1_000_003, 42).tolist() == [
        443188,
        563256,
        892889,
        283826,
        433137,
        88032,
    ]


@pytest.mark.parametrize(
    ("samples", "n_samples", "said"),
    [
        (1, 300, "0.00333 epochs"),
        (300, 300, "1 epoch"),
        (301, 300, "1 epoch"),
        (4027, 100, "40.3 epochs"),
        (123_456, 100, "1,235 epochs"),
        (0, 7, "0 epochs"),
    ],
)
def test_epochs_in_words(samples: int, n_samples: int, said: str) -> None:
    assert epochs(samples / n_samples) == said


@pytest.mark.parametrize("window", [0, 4])
def test_a_source_without_a_sample_is_an_error(window: int) -> None:
    with pytest.raises(DataError, match="fewer tokens than one sample"):
        samples_at(np.arange(3), 0, 1, window)


@pytest.mark.parametrize(
    ("window", "said"),
    [
        (0, "shuffled as a whole"),
        (200, "not shuffled: a data.shuffle_window of 200 tokens has one sample of 128"),
        (20_000, "shuffled within windows of 156 samples: 19,968 tokens, what 19.5 steps take"),
    ],
)
def test_an_order_in_words(window: int, said: str) -> None:
    assert order_in_words(window, 128, 1024) == said


@pytest.mark.parametrize(
    ("places", "window", "needed"), [([3, 47], 16, 48), ([3, 48], 16, 64), ([0], 16, 16), ([9], 0, 0)]
)
def test_the_windows_of_what_is_asked_for_are_waited_for(places: list[int], window: int, needed: int) -> None:
    waited = list[int]()
    source = SimpleNamespace(n=100, wait=waited.append)
    Samples.in_order(source, np.array(places), 0, window)
    assert waited == [needed]
