"""Matrices that are multiplied by a number each and converted, and transposed on the way if their memory asks for it.

Orthogonalisation begins and ends with that. On a GPU one kernel reads and writes each number once, both in order
(`titanlite/kernels/device/scaled_copy.py`).
"""

import torch
from torch import Tensor

from titanlite.kernels.operators import device_code

_launch = device_code("scaled_copy.launch_scaled_copy")


def scaled_copy(x: Tensor, out: Tensor, factor: float, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """Write factor X, or factor X / max(norm, eps), which is computed in float32, or wider.

    Args:
        x: [B, R, C].
        out: [B, R, C], of any floating dtype. Either may be a transposed view.
        factor: of all matrices.
        norm: [B, 1, 1] float32, or wider, by which each matrix is divided. None: 1.
        eps: a norm below it counts as it.

    Returns:
        `out`.
    """
    if x.is_cuda and x.itemsize == out.itemsize == 2:
        return _launch(x, out, factor, norm, eps)
    scale = factor if norm is None else factor / norm.clamp(min=eps)
    return out.copy_(x.to(torch.promote_types(x.dtype, torch.float32)) * scale)
