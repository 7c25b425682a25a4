"""The exponential moving average of the weights: a float32 copy of each shard, moved after each update.

    average ← average + (1 - d) · (weight - average)        d = min(optimizer.ema_decay, (1 + t) / (10 + t))

t counts the updates since the average began, at the weights of that step. The average begins short, over about the last
ninth of the updates, so that the first weights are forgotten however long the decay; division by 1 - d^t would keep
them for 1 / (1 - d) updates. TensorFlow's `ExponentialMovingAverage` and timm have this form, too.

The update is SGD's, of rate 1 - d, on half the square of average - weight: torch's fused kernel makes it in one pass
(12 bytes of each parameter), and changes nothing after a step that was left out.

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
"""The 10 of (1 + t) / (10 + t)."""


class WeightAverage:
    """The average of one run's weights: this rank's part of each, float32, as its optimizer has it.

    Attributes:
        updates: [] float32, since the average began.
        shards: this rank's part of the average, by the parameter's name.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], shards: Mapping[str, Tensor], decay: float, mesh: Mesh
    ) -> None:
        self._parameters, self._weights, self._mesh = parameters, shards, mesh
        self._least_share = 1 - decay  # in float64: float32 has few digits of what is near one
        self.updates = torch.zeros((), device=mesh.device)
        self.shards = {name: torch.empty_like(shard) for name, shard in shards.items()}
        present = [name for name, shard in shards.items() if shard.numel()]
        self._pairs = [self.shards[name] for name in present], [shards[name] for name in present]
        self.begin()

    def begin(self) -> None:
        """Begin at the current weights."""
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
                [],  # no momentum
                # average - weight: weight decay gives the average, and the weight is passed as a gradient to maximise.
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
        """Let a model compute with the average within a context, between two steps; collective."""
        self._exchange(model)
        yield  # after an error the run ends: other ranks would not join the collective of scales
        self._exchange(model)

    def _exchange(self, model: nn.Module) -> None:
        """Swap weights and average in place; needs one spare shard of the largest parameter."""
        for unit in model.modules():
            if isinstance(unit, FSDPModule):  # else FSDP would use weights that are still gathered, as a head's
                unit.reshard()
        for average, weight in zip(*self._pairs, strict=True):
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)
        precompute_scales(list(self._parameters.values()), self._mesh.fsdp)

    def state(self) -> dict[str, Tensor]:
        """Return a checkpoint's tensors of the average, laid out as the parameters; loading into them restores it."""
        averages = {f"{AVERAGE}{name}": as_laid_out(s, self._parameters[name]) for name, s in self.shards.items()}
        return {f"{AVERAGE}updates": self.updates, **averages}
