"""Choose the source of each training sample, and the sample of that source, by the stage table alone.

Within a row of the table (`stages.py`) the sources alternate by their shares, which are exact fractions. After i
samples, a source with share w has provided floor(i·w) or ceil(i·w) samples, for every i. This is the Pfair schedule:
sample k of the source may be at positions floor((k - 1) / w) to ceil(k / w) - 1, and each position takes the allowed
sample with the earliest last position. The schedule repeats after T samples, the common denominator of the shares, so
it is stored as a table of T entries.

A source is cut into units as long as the longest seq_len of all stages; `order.py` permutes the units of each epoch. A
stage with a shorter seq_len takes the pieces of a unit in order. In a new row each source continues where it was, so
that no tokens are lost or repeated. However, if seq_len grows in the middle of a unit, the tokens up to the next
multiple of the new seq_len are skipped, and counted.

Source: Baruah, Cohen, Plaxton and Varvel, "Proportionate progress: a notion of fairness in resource allocation", 1996.
For one resource and jobs of one unit of time, the earliest deadline first is optimal: Jackson, 1955.
"""

import hashlib
import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np

from titanlite.config.build import show
from titanlite.config.schema import Config
from titanlite.config.stages import source_keys
from titanlite.data.order import epochs
from titanlite.data.stages import StageRow, StageTable
from titanlite.errors import DataError, Problem, describe

_MANY_EPOCHS = 5  # up to four epochs are about as good as new text (Muennighoff et al., arXiv 2305.16264)
LONGEST_PERIOD = 100_000
"""Longest period of the schedule of sources, in samples; shares that need a longer period are rounded."""


