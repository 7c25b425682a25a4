"""A product of two float8 matrices, scaled by row and column or as a whole.

It is one operator on every device, so that a trace on a CPU is what runs on a GPU. There the hardware multiplies
float8; the definition on a CPU multiplies float32.
"""

import torch
from torch import Tensor
from torch.utils.flop_counter import mm_flop

from titanlite.kernels.operators import operator
from titanlite.kernels.products import scaled_product


@operator("scaled_matmul", None, flops=lambda *given, **_: mm_flop(*given[:2]))
def scaled_matmul(
    left: Tensor,
    right: Tensor,
    left_scale_inv: Tensor | None,
    right_scale_inv: Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    """Return `scaled_product` of the same arguments."""
    return scaled_product(left, right, left_scale_inv, right_scale_inv, out_dtype, fast_accum)
