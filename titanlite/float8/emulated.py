"""The definition of every float8 recipe in plain torch: matmuls of dequantised casts.

It runs on any device; other lowerings are tested against it. Where torchao has the recipe, results equal those of its
emulation bit for bit (`tests/unit/float8/test_emulated.py`), except that bytes are multiplied by the inverse scale, as
on tensor cores, while torchao divides by the scale.

Each operand takes part in two matmuls, and is cast for each along the dim that the matmul sums over:

    output       x  [M, K]    weight    [N, K]     sum over K, the in features
    grad_input   g  [M, N]    weight.T  [K, N]     sum over N, the out features
    grad_weight  g.T [N, M]   x.T       [K, M]     sum over M, the tokens
"""

from typing import Any

import torch
from torch import Tensor

from titanlite.config.recipe_schema import MATMULS, Float8Recipe
from titanlite.float8.cast import ALL_HERE, AmaxGroups, Cast, cast
from titanlite.kernels.block_scaled_matmul import dequantise


def multiply(left: Cast, right: Cast, dtype: torch.dtype) -> Tensor:
    """Return `left [R, C] @ right [S, C].T` [R, S], accumulated in float32 and rounded once."""
    return torch.mm(dequantise(*left), dequantise(*right).t()).to(dtype)


class EmulatedFloat8:
    """The matmul `x @ weight.T` as a recipe defines it, forward and backward; `over` as in `Float8Matmul`."""

    def __init__(self, recipe: Float8Recipe, over: AmaxGroups = ALL_HERE) -> None:
        self.recipe, self.over = recipe, over

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return `x [M, K] @ weight [N, K].T` [M, N]."""
        return _Matmul.apply(x, weight, self.recipe, self.over)  # type: ignore[no-any-return]


@torch._dynamo.allow_in_graph  # Dynamo cannot trace arguments that are not tensors
class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipe: Float8Recipe, over: AmaxGroups) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.recipe, ctx.over = recipe, over
        return _emulated_product(x, weight, "output", recipe, over)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        d_x = d_weight = None
        if ctx.needs_input_grad[0]:
            d_x = _emulated_product(grad, weight.t(), "grad_input", ctx.recipe, ctx.over)
        if ctx.needs_input_grad[1]:
            d_weight = _emulated_product(grad.t(), x.t(), "grad_weight", ctx.recipe, ctx.over)
        return d_x, d_weight, None, None


def _emulated_product(left: Tensor, right: Tensor, matmul: str, recipe: Float8Recipe, over: AmaxGroups) -> Tensor:
    """Cast both operands and return `left [R, C] @ right [S, C].T` [R, S]; `matmul` is "output", "grad_input" or
    "grad_weight", for which the recipe has different casts."""
    of = recipe.operands(matmul)
    if of == ("none", "none"):
        return torch.mm(left, right.t())
    a, b = (
        cast(operand, granularity, getattr(recipe, name).dtype, recipe.scale_rounding, getattr(over, name))
        for name, operand, granularity in zip(MATMULS[matmul], (left, right), of, strict=True)
    )
    return multiply(a, b, left.dtype)
