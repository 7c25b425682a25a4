"""Tokens through their experts against a plain loop over experts, in float64: results, and gradients of everything."""

from collections.abc import Callable
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


def all_at_once(x: Tensor, weights: Tensor, choices: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    return experts(x, weights, choices, w13.flatten(0, 1), w2.flatten(0, 1), len(w13))


class Case:
    """Tokens, weights, experts, and a gradient of the result."""

    def __init__(self, kind: str, M: int, K: int, D: int, F: int, device: str, dtype: torch.dtype) -> None:
        draw = partial(normal, device=device, dtype=dtype)
        self.choices, self.grad = choices_of(kind, M, K, device), draw(M, D, seed=4)
        weights = draw(M, K, seed=1, dtype=torch.promote_types(dtype, torch.float32))
        self.given = [draw(M, D), weights, draw(E, 2 * F, D, seed=2) / D**0.5, draw(E, D, F, seed=3) / F**0.5]

    def ran(self, run: Callable[..., Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
        """Return the result, and the gradients of everything."""
        x, weights, *w = leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in self.given]
        y = run(x, weights, self.choices, *w)
        return [y, *torch.autograd.grad(y, leaves, self.grad.to(y.dtype))]


KINDS = ["random", "one expert", "an expert without tokens"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("K", [1, 2, 4])
def test_experts_are_those_of_a_loop(kind: str, K: int) -> None:
    """Sums have at most 128 terms of size 100, exact within 128 · 100 · 1.1e-16, and are nested three times."""
    case = Case(kind, 13, K, D, F_, "cpu", torch.float64)
    for got, truth in zip(case.ran(all_at_once), case.ran(one_by_one), strict=True):
        assert (got - truth).abs().max() <= 1e-12 * max(1, truth.abs().max().item())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_in_bfloat16_the_device_code_is_near_the_loop(kind: str) -> None:
    """A result is rounded at x W13, at the gate, and at each expert's result; its gradients twice more, and each
    rounding is 2^-9 of the numbers summed: within 2 % of the largest for all, and 1 % of their norm."""
    case = Case(kind, 1000, 2, 256, 256, "cuda", torch.bfloat16)
    runs = case.ran(all_at_once), case.ran(all_at_once), case.ran(one_by_one, torch.float64)
    for got, second, wanted in zip(*runs, strict=True):
        assert torch.equal(got, second)
        off = got.double() - wanted
        assert off.abs().max() <= 0.02 * wanted.abs().max()
        assert off.norm() <= 0.01 * wanted.norm()
