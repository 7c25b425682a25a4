"""Losses of a router where all tokens are counted are plain means over them, to the bit."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.needs import DEVICES, slow
from tests.support.ranks import run_ranks, world_group
from titanlite.kernels.collectives import Group, all_reduce
from titanlite.kernels.router_losses import router_losses

E, K = 8, 2
SIZES = [512, 3000, 6144, 1000]  # 1 / M is exact of the first alone


def plain(logits: Tensor, choices: Tensor, group: Group | None = None) -> Tensor:
    """Return both losses without a token that is left out: of a group's ranks, which have equally many."""
    counts = torch.zeros(E, dtype=torch.int64, device=logits.device)
    counts.scatter_add_(0, choices.flatten().long(), torch.ones_like(choices.flatten(), dtype=torch.int64))
    if group is not None:
        counts = all_reduce(counts, "sum", group) / group.size
    share = counts.to(logits.dtype) / len(choices)
    losses = torch.stack((E * (share * logits.softmax(1).mean(0)).sum(), logits.logsumexp(1).square().mean()))
    return losses if group is None else losses / group.size


def differing(M: int, device: str = "cpu", group: Group | None = None) -> list[str]:
    """Say of which seeds the losses, or gradients of either, are not those of `plain`."""
    found, rank = list[str](), 0 if group is None else group.rank
    for seed in range(20):
        torch.manual_seed(97 * seed + rank)
        logits = (2 * torch.randn(M, E)).to(device).requires_grad_()
        choices = logits.topk(K).indices.int()
        wanted = plain(logits, choices, group)
        ours = router_losses(logits, choices, torch.ones(M, dtype=torch.bool, device=device), group)
        if not ours.equal(wanted):
            found.append(f"losses of seed {seed}: {ours.tolist()}, not {wanted.tolist()}")
        for coefficients in ([0.01, 0.0], [0.0, 0.003], [0.01, 0.003]):
            by = torch.tensor(coefficients, device=device)
            (a,), (b,) = (torch.autograd.grad(y, logits, by, retain_graph=True) for y in (ours, wanted))
            if not a.equal(b):
                found.append(f"gradient of {coefficients} of seed {seed}: {(a != b).sum()} of {a.numel()} differ")
    return found


@pytest.mark.parametrize("M", SIZES)
@pytest.mark.parametrize("device", DEVICES)
def test_losses_of_all_tokens_are_plain_means(device: str, M: int) -> None:
    assert differing(M, device) == []


@pytest.mark.parametrize("world", [2, *slow(3)])
def test_ranks_add_up_plain_means(world: int, tmp_path: Path) -> None:
    def body() -> None:
        assert [line for M in SIZES for line in differing(M, group=world_group())] == []

    run_ranks(body, tmp_path, world)
