"""A linear layer's products, with the communication that tensor parallelism puts around them.

One function owns all of it, so that a fused lowering of collective and matmul, or another arithmetic, replaces a part
of it without a change of any model: gather → matmul is column-parallel, matmul → scatter is row-parallel.
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from titanlite.kernels.all_gather_matmul import all_gather_matmul
from titanlite.kernels.collectives import Group, gather_tokens, scatter_tokens
from titanlite.kernels.matmul_reduce_scatter import matmul_reduce_scatter

Matmul = Callable[[Tensor, Tensor], Tensor]
"""`x [M, K], weight [N, K] → x @ weight.T [M, N]`, differentiable."""


def linear(
    x: Tensor,
    weight: Tensor,
    *,
    gather: Group | None = None,
    scatter: Group | None = None,
    matmul: Matmul = F.linear,
    fuse: bool = False,
) -> Tensor:
    """`x @ weight.T`, gathering the tokens before or scattering them after.

    Args:
        x: [M, K], or [M/tp, K] with `gather`.
        weight: [N, K], this rank's part.
        gather: the ranks whose tokens are gathered first (column-parallel).
        scatter: the ranks over which partial sums are reduced and tokens scattered (row-parallel).
        matmul: the arithmetic.
        fuse: hide the collective behind the matmul, forward and backward; only with one collective, and with
            `F.linear` as arithmetic.

    Returns:
        [M, N], or [M/tp, N] with `scatter`.

    Raises:
        ValueError: `fuse` with what cannot be fused.
    """
    if fuse and (matmul is not F.linear or (gather is None) == (scatter is None)):
        want = "one of gather and scatter, and F.linear"
        raise ValueError(f"linear: fuse with gather {gather}, scatter {scatter}, matmul {matmul}; want {want}")
    if fuse and gather is not None:
        return all_gather_matmul(x, [weight.t()], 0, x.shape[0] * gather.size, gather.name)[1]
    if fuse and scatter is not None:
        return matmul_reduce_scatter([x], [weight.t()], 0, scatter.name)
    if gather is not None:
        x = gather_tokens(x, gather)
    y = matmul(x, weight)
    return scatter_tokens(y, scatter) if scatter is not None else y
