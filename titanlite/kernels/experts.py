"""The experts of a layer: each token is computed by the experts chosen for it, and their weighted results are summed.

A row is one token at one of its experts: R = M·K rows for M tokens with K experts each, sorted by expert. Forward saves
x, the gate and up projections a of each row, and the routing. Backward recomputes everything else:

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
    """Return `swiglu` of each row, and zeros in rows without a token.

    Args:
        a: [R, 2F], alternating blocks of 128 columns of gate and up.
        slots: [R] int32, m·K + k for a row that is token m at its k-th expert; -1: no token.

    Returns:
        [R, F] in `a.dtype`.
    """
    return torch.where((slots >= 0)[:, None], gated(a), 0)


@operator("expert_gate_grad", "expert_gate.launch_expert_gate_grad")
def expert_gate_grad(grad: Tensor, a: Tensor, weights: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate `expert_gate(a, slots)` times the router's weights, and return this product, too.

    Args:
        grad: [R, F], gradient of the weighted results.
        a: [R, 2F].
        weights: [M, K] float32, of each token's experts.
        slots: see `expert_gate`.

    Returns:
        The gradient of `a`, [R, 2F] in its dtype; the weighted results, [R, F], both zeros in rows without a token; and
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
    """Cast `expert_gate` to float8, each row by its own power of two. Return bytes [R, F] and inverse scales [R, 1]."""
    return cast_rows.definition(expert_gate.definition(a, slots), dtype)


@operator("expert_gate_grad_cast", "expert_gate.launch_expert_gate_grad_cast")
def expert_gate_grad_cast(
    grad: Tensor, a: Tensor, weights: Tensor, slots: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Cast the gradient of `a` from `expert_gate_grad`, and `expert_gate(a, slots)`, each row by its own power of two.

    Args:
        grad, a, weights, slots: see `expert_gate_grad`.
        dtype: float8.

    Returns:
        Bytes [R, 2F] of the gradient of `a`, and their inverse scales, [R, 1] float32; bytes [R, F] and inverse scales
        of `expert_gate(a, slots)`, bitwise equal to `expert_gate_cast`; and the gradient of the weights, [M, K].
    """
    d_a, _, d_weights = expert_gate_grad.definition(grad, a, weights, slots)
    return *cast_rows.definition(d_a, dtype), *expert_gate_cast.definition(a, slots, dtype), d_weights


class PlainExperts:
    """Computes a layer's E experts in the dtype of the operands: all of them or, with a group, this rank's share.

    Tokens are sent to the ranks of their experts. For equal tokens, results and gradients have the same bits on any
    number of ranks. A weight's gradient includes the tokens of all ranks. No token is dropped: memory suffices for
    P·M·K rows, for the case that every choice of all ranks' tokens is an expert of this rank.

    Args:
        group: the P ranks; rank p holds the E/P experts from p·E/P on. None: this rank holds all experts.
    """

    def __init__(self, group: Group | None = None) -> None:
        self.group = group

    def __call__(self, x: Tensor, weights: Tensor, choices: Tensor, w13: Tensor, w2: Tensor, n_experts: int) -> Tensor:
        """Compute the experts of each token, and sum their weighted results. Collective, with equal M on all ranks.

        Args:
            x: [M, D].
            weights: [M, K] float32, the weights of each token's experts.
            choices: [M, K] int32, the numbers of each token's experts.
            w13: [E/P·2F, D], gate and up weights of this rank's experts one after the other, in alternating blocks of
                128 rows.
            w2: [E/P·D, F], down weights of this rank's experts, one after the other.
            n_experts: E.

        Returns:
            [M, D] in `x.dtype`. Each expert's result is rounded; weighted results are summed in float32, in the order
            of the token's choices.
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
        for_w13, for_w2 = ctx.needs_input_grad[3:5]
        grad, weights, *gathered_x = to.gathered(grad.contiguous(), weights, *([x] if for_w13 else []))
        grad_rows = to.rows(grad, routing)
        g = grouped_matmul(grad_rows, w2.mT, offsets)
        d_a, h, dots = expert_gate_grad(g, a, weights, slots)
        d_w2 = grouped_weight_gradient(grad_rows, h, offsets) if for_w2 else None
        d_w13 = grouped_weight_gradient(d_a, to.rows(*gathered_x, routing, d_a), offsets) if for_w13 else None
        d_x, d_weights = to.gradients(grouped_matmul(d_a, w13.mT, offsets), routing, choices, dots, len(w13))
        return d_x, d_weights, None, d_w13, d_w2, *[None] * 3 * (to.group is not None)
