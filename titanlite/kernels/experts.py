"""The experts of a layer: each token is computed by the experts chosen for it, and their weighted results are summed.

A row is one token at one of its experts: R = M·K rows for M tokens with K experts each, sorted by expert. Forward saves
x, the gate and up projections a of each row, and the routing. Backward recomputes everything else:

    forward    a = x[token] W13ᵀ      h = swiglu(a)      o = h W2ᵀ      y = Σ weight · o, over the slots of a token
    backward   g = dy[token] W2       d_weight = g · h   dW2 = dy[token]ᵀ (weight · h)
               d_a = swiglu'(weight · g, a)              dW13 = d_aᵀ x[token]          dx = Σ d_a W13

So the results o of single experts, the largest tensors, are never saved. With expert parallelism each rank computes the
rows of its own experts (`token_exchange.py`), in windows (`expert_windows.py`), and backward gathers tokens again.

Source: Guo et al. 2025, "SonicMoE", section 3, for the gradient of a weight without o.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from titanlite.kernels.collectives import Group
from titanlite.kernels.expert_gate import expert_gate, expert_gate_grad
from titanlite.kernels.expert_windows import (
    ARITHMETICS,
    RowGradients,
    combine_windows_at_owners,
    first_window,
    in_windows,
    window_gradients_at_owners,
)
from titanlite.kernels.grouped_matmul import grouped_matmul, grouped_weight_gradient
from titanlite.kernels.routing import gather_rows
from titanlite.kernels.token_exchange import Dispatch, Routing


class PlainExperts:
    """Computes a layer's E experts in the dtype of the operands: all of them or, with a group, this rank's share.

    Tokens are sent to the ranks of their experts. For equal tokens, results and gradients have the same bits on any
    number of ranks. A weight's gradient includes the tokens of all ranks. No token is dropped: rows beyond 1.5 times
    the mean are computed window by window (`expert_windows.py`).

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


PLAIN = "plain"
"""The name of this file's arithmetic in `ARITHMETICS`."""


@torch._dynamo.allow_in_graph
class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, choices: Tensor, w13: Tensor, w2: Tensor, *group: str | int
    ) -> Tensor:
        ctx.to = to = Dispatch(*group)
        every_x, every = to.gathered(x, choices)
        routing = in_windows(every, to, len(w13))
        first = first_window(routing, to, len(w13))
        a = grouped_matmul(to.rows(every_x, first), w13, first.offsets)
        ctx.save_for_backward(x, weights, choices if group else None, a, w13, w2, *routing)
        o = _results_of_rows(a, w2, first.slots, first.offsets)
        if routing.on_host is None:
            return to.sums(o, first, choices, weights, len(w13))
        rows = o, first.slots, choices, weights, len(w13), routing.slots, routing.offsets, routing.on_host
        return combine_windows_at_owners(*rows, [every_x, w13, w2], PLAIN, to.name)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, choices, a, w13, w2, *routing = ctx.saved_tensors
        to, routing = ctx.to, Routing(*routing)
        first, on_host = first_window(routing, to, len(w13)), routing.on_host
        for_w13, for_w2 = ctx.needs_input_grad[3:5]
        grad, weights, *every_x = to.gathered(
            grad.contiguous(), weights, *([x] if for_w13 or on_host is not None else [])
        )

        def x_rows(after: Tensor) -> Tensor:
            return to.rows(*every_x, first, after)

        d_rows, dots, d_w13, d_w2 = _gradients_of_rows(
            to.rows(grad, first), a, weights, w13, w2, first.slots, first.offsets, x_rows if for_w13 else None, for_w2
        )
        if on_host is not None:
            rows = d_rows, first.slots, choices, dots, len(w13), routing.slots, routing.offsets, on_host, weights
            given = [grad, *every_x, w13, w2]
            d_x, d_weights = window_gradients_at_owners(*rows, given, d_w13, d_w2, PLAIN, to.name)
        else:
            d_x, d_weights = to.gradients(d_rows, first, choices, dots, len(w13))
        return d_x, d_weights, None, d_w13, d_w2, *[None] * 3 * (to.group is not None)


def _results_of_rows(a: Tensor, w2: Tensor, slots: Tensor, offsets: Tensor) -> Tensor:
    return grouped_matmul(expert_gate(a, slots), w2, offsets)


def _gradients_of_rows(
    grad_rows: Tensor,
    a: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    slots: Tensor,
    offsets: Tensor,
    x_rows: Callable[[Tensor], Tensor] | None,
    for_w2: bool,
) -> RowGradients:
    """Differentiate the weighted results of rows.

    `grad_rows`, [R, D]: gradient of the sum of a token's results, for each row. `x_rows` returns the tokens of the
    rows, [R, D], after the given tensor exists; None: w13 has no gradient. Callers pass rows that they do not keep, and
    not by `*`, which would keep them.
    """
    d_a, h, dots = expert_gate_grad(grouped_matmul(grad_rows, w2.mT, offsets), a, weights, slots)
    d_w2 = grouped_weight_gradient(grad_rows, h, offsets) if for_w2 else None
    del grad_rows, a, h  # freed before rows of x are allocated
    d_w13 = None if x_rows is None else grouped_weight_gradient(d_a, x_rows(d_a), offsets)
    return RowGradients(grouped_matmul(d_a, w13.mT, offsets), dots, d_w13, d_w2)


class _PlainWindows:
    """Computes windows after the first. Given are all ranks' tokens, in backward after the gradient, and weights."""

    def results(self, given: list[Tensor], top_k: int, slots: Tensor, offsets: Tensor) -> Tensor:
        x, w13, w2 = given
        return _results_of_rows(grouped_matmul(gather_rows(x, slots, top_k), w13, offsets), w2, slots, offsets)

    def gradients(
        self, given: list[Tensor], weights: Tensor, slots: Tensor, offsets: Tensor, for_w13: bool, for_w2: bool
    ) -> RowGradients:
        (grad, x, w13, w2), top_k = given, weights.shape[1]

        def x_rows(after: Tensor | None = None) -> Tensor:
            return gather_rows(x, slots, top_k, after)

        return _gradients_of_rows(
            gather_rows(grad, slots, top_k), grouped_matmul(x_rows(), w13, offsets), weights, w13, w2, slots, offsets,
            x_rows if for_w13 else None, for_w2,
        )  # fmt: skip


ARITHMETICS[PLAIN] = _PlainWindows
