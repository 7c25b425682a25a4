"""Attention of tokens that ranks share out is that of all of them on one, with its gradients, in float64."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.documents import bounds_of
from tests.support.needs import slow
from tests.support.numbers import normal
from tests.support.ranks import run_ranks
from titanlite.data.context_split import ContextGroup, documents_of_samples, share_of_rank
from titanlite.kernels.attention import Bounds, attention
from titanlite.kernels.context_attention import KeyChunks, context_attention

N, S, H, K, E = 2048, 1024, 4, 2, 8
WINDOWS = (0, 200)
LENGTHS = {  # a rank of two has 1024 of these tokens, one of four has 512
    "random": [1, 700, 5, 1, 1, 130, 61, 300, 40, 2, 333, 1, 200, N],
    "at seams": [512, 512, 128, 384, N],
    "one token each": [1] * N,
    "samples": [N],
}


def starts_of(lengths: list[int]) -> np.ndarray:
    """Where the document of each token begins; documents end at a sample's end, too."""
    starts = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)[:N]
    return np.maximum(starts, documents_of_samples(N, S)).astype(np.int32)


def operands() -> list[Tensor]:
    """q, k, v and the gradient of what attention makes of them, of all tokens."""
    return [normal(N, n, E, seed=seed, dtype=torch.float64) for seed, n in enumerate((H, K, K, H))]


def off(starts: np.ndarray, window: int) -> float:
    """Return the largest difference of this rank's results and gradients to those of all tokens on one rank."""
    *given, grad = operands()
    whole = [t.requires_grad_() for t in given]
    given_starts = torch.from_numpy(starts)
    truth = attention(*whole, S, window, given_starts, bounds_of(given_starts))
    truths = [truth.detach(), *torch.autograd.grad(truth, whole, grad)]
    group = ContextGroup(dist.group.WORLD.group_name, dist.get_world_size(), dist.get_rank(), WINDOWS)
    share, w = share_of_rank(starts, S, group), WINDOWS.index(window)
    columns = torch.from_numpy(share.columns)
    own = [t.detach()[columns].requires_grad_() for t in given]
    exchange = KeyChunks(*(torch.from_numpy(of[w]) for of in (share.chunks, share.counts)))
    bounds = Bounds(*(torch.as_tensor(of[w]) for of in (share.bounds, share.runs)))
    begins, places = given_starts[columns], columns.int()
    out = context_attention(*own, S, window, begins, bounds, places, exchange, group.name)
    found = [out.detach(), *torch.autograd.grad(out, own, grad[columns])]
    return max((a - b[columns]).abs().max().item() for a, b in zip(found, truths, strict=True))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("documents", ["random", "at seams", *slow("one token each", "samples")])
def test_ranks_attend_as_one_does(documents: str, world: int, tmp_path: Path) -> None:
    """Numbers are near one, and sums of at most 1024 terms, 1.1e-16 of each off: 1e-12 is beyond their rounding."""

    def body() -> None:
        for window in WINDOWS:
            assert off(starts_of(LENGTHS[documents]), window) <= 1e-12

    run_ranks(body, tmp_path, world)
