"""The definition of every float8 recipe in plain torch: casts, and products of the numbers that the bytes stand for.

It runs on any device; the other lowerings are tested against it. Casts are torchao's to the bit where
torchao has the recipe, and so are the results of its emulation (`tests/unit/float8/test_emulated.py`), but for one
thing: bytes are multiplied by the inverse of their scale, as tensor cores do it, where torchao's emulation divides them
by the scale.

Each operand is cast for each of its two products, so that scales never lie along the sum:

    output       x  [M, K]    weight    [N, K]     sum over K, the in features
    grad_input   g  [M, N]    weight.T  [K, N]     sum over N, the out features
    grad_weight  g.T [N, M]   x.T       [K, M]     sum over M, the tokens

A matrix [R, C] is seen as rows of C values that are summed over, and as blocks [R/r, r, C/c, c] with one scale each.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from titanlite.config.recipe_schema import BLOCKS, MATMULS, Float8Recipe, Granularity
from titanlite.kernels.block_scaled_matmul import dequantise
from titanlite.kernels.collectives import Group, maximum
from titanlite.kernels.float8_scales import cast_to, scale_of

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_E8M0 = 127  # exponents of E8M0 reach from -127 to 127


class Cast(NamedTuple):
    """A matrix in float8: the numbers are `qdata · scale_inv`."""

    qdata: Tensor  # [R, C] float8
    scale_inv: Tensor  # float32: [] of the whole matrix, [R, 1] of rows, [R/r, C/c] of blocks


class AmaxGroups(NamedTuple):
    """The ranks over which each operand's maximum is reduced, for one scale of the whole; None: what is here is all."""

    input: Group | None = None  # of a layer's products
    weight: Group | None = None  # see `input`
    grad_output: Group | None = None  # see `input`


ALL_HERE = AmaxGroups()


def cast(x: Tensor, of: Granularity, dtype: str, rounding: str, over: Group | None = None) -> Cast:
    """Cast a matrix whose rows are summed over.

    Args:
        x: [R, C], any floating dtype. R and C are multiples of a block.
        of: what has a scale of its own; not "none".
        dtype: "e4m3" or "e5m2".
        rounding: of the scales: "exact" or "pow2_floor", as `scale_of` has them; "e8m0_rceil", the largest power of
            two by which no maximum leaves the range, if E8M0 has it.
        over: the ranks that hold the other parts, where one scale is for all of them; only with "tensor".

    Returns:
        The matrix, its bytes laid out as `x`. NaN makes NaN of all that shares its scale, and so does infinity, with
        exact scales once bytes are multiplied by `scale_inv`; E8M0 has a scale for infinity, and keeps it to itself.

    Source:
        torchao.float8.float8_utils; arXiv:2506.08027, algorithm 1, for "e8m0_rceil".
    """
    to = DTYPES[dtype]
    if of in BLOCKS:
        rows, columns = BLOCKS[of]
        blocks = x.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        scale, scale_inv = _scale_of(blocks.abs().amax((1, 3)), to, rounding)
        return Cast(cast_to(blocks, scale[:, None, :, None], to).flatten(2).flatten(0, 1), scale_inv)
    scale, scale_inv = _scale_of(_amax_of(x, of, over), to, rounding)
    return Cast(cast_to(x, scale, to), scale_inv)


def _amax_of(x: Tensor, of: Granularity, over: Group | None) -> Tensor:
    """Return the greatest size of each row, [R, 1], or of all there is, [], here or on all ranks."""
    if of == "row":
        return x.abs().amax(-1, keepdim=True)
    return x.abs().amax() if over is None else maximum(x.abs().amax(), over)


def _scale_of(amax: Tensor, dtype: torch.dtype, rounding: str) -> tuple[Tensor, Tensor]:
    """Return the scale of numbers up to `amax`, and its inverse."""
    if rounding != "e8m0_rceil":
        return scale_of(amax, dtype, rounding == "pow2_floor")
    exponent = torch.log2(amax.double() / torch.finfo(dtype).max).ceil()  # exact: float64 tells float32 numbers apart
    exponent = exponent.clamp(-_E8M0, _E8M0)
    return torch.exp2(-exponent).float(), torch.exp2(exponent).float()


def multiply(left: Cast, right: Cast, dtype: torch.dtype) -> Tensor:
    """Return `left [R, C] @ right [S, C].T` [R, S], accumulated in float32 and rounded once."""
    return torch.mm(dequantise(*left), dequantise(*right).t()).to(dtype)


class EmulatedFloat8:
    """The matmul `x @ weight.T` as a recipe defines it, forward and backward.

    Args:
        recipe: the arithmetic.
        over: the ranks that hold the rest of its operands.
    """

    def __init__(self, recipe: Float8Recipe, over: AmaxGroups = ALL_HERE) -> None:
        self.recipe, self.over = recipe, over

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply [M, K] by [N, K] transposed, to [M, N]."""
        return _Matmul.apply(x, weight, self.recipe, self.over)  # type: ignore[no-any-return]


@torch._dynamo.allow_in_graph  # what it is given beside tensors is no business of Dynamo's
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
    """Return `left [R, C] @ right [S, C].T` [R, S], one of the recipe's three."""
    of = recipe.operands(matmul)
    if of == ("none", "none"):
        return torch.mm(left, right.t())
    a, b = (
        cast(operand, granularity, getattr(recipe, name).dtype, recipe.scale_rounding, getattr(over, name))
        for name, operand, granularity in zip(MATMULS[matmul], (left, right), of, strict=True)
    )
    return multiply(a, b, left.dtype)
