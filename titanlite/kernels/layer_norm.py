"""LayerNorm with float32 statistics.

The normalised value is rounded once, at the end, so that a recomputation has the same bits.

Source: Ba et al. 2016, "Layer Normalization", eq. 4.
"""

from torch import Tensor


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Shift each row to mean zero, divide it by its standard deviation, scale and shift it: [M, D] in `x.dtype`.

    Weight and bias are [D], `eps` is added to the variance.
    """
    h = x.float()
    h = h - h.mean(-1, keepdim=True)
    h = h * (h.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (h * weight.float() + bias.float()).to(x.dtype)
