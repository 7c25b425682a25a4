"""The collectives of tensor parallelism, on plain tensors along dim 0, with their gradients.

Always dim 0: activations are packed `[M, D]`, so a gather or a scatter of tokens needs no copy. Each function issues
the functional op and waits for it, once: inside a compiled block the compiler sees the pair and may move it apart; an
unwaited result that crossed the block's boundary would give zero gradients in silence.

All-gather and reduce-scatter are each other's transpose, so each is the backward of the other.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.kernels.shapes import unviewed

_ops = torch.ops._c10d_functional


class Group(NamedTuple):
    """A process group as the functional collectives want it, and this process's place in it."""

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
    """All-to-all without a gradient: chunk r of `x`, [M, …], goes to rank r, chunk r of the result came from it."""
    each = [len(x) // group.size] * group.size
    return _ops.wait_tensor(_ops.all_to_all_single(x.contiguous(), each, each, group.name))


def all_reduce(x: Tensor, by: str, group: Group) -> Tensor:
    """Reduce the ranks' tensors by "sum" or "max", element by element, without a gradient."""
    return _ops.wait_tensor(_ops.all_reduce(x, by, group.name))


class _GatherOrScatter(torch.autograd.Function):
    """An all-gather or a reduce-scatter, whose gradient is the other one."""

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
    """Return the process group of that name, as operators receive it."""
    return Group(name, *_size_and_rank(name))


def process_group_of(name: str) -> dist.ProcessGroup:
    """Return torch's process group of that name."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


@torch.compiler.assume_constant_result
def _size_and_rank(name: str) -> tuple[int, int]:
    group = process_group_of(name)
    return group.size(), group.rank()


def gather_dim(shard: Tensor, dim: int, size: int, group: Group) -> Tensor:
    """Concatenate every rank's chunk along any dim (not negative), without a gradient; contiguous.

    Chunks are ⌈size/ranks⌉ long along `dim`, shorter on the last ranks; `size` is the length of the whole dim.
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
    """Sum whole tensors over the ranks and keep this rank's chunk of any dim (not negative), without a gradient.

    Rank r keeps rows r·⌈size/ranks⌉ up to (r+1)·⌈size/ranks⌉; contiguous.
    """
    size = x.shape[dim]
    chunk = -(-size // group.size)
    rows = x.movedim(dim, 0)
    if size < chunk * group.size:
        rows = torch.cat((rows, rows.new_zeros((chunk * group.size - size, *rows.shape[1:]))))
    mine = reduce_scatter(rows, group)[: max(0, min(chunk, size - group.rank * chunk))]
    return _compact(mine.movedim(0, dim))


def _compact(x: Tensor) -> Tensor:
    """Return `x` with a new tensor's strides: `contiguous()` keeps any stride of a dim of length 0 or 1."""
    return unviewed(x.flatten(), x.shape)
