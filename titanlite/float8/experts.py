"""The experts of a layer in float8 with one scale per row. Tensors are cast once; tokens are sent to experts as bytes.

As in `fused.py`, scales must not vary along the dim that a matmul sums over. A weight's gradient sums over the rows of
an expert. So both operands are transposed, and the narrower one is multiplied by the scales of both and cast again. In
the transposed operands the rows of an expert begin at multiples of 16 (`kernels/aligned_rows.py`).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from titanlite.config.recipe_schema import Float8Recipe
from titanlite.float8.cast import DTYPES, Cast
from titanlite.float8.weight import GatheredWeight
from titanlite.kernels.aligned_rows import aligned_rows
from titanlite.kernels.collectives import Group
from titanlite.kernels.experts import expert_gate_cast, expert_gate_grad_cast
from titanlite.kernels.float8_cast import cast_rows, cast_transpose, transpose
from titanlite.kernels.grouped_matmul import scaled_grouped_gradient, scaled_grouped_matmul
from titanlite.kernels.token_exchange import Dispatch, Routing


class Float8Experts:
    """Computes experts by a recipe whose scales are by row and powers of two; called as `kernels.experts.experts`.

    Args:
        recipe: the float8 recipe.
        group: see `kernels.experts.PlainExperts`.
    """

    def __init__(self, recipe: Float8Recipe, group: Group | None = None) -> None:
        self.recipe, self.group = recipe, group

    def __call__(self, x: Tensor, weights: Tensor, choices: Tensor, w13: Tensor, w2: Tensor, n_experts: int) -> Tensor:
        """Return the weighted sum of the results of each token's experts, [M, D] for M tokens of width D."""
        group = () if self.group is None else self.group
        count = n_experts // (1 if self.group is None else self.group.size)
        return _Float8Experts.apply(x, weights, choices, w13, w2, count, self.recipe, *group)  # type: ignore[no-any-return]


class _Side(NamedTuple):
    """An operand of a weight's gradient. Its aligned form has P rows, each a row of `cast` or padding."""

    cast: Cast  # [n, width], with scales of rows
    sources: Tensor  # [P], for each aligned row its row in `cast`; negative: padding

    def factors(self) -> Tensor:
        """Return the inverse scale of each aligned row, [P, 1]."""
        return self.cast.scale_inv[self.sources.clamp(min=0)]


@torch._dynamo.allow_in_graph  # Dynamo cannot see inside weights in float8
class _Float8Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        choices: Tensor,
        w13: Tensor,
        w2: Tensor,
        count: int,
        recipe: Float8Recipe,
        *group: str | int,
    ) -> Tensor:
        ctx.to = to = Dispatch(*group)
        c, fast = Cast(*cast_rows(x, DTYPES[recipe.input.dtype])), recipe.accumulation.output == "fast"
        *sent, every = to.gathered(*c, choices)
        routing = to.routing(every, count)
        _, slots, offsets = routing
        a = _product_of_rows(_sent(Cast(*sent), routing, to), _by_expert(w13, count, recipe), offsets, x.dtype, fast)
        h = Cast(*expert_gate_cast(a, slots, DTYPES[recipe.input.dtype]))
        o = _product_of_rows(h, _by_expert(w2, count, recipe), offsets, x.dtype, fast)
        ctx.save_for_backward(*c, weights, choices if group else None, a, w13, w2, *routing)
        ctx.count, ctx.recipe = count, recipe
        return to.sums(o, routing, choices, weights, count)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *c, weights, choices, a, w13, w2, rows, slots, offsets = ctx.saved_tensors
        recipe, dtype, count, to, routing = ctx.recipe, grad.dtype, ctx.count, ctx.to, Routing(rows, slots, offsets)
        fast = recipe.accumulation.grad_input == "fast"
        g = Cast(*cast_rows(grad.contiguous(), DTYPES[recipe.grad_output.dtype]))
        for_w13, for_w2 = ctx.needs_input_grad[3:5]
        *of_all, weights = to.gathered(*g, *(c if for_w13 else ()), weights)
        g, c = Cast(*of_all[:2]), of_all[2:]
        d_h = _product_of_rows(_sent(g, routing, to), _transposed(w2, count, recipe, g.qdata), offsets, dtype, fast)
        cast = expert_gate_grad_cast(d_h, a, weights, slots, DTYPES[recipe.grad_output.dtype])
        (d_a, h), dots = (Cast(*cast[:2]), Cast(*cast[2:4])), cast[4]
        d_rows = _product_of_rows(d_a, _transposed(w13, count, recipe, d_a.qdata), offsets, dtype, fast)
        d_x, d_weights = to.gradients(d_rows, routing, choices, dots, count)
        row_of, token_of, begins = aligned_rows(slots, offsets, weights.shape[1])
        weight = weights.flatten()[slots.clamp(min=0)][:, None]
        weighed = _Side(Cast(h.qdata, h.scale_inv * weight), row_of)
        how = begins, recipe, dtype
        d_w2 = _gradient(_Side(g, token_of), weighed, *how) if for_w2 else None
        d_w13 = _gradient(_Side(d_a, row_of), _Side(Cast(*c), token_of), *how) if for_w13 else None
        return d_x, d_weights, None, d_w13, d_w2, None, None, *[None] * 3 * (to.group is not None)


