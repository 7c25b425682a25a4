"""Float8 matmuls by titanlite's own kernels, with or without a fused collective.

Each tensor is quantised once, by row or as a whole, and backward uses the same float8 bytes. The weight's gradient sums
over tokens: both operands are transposed, and scales of their rows would vary along the sum. So the narrower operand is
multiplied by the scales of both and cast again by column; the wider one is only transposed. With the bytes `d`, `e` and
the inverse row scales `s`, `t` of the two operands,

    Σ_m (s_m · d_mn) · (t_m · e_mk)  =  Σ_m d_mn · (s_m · t_m · e_mk)

Row scales are powers of two, so the second cast loses only values that are too small for float8.

Under tensor parallelism a rank casts its part before the all-gather, which sends float8 bytes with a scale for each row
or for each rank's part. With `reduce_amax` the parts of all ranks share one scale.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from titanlite.config.recipe_schema import Float8Recipe, Granularity
from titanlite.float8.cast import ALL_HERE, DTYPES, AmaxGroups, Cast, cast
from titanlite.float8.scope import is_cast_from_bytes
from titanlite.float8.weight import GatheredWeight
from titanlite.kernels.all_gather_matmul import all_gather_matmul
from titanlite.kernels.collectives import Group
from titanlite.kernels.float8_cast import cast_rows, cast_transpose, transpose
from titanlite.kernels.matmul_reduce_scatter import matmul_reduce_scatter
from titanlite.kernels.products import scaled_matmul
from titanlite.kernels.swiglu import swiglu_cast, swiglu_grad_cast


class FusedFloat8:
    """The matmuls of a recipe without a `scope.obstacle`: plain, and fused with a collective as in `FusedMatmul`.

    `over` is as in `Float8Matmul`, and applies to plain matmuls.
    """

    def __init__(self, recipe: Float8Recipe, over: AmaxGroups = ALL_HERE) -> None:
        self.recipe, self.over = recipe, over

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return `x [M, K] @ weight [N, K].T` [M, N]."""
        return _Product.apply(x, weight, True, None, self.recipe, self.over)  # type: ignore[no-any-return]

    def gathered(self, x: Tensor, weight: Tensor, group: Group) -> Tensor:
        """Return `all_gather(x [M/tp, K]) @ weight [N, K].T` [M, N]."""
        return _Product.apply(x, weight, True, group, self.recipe, self._all_over(group))  # type: ignore[no-any-return]

    def scattered(self, x: Tensor, weight: Tensor, group: Group) -> Tensor:
        """Return `reduce_scatter(x [M, K] @ weight [N, K].T)` [M/tp, N]."""
        return _Product.apply(x, weight, False, group, self.recipe, self._all_over(group))  # type: ignore[no-any-return]

    def _all_over(self, group: Group) -> AmaxGroups:
        """Return the ranks that reduce maxima in matmuls with a collective, where a rank casts a part of an operand."""
        return AmaxGroups(group, group, group) if self.recipe.reduce_amax else ALL_HERE


def _cast_contiguous(x: Tensor, of: Granularity, dtype: str, recipe: Float8Recipe, over: Group | None) -> Cast:
    """Cast a matrix as `cast` does, but to bytes that are contiguous."""
    qdata, scale_inv = cast(x, of, dtype, recipe.scale_rounding, over)
    return Cast(qdata.contiguous(), scale_inv)


def _cast_weight(weight: Tensor, how: "_TokenProduct", recipe: Float8Recipe, factor: Tensor) -> Cast:
    """Return a weight [N, K], or its transpose [K, N] if `how` needs that, cast to float8 for a matmul.

    FSDP may have gathered it in float8 already. The kernel that transposes it is ordered after `factor`, which is the
    other operand.
    """
    dtype, pow2, by_row = recipe.weight.dtype, recipe.scale_rounding == "pow2_floor", how.weight_of == "row"
    if isinstance(weight, GatheredWeight):
        straight = Cast(weight.qdata, weight.scale_inv)
    elif how.transposed and how.weight_over is None:
        ones = weight.new_ones((len(weight), 1), dtype=torch.float32)
        return Cast(*cast_transpose(weight, ones, by_row, DTYPES[dtype], pow2, factor))
    else:
        straight = _cast_contiguous(weight, how.weight_of, dtype, recipe, how.weight_over)
    if not how.transposed:
        return straight
    if straight.scale_inv.ndim == 0:
        return Cast(transpose(straight.qdata, factor), straight.scale_inv)
    return Cast(*cast_transpose(*straight, by_row, DTYPES[dtype], pow2, factor))


def _columns(scale_inv: Tensor) -> Tensor:
    """View inverse scales [N, 1] of rows as scales [1, N] of the transpose's columns. A scale [] remains unchanged."""
    return scale_inv.t() if scale_inv.ndim else scale_inv


