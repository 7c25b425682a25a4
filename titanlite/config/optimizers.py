"""The bytes that an optimizer keeps of each parameter and moves in a step: from the config alone, without torch.

Memory, the room that checkpoints take, a host's memory and the step time ask here. The update itself is in
`training/optimizers`; `tests/ranks/training/test_optimizer.py` holds the two equal.
"""

from dataclasses import dataclass

from titanlite.config.schema import Optimizer

_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class OptimizerCost:
    """Bytes of one element of a parameter.

    Attributes:
        state: that the optimizer keeps, on the device and in a checkpoint.
        moved: that a step reads and writes: the norm of the gradients, and the update.
    """

    state: int
    moved: int


def optimizer_cost(config: Optimizer) -> OptimizerCost:
    """Give the bytes of the optimizer of a run."""
    return _adamw_cost(config)  # of the only rule that recipes have


def _adamw_cost(config: Optimizer) -> OptimizerCost:
    """Two moments. The norm reads the gradient; the update reads it again, and reads and writes all else."""
    moments = 2 * _BYTES[config.state_dtype]
    return OptimizerCost(state=moments, moved=4 + 3 * 4 + 2 * moments)
