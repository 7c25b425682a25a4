"""Float8 matmuls with one scale per block: by cuBLASLt on Hopper, by their definition in torch elsewhere.

A tensor is read once and quantised twice, by its rows and by its columns: each of its two matmuls sums over another
dim, and needs blocks along this dim. Forward keeps the quantised bytes of its input that backward multiplies.
"""

from typing import Any

import torch
from torch import Tensor

from titanlite.config.recipe_schema import BLOCKS, Float8Recipe, Granularity
from titanlite.float8.cast import DTYPES, Cast
from titanlite.kernels.block_scaled_matmul import block_scaled_matmul
from titanlite.kernels.float8_cast import cast_blocks

Either = Cast | Tensor
"""A matrix cast to float8, or the original matrix if the recipe leaves the matmul in high precision."""


class BlockScaledFloat8:
    """The matmul `x @ weight.T` by a recipe with one scale per block; see `scope.is_by_blocks`."""

    def __init__(self, recipe: Float8Recipe) -> None:
        self.recipe = recipe

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return `x [M, K] @ weight [N, K].T` [M, N]."""
        return _BlockScaledMatmul.apply(x, weight, self.recipe)  # type: ignore[no-any-return]


def _cast_both_ways(
    x: Tensor, of: Granularity, of_transpose: Granularity, dtype: str, recipe: Float8Recipe, after: Tensor | None = None
) -> tuple[Either, Either]:
    """Cast a matrix [R, C] for a matmul that sums over its columns, and its transpose for one that sums over its rows.

    `of` and `of_transpose`: the unit that has a scale, in each. `after`: a tensor to compute before the cast.
    """
    rows, rows_transposed = (BLOCKS[each][0] if each in BLOCKS else 0 for each in (of, of_transpose))
    if not rows and not rows_transposed:
        return x, x.t()
    pow2 = recipe.scale_rounding == "pow2_floor"
    both = cast_blocks(x, rows, rows_transposed, DTYPES[dtype], pow2, after)
    return Cast(*both[:2]) if rows else x, Cast(*both[2:]) if rows_transposed else x.t()


def _multiply_casts(left: Either, right: Either, dtype: torch.dtype) -> Tensor:
    """Return `left [R, C] @ right [S, C].T` [R, S]."""
    if isinstance(left, Cast) and isinstance(right, Cast):
        return block_scaled_matmul(*left, *right, dtype)
    assert isinstance(left, Tensor)  # noqa: S101
    assert isinstance(right, Tensor)  # noqa: S101
    return torch.mm(left, right.t())


@torch._dynamo.allow_in_graph  # Dynamo cannot trace arguments that are not tensors
class _BlockScaledMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipe: Float8Recipe) -> Tensor:
        of, of_weight = recipe.input, recipe.weight
        left, kept = _cast_both_ways(x, of.output, of.grad_weight, of.dtype, recipe)
        right, _ = _cast_both_ways(weight, of_weight.output, "none", of_weight.dtype, recipe)
        ctx.save_for_backward(*(kept if isinstance(kept, Cast) else (x,)), weight)
        ctx.recipe = recipe
        return _multiply_casts(left, right, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (*x, weight), recipe = ctx.saved_tensors, ctx.recipe
        of, of_weight = recipe.grad_output, recipe.weight
        for_x, for_weight = ctx.needs_input_grad[:2]
        wanted = of.grad_input if for_x else "none", of.grad_weight if for_weight else "none"
        left, transposed = _cast_both_ways(grad, *wanted, of.dtype, recipe)
        d_x = d_weight = None
        if for_x:
            _, right = _cast_both_ways(weight, "none", of_weight.grad_input, of_weight.dtype, recipe, grad)
            d_x = _multiply_casts(left, right, grad.dtype)
        if for_weight:
            d_weight = _multiply_casts(transposed, x[0].t() if len(x) == 1 else Cast(*x), weight.dtype)
        return d_x, d_weight, None
