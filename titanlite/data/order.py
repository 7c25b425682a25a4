"""The global sample order: which sample is seen at which position of training.

A pure function of (seed, epoch, position), the same for every number of ranks, so that its state is one integer and a
run may resume on another layout. Each epoch is a pseudo-random permutation of all samples, computed position by
position without a table: a Feistel network permutes 0 … 2^b - 1, the smallest such range that holds all samples, and a
result outside the samples is permuted again until it is inside (cycle walking, fewer than two turns on average).

The trade-off: it is not a perfect shuffle (of n! permutations at most 2^64 can occur), and no reader could tell.

Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002, sections 3 and 5; the mixing function is
splitmix64's (Steele, Lea and Flood, 2014).
"""

import numpy as np

_ROUNDS = 8
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def samples_at(positions: np.ndarray, n_samples: int, seed: int) -> np.ndarray:
    """Return the samples at positions [N] of training, [N] int64 in 0 … n_samples - 1.

    position // n_samples is the epoch, over whose positions each sample occurs once. `seed` is any integer.
    """
    epochs, places = np.divmod(np.asarray(positions, np.int64), n_samples)
    bits = max(2, (n_samples - 1).bit_length())
    key = mix(seed_key(seed) + epochs.astype(np.uint64))
    samples = _permute(places.astype(np.uint64), key, bits)
    while (outside := samples >= n_samples).any():
        samples[outside] = _permute(samples[outside], key[outside], bits)
    return samples.astype(np.int64)


def seed_key(seed: int) -> np.ndarray:
    """Return the key to which an epoch's number is added, [1] uint64."""
    return mix(np.full(1, seed & _MASK, np.uint64))


def epochs(count: float) -> str:
    """Say how often a source is gone through: `0.22 epochs`, `1 epoch`, `1,200 epochs`."""
    text = f"{count:{',.0f' if count >= 100 else '.3g'}}"
    return f"{text} epoch{'s' * (text != '1')}"


def _permute(x: np.ndarray, key: np.ndarray, bits: int) -> np.ndarray:
    """Permute 0 … 2^bits - 1 for each key: halves are changed in turn, each by a function of the other."""
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
    """Apply splitmix64 to uint64s, wrapping: each bit of the result depends on each bit of x."""
    x = x + np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
