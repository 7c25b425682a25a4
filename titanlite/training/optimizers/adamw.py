"""AdamW on each rank's shards, with clipping folded into the update.

Parameters are DTensors, the update is elementwise: it runs on the local shards, in one kernel. Clipping costs one read
of the gradients for the norm; the division happens inside the kernel. Whether the step is applied at all is decided on
the device too, so the host never waits.

Bytes per parameter and step: 4 for the norm, 28 for the update (read parameter, gradient and two moments, write
parameter and two moments), 20 with moments in bfloat16.

Source: Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization", algorithm 2.
"""

import torch
from torch import Tensor, nn

from titanlite.config.schema import Optimizer
from titanlite.config.weight_decay import without_decay
from titanlite.kernels.adamw import AdamWState, adamw
from titanlite.parallel.mesh import Mesh
from titanlite.training.optimizers.sharded import ShardedOptimizer


class AdamW(ShardedOptimizer):
    """See `ShardedOptimizer`.

    Raises:
        ConfigError: a pattern of `weight_decay_exclude` matches no parameter.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], config: Optimizer, mesh: Mesh) -> None:
        super().__init__(parameters, config, mesh)
        dtype = getattr(torch, config.state_dtype)
        for kind in ("exp_avg", "exp_avg_sq"):
            self.kept[kind] = {name: torch.zeros_like(p, dtype=dtype) for name, p in self.locals.items()}
        excluded = without_decay(config.weight_decay_exclude, parameters)
        state = AdamWState(
            *([tensors[n] for n in self.names] for tensors in (self.locals, *self.kept.values())),
            weight_decays=[0.0 if n in excluded else config.weight_decay for n in self.names],
            updates=self.updates,
            beta1=config.beta1,
            beta2=config.beta2,
            eps=config.eps,
        )
        self._update = adamw(state)

    def step(self, grads: dict[str, Tensor], lr: float, divisor: Tensor, skip: Tensor) -> None:
        """See `ShardedOptimizer.step`."""
        self.updates += 1 - skip
        self._update([grads[name] for name in self.names], lr, divisor, skip)
