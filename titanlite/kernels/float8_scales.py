"""Scales of float8 tensors, and the elementwise cast by a scale.

A scale equals torchao's (`torchao.float8.float8_utils.amax_to_scale`): a quotient in float64, rounded to float32. A
power of two is computed from exponent and mantissa, where torchao takes a logarithm. Both give the same bits unless the
quotient is within a rounding error of the next power, which never happens for maxima in bfloat16 or float8.
"""

import torch
from torch import Tensor

EPS = 1e-12
"""Maxima below this number are replaced by it before a scale is computed."""

BLOCK = 128
"""Columns of a block that has its own scale; and rows of such a block if it is square."""

_TOPS = {
    dtype: int(torch.tensor(torch.finfo(dtype).max, device="cpu").view(torch.int32))
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
}
"""The greatest number of each float8 dtype, as the bits of a float32."""


def scale_of(amax: Tensor, dtype: torch.dtype, pow2: bool) -> tuple[Tensor, Tensor]:
    """Return the scale that maps numbers up to `amax` to the range of a float8 dtype.

    Args:
        amax: maxima of absolute values, of any shape; EPS replaces smaller ones.
        dtype: float8.
        pow2: round down to a power of two.

    Returns:
        The scale and its inverse; float32, NaN where `amax` is not finite and `pow2` is set.
    """
    if not pow2:
        scale = (torch.finfo(dtype).max / amax.double().clamp(min=EPS)).float()
        return scale, scale.reciprocal()
    amax, top = amax.float().clamp(min=EPS), _TOPS[dtype]
    # A mantissa above that of the greatest number carries into the exponent; inf and NaN become NaN.
    exponent = 254 + (top >> 23) - 127 - ((amax.view(torch.int32) + (0x7FFFFF - (top & 0x7FFFFF))) >> 23)
    of_numbers = amax - amax
    return tuple((e << 23).view(torch.float32) + of_numbers for e in (exponent, 254 - exponent))  # type: ignore[return-value]


def cast_to(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast `x · scale` to float8, saturating; NaN remains NaN. `scale` is float32, and broadcast to the shape of `x`.

    All operations are elementwise, so that compilers fuse them.
    """
    most = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-most, most).to(dtype)


def cast_by_amax(x: Tensor, by_row: bool, dtype: torch.dtype, pow2: bool) -> tuple[Tensor, Tensor]:
    """Cast a matrix [R, C] to float8 by one scale, or one per row. Return bytes, and inverse scales [] or [R, 1]."""
    scale, scale_inv = scale_of(x.abs().amax(1, keepdim=True) if by_row else x.abs().amax(), dtype, pow2)
    return cast_to(x, scale, dtype), scale_inv


def empty_blocks(x: Tensor, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Allocate the results of `float8_cast.cast_blocks` for a matrix [R, C]: bytes and inverse scales."""
    R, C = x.shape
    if not rows:
        return x.new_empty((0, 0), dtype=dtype), x.new_empty((0, 0), dtype=torch.float32)
    shape = (C // BLOCK, R) if rows == 1 else (R // rows, C // BLOCK)
    scale_invs = x.new_empty(shape, dtype=torch.float32)
    return x.new_empty((R, C), dtype=dtype), scale_invs.t() if rows == 1 else scale_invs
