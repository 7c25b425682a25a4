"""SwiGLU gate over one fused projection whose columns interleave gate and up in blocks.

Source: Shazeer 2020, "GLU Variants Improve Transformer", eq. 6.
"""

import torch.nn.functional as F
from torch import Tensor

BLOCK = 128
"""Columns of the gate (w1) and of the up projection (w3) alternate in blocks of this width, so that any split of the
fused weight into equal parts of whole block pairs is a legal tensor-parallel shard."""


def swiglu(x: Tensor) -> Tensor:
    """`silu(gate) * up`, formed in float32.

    Args:
        x: [M, 2F], blocks of 128 columns of gate and up in turn.

    Returns:
        [M, F] in `x.dtype`.
    """
    gate, up = x.unflatten(-1, (-1, 2, BLOCK)).unbind(-2)  # [M, F/128, 128] each
    return (F.silu(gate.float()) * up.float()).to(x.dtype).flatten(-2)
