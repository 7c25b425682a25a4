"""A linear layer's product, with the collective that tensor parallelism needs before or after it.

One function does both, so that a fused collective matmul or another arithmetic can replace them without a change to any
model. Gather → matmul is column-parallel, matmul → scatter is row-parallel.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from titanlite.kernels.all_gather_matmul import all_gather_matmul
from titanlite.kernels.collectives import Group, gather_tokens, scatter_tokens
from titanlite.kernels.matmul_reduce_scatter import matmul_reduce_scatter

Matmul = Callable[[Tensor, Tensor], Tensor]
"""`x [M, K], weight [N, K] → x @ weight.T [M, N]`, differentiable."""


class FusedMatmul(NamedTuple):
    """A matmul fused with its collective, forward and backward; functions of (x, weight [N, K], group)."""

    gathered: Callable[[Tensor, Tensor, Group], Tensor]  # → all_gather(x [M/tp, K]) @ weight.T [M, N]
    scattered: Callable[[Tensor, Tensor, Group], Tensor]  # → reduce_scatter(x [M, K] @ weight.T) [M/tp, N]


FUSED_LINEAR = FusedMatmul(
    lambda x, w, group: all_gather_matmul(x, [w.t()], 0, len(x) * group.size, group.name)[1],
    lambda x, w, group: matmul_reduce_scatter([x], [w.t()], 0, group.name),
)
"""Fused matmuls that compute in the dtype of their operands."""


def linear(
    x: Tensor,
    weight: Tensor,
    *,
    gather: Group | None = None,
    scatter: Group | None = None,
    matmul: Matmul = F.linear,
    fused: FusedMatmul | None = None,
) -> Tensor:
    """Return `x @ weight.T`, gathering the tokens before or scattering them after.

    Args:
        x: [M, K], or [M/tp, K] with `gather`.
        weight: [N, K], this rank's part.
        gather: the ranks whose tokens are gathered first (column-parallel).
        scatter: the ranks over which partial sums are reduced and tokens scattered (row-parallel).
        matmul: computes the product.
        fused: computes product and collective in place of `matmul`; needs exactly one of `gather` and `scatter`.

    Returns:
        [M, N], or [M/tp, N] with `scatter`.

    Raises:
        ValueError: `fused` with neither `gather` nor `scatter`, or with both.
    """
    if fused is not None and (gather is None) == (scatter is None):
        raise ValueError(f"linear: fused with gather {gather}, scatter {scatter}; want one of the two")
    if fused is not None and gather is not None:
        return fused.gathered(x, weight, gather)
    if fused is not None and scatter is not None:
        return fused.scattered(x, weight, scatter)
    if gather is not None:
        x = gather_tokens(x, gather)
    y = matmul(x, weight)
    return scatter_tokens(y, scatter) if scatter is not None else y
