"""The order within windows: each unit once an epoch, one window after the other, whatever is known of the length."""

import numpy as np
import pytest

from titanlite.data.order import samples_at
from titanlite.data.windows import order_in_words, units_at, units_needed
from titanlite.errors import DataError


def test_without_a_window_it_is_the_order_of_the_whole_source() -> None:
    positions = np.arange(700)
    assert np.array_equal(units_at(positions, 300, 5), samples_at(positions, 300, 5))


@pytest.mark.parametrize("n", [1, 6, 7, 8, 13, 14, 15, 100])
@pytest.mark.parametrize("window", [1, 2, 7, 200])
def test_each_window_has_its_units_once_in_each_epoch(n: int, window: int) -> None:
    units = units_at(np.arange(3 * n), n, 3, window)
    for epoch in units.reshape(3, n):
        for first in range(0, n, window):
            end = min(n, first + window)
            assert sorted(epoch[first:end].tolist()) == list(range(first, end))


def test_the_order_does_not_depend_on_the_end_before_it_is_near() -> None:
    positions = np.arange(48)
    known = [units_at(positions, n, 11, 16).tolist() for n in (48, 50, 10**12)]
    assert known == [units_at(positions, None, 11, 16).tolist()] * 3
    assert units_needed(positions, 16) == 48
    assert units_needed(np.array([3, 48]), 16) == 64
    assert units_needed(np.array([0]), 16) == 16


def test_positions_come_in_any_order_and_span_windows_and_epochs() -> None:
    positions = np.array([[250, 3], [99, 100], [16, 15]]).ravel()
    assert units_at(positions, 101, 5, 16).tolist() == [
        units_at(positions[i : i + 1], 101, 5, 16).item() for i in range(len(positions))
    ]


def test_windows_seeds_and_epochs_have_unrelated_orders() -> None:
    size = 5000
    orders = [
        units_at(np.arange(2 * size) + epoch * 2 * size, 2 * size, seed, size).reshape(2, size)[w] - w * size
        for seed in (0, 1)
        for epoch in (0, 1)
        for w in (0, 1)
    ]
    for i, a in enumerate(orders):
        for b in orders[:i]:  # two independent permutations agree in a number of places that is Poisson of mean 1
            assert (a == b).sum() < 12


def test_the_order_in_windows_never_changes() -> None:
    """Old runs resume: these values are part of the format of a checkpoint."""
    assert units_at(np.arange(12), 10, 0, 4).tolist() == [1, 3, 2, 0, 7, 6, 4, 5, 9, 8, 1, 2]


@pytest.mark.parametrize("window", [0, 4])
def test_a_source_without_a_unit_is_an_error(window: int) -> None:
    with pytest.raises(DataError, match="fewer tokens than one sample"):
        units_at(np.arange(3), 0, 1, window)


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