def _sent(c: Cast, routing: Routing, to: Dispatch) -> Cast:
    """Copy the float8 bytes and scales of tokens to the rows of their experts."""
    K = routing.rows.shape[1]
    return Cast(to.rows(c.qdata, routing), c.scale_inv[routing.slots.clamp(min=0) // K])


def _product_of_rows(a: Cast, weight: Cast, offsets: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    return scaled_grouped_matmul(a.qdata, weight.qdata, a.scale_inv, weight.scale_inv, offsets, dtype, fast)


def _straight(weight: Tensor, recipe: Float8Recipe) -> Cast:
    if isinstance(weight, GatheredWeight):
        return Cast(weight.qdata, weight.scale_inv)
    return Cast(*cast_rows(weight, DTYPES[recipe.weight.dtype]))


def _by_expert(weight: Tensor, E: int, recipe: Float8Recipe) -> Cast:
    """Cast the stacked weights [E·N, K] of E experts by row; return [E, N, K] with inverse scales [E, N]."""
    qdata, scale_inv = _straight(weight, recipe)
    return Cast(qdata.unflatten(0, (E, -1)), scale_inv.view(E, -1))


def _transposed(weight: Tensor, E: int, recipe: Float8Recipe, after: Tensor) -> Cast:
    """Cast the transposes of the weights [E·N, K] of E experts, after the tensor `after` exists; return [E, K, N], with
    inverse scales [1, K] that all experts share."""
    c = _straight(weight, recipe)
    qdata, scale_inv = cast_transpose(*c, True, DTYPES[recipe.weight.dtype], True, after)
    return Cast(qdata.unflatten(1, (E, -1)).transpose(0, 1), scale_inv.t())


def _gradient(grad: _Side, x: _Side, begins: Tensor, recipe: Float8Recipe, dtype: torch.dtype) -> Tensor:
    """Return the gradient of a weight, [E·N, K], as the product of the transposed operands.

    The narrower one is multiplied by the scales of both and cast again. `begins`: first aligned row of each expert.
    """
    of_grad = grad.cast.qdata.shape[1] <= x.cast.qdata.shape[1]
    narrow, wide = (grad, x) if of_grad else (x, grad)
    operand = recipe.grad_output if of_grad else recipe.input
    factors = narrow.factors() * wide.factors()
    again, scale_inv = cast_transpose(
        narrow.cast.qdata, factors, True, DTYPES[operand.dtype], True, None, narrow.sources
    )
    other = transpose(wide.cast.qdata, None, wide.sources)
    operands = (again, other, scale_inv, None) if of_grad else (other, again, None, scale_inv)
    fast = recipe.accumulation.grad_weight == "fast"
    return scaled_grouped_gradient(*operands, begins, dtype, fast).flatten(0, 1)
