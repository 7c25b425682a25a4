"""The bytes that an optimizer keeps of each parameter and moves in a step, by rule; without torch.

Memory, the room that checkpoints take, a host's memory and the step time ask here. The update itself is in
`training/optimizers`; `tests/ranks/training/test_optimizer.py` holds the two equal.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from titanlite.config.parameter_groups import update_settings
from titanlite.config.recipe_schema import OptimizerRecipe, OwnRule
from titanlite.config.schema import Optimizer

_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class OptimizerCost:
    """Bytes of one element of a parameter.

    Attributes:
        state: that the optimizer keeps, on the device and in a checkpoint.
        moved: that a step reads and writes where the parameter lies: the norm of the gradients, and the update.
        row: that each rank keeps of each row of the whole parameter.
    """

    state: int
    moved: int
    row: int = 0


def optimizer_cost(rule: str, config: Optimizer, own: Mapping[str, OwnRule] = MappingProxyType({})) -> OptimizerCost:
    """Give the bytes of a rule of a recipe.

    Args:
        rule: its name.
        config: `[optimizer]`.
        own: rules of the user's own file; what such a one moves itself, `forecast/update_work.py` adds.
    """
    return _own_cost(own[rule], config) if rule in own else _COSTS[rule](config)


def average_cost(config: Optimizer) -> OptimizerCost:
    """Give the bytes of the average of the weights, in float32: nothing if there is none.

    A step reads the weight, and reads and writes the average.
    """
    return OptimizerCost(state=4, moved=3 * 4) if config.ema_decay else OptimizerCost(state=0, moved=0)


def state_bytes(recipe: OptimizerRecipe, config: Optimizer, shapes: Mapping[str, Sequence[int]]) -> int:
    """Add up what the optimizer keeps of all parameters, and the average of the weights.

    Args:
        recipe: the rule of each.
        config: `[optimizer]`.
        shapes: of the whole parameters, by name.

    Raises:
        ConfigError: as of `update_settings`.
    """
    settings = update_settings(recipe, config, shapes)
    average, found = average_cost(config).state, 0
    for name, own in settings.items():
        cost = optimizer_cost(own.rule, config, recipe.own_rules)
        found += (average + cost.state) * math.prod(shapes[name]) + cost.row * shapes[name][0]
    return found


def _adamw_cost(config: Optimizer) -> OptimizerCost:
    """Two moments. The norm reads the gradient; the update reads it again, and reads and writes all else."""
    moments = 2 * _BYTES[config.state_dtype]
    return OptimizerCost(state=moments, moved=4 + 3 * 4 + 2 * moments)


def _muon_cost(config: Optimizer) -> OptimizerCost:
    """The momentum. After the norm, the gradient is read again, the momentum read and written, and what is sent to the
    owner written in 16 bits; what comes back is read in 16 bits, and the parameter read and written."""
    momentum = _BYTES[config.state_dtype]
    return OptimizerCost(state=momentum, moved=4 + 4 + 2 * momentum + 2 + 2 + 2 * 4)


def _normuon_cost(config: Optimizer) -> OptimizerCost:
    """Also a second moment of each row, which every rank has of all."""
    return replace(_muon_cost(config), row=_BYTES[config.state_dtype])


def _own_cost(rule: OwnRule, config: Optimizer) -> OptimizerCost:
    """Count what it keeps. After the norm, operation by operation: the gradient is divided, the state read in float32,
    the parameter decayed and moved, and what is new chosen and stored."""
    each = _BYTES[config.state_dtype]
    of_state = (each + 4) + (each + 4 + 4) + (4 + each)
    return OptimizerCost(state=len(rule.state) * each, moved=4 + 2 * 4 + 5 * 4 + 5 * 4 + len(rule.state) * of_state)


_COSTS: dict[str, Callable[[Optimizer], OptimizerCost]] = {
    "adamw": _adamw_cost,
    "muon": _muon_cost,
    "normuon": _normuon_cost,
}
