"""The base class of update rules. One object updates all parameters that have the same rule."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from titanlite.config.parameter_groups import UpdateSettings
from titanlite.config.schema import Optimizer
from titanlite.models.matrices import Matrix
from titanlite.optimizers.group_norms import GroupNorms
from titanlite.parallel.mesh import Mesh


@dataclass(frozen=True, eq=False)
class ParametersOfRule:
    """The parameters that have the same rule, and what the rule needs to update them.

    Attributes:
        parameters: parameters by name.
        locals: this rank's shard of each parameter; empty if the rank holds no part of it.
        settings: settings of the update of each parameter.
        updates: [] float32, number of updates; the optimizer increases it before `UpdateRule.step`.
        matrices: the matrices that are fused in the parameter of each projection.
    """

    parameters: Mapping[str, nn.Parameter]
    locals: Mapping[str, Tensor]
    settings: Mapping[str, UpdateSettings]
    config: Optimizer
    mesh: Mesh
    updates: Tensor
    matrices: Mapping[str, Sequence[Matrix]]

    def decay_factor(self, lr: float) -> float:
        """Return the factor by which `optimizer.weight_decay_schedule` scales weight decays at learning rate `lr`."""
        return lr / self.config.lr if self.config.weight_decay_schedule == "lr" else 1.0

    @property
    def names(self) -> list[str]:
        """Names of the parameters of which this rank holds a part: with more ranks than rows, some shards are empty."""
        return [name for name, p in self.locals.items() if p.numel()]


@dataclass(frozen=True)
class UpdateCost:
    """Bytes that an update rule keeps and moves per element of a parameter.

    Attributes:
        state: bytes of optimizer state per element, on the device and in a checkpoint.
        moved: bytes that a step reads and writes in memory per element, for the norm of the gradients and the update.
        row: bytes that each rank keeps for each row of the whole parameter.
    """

    state: int
    moved: int
    row: int = 0


def bytes_of_state(config: Optimizer) -> int:
    """Return the bytes of one element of a tensor of optimizer state."""
    return getattr(torch, config.state_dtype).itemsize


class UpdateRule(ABC):
    """Updates all parameters that have the same rule.

    Attributes:
        kept: optimizer state: kind, such as "exp_avg" → parameter → tensor of the shape of this rank's shard.
    """

    kept: dict[str, dict[str, Tensor]]

    @abstractmethod
    def __init__(self, own: ParametersOfRule) -> None:
        """Allocate the optimizer state of the parameters in `own`."""

    @property
    def whole(self) -> dict[str, dict[str, Tensor]]:
        """Return state that is complete and equal on every rank: kind → parameter → tensor."""
        return {}

    def facts(self) -> dict[str, object]:
        """Return facts about the work of all ranks for the receipt, as JSON values. Collective over all ranks."""
        return {}

    @abstractmethod
    def step(
        self, grads: dict[str, Tensor], lr: float, divisor: Tensor, skip: Tensor, norms: GroupNorms | None = None
    ) -> None:
        """Apply one update, or none.

        Args:
            grads: gradients of all parameters. The rule may overwrite those of its own parameters.
            lr: learning rate, without the factors of groups.
            divisor: [] float32, by which gradients are divided to clip them.
            skip: [] float32; 1 leaves parameters and state unchanged.
            norms: given in a step that is logged. The rule must add the squares of its weights and of their change, by
                `GroupNorms.add_update` or `around`.
        """


class ShippedRule(UpdateRule):
    """A rule that titanlite ships; its class can return its cost in bytes."""

    @classmethod
    @abstractmethod
    def cost(cls, config: Optimizer) -> UpdateCost:
        """Return the bytes per element of a parameter that the rule keeps and moves with this config."""
