"""Copy matrices with a factor, a conversion to another dtype, and a transpose if one of the two is a transposed view.

Orthogonalisation begins and ends with such a copy. On a GPU a kernel reads and writes each number once, in the order of
memory (`titanlite/kernels/device/scaled_copy.py`).
"""

import torch
from torch import Tensor

from titanlite.kernels.operators import device_code

_launch = device_code("scaled_copy.launch_scaled_copy")


def scaled_copy(x: Tensor, out: Tensor, factor: float, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """Write `factor · x / max(norm, eps)` to `out`, computed in float32 or wider, and return `out`.

    `x` and `out` are [B, R, C] of any floating dtype, or transposed views. `norm` is [B, 1, 1] float32 or wider;
    None: 1.
    """
    if x.is_cuda and x.itemsize == out.itemsize == 2:
        return _launch(x, out, factor, norm, eps)
    scale = factor if norm is None else factor / norm.clamp(min=eps)
    return out.copy_(x.to(torch.promote_types(x.dtype, torch.float32)) * scale)
