"""A small state under any layout: what a rank holds of it, filled with the true values or with zeros."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

# Widths that no world size here divides, shards that are empty on some rank, each dtype that a state has.
SHAPES = {
    "model/even": ((8, 4), torch.float32),
    "model/odd": ((5, 3), torch.float32),
    "optimizer/exp_avg/odd": ((5, 3), torch.bfloat16),
    "model/short": ((1,), torch.float32),
    "model/none": ((0, 4), torch.float32),
    "ids": ((7,), torch.int64),
    "mask": ((9, 2), torch.uint8),
}
PLAIN = {"optimizer/step": ((), torch.float32), "replicated": ((6,), torch.float32)}


def truth(name: str) -> Tensor:
    """The full tensor; values differ by name and position and are exact in bfloat16."""
    shape, dtype = (SHAPES | PLAIN)[name]
    start = 10 * sorted(SHAPES | PLAIN).index(name)
    return (start + torch.arange(torch.Size(shape).numel())).reshape(shape).to(dtype)


def sharded(fill: bool, *, mesh_shape: tuple[int, ...] | None = None) -> dict[str, Tensor]:
    """DTensors sharded on dim 0 of a 1-D mesh (or dims 0 and 1 of a 2-D one), and plain replicated tensors."""
    mesh_shape = mesh_shape or (dist.get_world_size(),)
    mesh = init_device_mesh("cpu", mesh_shape)
    state: dict[str, Tensor] = {}
    for name, (shape, _) in SHAPES.items():
        placements = [Shard(0), Shard(1) if len(shape) > 1 else Replicate()][: len(mesh_shape)]
        full = truth(name) if fill else torch.zeros_like(truth(name))
        state[name] = distribute_tensor(full, mesh, placements)
    return state | {name: truth(name) if fill else torch.zeros_like(truth(name)) for name in PLAIN}


def plain(fill: bool) -> dict[str, Tensor]:
    """Full tensors on every rank."""
    return {name: truth(name) if fill else torch.zeros_like(truth(name)) for name in SHAPES | PLAIN}


def check(state: dict[str, Tensor]) -> None:
    """Every tensor, gathered if need be, is bitwise the truth."""
    for name, tensor in state.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(full, truth(name)), f"{name}: {full} is not {truth(name)}"
