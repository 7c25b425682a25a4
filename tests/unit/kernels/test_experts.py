"""Tokens through their experts against a plain loop over experts, in float64: results, and gradients of everything."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.numbers import normal
from titanlite.kernels.experts import experts
from titanlite.kernels.swiglu import BLOCK

D, F_, E = 24, 128, 5
random = partial(normal, dtype=torch.float64)


def one_by_one(x: Tensor, weights: Tensor, choices: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """Send through each expert the tokens that chose it, slot by slot."""
    y = torch.zeros_like(x)
    for expert in range(len(w13)):
        w1, w3 = w13[expert].unflatten(0, (-1, 2, BLOCK)).unbind(1)
        for slot in range(choices.shape[1]):
            tokens = (choices[:, slot] == expert).nonzero().flatten()
            own = x[tokens]
            result = (F.silu(own @ w1.flatten(0, 1).t()) * (own @ w3.flatten(0, 1).t())) @ w2[expert].t()
            y = y.index_add(0, tokens, result * weights[tokens, slot, None])
    return y


def choices_of(kind: str, M: int, K: int, device: str = "cpu") -> Tensor:
    """Choose K different experts for each token: at random, the same for all, or never the third."""
    if kind == "one expert":
        return torch.arange(K, device=device).int().expand(M, K).contiguous()
    scores = torch.rand(M, E, generator=torch.Generator().manual_seed(0))
    if kind == "an expert without tokens":
        scores[:, 2] = -1
    return scores.topk(K, dim=1).indices.int().to(device)


@pytest.mark.parametrize("kind", ["random", "one expert", "an expert without tokens"])
@pytest.mark.parametrize("K", [1, 2, 4])
def test_experts_are_those_of_a_loop(kind: str, K: int) -> None:
    """Sums have at most 128 terms of size 100, exact within 128 · 100 · 1.1e-16, and are nested three times."""
    M = 13
    given = [
        random(M, D, seed=0),
        random(M, K, seed=1),
        random(E, 2 * F_, D, seed=2) / D**0.5,
        random(E, D, F_, seed=3) / F_**0.5,
    ]
    x, weights, w13, w2 = (t.requires_grad_() for t in given)
    choices, grad = choices_of(kind, M, K), random(M, D, seed=4)
    ours, theirs = (
        experts(x, weights, choices, w13.flatten(0, 1), w2.flatten(0, 1), E),
        one_by_one(x, weights, choices, w13, w2),
    )
    for got, truth in zip(
        (ours, *torch.autograd.grad(ours, given, grad)),
        (theirs, *torch.autograd.grad(theirs, given, grad)),
        strict=True,
    ):
        assert (got - truth).abs().max() <= 1e-12 * max(1, truth.abs().max().item())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["random", "one expert", "an expert without tokens"])
def test_in_bfloat16_the_device_code_is_near_the_loop(kind: str) -> None:
    """A result is rounded at x W13, at the gate, and at each expert's result; its gradients twice more, and each
    rounding is 2^-9 of the numbers summed: within 2 % of the largest for all, and 1 % of their norm."""
    M, K, D, F = 1000, 2, 256, 256
    bf16 = {"device": "cuda", "dtype": torch.bfloat16}
    given = [
        random(M, D, seed=0, **bf16),
        random(M, K, seed=1, device="cuda", dtype=torch.float32),
        (random(E, 2 * F, D, seed=2) / D**0.5).to(**bf16),
        (random(E, D, F, seed=3) / F**0.5).to(**bf16),
    ]
    choices, grad = choices_of(kind, M, K, "cuda"), random(M, D, seed=4, **bf16)

    def of(run, given: list[Tensor]) -> list[Tensor]:
        x, weights, w13, w2 = (t.detach().requires_grad_() for t in given)
        y = run(x, weights, choices, w13, w2)
        return [y, *torch.autograd.grad(y, [x, weights, w13, w2], grad.to(y.dtype))]

    def all_at_once(x: Tensor, weights: Tensor, choices: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        return experts(x, weights, choices, w13.flatten(0, 1), w2.flatten(0, 1), len(w13))

    ours, again, truth = of(all_at_once, given), of(all_at_once, given), of(one_by_one, [t.double() for t in given])
    for got, second, wanted in zip(ours, again, truth, strict=True):
        assert torch.equal(got, second)
        off = got.double() - wanted
        assert off.abs().max() <= 0.02 * wanted.abs().max()
        assert off.norm() <= 0.01 * wanted.norm()
