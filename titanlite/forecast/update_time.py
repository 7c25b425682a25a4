"""Predict the time of the optimizer's update of a step, from its work (`update_work.py`) and measured rates.

passes             over this rank's shard: the norm of gradients, AdamW's update, Muon's momentum and its weights; and
                   over the matrices that an owner assembles from rows and hands back
orthogonalisation  on the rank with the most work
exchanges          that nothing hides: the first collection, the last return, and the excess of all others over the
                   orthogonalisation, which runs at the same time
"""

from collections.abc import Mapping
from dataclasses import dataclass

from titanlite.forecast.device_specs import Rates
from titanlite.forecast.network import placed
from titanlite.forecast.update_work import ITEMSIZE, BucketWork, SharedMatrices, UpdateWork
from titanlite.kernels.orthogonalise import STEPS_OF_GRAM, orthogonalise_flops

_T, _G = 1e12, 1e9
_COPIES = 4
"""Times that a matrix's owner reads or writes a row outside of the orthogonalisation: two to copy collected rows into
the matrix, and two to copy the result, which replaces the matrix, into the buffer to send."""
_NORMALISED = 44
"""Bytes per element that NorMuon reads and writes to scale rows: squares, their mean, two quotients, a norm."""
_SUMMED, _CHOSEN = 2, 4
"""Times that Dion2 also reads or writes each element of a matrix (to sum rows; to fill what is not updated), and each
of the part that is orthogonalised (to copy it out and back)."""


@dataclass(frozen=True)
class UpdateTime:
    """The milliseconds of an update, by the classes of this module's docstring. `passes`: by rule, and of `AVERAGE`."""

    passes: Mapping[str, float]
    orthogonalisation: float
    exchanges: float

    @property
    def total(self) -> float:
        """Return the sum of all classes."""
        return sum(self.passes.values()) + self.orthogonalisation + self.exchanges


def update_time(work: UpdateWork, rates: Rates) -> UpdateTime:
    """Predict the time of an optimizer's update from its work."""
    passes = {rule: 1e3 * moved / rates.optimizer / _G for rule, moved in work.moved().items()}
    computing = exchanges = 0.0
    for rule, shared in work.shared:
        choosing = 0 if shared.share is None else _SUMMED + _CHOSEN * shared.share
        each = (_COPIES + choosing) * ITEMSIZE + (_NORMALISED if work.rows[rule] else 0)
        copied = each * sum(bucket.collected for bucket in shared.buckets)
        passes[rule] += 1e3 * copied / rates.memory / _G
        own = 1e3 * max(seconds_of(matrices, shared.steps, rates) for matrices in shared.owned)
        computing += own
        exchanges += _exposed(shared, work, rates, own)
    return UpdateTime(passes, computing, exchanges)


def seconds_of(matrices: Mapping[tuple[int, int], int], steps: int, rates: Rates) -> float:
    """Predict the seconds to orthogonalise matrices by `steps` polynomials; `matrices`: numbers by shape (R, C)."""
    return sum(n * computed_flops(*rc, steps) / rates.orthogonalise_of(min(rc)) / _T for rc, n in matrices.items())


def computed_flops(rows: int, columns: int, steps: int) -> int:
    """Return the FLOPs to orthogonalise one matrix X, with half of each symmetric product computed.

    Not symmetric is the product of a square factor with X, once every `STEPS_OF_GRAM` polynomials.
    """
    short, long = sorted((rows, columns))
    return orthogonalise_flops(rows, columns, steps) // 2 + -(-steps // STEPS_OF_GRAM) * short * short * long


def _exposed(shared: SharedMatrices, work: UpdateWork, rates: Rates, computing: float) -> float:
    """Return the milliseconds of exchanges that `computing` milliseconds of orthogonalisation do not hide."""
    world = work.world
    ranks = placed(world, 1, world, rates.host)

    def exchange(elements: float) -> float:
        return 1e3 * rates.network.seconds("all_to_all", ITEMSIZE * elements, ranks, rates.fsdp)

    def collect(bucket: BucketWork) -> float:
        return exchange(bucket.collected * (1 - work.replicas / world))

    def hand_back(bucket: BucketWork) -> float:
        return exchange(max(bucket.returned, bucket.handed / world) * (1 - 1 / world))

    last = shared.buckets[-1]
    ends = collect(shared.buckets[0]) + hand_back(last)
    others = sum(collect(bucket) + hand_back(bucket) for bucket in shared.buckets) - ends
    return ends + max(0.0, others - computing)
