"""Sum the gradients of parameters that every tensor-parallel rank holds in full and applies to its own tokens."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlite.kernels.collectives import Group


def reduce_replicated_gradients(parameters: list[nn.Parameter], group: Group | None) -> None:
    """Sum gradients of replicated parameters over tensor-parallel ranks, in float32, by one collective per step.

    `parameters`: all parameters of the model, with gradients that FSDP has reduced.
    """
    grads = [p.grad.to_local() for p in parameters if is_replicated(p) and isinstance(p.grad, DTensor)]
    if group is None or not grads:
        return
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat, group=dist.distributed_c10d._resolve_process_group(group.name))  # type: ignore[arg-type]
    torch._foreach_copy_([g.view(-1) for g in grads], list(flat.split([g.numel() for g in grads])))


def is_replicated(parameter: Tensor) -> bool:
    """Return whether every tensor-parallel rank holds this parameter in full."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return "tp" in names and parameter.placements[names.index("tp")].is_replicate()
