"""A kernel that does nothing but call `scale_from_amax` of the device code."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titanlite.kernels.device.float8_cast import scale_from_amax


@triton.jit
def _probe(amax, scale, scale_inv, n, most, POW2: tl.constexpr):
    at = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    scales, scale_invs = scale_from_amax(tl.load(amax + at, mask=at < n, other=0), most, POW2)
    tl.store(scale + at, scales, mask=at < n)
    tl.store(scale_inv + at, scale_invs, mask=at < n)


def scales(amax: Tensor, most: float, pow2: bool) -> tuple[Tensor, Tensor]:
    """Scale and unit for each of [n] float32 maxima on a GPU, float32."""
    scale, scale_inv = torch.empty_like(amax), torch.empty_like(amax)
    _probe[(triton.cdiv(len(amax), 1024),)](amax.view(torch.int32), scale, scale_inv, len(amax), most, pow2)
    return scale, scale_inv
