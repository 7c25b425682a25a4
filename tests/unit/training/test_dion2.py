"""What Dion2 takes of stacks of matrices, in the dtype in which rows are exchanged, against a loop over rows."""

import pytest
import torch
from torch import Tensor

from tests.support.needs import DEVICES
from titanlite.kernels.orthogonalise import ITERATIONS, orthogonalise
from titanlite.optimizers.dion2 import orthogonalise_share

POLYNOMIALS = ITERATIONS["polar_express"]


def by_loop(x: Tensor, count: int) -> Tensor:
    """Each matrix is wide: its `count` rows with the largest sums of absolute values, of equal ones the first."""
    found = torch.zeros_like(x)
    for matrix, result in zip(x, found, strict=True):
        sums = matrix.double().abs().sum(1).tolist()
        chosen = sorted(sorted(range(len(sums)), key=lambda row: -sums[row])[:count])
        result[chosen] = orthogonalise(matrix[chosen][None], POLYNOMIALS)[0]
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("share", "count"), [(0.25, 18), (0.3, 22), (0.001, 1), (1.0, 72)])
def test_the_largest_rows_of_wide_matrices_and_columns_of_tall_ones(share: float, count: int, device: str) -> None:
    """Of whole numbers, whose sums are exact, and some of them equal; and of a matrix without a gradient."""
    x = torch.randint(-8, 9, (3, 72, 136), generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    x[1] = 0
    assert len(x[0].float().abs().sum(1).unique()) < 72
    for each in x.split(1):
        wide, tall = each.clone(), each.mT.contiguous()
        wanted = by_loop(each, count)
        orthogonalise_share(wide, share, POLYNOMIALS)
        assert torch.equal(wide, wanted)
        orthogonalise_share(tall, share, POLYNOMIALS)
        torch.testing.assert_close(tall.mT, wanted, rtol=2**-7, atol=2**-8 * 136**-0.5)
        assert torch.equal(tall.mT != 0, wanted != 0)
    together = x.clone()
    orthogonalise_share(together, share, POLYNOMIALS)
    assert torch.equal(together != 0, torch.cat([by_loop(each, count) for each in x.split(1)]) != 0)
