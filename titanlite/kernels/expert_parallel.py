"""The experts of a layer shared out over ranks: tokens travel, weights stay.

Each of P ranks has M tokens and E/P experts. A token that chooses 8 of 128 experts reaches nearly all of a few ranks,
so all tokens go to all of them, which is near the least traffic and has one size whatever the routers say:

    forward    all-gather of x and choices     own experts on the rows that chose them     results → owners, y = Σ
    backward   all-gather of dy and weights    own experts' gradients                      d_x, d_weight → owners, Σ

What goes back are results of single slots, [M·K, D] from each rank to each other one: in the place of a slot whose
expert is elsewhere nothing of use travels, and the owner does not read it. It takes each slot from the one rank that
has it, so nothing is added on the way, and sums in the order of slots, as `experts` does: for the same tokens, results
and gradients have the same bits for any P. The gradient of a weight has the tokens of all P ranks.

Memory is for the worst router, which sends every token of every rank here: P·M·K rows. No token is dropped.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from titanlite.kernels.collectives import Group, all_gather, exchange
from titanlite.kernels.experts import expert_gate, expert_gate_grad
from titanlite.kernels.grouped_matmul import grouped_matmul, grouped_weight_gradient
from titanlite.kernels.routing import combine, expert_rows, gather_rows


class ParallelExperts:
    """The experts of a layer, of which this rank has some; called as `experts`, by all ranks of the group.

    Args:
        group: the P ranks, rank p with the E/P experts from p·E/P on.
    """

    def __init__(self, group: Group) -> None:
        self.group = group

    def __call__(self, x: Tensor, weights: Tensor, choices: Tensor, w13: Tensor, w2: Tensor, n_experts: int) -> Tensor:
        """Send each token through its experts, wherever they are.

        Args:
            x: [M, D], this rank's tokens; M is equal on all ranks.
            weights: [M, K] float32, of a token's experts.
            choices: [M, K] int32, their numbers among all E.
            w13: [E/P·2F, D], of this rank's experts.
            w2: [E/P·D, F].
            n_experts: E.

        Returns:
            [M, D], as `experts` does.
        """
        w13, w2 = (w.unflatten(0, (n_experts // self.group.size, -1)) for w in (w13, w2))
        return _ParallelExperts.apply(x, weights, choices, w13, w2, *self.group)  # type: ignore[no-any-return]


@torch._dynamo.allow_in_graph
class _ParallelExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, choices: Tensor, w13: Tensor, w2: Tensor, *group: str | int
    ) -> Tensor:
        ctx.group = Group(*group)  # type: ignore[arg-type]
        x, every = all_gather(x, ctx.group), all_gather(choices, ctx.group)
        rows, slots, offsets = expert_rows(every, ctx.group.rank * len(w13), len(w13))
        a = grouped_matmul(gather_rows(x, slots, choices.shape[1]), w13, offsets)
        ctx.save_for_backward(x, weights, choices, a, rows, slots, offsets, w13, w2)
        o = grouped_matmul(expert_gate(a, slots), w2, offsets)
        return combine(_to_owners(o, rows, ctx.group), _where(choices, len(w13)), weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, choices, a, rows, slots, offsets, w13, w2 = ctx.saved_tensors
        K = choices.shape[1]
        grad_rows = gather_rows(all_gather(grad, ctx.group), slots, K)
        g = grouped_matmul(grad_rows, w2.mT, offsets)
        d_a, h, dots = expert_gate_grad(g, a, all_gather(weights, ctx.group), slots)
        d_w2 = grouped_weight_gradient(grad_rows, h, offsets)
        d_w13 = grouped_weight_gradient(d_a, gather_rows(x, slots, K, d_a), offsets)
        where = _where(choices, len(w13))
        d_x = combine(_to_owners(grouped_matmul(d_a, w13.mT, offsets), rows, ctx.group), where, None)
        d_weights = exchange(dots.flatten(), ctx.group)[where.long()]
        return d_x, d_weights, None, d_w13, d_w2, None, None, None


def _to_owners(o: Tensor, rows: Tensor, group: Group) -> Tensor:
    """Send rows of experts to the ranks whose tokens they are.

    Args:
        o: [P·M·K, D].
        rows: [P·M, K], of each slot of each rank's tokens its row here, or -1.
        group: the ranks.

    Returns:
        [P·M·K, D]: from each rank in turn the results of this rank's slots, of use where it has their experts.
    """
    return exchange(gather_rows(o, rows.flatten(), 1), group)


def _where(choices: Tensor, count: int) -> Tensor:
    """Find the row that `_to_owners` brings the result of each slot in: [M, K] int32.

    Args:
        choices: [M, K].
        count: experts of each rank.
    """
    slots = torch.arange(choices.numel(), dtype=torch.int32, device=choices.device).view_as(choices)
    return choices // count * choices.numel() + slots
