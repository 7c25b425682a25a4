"""A product of two float8 matrices, scaled by row and column or as a whole.

One operator on every device, so that what is traced on a CPU is what runs on a GPU. There the hardware's own
instruction does it; the definition multiplies what the bytes stand for.
"""

import torch
from torch import Tensor
from torch.utils.flop_counter import mm_flop, register_flop_formula

from titanlite.kernels import lowering, products


def scaled_matmul(
    left: Tensor,
    right: Tensor,
    left_scale_inv: Tensor | None,
    right_scale_inv: Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    """Return `(left · left_scale_inv) @ (right · right_scale_inv)`, accumulated in float32 and rounded once.

    Args:
        left: [M, K] float8, rows contiguous.
        right: [K, N] float8, columns contiguous.
        left_scale_inv: [M, 1] or [] float32; None for one.
        right_scale_inv: [1, N] or [] float32, or None.
        out_dtype: of the result.
        fast_accum: sums may be left to tensor cores, which keep about 14 bits.

    Returns:
        [M, N].
    """
    return torch.ops.titanlite.scaled_matmul(left, right, left_scale_inv, right_scale_inv, out_dtype, fast_accum)


def _multiply(
    left: Tensor,
    right: Tensor,
    left_scale_inv: Tensor | None,
    right_scale_inv: Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    return products.scaled_product(left, right, left_scale_inv, right_scale_inv, out_dtype, fast_accum)


def _fake(left, right, left_scale_inv, right_scale_inv, out_dtype, fast_accum):
    return left.new_empty((left.shape[0], right.shape[1]), dtype=out_dtype)


lowering.define("scaled_matmul", _multiply, _multiply, _fake)


register_flop_formula(torch.ops.titanlite.scaled_matmul)(lambda left, right, *_, **__: mm_flop(left, right))
