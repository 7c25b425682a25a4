"""The collectives of tensor parallelism, on plain tensors along dim 0, with their gradients.

Activations are packed `[M, D]`, so gathering or scattering tokens along dim 0 needs no copy. Each function issues a
functional collective and waits for its result. Inside a compiled block the compiler may schedule work between the two.
If the result left the block without a wait, gradients would silently be zero.

All-gather and reduce-scatter are each other's transpose, so each is the backward of the other.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.kernels.shapes import unviewed

_ops = torch.ops._c10d_functional


class Group(NamedTuple):
    """The name and size of a process group, as functional collectives take them, and this process's rank in it."""

    name: str
    size: int
    rank: int


def all_gather(x: Tensor, group: Group) -> Tensor:
    """Concatenate every rank's tensor along dim 0, [M/tp, …] → [M, …], without a gradient."""
    return _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), group.size, group.name))


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """Sum over the ranks and keep this rank's rows, [M, …] → [M/tp, …], without a gradient; M a multiple of tp."""
    return _ops.wait_tensor(_ops.reduce_scatter_tensor(x.contiguous(), "sum", group.size, group.name))


def exchange(x: Tensor, group: Group) -> Tensor:
    """Send chunk r of `x`, [M, …], to each rank r; chunk r of the result comes from rank r. Without a gradient."""
    each = [len(x) // group.size] * group.size
    return _ops.wait_tensor(_ops.all_to_all_single(x.contiguous(), each, each, group.name))


def all_reduce(x: Tensor, by: str, group: Group) -> Tensor:
    """Reduce the ranks' tensors by "sum" or "max", element by element, without a gradient."""
    return _ops.wait_tensor(_ops.all_reduce(x, by, group.name))


class _GatherOrScatter(torch.autograd.Function):
    """An all-gather or a reduce-scatter; the backward of each is the other."""

    @staticmethod
    def forward(ctx, x: Tensor, gathers: bool, *group: str | int) -> Tensor:
        ctx.gathers, ctx.group = gathers, Group(*group)  # type: ignore[arg-type]
        return (all_gather if gathers else reduce_scatter)(x, ctx.group)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        return (reduce_scatter if ctx.gathers else all_gather)(grad, ctx.group), None, None, None, None


def gather_tokens(x: Tensor, group: Group) -> Tensor:
    """Gather the tokens of all ranks, [M/tp, D] → [M, D]; backward sums and scatters the gradient."""
    return _GatherOrScatter.apply(x, True, *group)  # type: ignore[no-any-return]


def scatter_tokens(x: Tensor, group: Group) -> Tensor:
    """Sum partial results [M, D] over all ranks, keep this rank's tokens [M/tp, D]; backward gathers the gradient."""
    return _GatherOrScatter.apply(x, False, *group)  # type: ignore[no-any-return]


def named_group(name: str) -> Group:
    """Return the name, size and rank of a process group; operators receive only its name."""
    return Group(name, *_size_and_rank(name))


def process_group_of(name: str) -> dist.ProcessGroup:
    """Return the `ProcessGroup` of this name."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


@torch.compiler.assume_constant_result
def _size_and_rank(name: str) -> tuple[int, int]:
    group = process_group_of(name)
    return group.size(), group.rank()


def gather_dim(shard: Tensor, dim: int, size: int, group: Group) -> Tensor:
    """Concatenate every rank's chunk along `dim` (≥ 0), without a gradient; the result is contiguous.

    `size` is the length of `dim` in the result. Chunks are ⌈size/ranks⌉ long, or shorter on the last ranks.
    """
    chunk = -(-size // group.size)
    rows = shard.movedim(dim, 0)
    if rows.shape[0] < chunk:
        rows = torch.cat((rows, rows.new_zeros((chunk - rows.shape[0], *rows.shape[1:]))))
    dtype = rows.dtype
    if dtype.itemsize == 1:  # gloo and older NCCL move float8 as bytes only
        rows = rows.contiguous().view(torch.uint8)
    return _compact(all_gather(rows, group)[:size].view(dtype).movedim(0, dim))


def scatter_dim(x: Tensor, dim: int, group: Group) -> Tensor:
    """Sum `x` over the ranks and keep this rank's chunk along `dim` (≥ 0), without a gradient.

    For a `dim` of length `size`, rank r keeps the indices r·⌈size/ranks⌉ up to (r+1)·⌈size/ranks⌉, contiguous.
    """
    size = x.shape[dim]
    chunk = -(-size // group.size)
    rows = x.movedim(dim, 0)
    if size < chunk * group.size:
        rows = torch.cat((rows, rows.new_zeros((chunk * group.size - size, *rows.shape[1:]))))
    mine = reduce_scatter(rows, group)[: max(0, min(chunk, size - group.rank * chunk))]
    return _compact(mine.movedim(0, dim))


def _compact(x: Tensor) -> Tensor:
    """Return `x` with the strides of a new tensor. `contiguous()` may keep other strides for dims of length 0 or 1."""
    return unviewed(x.flatten(), x.shape)
