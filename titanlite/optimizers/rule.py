"""The base of the rules by which parameters are updated: one for all those that have it."""

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
    """Parameters that have one rule.

    Attributes:
        parameters: by name.
        locals: this rank's shard of each; empty where it has no part.
        settings: what each is updated with.
        updates: [] float32, updates so far; counted by the optimizer, before `UpdateRule.step`.
        matrices: that the parameters of projections are made of.
    """

    parameters: Mapping[str, nn.Parameter]
    locals: Mapping[str, Tensor]
    settings: Mapping[str, UpdateSettings]
    config: Optimizer
    mesh: Mesh
    updates: Tensor
    matrices: Mapping[str, Sequence[Matrix]]

    def decay_factor(self, lr: float) -> float:
        """Return the factor of weight decays that `optimizer.weight_decay_schedule` asks for, beside the rate."""
        return lr / self.config.lr if self.config.weight_decay_schedule == "lr" else 1.0

    @property
    def names(self) -> list[str]:
        """Parameters of which this rank has a part: with more ranks than rows, a shard is empty."""
        return [name for name, p in self.locals.items() if p.numel()]


@dataclass(frozen=True)
class UpdateCost:
    """Bytes of one element of a parameter.

    Attributes:
        state: that the optimizer keeps, on the device and in a checkpoint.
        moved: that a step reads and writes where the parameter lies: the norm of the gradients, and the update.
        row: that each rank keeps of each row of the whole parameter.
    """

    state: int
    moved: int
    row: int = 0


def bytes_of_state(config: Optimizer) -> int:
    """Return the bytes of an element of the state."""
    return getattr(torch, config.state_dtype).itemsize


class UpdateRule(ABC):
    """The update of the parameters that have one rule; made with them alone.

    Attributes:
        kept: state of each kind, as "exp_avg", by the parameter's name, laid out as this rank's shard of it.
    """

    kept: dict[str, dict[str, Tensor]]

    @abstractmethod
    def __init__(self, own: ParametersOfRule) -> None:
        """Make the state of these parameters."""

    @property
    def whole(self) -> dict[str, dict[str, Tensor]]:
        """State that each rank has whole, and the same: of each kind, by the parameter's name."""
        return {}

    def facts(self) -> dict[str, object]:
        """Return what the receipt says of the work of all ranks, as JSON. Collective, over all of them."""
        return {}

    @abstractmethod
    def step(
        self, grads: dict[str, Tensor], lr: float, divisor: Tensor, skip: Tensor, norms: GroupNorms | None = None
    ) -> None:
        """Apply one update, or none.

        Args:
            grads: of all parameters; values of its own are not defined afterwards.
            lr: learning rate, before a group's factor.
            divisor: [] float32 that gradients are divided by, to clip them.
            skip: [] float32; 1 leaves parameters and state as they are.
            norms: in a step that is logged, must get the squares of weights and of what the update changes: by
                `GroupNorms.add_update`, or `around`.
        """


class ShippedRule(UpdateRule):
    """A rule of titanlite's own, whose class says what it costs."""

    @classmethod
    @abstractmethod
    def cost(cls, config: Optimizer) -> UpdateCost:
        """Return what an element costs."""