def _weight_gradient(grad: Cast | Tensor, x: Cast | Tensor, recipe: Float8Recipe, dtype: torch.dtype) -> Tensor:
    """Return `grad.T @ x` [N, K], for a gradient [M, N] and an input [M, K] of M tokens.

    One of the two may be in high precision; it is then cast by column.
    """
    fast, pow2 = recipe.accumulation.grad_weight == "fast", recipe.scale_rounding == "pow2_floor"
    if isinstance(grad, Cast) and isinstance(x, Cast) and grad.scale_inv.ndim == x.scale_inv.ndim == 0:
        return scaled_matmul(transpose(grad.qdata), transpose(x.qdata).t(), grad.scale_inv, x.scale_inv, dtype, fast)
    if isinstance(x, Tensor) or (isinstance(grad, Cast) and grad.qdata.shape[1] > x.qdata.shape[1]):
        assert isinstance(grad, Cast)  # noqa: S101
        again = _cast_again(x, grad.scale_inv, recipe.input.grad_weight, recipe.input.dtype, pow2)
        return scaled_matmul(transpose(grad.qdata), again.qdata.t(), None, _columns(again.scale_inv), dtype, fast)
    again = _cast_again(grad, x.scale_inv, recipe.grad_output.grad_weight, recipe.grad_output.dtype, pow2)
    return scaled_matmul(again.qdata, transpose(x.qdata).t(), again.scale_inv, None, dtype, fast)


def _cast_again(x: Cast | Tensor, by: Tensor, of: Granularity, dtype: str, pow2: bool) -> Cast:
    """Cast the transpose of `x [M, K] · by [M, 1]`; `of` is the unit of the transpose that has a scale."""
    source, factors = (x.qdata, x.scale_inv * by) if isinstance(x, Cast) else (x, by)
    return Cast(*cast_transpose(source, factors, of == "row", DTYPES[dtype], pow2))


class _TokenProduct(NamedTuple):
    """How to cast and multiply a tensor with one row per token by the weight, or by the transposed weight."""

    of: Granularity  # unit of the tensor that has a scale
    over: Group | None  # the ranks that hold the other parts of the tensor, if all share one scale
    dtype: str  # dtype to which the tensor is cast
    weight_of: Granularity  # as `of`, for the weight
    weight_over: Group | None  # as `over`, for the weight
    transposed: bool  # whether the weight is transposed
    fast: bool  # whether to accumulate in tensor cores only, faster and less exact than in float32

    def cast(self, x: Tensor, recipe: Float8Recipe) -> Cast:
        """Cast `x`, the tensor with one row per token, to contiguous bytes."""
        return _cast_contiguous(x, self.of, self.dtype, recipe, self.over)


def _output(recipe: Float8Recipe, over: AmaxGroups = ALL_HERE) -> _TokenProduct:
    x, w, fast = recipe.input, recipe.weight, recipe.accumulation.output == "fast"
    return _TokenProduct(x.output, over.input, x.dtype, w.output, over.weight, transposed=False, fast=fast)


def _grad_input(recipe: Float8Recipe, over: AmaxGroups = ALL_HERE) -> _TokenProduct:
    g, w, fast = recipe.grad_output, recipe.weight, recipe.accumulation.grad_input == "fast"
    return _TokenProduct(g.grad_input, over.grad_output, g.dtype, w.grad_input, over.weight, transposed=True, fast=fast)


def _gathered_product(
    x: Cast, weight: Tensor, group: Group | None, recipe: Float8Recipe, how: _TokenProduct, dtype: torch.dtype
) -> tuple[Cast, Tensor]:
    """All-gather x [M/tp, K] over the group, if any; return (the gathered x [M, K], its product with the weight)."""
    w, w_scale_inv = _cast_weight(weight, how, recipe, x.qdata)
    if group is None:
        return x, scaled_matmul(x.qdata, w.t(), x.scale_inv, _columns(w_scale_inv), dtype, how.fast)
    gathered, y, *scale_invs = all_gather_matmul(
        x.qdata,
        [w.t()],
        0,
        len(x.qdata) * group.size,
        group.name,
        scale=x.scale_inv,
        scale_of="row" if x.scale_inv.ndim else "tensor" if how.over else "shard",
        other_scales=[_columns(w_scale_inv)],
        out_dtype=dtype,
        fast_accum=how.fast,
    )
    return Cast(gathered, scale_invs[0] if scale_invs else x.scale_inv), y


