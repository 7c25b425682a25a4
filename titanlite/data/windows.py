"""The order of a source that is shuffled within windows: the units of one window, all of them, and then the next.

A window is a run of units that lie one after the other in the source. Each epoch goes through the windows in order and
through the units of each in an order of its own, which is `order.py`'s. So training needs only the beginning of a
source that is still being tokenized, and what it reads when does not depend on how far that is.

The trade-off: text is not mixed over more than a window. A source that is sorted must be shuffled beforehand.
"""

import numpy as np

from titanlite.data.order import mix, samples_at, seed_key
from titanlite.errors import DataError


def units_at(positions: np.ndarray, n_units: int | None, seed: int, window: int = 0) -> np.ndarray:
    """Return the units at some positions of a source's order.

    Args:
        positions: [N] integers from 0 on; position // n_units is the epoch.
        n_units: units of the source; None while unknown, the source then has at least `units_needed`.
        seed: any integer.
        window: units of a window; the last one may have fewer. 0: one window, the whole source.

    Returns:
        [N] int64, units in 0 … n_units - 1. Over the positions of one epoch each occurs once.

    Raises:
        DataError: the source has none.
    """
    if n_units is not None and n_units < 1:
        saw, want = "a source with fewer tokens than one sample", "at least one sample of each source"
        raise DataError.of("data", "data", saw, want, "give a source with more text, or a smaller seq_len")
    if not window:
        assert n_units is not None  # noqa: S101  # the order within a window depends on its length
        return samples_at(positions, n_units, seed)
    positions = np.asarray(positions, np.int64)
    epochs, places = np.divmod(positions, n_units) if n_units is not None else (np.zeros_like(positions), positions)
    windows, places = np.divmod(places, window)
    units = np.empty_like(positions)
    for epoch, number in {*zip(epochs.tolist(), windows.tolist(), strict=True)}:
        first = number * window
        size = window if n_units is None else min(window, n_units - first)
        here = (epochs == epoch) & (windows == number)
        key = mix(seed_key(seed) + np.uint64(epoch))
        of_window = int((mix(key) + np.uint64(number)).item())
        units[here] = first + samples_at(places[here], size, of_window)
    return units


def order_in_words(window: int, unit_len: int, tokens_per_step: int) -> str:
    """Say how a source is shuffled by a `data.shuffle_window` of tokens; `tokens_per_step` is 0 while unknown."""
    samples = window // unit_len
    if not window:
        return "shuffled as a whole"
    if samples == 1:
        return f"not shuffled: a data.shuffle_window of {window:,} tokens has one sample of {unit_len:,}"
    steps = f", what {samples * unit_len / tokens_per_step:,.3g} steps take" if tokens_per_step else ""
    return f"shuffled within windows of {samples:,} samples: {samples * unit_len:,} tokens{steps}"


def units_needed(positions: np.ndarray, window: int) -> int:
    """Return how many units a source of unknown length must have before its order at some positions is known."""
    return (int(np.max(positions)) // window + 1) * window
