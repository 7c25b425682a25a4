"""Count what context-parallel ranks give each other for attention, and the passes over memory around it.

Both follow from `kernels/context_attention.py` and from the documents, which say how many keys of others a rank sees.
"""

import numpy as np

from titanlite.activation_checkpoint.operations import CONTEXT_ATTENTION, LENGTH_AND_WINDOW
from titanlite.data.context_split import documents_of_samples, gathered_share
from titanlite.forecast.activation_cost import Activation
from titanlite.forecast.attended import AttendedShare
from titanlite.forecast.traced_block import Operation, Shape
from titanlite.forecast.traced_run import TracedRun

_MICRO_BATCHES = 4  # whose documents are looked at


class ExchangedKeys:
    """Knows the keys that ranks get from each other, in the mean of ranks.

    Args:
        run: of a rank.
        attended: the documents of the run; None: each sample is one.
    """

    def __init__(self, run: TracedRun, attended: AttendedShare | None = None) -> None:
        self.ranks, tokens = run.context_parallel, run.tokens * run.context_parallel
        self._shares = dict[int, float]()
        if self.ranks == 1:
            return
        windows = sorted({0, *(window for block in run.blocks for window in block.windows)})
        known = attended.starts(tokens, _MICRO_BATCHES) if attended else [documents_of_samples(tokens, run.seq_len)]
        found = [gathered_share(starts, run.seq_len, self.ranks, windows) for starts in known]
        self._shares = dict(zip(windows, np.mean(found, 0).tolist(), strict=True))

    def shape(self, each: Operation | Activation) -> tuple[int, int, int]:
        """Return that of the keys and values that a rank gets for an operation: [tokens, 2·K, E]."""
        M, K, E = _keys(each).size
        return round(self._shares[each.call[1][LENGTH_AND_WINDOW[each.op]][1]] * M * self.ranks), 2 * K, E

    def received(self, each: Operation | Activation) -> int:
        """Return the bytes of these, which an exchange brings; nothing of another operation."""
        tokens, K, E = self.shape(each) if each.op == CONTEXT_ATTENTION else (0, 0, 0)
        return tokens * K * E * _keys(each).dtype.itemsize if tokens else 0

    def moved(self, each: Operation | Activation, forward: bool) -> float:
        """Return the bytes that passes over memory read and write around the exchanges of forward, or of backward.

        Keys and values of all are zeros first, then this rank's and those that came are copied in. Backward does this
        again, joins both gradients, copies those of others out, and adds up what came in float32.
        """
        if each.op != CONTEXT_ATTENTION:
            return 0.0
        M, K, E = _keys(each).size
        own, got = 2 * M * K * E * _keys(each).dtype.itemsize, self.received(each)
        gathered = 4 * own + own * self.ranks + 4 * got
        return gathered if forward else gathered + 2 * own * self.ranks + 6 * own + 7 * got


def _keys(each: Operation | Activation) -> Shape:
    return each.call[1][1]
