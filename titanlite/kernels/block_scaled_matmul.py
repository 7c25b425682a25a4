"""The product of two float8 matrices with a scale per block: 1×128, along the contracted dim; one may have 128×128.

On Hopper cuBLASLt 12.9 computes it (`torch.nn.functional.scaled_mm`): each run of 128 products is summed, the sum is
scaled, and scaled sums are added in float32. Scales have these layouts, for R rows and C = 128·c columns:

    1×128      [R, c]         columns contiguous: stride (1, R)
    128×128    [c', R/128]    transposed, c' = c rounded up to a multiple of 4: stride (1, c')

Blackwell scales blocks of other sizes.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from titanlite.device import Device
from titanlite.kernels.float8_scales import BLOCK
from titanlite.kernels.operators import operator


def block_scaling_unsupported_reason(device: Device) -> str | None:
    """Return the reason why a device cannot compute block-scaled products, or None."""
    if device.capability is None:
        return "the device is no GPU"
    if (capability := device.capability)[0] != 9:
        return f"blocks of {BLOCK} need compute capability 9.x, this GPU has {capability[0]}.{capability[1]}"
    if device.is_named:
        return None
    cuda = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    if cuda < (12, 9):
        return f"blocks of {BLOCK} need CUDA 12.9, this torch was built with {torch.version.cuda}"
    return None


def dequantise(qdata: Tensor, scale_inv: Tensor) -> Tensor:
    """Multiply float8 bytes [R, C] by inverse scales, [R/r, C/c] float32 for blocks of r × c, or [] for one scale.

    Returns:
        [R, C] float32, laid out as `qdata`.
    """
    if scale_inv.ndim == 0:
        return qdata.float() * scale_inv
    rows, columns = scale_inv.shape
    blocks = qdata.float().unflatten(1, (columns, -1)).unflatten(0, (rows, -1))
    return (blocks * scale_inv[:, None, :, None]).flatten(2).flatten(0, 1)


def _by_cublas(
    left: Tensor, left_scale_inv: Tensor, right: Tensor, right_scale_inv: Tensor, dtype: torch.dtype
) -> Tensor:
    left, right = left.contiguous(), right.contiguous()
    left_scale_inv, left_blocks = as_cublas_has_it(left, left_scale_inv)
    right_scale_inv, right_blocks = as_cublas_has_it(right, right_scale_inv)
    return F.scaled_mm(left, right.t(), left_scale_inv, left_blocks, right_scale_inv, right_blocks, output_dtype=dtype)


def as_cublas_has_it(qdata: Tensor, scale_inv: Tensor) -> tuple[Tensor, F.ScalingType]:
    """Return inverse scales in cuBLASLt's layout, and torch's name for the size of their blocks."""
    if scale_inv.shape[0] == qdata.shape[0]:
        return scale_inv.t().contiguous().t(), F.ScalingType.BlockWise1x128
    return F.pad(scale_inv, (0, -scale_inv.shape[1] % 4)).contiguous().t(), F.ScalingType.BlockWise128x128


@operator(
    "block_scaled_matmul",
    _by_cublas,
    flops=lambda left_shape, _, right_shape, *__, **___: 2 * math.prod(left_shape) * right_shape[0],
)
def block_scaled_matmul(
    left: Tensor, left_scale_inv: Tensor, right: Tensor, right_scale_inv: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return `left @ right.T` of the dequantised matrices, accumulated in float32 and rounded once.

    Args:
        left: [R, C] float8; R and C are multiples of 128.
        left_scale_inv: [R, C/128] or [R/128, C/128] float32, see `dequantise`.
        right: [S, C] float8; S is a multiple of 128. At most one of the two matrices is e5m2.
        right_scale_inv: [S, C/128] or [S/128, C/128] float32. At most one of the two matrices has 128×128 blocks.
        dtype: of the result, bfloat16 or float32.

    Returns:
        [R, S].
    """
    return torch.mm(dequantise(left, left_scale_inv), dequantise(right, right_scale_inv).t()).to(dtype)
