"""Experts shared out over ranks compute what one rank with all tokens and all experts does, to the bit."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.needs import slow
from tests.support.numbers import normal
from tests.support.ranks import run_ranks
from titanlite.kernels.collectives import Group
from titanlite.kernels.experts import PlainExperts

M, D, F, E, K = 24, 16, 128, 8, 3  # tokens are of all ranks together
STEPS = 10


def choices_of(kind: str) -> Tensor:
    """Choose K different experts for each token: at random, all of the first rank, or those of one rank never."""
    scores = torch.rand(M, E, generator=torch.Generator().manual_seed(1))
    if kind == "the first rank's":
        scores[:, :K] += 1  # of four ranks' two experts, those of the first and one more
    elif kind == "none of the last rank's":
        scores[:, -2:] = -1
    return scores.topk(K, dim=1).indices.int()


def trained(rank: int, group: Group | None, kind: str, dtype: torch.dtype) -> list[Tensor]:
    """Take ten steps of gradient descent with this rank's tokens and experts; return all that was computed."""
    size = 1 if group is None else group.size
    tokens, own = slice(rank * M // size, (rank + 1) * M // size), slice(rank * E // size, (rank + 1) * E // size)
    w13, w2 = (normal(E, 2 * F, D, seed=2, dtype=dtype) / 4)[own], (normal(E, D, F, seed=3, dtype=dtype) / 11)[own]
    w13, w2, compute = w13.flatten(0, 1), w2.flatten(0, 1), PlainExperts(group)
    x, weights = normal(M, D, seed=4, dtype=dtype)[tokens], normal(M, K, seed=5).softmax(1)[tokens]
    choices, given, found = choices_of(kind)[tokens], [x, weights, w13, w2], []
    for _ in range(STEPS):
        x, weights, w13, w2 = given = [t.detach().requires_grad_() for t in given]
        y = compute(x, weights, choices, w13, w2, E)
        gradients = torch.autograd.grad(y, given, y.detach())  # of Σ y² / 2
        found += [y.detach(), *gradients]
        assert all(t.isfinite().all() for t in found[-5:])  # else no two are equal
        given = [t.detach() - 0.01 * gradient for t, gradient in zip(given, gradients, strict=True)]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, *slow(torch.bfloat16)])
@pytest.mark.parametrize("kind", ["random", *slow("the first rank's", "none of the last rank's")])
@pytest.mark.parametrize("world", [4, *slow(8)])
def test_any_degree_has_the_bits_of_one(world, kind, dtype, tmp_path):
    truth = trained(0, None, kind, dtype)

    def body() -> None:
        rank, wrong = dist.get_rank(), []
        pair = [dist.new_group([n, n + 1]) for n in range(0, world, 2)][rank // 2]
        for group in (dist.group.WORLD, pair):
            size = group.size()
            here = Group(group.group_name, size, rank % size)
            for n, (got, whole) in enumerate(zip(trained(rank % size, here, kind, dtype), truth, strict=True)):
                if not torch.equal(got, whole.chunk(size)[rank % size]):
                    wrong.append((size, n // 5, n % 5))
        assert not wrong, f"degree, step, which of y, d_x, d_weights, d_w13, d_w2: {wrong}"

    run_ranks(body, tmp_path, world)
