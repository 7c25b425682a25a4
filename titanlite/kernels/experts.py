"""The experts of a layer: each token passes through the experts it chose, and their results are weighed and summed.

A row is one token at one of its experts: R = M·K rows for M tokens of K experts each, sorted by expert. Saved are x,
each row's gate and up projections, and the routing; backward recomputes the rest:

    forward    a = x[token] W13ᵀ      h = swiglu(a)      o = h W2ᵀ      y = Σ weight · o, over the slots of a token
    backward   g = dy[token] W2       d_weight = g · h   dW2 = dy[token]ᵀ (weight · h)
               d_a = swiglu'(weight · g, a)              dW13 = d_aᵀ x[token]          dx = Σ d_a W13

So the results o of single experts, the largest tensors, are never saved. With expert parallelism each rank computes the
rows of its own experts (`token_exchange.py`), and backward gathers tokens again.

Source: Guo et al. 2025, "SonicMoE", section 3, for the gradient of a weight without o.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from titanlite.kernels.collectives import Group
from titanlite.kernels.float8_cast import cast_rows
from titanlite.kernels.grouped_matmul import grouped_matmul, grouped_weight_gradient
from titanlite.kernels.operators import operator
from titanlite.kernels.swiglu import gated, swiglu_grad
from titanlite.kernels.token_exchange import Dispatch, Routing


@operator("expert_gate", "expert_gate.launch_expert_gate")
def expert_gate(a: Tensor, slots: Tensor) -> Tensor:
    """Return `swiglu` of each row, zeros in rows without a token, as `gather_rows` leaves them.

    Args:
        a: [R, 2F], blocks of 128 columns of gate and up in turn.
        slots: [R] int32, each row's slot, m·K + k; -1: without a token.

    Returns:
        [R, F] in `a.dtype`.
    """
    return torch.where((slots >= 0)[:, None], gated(a), 0)


@operator("expert_gate_grad", "expert_gate.launch_expert_gate_grad")
def expert_gate_grad(grad: Tensor, a: Tensor, weights: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of `expert_gate` times weights, and by-products.

    Args:
        grad: [R, F], of the weighed result.
        a: [R, 2F].
        weights: [M, K] float32.
        slots: as of `expert_gate`.

    Returns:
        The gradient of a, [R, 2F] in its dtype; the weighed results, [R, F], both zeros in rows without a token; and
        the gradient of the weights, [M, K], zeros for a slot without a row.
    """
    is_row, at = slots >= 0, slots.clamp(min=0).long()
    weight = torch.where(is_row, weights.flatten()[at], 0)[:, None]
    h = torch.where(is_row[:, None], gated(a), 0)
    weighed = (grad * weight).to(grad.dtype)
    d_a = torch.where(is_row[:, None], swiglu_grad.definition(weighed, a), 0)
    dots = torch.where(is_row, (grad.to(weights.dtype) * h.to(weights.dtype)).sum(1), 0)
    d_weights = torch.zeros_like(weights).flatten().index_add(0, at, dots).view_as(weights)
    return d_a, (h * weight).to(h.dtype), d_weights


@operator("expert_gate_cast", "expert_gate.launch_expert_gate_cast")
def expert_gate_cast(a: Tensor, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cast `expert_gate` to float8, each row by a power of two of its own; bytes [R, F] and inverse scales [R, 1]."""
    return cast_rows.definition(expert_gate.definition(a, slots), dtype)


@operator("expert_gate_grad_cast", "expert_gate.launch_expert_gate_grad_cast")
def expert_gate_grad_cast(
    grad: Tensor, a: Tensor, weights: Tensor, slots: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Cast what `expert_gate_grad` returns, each row by a power of two of its own; the results are not weighed.

    Args:
        grad, a, weights, slots: as of `expert_gate_grad`.
        dtype: float8.

    Returns:
        Bytes [R, 2F] of the gradient of a, and their inverse scales, [R, 1] float32; the same of the results, [R, F],
        bitwise equal to `expert_gate_cast`; and the gradient of the weights, [M, K].
    """
    d_a, _, d_weights = expert_gate_grad.definition(grad, a, weights, slots)
    return *cast_rows.definition(d_a, dtype), *expert_gate_cast.definition(a, slots, dtype), d_weights


class PlainExperts:
    """The experts of a layer in their operands' dtype: all of them or, with a group, those that this rank has.

    Tokens travel, weights do not: for the same tokens, results and gradients have the same bits on any number of ranks.
    A weight's gradient includes the tokens of all ranks. Memory suffices for a router that sends every token of every
    rank here, P·M·K rows: no token is dropped.

    Args:
        group: the P ranks, rank p with the E/P experts from p·E/P on; None: all experts are here.
    """

    def __init__(self, group: Group | None = None) -> None:
        self.group = group

    def __call__(self, x: Tensor, weights: Tensor, choices: Tensor, w13: Tensor, w2: Tensor, n_experts: int) -> Tensor:
        """Send each token through its experts; called by all ranks of the group, with as many tokens on each.

        Args:
            x: [M, D].
            weights: [M, K] float32, of a token's experts.
            choices: [M, K] int32, their numbers.
            w13: [E/P·2F, D], of each expert here in turn, blocks of 128 rows of gate and up in turn.
            w2: [E/P·D, F], of each expert here in turn.
            n_experts: E.

        Returns:
            [M, D] in `x.dtype`: for each token the sum of its experts' results, each rounded, times their weights, in
            the order of the slots, in float32.
        """
        group = () if self.group is None else self.group
        here = n_experts // (1 if self.group is None else self.group.size)
        w13, w2 = (w.unflatten(0, (here, -1)) for w in (w13, w2))
        return _Experts.apply(x, weights, choices, w13, w2, *group)  # type: ignore[no-any-return]


experts = PlainExperts()


@torch._dynamo.allow_in_graph
class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, choices: Tensor, w13: Tensor, w2: Tensor, *group: str | int
    ) -> Tensor:
        ctx.to = to = Dispatch(*group)
        every_x, every = to.gathered(x, choices)
        routing = to.routing(every, len(w13))
        a = grouped_matmul(to.rows(every_x, routing), w13, routing.offsets)
        ctx.save_for_backward(x, weights, choices if group else None, a, w13, w2, *routing)
        o = grouped_matmul(expert_gate(a, routing.slots), w2, routing.offsets)
        return to.sums(o, routing, choices, weights, len(w13))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, choices, a, w13, w2, *routing = ctx.saved_tensors
        to, routing = ctx.to, Routing(*routing)
        _, slots, offsets = routing
        grad, weights, x = to.gathered(grad.contiguous(), weights, x)
        grad_rows = to.rows(grad, routing)
        g = grouped_matmul(grad_rows, w2.mT, offsets)
        d_a, h, dots = expert_gate_grad(g, a, weights, slots)
        d_w2 = grouped_weight_gradient(grad_rows, h, offsets)
        d_w13 = grouped_weight_gradient(d_a, to.rows(x, routing, d_a), offsets)
        d_x, d_weights = to.gradients(grouped_matmul(d_a, w13.mT, offsets), routing, choices, dots, len(w13))
        return d_x, d_weights, None, d_w13, d_w2, *[None] * 3 * (to.group is not None)
