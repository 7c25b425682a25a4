"""GeGLU gate over one fused projection whose columns interleave gate and up in blocks, as for `swiglu`.

Source: Shazeer 2020, "GLU Variants Improve Transformer", eq. 6; GELU in the tanh form of Hendrycks and Gimpel 2016.
"""

import torch.nn.functional as F
from torch import Tensor

from titanlite.kernels.swiglu import gate_and_up


def geglu(x: Tensor) -> Tensor:
    """Return `gelu(gate) * up` [M, F] in `x.dtype`, computed in float32. `x` is laid out as for `swiglu`."""
    gate, up = gate_and_up(x)
    return (F.gelu(gate, approximate="tanh") * up).to(x.dtype).flatten(-2)
