"""GeGLU gate over one fused projection whose columns interleave gate and up in blocks, as for `swiglu`.

Source: Shazeer 2020, "GLU Variants Improve Transformer", eq. 6; GELU in the tanh form of Hendrycks and Gimpel 2016.
"""

import torch.nn.functional as F
from torch import Tensor

from titanlite.kernels.swiglu import BLOCK


def geglu(x: Tensor) -> Tensor:
    """Return `gelu(gate) * up`, formed in float32.

    Args:
        x: [M, 2F], blocks of 128 columns of gate and up in turn.

    Returns:
        [M, F] in `x.dtype`.
    """
    gate, up = x.unflatten(-1, (-1, 2, BLOCK)).unbind(-2)  # [M, F/128, 128] each
    return (F.gelu(gate.float(), approximate="tanh") * up.float()).to(x.dtype).flatten(-2)
