"""AdamW on each rank's shards, with clipping folded into the update.

Parameters are DTensors, the update is elementwise: it runs on the local shards, in one kernel. Clipping costs one read
of the gradients for the norm; the division happens inside the kernel. Whether the step is applied at all is decided on
the device too, so the host never waits.

Bytes per parameter and step: 4 for the norm, 28 for the update (read parameter, gradient and two moments, write
parameter and two moments), 20 with moments in bfloat16.

Source: Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization", algorithm 2.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.config.schema import Optimizer
from titanlite.config.weight_decay import without_decay
from titanlite.errors import Problem, StepError, describe
from titanlite.float8.weight import as_laid_out, local_data
from titanlite.kernels.adamw import AdamWState, adamw
from titanlite.parallel.mesh import Mesh
from titanlite.parallel.tensor import is_replicated


class AdamW:
    """The optimizer of one run.

    Args:
        parameters: by name; after FSDP's lazy initialisation, which may move the shards.
        config: `[optimizer]`.
        mesh: the mesh.

    Raises:
        ConfigError: a pattern of `weight_decay_exclude` matches no parameter.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], config: Optimizer, mesh: Mesh) -> None:
        self.config, self.mesh, self.parameters = config, mesh, parameters
        self.locals = {name: local_data(p) for name, p in parameters.items()}
        dtype = getattr(torch, config.state_dtype)
        self.exp_avg = {name: torch.zeros_like(p, dtype=dtype) for name, p in self.locals.items()}
        self.exp_avg_sq = {name: torch.zeros_like(p, dtype=dtype) for name, p in self.locals.items()}
        self.updates = torch.zeros((), device=mesh.device)  # steps applied so far; float32, as the kernel wants it
        excluded = without_decay(config.weight_decay_exclude, parameters)
        # An empty shard (more ranks than rows) has nothing to update.
        self.names = names = [n for n, p in self.locals.items() if p.numel()]
        state = AdamWState(
            *([tensors[n] for n in names] for tensors in (self.locals, self.exp_avg, self.exp_avg_sq)),
            weight_decays=[0.0 if n in excluded else config.weight_decay for n in names],
            updates=self.updates,
            beta1=config.beta1,
            beta2=config.beta2,
            eps=config.eps,
        )
        self._update = adamw(state)
        # Whole on every tensor-parallel rank: counted once in the norm.
        self.shared = [n for n in names if mesh.tp_size > 1 and is_replicated(parameters[n])]
        self.owned = [n for n in names if n not in set(self.shared)]

    def gradients(self) -> dict[str, Tensor]:
        """This rank's shard of each gradient, float32: the memory that backward filled.

        Raises:
            StepError: some parameter has none.
        """
        if without := [name for name, p in self.parameters.items() if p.grad is None]:
            want = "a gradient for every parameter"
            fix = "take out of the model what forward does not use; return zeros, not None, in a backward of your own"
            problems = [Problem(name, "no gradient after backward", want, fix) for name in without]
            raise StepError(describe("model", problems))
        return {name: local_data(p.grad) for name, p in self.parameters.items() if p.grad is not None}

    def norm(self, grads: dict[str, Tensor]) -> Tensor:
        """Global L2 norm of all gradients.

        Args:
            grads: from `gradients`.

        Returns:
            [] float32, equal on every rank.
        """
        square = _sum_of_squares([grads[n] for n in self.owned], self.mesh.device)
        square += _sum_of_squares([grads[n] for n in self.shared], self.mesh.device) / self.mesh.tp_size
        dist.all_reduce(square)
        return (square / self.mesh.replicas).sqrt()

    def step(self, grads: dict[str, Tensor], lr: float, divisor: Tensor, skip: Tensor) -> None:
        """Apply one update, or none.

        Args:
            grads: from `gradients`; their values are not defined afterwards.
            lr: learning rate.
            divisor: [] float32 that gradients are divided by, to clip them.
            skip: [] float32; 1 leaves parameters and moments as they are.
        """
        self.updates += 1 - skip
        self._update([grads[name] for name in self.names], lr, divisor, skip)

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint must hold, laid out as the parameters are; loading into these tensors restores it."""
        out: dict[str, Tensor] = {"optimizer/updates": self.updates}
        for kind, tensors in (("exp_avg", self.exp_avg), ("exp_avg_sq", self.exp_avg_sq)):
            for name, local in tensors.items():
                out[f"optimizer/{kind}/{name}"] = as_laid_out(local, self.parameters[name])
        return out


def _sum_of_squares(tensors: list[Tensor], device: torch.device) -> Tensor:
    if not tensors:
        return torch.zeros((), device=device)
    return torch.stack(torch._foreach_norm(tensors)).square().sum()
