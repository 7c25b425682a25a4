"""RMSNorm with float32 statistics, and the residual add in front of it.

The normalised value is rounded once, at the end: whoever recomputes it gets the same bits.

Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", eq. 4.
"""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide each row by its root mean square and scale it.

    Args:
        x: [M, D], any float dtype.
        weight: [D].
        eps: added to the mean square.

    Returns:
        [M, D] in `x.dtype`.
    """
    h = x.float()
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return (h * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add `x` to the residual stream, then normalise the sum.

    Args:
        x: [M, D] output of the previous sublayer.
        residual: [M, D] residual stream.
        weight: [D].
        eps: added to the mean square.

    Returns:
        The normalised sum and the sum, both [M, D] in `x.dtype`.
    """
    total = x + residual
    return rms_norm(total, weight, eps), total
