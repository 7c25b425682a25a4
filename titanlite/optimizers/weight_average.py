"""The exponential moving average of the weights: a float32 copy of each shard, moved after each update.

    average ← average + (1 - d) · (weight - average)        d = min(optimizer.ema_decay, (1 + t) / (10 + t))

t counts the updates since the average was set to the weights. At first the average covers only about the last ninth of
the updates, so that the first weights are forgotten even with a long decay. A correction as Adam's, division by
1 - d^t, would keep them for 1 / (1 - d) updates. TensorFlow's `ExponentialMovingAverage` and timm have this form, too.

The update equals a step of SGD of rate 1 - d on half the square of average - weight. torch's fused kernel of SGD does
it in one pass (12 bytes per element), and changes nothing if the step was skipped.

Source: Polyak and Juditsky 1992, "Acceleration of stochastic approximation by averaging", for why weights are averaged.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from titanlite.checkpoint.resume import AVERAGE
from titanlite.float8.convert import precompute_scales
from titanlite.float8.weight import as_laid_out
from titanlite.optimizers.rule import UpdateCost
from titanlite.parallel.mesh import Mesh

COST = UpdateCost(state=4, moved=3 * 4)
"""A step reads the weight, and reads and writes the average, in float32."""

_SHORTEST = 10
"""The constant 10 in (1 + t) / (10 + t)."""


class WeightAverage:
    """The moving average of a run's weights: a float32 tensor for each shard of this rank.

    Attributes:
        updates: [] float32, number of updates since the average began.
        shards: this rank's shard of the average, by the parameter's name.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], shards: Mapping[str, Tensor], decay: float, mesh: Mesh
    ) -> None:
        self._parameters, self._weights, self._mesh = parameters, shards, mesh
        self._least_share = 1 - decay  # in Python's float64: float32 has few digits of 1 - decay
        self.updates = torch.zeros((), device=mesh.device)
        self.shards = {name: torch.empty_like(shard) for name, shard in shards.items()}
        present = [name for name, shard in shards.items() if shard.numel()]
        self._pairs = [self.shards[name] for name in present], [shards[name] for name in present]
        self.begin()

    def begin(self) -> None:
        """Set the average to the current weights, and `updates` to 0."""
        self.updates.zero_()
        for name, shard in self.shards.items():
            shard.copy_(self._weights[name])

    def update(self, skip: Tensor) -> None:
        """Move the average towards the weights, unless `skip`, [] float32, is 1."""
        self.updates += 1 - skip
        share = ((_SHORTEST - 1) / (self.updates + _SHORTEST)).clamp(min=self._least_share)
        averages, weights = self._pairs
        if averages:
            torch._fused_sgd_(
                averages,
                weights,
                [],  # no tensors of momentum
                # Gradient average - weight: weight decay adds the average; the weight is a gradient to maximise.
                weight_decay=1.0,
                maximize=True,
                momentum=0.0,
                lr=share,
                dampening=0.0,
                nesterov=False,
                is_first_step=False,
                found_inf=skip,
            )

    @contextmanager
    def in_place_of_weights(self, model: nn.Module) -> Generator[None]:
        """Replace a model's weights by the average within the context, between two steps. Collective."""
        self._exchange(model)
        yield  # after an error the run ends: other ranks would not join the collective of scales
        self._exchange(model)

    def _exchange(self, model: nn.Module) -> None:
        """Swap weights and average in place. Needs memory for a copy of the largest shard."""
        for unit in model.modules():
            if isinstance(unit, FSDPModule):  # else FSDP would use weights that are still gathered
                unit.reshard()
        for average, weight in zip(*self._pairs, strict=True):
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)
        precompute_scales(list(self._parameters.values()), self._mesh.fsdp)

    def state(self) -> dict[str, Tensor]:
        """Return the average's tensors for a checkpoint, laid out as the parameters. Loading into them restores it."""
        averages = {f"{AVERAGE}{name}": as_laid_out(s, self._parameters[name]) for name, s in self.shards.items()}
        return {f"{AVERAGE}updates": self.updates, **averages}