@dataclass(frozen=True)
class Turns:
    """One period of the schedule of sources, which repeats without end."""

    source: np.ndarray  # [T] the source of each position
    before: np.ndarray  # [T] how many earlier positions of the period have the same source
    counts: np.ndarray  # [sources] number of positions of each source in the period

    def at(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source at each position, counted from 0, and its number of earlier positions: [N] int64 each."""
        periods, within = np.divmod(places, len(self.source))
        source = self.source[within]
        return source, periods * self.counts[source] + self.before[within]

    def given(self, places: int) -> np.ndarray:
        """Return how many of the first `places` positions each source has: [sources] int64."""
        periods, within = divmod(places, len(self.source))
        return periods * self.counts + np.bincount(self.source[:within], minlength=len(self.counts))


def whole_shares(shares: Sequence[Fraction]) -> list[int]:
    """Return the numerators of shares over their common denominator, or rounded ones over LONGEST_PERIOD if less."""
    period = math.lcm(*(share.denominator for share in shares))
    if period <= LONGEST_PERIOD:
        return [int(share * period) for share in shares]
    exact = [share * LONGEST_PERIOD for share in shares]
    whole = [max(int(share > 0), int(share)) for share in exact]
    by_rest = sorted(range(len(shares)), key=lambda n: exact[n] - whole[n], reverse=True)
    left = LONGEST_PERIOD - sum(whole)
    for n in by_rest[:left] if left > 0 else ():
        whole[n] += 1
    if left < 0:  # very small shares were rounded up to one place each
        whole[max(range(len(whole)), key=whole.__getitem__)] += left
    return whole


@lru_cache(maxsize=64)
def turns(whole: tuple[int, ...]) -> Turns:
    """Return the schedule in which source s has `whole[s]` of the `sum(whole)` positions of a period."""
    period = sum(whole)
    source, before, given = np.zeros(period, np.int64), np.zeros(period, np.int64), [0] * len(whole)
    coming = [(0, s) for s, count in enumerate(whole) if count]  # (first position of the next sample, source)
    due: list[tuple[int, int]] = []  # (deadline, source) of the samples that may be placed now
    for place in range(period):
        while coming and coming[0][0] <= place:
            _, s = heapq.heappop(coming)
            heapq.heappush(due, (-(-(given[s] + 1) * period // whole[s]), s))
        _, s = heapq.heappop(due)
        source[place], before[place] = s, given[s]
        given[s] += 1
        heapq.heappush(coming, (given[s] * period // whole[s], s))
    return Turns(source, before, np.array(whole, np.int64))


def seed_of(seed: int, name: str) -> int:
    """Return the seed of a source's order: `training.seed`, which in a mixture is hashed with the source's name."""
    if not name:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest(), "little")


def check_epochs(config: Config, table: StageTable, units: Mapping[str, int | None]) -> None:
    """Raise a DataError that lists all sources which a run reads more often than their `max_epochs`.

    `units`: number of samples of `table.unit_len` tokens of each source, by name; None or no entry: not known yet.
    """
    unit_len, problems = table.unit_len, list[Problem]()
    mixture = Mixture(table, units)
    epochs, taken = mixture.epochs(table.steps), mixture.tokens(table.steps)
    for n, source in enumerate(config.data.mixture):
        if source.max_epochs is not None and epochs.get(source.name, 0) > source.max_epochs:
            most = int(source.max_epochs * (units[source.name] or 0) * unit_len)
            saw = f"{source.max_epochs:g}, and {table.steps:,} steps take {epochs[source.name]:.3g} of {source.name!r}"
            want = f"at most {most:,} tokens of it: the run takes {taken[source.name]:,}"
            fix = "a smaller weight, a shorter run, more text, or a larger max_epochs"
            problems.append(Problem(f"data.mixture[{n}].max_epochs", saw, want, fix))
    if problems:
        raise DataError(describe("data", problems))


def many_epochs(config: Config, table: StageTable, units: Mapping[str, int | None]) -> list[str]:
    """Return a warning for each source without `max_epochs` that a run reads five times or more."""
    asked, bounded = source_keys(config), {each.name for each in config.data.mixture if each.max_epochs is not None}
    passes = Mixture(table, {name: n for name, n in units.items() if name in asked and name not in bounded})
    why = "from the fifth on a repetition teaches less than new text would; give more text or fewer steps"
    return [
        f"{asked[name][0]} = {show(asked[name][1])}: {epochs(n)} in {table.steps:,} steps; {why}"
        for name, n in passes.epochs(table.steps).items()
        if n >= _MANY_EPOCHS
    ]


@dataclass(frozen=True)
class Taken:
    """The origin of N training samples: source, unit of the source, and piece of the unit."""

    source: np.ndarray  # [N] index in `Mixture.names`
    unit: np.ndarray  # [N] position in the order of the source, counted through all epochs
    piece: np.ndarray  # [N] number of the piece in the unit; a piece has seq_len tokens
    seq_len: int


class Mixture:
    """The order in which training reads the samples of all its sources.

    `units`: number of units of each source by name, at least one; None: not known yet.
    """

    def __init__(self, table: StageTable, units: Mapping[str, int | None]) -> None:
        # Sorted, so that the schedule does not depend on the order in the config. Past rows may have other sources.
        self.names = tuple(sorted({*units, *(name for row in table.rows for name in row.asked.weights)}))
        self.table, self.units, self.unit_len = table, units, table.unit_len
        self.rounded: list[tuple[StageRow, dict[str, Fraction]]] = []  # rows and their rounded shares
        self._turns: list[Turns] = []
        self._cursors: list[np.ndarray] = []  # per row, tokens of each source read or skipped at its start
        self._skipped: list[np.ndarray] = []  # per row, tokens of each source skipped at its start
        cursor, skipped = np.zeros(len(self.names), np.int64), np.zeros(len(self.names), np.int64)
        for n, row in enumerate(table.rows):
            if n:
                cursor = cursor + self._given(n - 1, row.from_sample)
            seq_len = row.asked.seq_len
            shares = [row.asked.shares.get(name, Fraction(0)) for name in self.names]
            whole = whole_shares(shares)
            exact = [Fraction(count, sum(whole)) for count in whole]
            if exact != shares:
                self.rounded.append((row, dict(zip(self.names, exact, strict=True))))
            rest = np.where(np.array(whole) > 0, -cursor % seq_len, 0)
            cursor, skipped = cursor + rest, skipped + rest
            self._turns.append(turns(tuple(whole)))
            self._cursors.append(cursor)
            self._skipped.append(skipped)

    def taken(self, row: StageRow, samples: np.ndarray) -> Taken:
        """Return source, unit and piece of `samples`, [N] in a row, numbered from 0 at the start of training."""
        n, seq_len = self.table.rows.index(row), row.asked.seq_len
        source, before = self._turns[n].at(samples - row.from_sample)
        tokens = self._cursors[n][source] + before * seq_len
        unit, within = np.divmod(tokens, self.unit_len)
        return Taken(source, unit, within // seq_len, seq_len)

    def tokens(self, step: int) -> dict[str, int]:
        """Return the number of tokens of each source that were trained on up to a step."""
        behind, skipped = self._behind(step)
        return dict(zip(self.names, (behind - skipped).tolist(), strict=True))

    def skipped(self, step: int) -> dict[str, int]:
        """Return the number of tokens of each source that were skipped up to a step because seq_len grew."""
        return dict(zip(self.names, self._behind(step)[1].tolist(), strict=True))

    def epochs(self, step: int) -> dict[str, float]:
        """Return how many epochs of each source were read up to a step; NaN while its length is not known."""
        behind = dict(zip(self.names, self._behind(step)[0].tolist(), strict=True))
        return {
            name: math.nan if count is None else behind[name] / (count * self.unit_len)
            for name, count in self.units.items()
        }

    def asked(self, step: int) -> dict[str, Fraction]:
        """Return the exact number of tokens of each source that its weights demand up to a step."""
        found = dict.fromkeys(self.names, Fraction(0))
        for row, after in zip(self.table.rows, (*self.table.rows[1:], None), strict=True):
            end = min(step, step if after is None else after.from_step)
            if end > row.from_step:
                trained = (end - row.from_step) * row.asked.tokens_per_step
                for name, share in row.asked.shares.items():
                    found[name] += share * trained
        return found

    def _given(self, n: int, sample: int) -> np.ndarray:
        row = self.table.rows[n]
        return self._turns[n].given(sample - row.from_sample) * row.asked.seq_len

    def _behind(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        n = self.table.rows.index(self.table.row(step))
        return self._cursors[n] + self._given(n, self.table.samples(step)), self._skipped[n]
