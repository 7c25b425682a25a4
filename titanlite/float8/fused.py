"""Float8 products with their collectives fused: what tensor-parallel layers run under async tensor parallelism.

A tensor that is gathered is cast first, on the rank that has it: float8 bytes travel, with a scale for each row, or one
for each rank ("tensor" of a recipe is then this rank's part). No scale is reduced over the ranks. Backward keeps the
gathered bytes and multiplies them again for the weight's gradient. There the scales lie along the sum, so they go to
the other factor before that is cast: with `d` the bytes and `s` the scales of its rows,

    Σ_m (s_m · d_mn) · x_mk  =  Σ_m d_mn · (s_m · x_mk)

The gathered factor is thus cast once for both of its products, by row; beside an unfused collective, torchao casts it
anew by column for the second.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from titanlite.config.recipe_schema import Float8Recipe, Granularity
from titanlite.kernels.all_gather_matmul import all_gather_matmul
from titanlite.kernels.collectives import Group
from titanlite.kernels.float8_cast import cast_turned, turn
from titanlite.kernels.matmul_reduce_scatter import matmul_reduce_scatter
from titanlite.kernels.products import product

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


class FusedFloat8:
    """A recipe's products for the two kinds of tensor-parallel layer; as `titanlite.kernels.linear.Fused`.

    Args:
        recipe: has all six operands in float8 (`obstacle`).
    """

    def __init__(self, recipe: Float8Recipe) -> None:
        self.recipe = recipe

    @staticmethod
    def obstacle(recipe: Float8Recipe) -> str | None:
        """Why a recipe cannot be fused, or None."""
        if recipe.all_in_float8:
            return None
        return "has a matmul in high precision, for which its tokens would be gathered once more"

    def gathered(self, x: Tensor, weight: Tensor, group: Group) -> Tensor:
        """`all_gather(x [M/tp, K]) @ weight [N, K].T` → [M, N]."""
        return _Gathered.apply(x, weight, group, self.recipe)  # type: ignore[no-any-return]

    def scattered(self, x: Tensor, weight: Tensor, group: Group) -> Tensor:
        """`reduce_scatter(x [M, K] @ weight [N, K].T)` → [M/tp, N]."""
        return _Scattered.apply(x, weight, group, self.recipe)  # type: ignore[no-any-return]


def cast(x: Tensor, of: Granularity, dtype: str, rounding: str) -> tuple[Tensor, Tensor]:
    """A matrix in float8, bit for bit as torchao casts it.

    Args:
        x: [M, K].
        of: "row" or "tensor": what has a scale of its own.
        dtype: "e4m3" or "e5m2".
        rounding: of the scales: "exact" or "pow2_floor".

    Returns:
        The bytes [M, K], contiguous, and the value of one unit of them: [M, 1] or [] float32.
    """
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

    scale = tensor_to_scale(
        x,
        DTYPES[dtype],
        scaling_granularity=ScalingGranularity.AXISWISE if of == "row" else ScalingGranularity.TENSORWISE,
        axiswise_dim=-1 if of == "row" else None,
        round_scales_to_power_of_2=rounding == "pow2_floor",
    )
    return to_fp8_saturated(x.float() * scale, DTYPES[dtype]).contiguous(), scale.reciprocal()


def _cast_weight(weight: Tensor, of: Granularity, recipe: Float8Recipe, turned: bool) -> tuple[Tensor, Tensor]:
    """A weight [N, K], or its transpose [K, N], cast by its rows; it may come in float8, as FSDP has gathered it."""
    if hasattr(weight, "_data"):
        data = weight._data  # type: ignore[attr-defined]
        return turn(data) if turned else data.contiguous(), weight._scale.reciprocal()  # type: ignore[attr-defined]
    return cast(weight.t() if turned else weight, of, recipe.weight.dtype, recipe.scale_rounding)


def _columns(scale: Tensor) -> Tensor:
    """Scales [N, 1] of a factor's rows as those of its transpose's columns."""
    return scale.t() if scale.ndim else scale


def _weight_gradient(
    kept: Tensor, scales: Tensor, other: Tensor, of: Granularity, dtype: str, recipe: Float8Recipe, turned: bool
) -> Tensor:
    """`(scales · kept).T @ other`, or its transpose: the sum over tokens of a factor in float8 and one that is cast.

    Args:
        kept: [M, A] float8.
        scales: [M, 1].
        other: [M, B].
        of: what of `other`'s transpose has a scale of its own.
        dtype: that it is cast to.
        recipe: the arithmetic.
        turned: whether the result is [B, A].
    """
    pow2 = recipe.scale_rounding == "pow2_floor"
    moved, moved_scale = cast_turned(other, scales, of == "row", DTYPES[dtype], pow2)  # [B, M]
    kept, one = turn(kept), scales.new_ones(())  # [A, M]
    fast = recipe.accumulation.grad_weight == "fast"
    if turned:
        return product(moved, kept.t(), None, moved_scale, one, other.dtype, fast)
    return product(kept, moved.t(), None, one, _columns(moved_scale), other.dtype, fast)


class _Product(NamedTuple):
    """One of the two products that move tokens: of a tensor with the weight, or with its transpose.

    Attributes:
        of: what of the tensor has a scale of its own.
        dtype: that the tensor is cast to.
        weight_of: what of the weight has a scale of its own.
        turned: whether the weight is transposed.
        fast: whether sums are left to the tensor cores.
    """

    of: Granularity
    dtype: str
    weight_of: Granularity
    turned: bool
    fast: bool


def _output(recipe: Float8Recipe) -> _Product:
    x, add = recipe.input, recipe.accumulation
    return _Product(x.output, x.dtype, recipe.weight.output, turned=False, fast=add.output == "fast")


def _grad_input(recipe: Float8Recipe) -> _Product:
    g, add = recipe.grad_output, recipe.accumulation
    return _Product(g.grad_input, g.dtype, recipe.weight.grad_input, turned=True, fast=add.grad_input == "fast")


def _gather(x: Tensor, weight: Tensor, group: Group, recipe: Float8Recipe, how: _Product) -> list[Tensor]:
    """Of x [M/tp, K]: the gathered bytes [M, K], their product with the weight, and the scales of their rows [M, 1]."""
    bits, scale = cast(x, how.of, how.dtype, recipe.scale_rounding)
    w, w_scale = _cast_weight(weight, how.weight_of, recipe, how.turned)
    return all_gather_matmul(
        bits,
        [w.t()],
        0,
        x.shape[0] * group.size,
        group.name,
        scale=scale,
        scale_of="row" if scale.ndim else "shard",
        other_scales=[_columns(w_scale)],
        out_dtype=x.dtype,
        fast_accum=how.fast,
    )


def _scatter(x: Tensor, weight: Tensor, group: Group, recipe: Float8Recipe, how: _Product) -> Tensor:
    """Of x [M, K]: this rank's part [M/tp, N] of its product with the weight."""
    bits, scale = cast(x, how.of, how.dtype, recipe.scale_rounding)
    w, w_scale = _cast_weight(weight, how.weight_of, recipe, how.turned)
    return matmul_reduce_scatter(
        [bits],
        [w.t()],
        0,
        group.name,
        left_scales=[scale],
        right_scales=[_columns(w_scale)],
        out_dtype=x.dtype,
        fast_accum=how.fast,
    )


