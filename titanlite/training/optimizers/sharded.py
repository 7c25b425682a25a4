"""The base of all optimizers of this trainer: they update each rank's shards, and decide nothing on the host.

An optimizer is a file in this folder with a class of the name that `optimizer.name` has; its bytes are an entry of
`config/optimizers.py`.
"""

import importlib
from abc import ABC, abstractmethod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.config.schema import Optimizer
from titanlite.errors import Problem, StepError, describe
from titanlite.float8.weight import as_laid_out, local_data
from titanlite.parallel.mesh import Mesh
from titanlite.parallel.replicated_gradients import is_replicated


class ShardedOptimizer(ABC):
    """The optimizer of one run.

    Args:
        parameters: by name; after FSDP's lazy initialisation, which may move the shards.
        config: `[optimizer]`.
        mesh: the mesh.

    Attributes:
        locals: this rank's shard of each parameter.
        kept: state of each kind, as "exp_avg", by the parameter's name, laid out as this rank's shard of it.
        updates: [] float32, steps applied so far.
        names: parameters of which this rank has a part: with more ranks than rows, a shard is empty.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], config: Optimizer, mesh: Mesh) -> None:
        self.config, self.mesh, self.parameters = config, mesh, parameters
        self.locals = {name: local_data(p) for name, p in parameters.items()}
        self.kept: dict[str, dict[str, Tensor]] = {}
        self.updates = torch.zeros((), device=mesh.device)
        self.names = [name for name, p in self.locals.items() if p.numel()]
        # Whole on every tensor-parallel rank: counted once in the norm.
        self._shared = [n for n in self.names if mesh.tp_size > 1 and is_replicated(parameters[n])]
        self._owned = [n for n in self.names if n not in set(self._shared)]

    @abstractmethod
    def step(self, grads: dict[str, Tensor], lr: float, divisor: Tensor, skip: Tensor) -> None:
        """Apply one update, or none.

        Args:
            grads: from `gradients`; their values are not defined afterwards.
            lr: learning rate.
            divisor: [] float32 that gradients are divided by, to clip them.
            skip: [] float32; 1 leaves parameters and state as they are.
        """

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
        square = _sum_of_squares([grads[n] for n in self._owned], self.mesh.device)
        square += _sum_of_squares([grads[n] for n in self._shared], self.mesh.device) / self.mesh.tp_size
        dist.all_reduce(square)
        return (square / self.mesh.replicas).sqrt()

    def state(self) -> dict[str, Tensor]:
        """Return what a checkpoint must hold, laid out as the parameters are; to load into it restores it."""
        out: dict[str, Tensor] = {"optimizer/updates": self.updates}
        for kind, tensors in self.kept.items():
            for name, local in tensors.items():
                out[f"optimizer/{kind}/{name}"] = as_laid_out(local, self.parameters[name])
        return out

    def state_tensors(self) -> list[Tensor]:
        """All that it keeps of this rank's shards."""
        return [tensor for tensors in self.kept.values() for tensor in tensors.values()]


def build_optimizer(parameters: dict[str, nn.Parameter], config: Optimizer, mesh: Mesh) -> ShardedOptimizer:
    """Make the optimizer that a config names; arguments as of `ShardedOptimizer`."""
    file = importlib.import_module(f"titanlite.training.optimizers.{config.name.lower()}")
    return getattr(file, config.name)(parameters, config, mesh)


def _sum_of_squares(tensors: list[Tensor], device: torch.device) -> Tensor:
    if not tensors:
        return torch.zeros((), device=device)
    return torch.stack(torch._foreach_norm(tensors)).square().sum()
