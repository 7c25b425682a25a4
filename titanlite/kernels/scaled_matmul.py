"""A product of two float8 matrices, scaled by row and column or as a whole.

One operator on every device, so that what is traced on a CPU is what runs on a GPU. There the hardware's own
instruction does it; the definition multiplies what the bytes stand for.
"""

import torch
from torch import Tensor
from torch.utils.flop_counter import mm_flop, register_flop_formula

from titanlite.kernels.operators import operator
from titanlite.kernels.products import scaled_product


@operator("scaled_matmul", None)
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
    return scaled_product(left, right, left_scale_inv, right_scale_inv, out_dtype, fast_accum)


register_flop_formula(torch.ops.titanlite.scaled_matmul)(lambda left, right, *_, **__: mm_flop(left, right))
