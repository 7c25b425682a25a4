"""The global sample order: which sample is read at which position of training.

The order is a pure function of (seed, epoch, position), the same for every number of ranks. So its state is one integer
and a run may resume with another layout. Each epoch is a pseudo-random permutation of all samples, computed position by
position without a table. A Feistel network permutes 0 … 2^b - 1, the smallest such range that contains all samples. A
result that is no sample is permuted again until it is one (cycle walking, fewer than two permutations on average).

With a window of w samples, the source is cut into runs of w samples. An epoch goes through the runs in order, and each
run is shuffled separately. So training needs only the beginning of a source that is still being tokenized.

The trade-offs: the shuffle is not perfect (of n! permutations at most 2^64 can occur), without a noticeable effect.
With a window, text is only mixed within the window: a sorted source must be shuffled beforehand.

Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002, sections 3 and 5; the mixing function is
splitmix64's (Steele, Lea and Flood, 2014).
"""

import numpy as np

from titanlite.errors import DataError

_ROUNDS = 8
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def samples_at(positions: np.ndarray, n_samples: int | None, seed: int, window: int = 0) -> np.ndarray:
    """Return the samples at the given positions of a source's order.

    Args:
        positions: [N] integers from 0 on; position // n_samples is the epoch.
        n_samples: number of samples of the source; None: not known yet, the source is taken to be long enough.
        seed: any integer.
        window: number of samples that are shuffled together; the last window may have fewer. 0: the whole source.

    Returns:
        [N] int64, samples in 0 … n_samples - 1. Over the positions of one epoch each occurs once.

    Raises:
        DataError: the source has no sample.
    """
    if n_samples is not None and n_samples < 1:
        saw, want = "a source with fewer tokens than one sample", "at least one sample of each source"
        raise DataError.of("data", "data", saw, want, "give a source with more text, or a smaller seq_len")
    positions = np.asarray(positions, np.int64)
    if not window:
        assert n_samples is not None  # noqa: S101  # without a window the order depends on it
        return _shuffled(positions, n_samples, seed)
    epochs, places = (np.zeros_like(positions), positions) if n_samples is None else np.divmod(positions, n_samples)
    windows, places = np.divmod(places, window)
    samples = np.empty_like(positions)
    for epoch, number in {*zip(epochs.tolist(), windows.tolist(), strict=True)}:
        first = number * window
        size = window if n_samples is None else min(window, n_samples - first)
        here = (epochs == epoch) & (windows == number)
        of_window = int((mix(_epoch_key(seed, np.uint64(epoch))) + np.uint64(number)).item())
        samples[here] = first + _shuffled(places[here], size, of_window)
    return samples


def order_in_words(window: int, unit_len: int, tokens_per_step: int) -> str:
    """Describe how a source is shuffled with data.shuffle_window = `window` tokens; `tokens_per_step` 0: not known."""
    samples = window // unit_len
    if not window:
        return "shuffled as a whole"
    if samples == 1:
        return f"not shuffled: a data.shuffle_window of {window:,} tokens has one sample of {unit_len:,}"
    steps = f", what {samples * unit_len / tokens_per_step:,.3g} steps take" if tokens_per_step else ""
    return f"shuffled within windows of {samples:,} samples: {samples * unit_len:,} tokens{steps}"


def epochs(count: float) -> str:
    """Format a number of epochs: `0.22 epochs`, `1 epoch`, `1,200 epochs`."""
    text = f"{count:{',.0f' if count >= 100 else '.3g'}}"
    return f"{text} epoch{'s' * (text != '1')}"


def _shuffled(positions: np.ndarray, n_samples: int, seed: int) -> np.ndarray:
    """Return the samples at the given positions of a source that is shuffled without a window."""
    epochs, places = np.divmod(positions, n_samples)
    bits = max(2, (n_samples - 1).bit_length())
    key = _epoch_key(seed, epochs.astype(np.uint64))
    samples = _permute(places.astype(np.uint64), key, bits)
    while (outside := samples >= n_samples).any():
        samples[outside] = _permute(samples[outside], key[outside], bits)
    return samples.astype(np.int64)


def _epoch_key(seed: int, epochs: np.ndarray | np.uint64) -> np.ndarray:
    return mix(mix(np.full(1, seed & _MASK, np.uint64)) + epochs)


def _permute(x: np.ndarray, key: np.ndarray, bits: int) -> np.ndarray:
    """Permute `x` in 0 … 2^bits - 1 by a Feistel network: its halves change in turn, each by a hash of the other."""
    low_bits = np.uint64(bits // 2)
    low_mask, high_mask = np.uint64((1 << bits // 2) - 1), np.uint64((1 << (bits - bits // 2)) - 1)
    low, high = x & low_mask, x >> low_bits
    for i in range(_ROUNDS):
        round_key = key + np.uint64(i * _GOLDEN & _MASK)
        if i % 2 == 0:
            high = high ^ (mix(low ^ round_key) & high_mask)
        else:
            low = low ^ (mix(high ^ round_key) & low_mask)
    return high << low_bits | low


def mix(x: np.ndarray) -> np.ndarray:
    """Apply the hash splitmix64 to each uint64, modulo 2^64: each bit of the result depends on each bit of x."""
    x = x + np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
