"""Count what context-parallel ranks give each other for attention, and the passes over memory around it.

Both follow from `kernels/context_attention.py` and from the documents, which say how many keys of others a rank sees.
"""

import math

import numpy as np

from titanlite.activation_checkpoint.operations import CONTEXT_ATTENTION
from titanlite.data.context_split import documents_of_samples, load_of_split
from titanlite.forecast.activation_cost import Activation
from titanlite.forecast.attended import AttendedShare
from titanlite.forecast.traced_block import Operation, Shape
from titanlite.forecast.traced_run import TracedRun

_MICRO_BATCHES = 4  # whose documents are looked at


class ExchangedKeys:
    """Knows how tokens are split over ranks, and the keys that these get from each other.

    Args:
        run: of a rank.
        attended: the documents of the run; None: each sample is one.
    """

    def __init__(self, run: TracedRun, attended: AttendedShare | None = None) -> None:
        self.ranks, tokens = run.context_parallel, run.tokens * run.context_parallel
        self._busiest, self._shares, self._most = 1.0, dict[int, float](), dict[int, float]()
        if self.ranks == 1:
            return
        windows = sorted({0, *(window for block in run.blocks for window in block.windows)})
        known = attended.starts(tokens, _MICRO_BATCHES) if attended else [documents_of_samples(tokens, run.seq_len)]
        loads = [load_of_split(starts, run.seq_len, self.ranks, windows) for starts in known]
        self._busiest = float(np.mean([load.attention for load in loads]))
        self._shares, self._most = (
            dict(zip(windows, np.mean(of, 0).tolist(), strict=True))
            for of in ([load.keys for load in loads], [load.most for load in loads])
        )

    def shape(self, each: Operation | Activation, busiest: bool = False) -> tuple[int, int, int]:
        """Return that of the keys and values that a rank gets for an operation: [tokens, 2·K, E].

        Args:
            each: the operation.
            busiest: of what the rank gets, or sends, that has most; else in the mean of ranks.
        """
        M, K, E = _keys(each).size
        share = (self._most if busiest else self._shares)[_window(each)]
        return round(share * M * self.ranks), 2 * K, E

    def received(self, each: Operation | Activation, busiest: bool = False) -> int:
        """Return the bytes of these, which an exchange brings; nothing of another operation."""
        return math.prod(self.shape(each, busiest)) * _keys(each).dtype.itemsize if each.op == CONTEXT_ATTENTION else 0

    def slowest(self, each: Operation | Activation) -> float:
        """Return the attention of the rank that has most over the mean; with a window, all have as much."""
        return self._busiest if each.op == CONTEXT_ATTENTION and not _window(each) else 1.0

    def moved(self, each: Operation | Activation, forward: bool) -> float:
        """Return the bytes that passes over memory read and write around the exchanges of forward, or of backward.

        Keys and values of all are zeros first, then this rank's and those that came are copied in. Backward does this
        again, joins both gradients, copies those of others out, and adds up what came in float32.
        """
        if each.op != CONTEXT_ATTENTION:
            return 0.0
        M, K, E = _keys(each).size
        own, got = 2 * M * K * E * _keys(each).dtype.itemsize, self.received(each, busiest=True)
        gathered = 4 * own + own * self.ranks + 4 * got
        return gathered if forward else gathered + 2 * own * self.ranks + 6 * own + 7 * got


def _window(each: Operation | Activation) -> int:
    return each.call[1][-1]


def _keys(each: Operation | Activation) -> Shape:
    return each.call[1][1]
