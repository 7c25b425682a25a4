"""Tensor-parallel layers: parameters are DTensors, activations plain local tensors, collectives explicit.

Tokens are split over the ranks between the matmuls (sequence parallelism) and heads or features within them:

    residual stream, norms        [M/tp, D]
    wqkv, w13, output   gather →  [M, D] @ [N/tp, D].T            column-parallel
    wo, w2                        [M, K/tp] @ [D, K/tp].T → scatter   row-parallel

A norm's weight is whole on every rank but sees only that rank's tokens, so its gradient is a partial sum.
`reduce_replicated_gradients` adds all of those in float32 with one collective per step, after FSDP has reduced them
over the data-parallel ranks, instead of one small all-reduce per norm.

Nothing is ever computed on a DTensor inside a block: its implicit redistributions are what makes a step slow unseen.
"""

from fnmatch import fnmatch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from titanlite.kernels.collectives import Group, scatter_tokens
from titanlite.kernels.linear import Fused, FusedLinear, linear
from titanlite.kernels.rms_norm import add_rms_norm, rms_norm
from titanlite.models.layers import Embedding, Linear, RMSNorm

_FUSED_LINEAR = FusedLinear()


def _local(weight: Tensor) -> Tensor:
    """This rank's part of a tensor-parallel parameter."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


class ParallelLinear(Linear):
    """A `Linear` that is split over the ranks of a group.

    Attributes:
        group: the ranks.
        asynchronous: whether its collectives are to be fused into its matmuls.
    """

    group: Group
    asynchronous: bool

    @property
    def unfused(self) -> str | None:
        """Why its collectives stand beside its matmuls although `asynchronous` is set, or None."""
        return None if self.matmul is F.linear else getattr(self.matmul, "unfused", "has an arithmetic of its own")

    @property
    def fused(self) -> Fused | None:
        """What fuses its collectives with its matmuls, if they are to be fused."""
        if not self.asynchronous or self.unfused is not None:
            return None
        return _FUSED_LINEAR if self.matmul is F.linear else self.matmul.fused  # type: ignore[attr-defined]


class ColumnParallelLinear(ParallelLinear):
    """Holds some of the output features: gathers tokens, then multiplies."""

    def forward(self, x: Tensor) -> Tensor:
        """[M/tp, K] → [M, N/tp]."""
        return linear(x, _local(self.weight), gather=self.group, matmul=self.matmul, fused=self.fused)


class RowParallelLinear(ParallelLinear):
    """Holds some of the input features: multiplies, then sums over ranks and scatters tokens."""

    def forward(self, x: Tensor) -> Tensor:
        """[M, K/tp] → [M/tp, N]."""
        return linear(x, _local(self.weight), scatter=self.group, matmul=self.matmul, fused=self.fused)


class SequenceParallelRMSNorm(RMSNorm):
    """An `RMSNorm` over this rank's tokens."""

    def forward(self, x: Tensor) -> Tensor:
        """[M/tp, D] → [M/tp, D]."""
        return rms_norm(x, _local(self.weight), self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise `x + residual`; returns that and the sum, [M/tp, D] each."""
        return add_rms_norm(x, residual, _local(self.weight), self.eps)


class VocabParallelEmbedding(Embedding):
    """An `Embedding` that holds some of the rows and leaves each rank its own tokens."""

    group: Group

    def forward(self, tokens: Tensor) -> Tensor:
        """[M] int64 → [M/tp, D]."""
        weight = _local(self.weight)  # [V/tp, D]
        local = tokens - self.group.rank * weight.shape[0]
        owned = (local >= 0) & (local < weight.shape[0])
        rows = F.embedding(torch.where(owned, local, 0), weight) * owned[:, None]
        return scatter_tokens(rows, self.group)


_PLAN: dict[str, tuple[type[nn.Module], Placement]] = {
    "tok_embeddings": (VocabParallelEmbedding, Shard(0)),
    "*.wqkv": (ColumnParallelLinear, Shard(0)),
    "*.wo": (RowParallelLinear, Shard(1)),
    "*.w13": (ColumnParallelLinear, Shard(0)),
    "*.w2": (RowParallelLinear, Shard(1)),
    "*norm": (SequenceParallelRMSNorm, Replicate()),
    "output": (ColumnParallelLinear, Shard(0)),
}


def local_shape(name: str, module: nn.Module, ranks: int) -> torch.Size:
    """The shape of one rank's part of a module's weight, as `apply_tensor_parallel` splits it.

    Args:
        name: of the module.
        module: whole; has a weight.
        ranks: tensor-parallel ranks.

    Raises:
        ValueError: no rule of the plan places it.
    """
    weight, (_, placement) = module.weight, _rule(name, module)
    assert isinstance(weight, Tensor)  # noqa: S101
    return torch.Size(n // ranks if placement.is_shard(dim) else n for dim, n in enumerate(weight.shape))


def _rule(name: str, module: nn.Module) -> tuple[type[nn.Module], Placement]:
    """What becomes of a module with parameters."""
    for pattern, rule in _PLAN.items():
        if fnmatch(name, pattern):
            return rule
    raise ValueError(f"{name} ({type(module).__name__}) has parameters but no tensor-parallel placement")


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh, group: Group, asynchronous: bool = False) -> None:
    """Split every layer of a model over the tensor-parallel ranks, in place.

    Args:
        model: on the meta device; its layers are those of `titanlite.models.layers`.
        mesh: 1-D.
        group: the same ranks.
        asynchronous: fuse the collectives of linear layers into their matmuls.

    Raises:
        ValueError: a layer has parameters that no rule of the plan places.
    """
    placed: dict[nn.Parameter, nn.Parameter] = {}  # tied weights stay one parameter
    for name, module in model.named_modules():
        if not module._parameters:
            continue
        parallel, placement = _rule(name, module)
        weight = module.weight
        assert isinstance(weight, nn.Parameter)  # noqa: S101
        if weight not in placed:
            placed[weight] = nn.Parameter(distribute_tensor(weight.data, mesh, [placement]))
        module.__class__ = parallel  # as FSDP2 does: the module object, its name and its attributes stay
        module.weight = placed[weight]
        module.group = group  # type: ignore[assignment]
        if isinstance(module, ParallelLinear):
            module.asynchronous = asynchronous


def reduce_replicated_gradients(parameters: list[nn.Parameter], group: Group | None) -> None:
    """Sum the gradients of parameters that are whole on every tensor-parallel rank; one collective for all of them.

    Args:
        parameters: all parameters of the model, with gradients.
        group: the tensor-parallel ranks, or None.
    """
    if group is None:
        return
    grads = [p.grad.to_local() for p in parameters if is_replicated(p) and isinstance(p.grad, DTensor)]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat, group=dist.distributed_c10d._resolve_process_group(group.name))  # type: ignore[arg-type]
    torch._foreach_copy_([g.view(-1) for g in grads], list(flat.split([g.numel() for g in grads])))


def is_replicated(parameter: Tensor) -> bool:
    """Whether every tensor-parallel rank holds this parameter whole."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return "tp" in names and parameter.placements[names.index("tp")].is_replicate()
