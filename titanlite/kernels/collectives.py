"""The collectives of tensor parallelism, on plain tensors along dim 0, with their gradients.

Always dim 0: activations are packed `[M, D]`, so a gather or a scatter of tokens needs no copy. Each function issues
the functional op and waits for it, once: inside a compiled block the compiler sees the pair and may move it apart; an
unwaited result that crossed the block's boundary would give zero gradients in silence.

All-gather and reduce-scatter are each other's transpose, so each is the backward of the other.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_ops = torch.ops._c10d_functional


class Group(NamedTuple):
    """A process group as the functional collectives want it, and this process's place in it."""

    name: str
    size: int
    rank: int


def all_gather(x: Tensor, group: Group) -> Tensor:
    """Concatenate every rank's tensor along dim 0, without a gradient.

    Args:
        x: [M/tp, …].
        group: tp ranks.

    Returns:
        [M, …].
    """
    return _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), group.size, group.name))


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """Sum over the ranks and keep this rank's rows, without a gradient.

    Args:
        x: [M, …], M a multiple of tp.
        group: tp ranks.

    Returns:
        [M/tp, …].
    """
    return _ops.wait_tensor(_ops.reduce_scatter_tensor(x.contiguous(), "sum", group.size, group.name))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, *group: str | int) -> Tensor:
        ctx.group = Group(*group)  # type: ignore[arg-type]
        return all_gather(x, ctx.group)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        return reduce_scatter(grad, ctx.group), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, *group: str | int) -> Tensor:
        ctx.group = Group(*group)  # type: ignore[arg-type]
        return reduce_scatter(x, ctx.group)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        return all_gather(grad, ctx.group), None, None, None


def gather_tokens(x: Tensor, group: Group) -> Tensor:
    """Gather the tokens of all ranks; backward sums and scatters the gradient.

    Args:
        x: [M/tp, D].
        group: tp ranks.

    Returns:
        [M, D].
    """
    return _Gather.apply(x, *group)  # type: ignore[no-any-return]


def scatter_tokens(x: Tensor, group: Group) -> Tensor:
    """Sum partial results over all ranks and keep this rank's tokens; backward gathers the gradient.

    Args:
        x: [M, D], partial sums.
        group: tp ranks.

    Returns:
        [M/tp, D].
    """
    return _Scatter.apply(x, *group)  # type: ignore[no-any-return]
