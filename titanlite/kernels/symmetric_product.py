"""Matrix products that are symmetric: the half below the diagonal is computed, and also written above the diagonal.

Orthogonalisation needs X Xᵀ, and products of symmetric matrices that commute.
"""

import torch
from torch import Tensor

from titanlite.kernels.operators import device_code

_launch = device_code("symmetric_product.launch_symmetric_product")


def symmetric_product(
    x: Tensor,
    y: Tensor | None = None,
    *,
    added: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    diagonal: float = 0.0,
) -> Tensor:
    """Compute alpha X Yᵀ + beta D + diagonal I, which must be symmetric.

    On a GPU the kernel takes only 16-bit floats, and rows that TMA can read: a multiple of 16 bytes long.

    Args:
        x: [B, R, C].
        y: as `x`; None: `x`.
        added: D, [B, R, R], symmetric; elements above its diagonal are not always read. None: zeros.
        alpha, beta, diagonal: factors in the formula.

    Returns:
        [B, R, R], in the dtype of `x`; sums are float32 or wider.
    """
    y = x if y is None else y
    if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and x.shape[2] % 8 == 0:
        return _launch(x, y, added, alpha, beta, diagonal)
    if added is None:
        out = x @ y.mT if alpha == 1 else torch.baddbmm(x.new_empty(()), x, y.mT, beta=0, alpha=alpha)
    else:
        out = torch.baddbmm(added, x, y.mT, beta=beta, alpha=alpha)
    if diagonal:
        out.diagonal(dim1=1, dim2=2).add_(diagonal)
    return out.tril() + out.tril(-1).mT