@torch._dynamo.allow_in_graph  # weights may be torchao's float8 tensors, whose insides Dynamo does not see
class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: Group, recipe: Float8Recipe) -> Tensor:
        gathered, y, scales = _gather(x, weight, group, recipe, _output(recipe))
        ctx.save_for_backward(gathered, scales, weight)
        ctx.group, ctx.recipe = group, recipe
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (gathered, scales, weight), recipe = ctx.saved_tensors, ctx.recipe
        d_x = d_weight = None
        if ctx.needs_input_grad[0]:
            d_x = _scatter(grad, weight, ctx.group, recipe, _grad_input(recipe))
        if ctx.needs_input_grad[1]:
            g = recipe.grad_output
            d_weight = _weight_gradient(gathered, scales, grad, g.grad_weight, g.dtype, recipe, turned=True)
        return d_x, d_weight, None, None


@torch._dynamo.allow_in_graph
class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: Group, recipe: Float8Recipe) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.recipe = group, recipe
        return _scatter(x, weight, group, recipe, _output(recipe))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), recipe = ctx.saved_tensors, ctx.recipe
        gathered, d_x, scales = _gather(grad, weight, ctx.group, recipe, _grad_input(recipe))
        d_weight = None
        if ctx.needs_input_grad[1]:
            i = recipe.input
            d_weight = _weight_gradient(gathered, scales, x, i.grad_weight, i.dtype, recipe, turned=False)
        return d_x, d_weight, None, None
