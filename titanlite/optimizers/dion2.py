"""Dion2: Muon that orthogonalises a share of each matrix in a step, the rows with the largest momentum.

    m ← m + (1 - μ) g
    K = the ⌈share · R⌉ rows of m of largest norm, the sum of absolute values; of equal ones the first
    o = orthogonalise(m[K]) in the rows K, 0 in all others
    m[K] ← μ m[K]                              rows that wait keep all that they have gathered
    p ← (1 - lr·λ) p - lr·0.2·√max(R, C) · o   weight decay is for all rows

Of a matrix with fewer columns than rows columns are chosen: a share of the shorter side makes the products smallest,
and the rows of an update as large as Muon's. A `share` of 1 is Muon without Nesterov's momentum.

Owners collect and return whole matrices as in `muon.py`, and choose from what they collected: in every layout the
same rows. Where a result is not 0 its holder lets the momentum decay; one that rounds to 0 leaves it.

Source: Ahn, Amsel and Langford 2025, "Dion2: A Simple Method to Shrink Matrix in Muon"; norm, side, decay and scale
are those of the authors' code (github.com/microsoft/dion, dion2.py, of matrices that are whole, "rms_norm"), which has
m ← m + g, of the same direction, and by default chooses on each shard by itself.
"""

import torch
from torch import Tensor

from titanlite.kernels.orthogonalise import Polynomials, orthogonalise
from titanlite.optimizers.muon import Muon
from titanlite.parallel.share_matrices import part_of


class Dion2(Muon):
    """Updates parameters as `Muon` does, a share of each matrix at a time."""

    _decays_at_once = False

    def _replace(self, matrices: Tensor) -> None:
        orthogonalise_share(matrices, self.rule.share, self.rule.polynomials, self.rule.eps)


def orthogonalise_share(x: Tensor, share: float | None, polynomials: Polynomials, eps: float = 1e-7) -> None:
    """Replace B matrices [B, R, C] by o of this module's docstring. The host does not wait for the device."""
    part = part_of((x.shape[1], x.shape[2]), share)
    side = 1 if x.shape[1] <= x.shape[2] else 2  # the dimension of which a share is chosen
    exact = torch.promote_types(x.dtype, torch.float32)
    sums = torch.linalg.vector_norm(x, 1, dim=3 - side, keepdim=True, dtype=exact)
    largest = sums.sort(dim=side, descending=True, stable=True).indices.narrow(side, 0, part[side - 1])
    chosen = largest.sort(side).values.expand(-1, *part)
    some = x.gather(side, chosen)
    orthogonalise(some, polynomials, eps, out=some)
    x.zero_().scatter_(side, chosen, some)
