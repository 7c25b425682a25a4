"""How the ranks of a group may share the work of an operator: the sharding rules of titanlite's own operators.

The file of an operator adds its rule to `SPLITS`; `sharding/op_rules.py` reads them. An operator that is not here, and
that neither `op_rules.py` nor DTensor has rules of is refused in a tensor-parallel model.
"""

from typing import NamedTuple

import torch


class Split(NamedTuple):
    """One way to compute parts of an operator's results from parts of its inputs, on each rank alone.

    Attributes:
        inputs: for each tensor among its arguments the dim that is split; None for one that every rank has whole.
        output: the dim by which its results, all of them, are split.
    """

    inputs: tuple[int | None, ...]
    output: int


SPLITS: dict[torch._ops.OpOverload, tuple[Split, ...]] = {}
