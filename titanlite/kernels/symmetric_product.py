"""Products whose result is symmetric: the half below the diagonal is computed, and written twice.

Orthogonalisation has two in each step: X Xᵀ, and b G + c G G of a symmetric G. They are 4/6 of its operations on square
matrices, of which half can be left out.
"""

import torch
from torch import Tensor


def symmetric_product(x: Tensor, added: Tensor | None = None, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
    """Compute alpha X Xᵀ + beta D.

    On a GPU the kernel takes bfloat16 alone, and rows that TMA can read: a multiple of 16 bytes long.

    Args:
        x: [B, R, C].
        added: D, [B, R, R], symmetric: what lies above its diagonal may not be read. None: zeros.
        alpha: factor of the product.
        beta: factor of D.

    Returns:
        [B, R, R], in the dtype of `x`; sums are float32, or wider.
    """
    if x.is_cuda and x.dtype == torch.bfloat16 and x.shape[2] % 8 == 0:
        from titanlite.kernels.device.symmetric_product import launch_symmetric_product

        return launch_symmetric_product(x, added, alpha, beta)
    if added is None:
        return x @ x.mT if alpha == 1 else alpha * (x @ x.mT)
    return torch.baddbmm(added, x, x.mT, beta=beta, alpha=alpha)