def _scattered_product(
    x: Cast, weight: Tensor, group: Group | None, recipe: Float8Recipe, how: _TokenProduct, dtype: torch.dtype
) -> Tensor:
    """Multiply x [M, K] by the weight; return this rank's part [M/tp, N] of the sum over the group, if any."""
    w, w_scale_inv = _cast_weight(weight, how, recipe, x.qdata)
    if group is None:
        return scaled_matmul(x.qdata, w.t(), x.scale_inv, _columns(w_scale_inv), dtype, how.fast)
    return matmul_reduce_scatter(
        [x.qdata],
        [w.t()],
        0,
        group.name,
        left_scales=[x.scale_inv],
        right_scales=[_columns(w_scale_inv)],
        out_dtype=dtype,
        fast_accum=how.fast,
    )


def feed_forward(x: Tensor, w13: Tensor, w2: Tensor, group: Group | None, recipe: Float8Recipe) -> Tensor:
    """Return `swiglu(x @ w13.T) @ w2.T` [M/tp, D]. The result of swiglu exists only in float8.

    Args:
        x: [M/tp, D], the activations of this rank's tokens.
        w13: [2F/tp, D], gate and up projection in alternating blocks of 128 rows.
        w2: [D, F/tp].
        group: the tensor-parallel ranks from which tokens are gathered, or None.
        recipe: a recipe that `scope.joins_feed_forward` allows.
    """
    return _FeedForward.apply(x, w13, w2, group, recipe)  # type: ignore[no-any-return]


@torch._dynamo.allow_in_graph  # Dynamo cannot trace a weight in float8
class _Product(torch.autograd.Function):
    """A matmul after an all-gather (`gathers`), or before a reduce-scatter. Backward has the other collective."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, gathers: bool, group: Group | None, recipe: Float8Recipe, over: AmaxGroups
    ) -> Tensor:
        how = _output(recipe, over)
        c = how.cast(x, recipe)
        if gathers:
            kept, y = _gathered_product(c, weight, group, recipe, how, x.dtype)
        else:
            kept = c if is_cast_from_bytes(recipe, group is not None) else (x,)
            y = _scattered_product(c, weight, group, recipe, how, x.dtype)
        ctx.save_for_backward(*kept, weight)
        ctx.given = gathers, group, recipe, over
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (*kept, weight), (gathers, group, recipe, over) = ctx.saved_tensors, ctx.given
        how, d_x, d_weight = _grad_input(recipe, over), None, None
        g = how.cast(grad, recipe)
        if not gathers:
            g, d_x = _gathered_product(g, weight, group, recipe, how, grad.dtype)
        elif ctx.needs_input_grad[0]:
            d_x = _scattered_product(g, weight, group, recipe, how, grad.dtype)
        if ctx.needs_input_grad[1]:
            source = g if not gathers or is_cast_from_bytes(recipe, group is not None) else grad
            d_weight = _weight_gradient(source, kept[0] if len(kept) == 1 else Cast(*kept), recipe, weight.dtype)
        return d_x, d_weight, *[None] * 4


@torch._dynamo.allow_in_graph
class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w13: Tensor, w2: Tensor, group: Group | None, recipe: Float8Recipe) -> Tensor:
        how = _output(recipe)
        gathered, a = _gathered_product(how.cast(x, recipe), w13, group, recipe, how, x.dtype)  # a [M, 2F/tp]
        ctx.save_for_backward(*gathered, a, w13, w2)
        ctx.group, ctx.recipe = group, recipe
        h = Cast(*swiglu_cast(a, how.of == "row", DTYPES[how.dtype], recipe.scale_rounding == "pow2_floor"))
        return _scattered_product(h, w2, group, recipe, how, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (qdata, scale_inv, a, w13, w2), group, recipe = ctx.saved_tensors, ctx.group, ctx.recipe
        how, forward = _grad_input(recipe), _output(recipe)
        # A separate kernel: the cast is first in the block's backward, so the compiler cannot fuse it with other work.
        cast_grad = Cast(*cast_rows(grad, DTYPES[how.dtype])) if how.of == "row" else how.cast(grad, recipe)
        g, d_h = _gathered_product(cast_grad, w2, group, recipe, how, grad.dtype)
        dtypes, pow2 = (DTYPES[how.dtype], DTYPES[forward.dtype]), recipe.scale_rounding == "pow2_floor"
        d_qdata, d_scale_inv, h_qdata, h_scale_inv = swiglu_grad_cast(d_h, a, how.of == "row", *dtypes, pow2)
        for_x, for_w13, for_w2 = ctx.needs_input_grad[:3]
        d_w2 = _weight_gradient(g, Cast(h_qdata, h_scale_inv), recipe, w2.dtype) if for_w2 else None
        d_a = Cast(d_qdata, d_scale_inv)
        d_x = _scattered_product(d_a, w13, group, recipe, how, grad.dtype) if for_x else None
        d_w13 = _weight_gradient(d_a, Cast(qdata, scale_inv), recipe, w13.dtype) if for_w13 else None
        return d_x, d_w13, d_w2, None, None
