"""A recipe file says what torchao's recipe of the same name says, and its three matmuls have the accuracy of float8."""

import dataclasses
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from titanlite import recipes
from titanlite.config.recipe_schema import Float8Recipe
from titanlite.float8.convert import Float8Matmul, torchao_config

NAMES = recipes.names("float8")
M, K, N = 512, 256, 384


@pytest.mark.parametrize("name", NAMES)
def test_is_torchaos_recipe(name):
    from torchao.float8 import Float8LinearConfig

    theirs = Float8LinearConfig.from_recipe_name(name)
    ours = torchao_config(recipes.load("float8", name))
    for field in dataclasses.fields(theirs):
        assert getattr(ours, field.name) == getattr(theirs, field.name), field.name


@pytest.mark.parametrize("name", NAMES)
def test_emulation_is_the_only_difference_of_emulation(name):
    recipe = recipes.load("float8", name)
    assert dataclasses.replace(torchao_config(recipe, emulate=True), emulate=False) == torchao_config(recipe)


class Ratios(NamedTuple):
    """Signal to quantisation noise in dB: of the whole matrix, and what 99 % of its rows reach."""

    whole: float
    rows: float


def signal_to_noise(got: Tensor, truth: Tensor) -> Ratios:
    noise, signal = (got.double() - truth).square(), truth.square()
    rows = 10 * (signal.sum(1) / noise.sum(1)).log10()
    return Ratios(10 * (signal.sum() / noise.sum()).log10().item(), rows.quantile(0.01).item())


def measure(recipe: Float8Recipe) -> dict[str, Ratios]:
    """The three matmuls against float64 products of the same bfloat16 operands."""
    rng = torch.Generator().manual_seed(0)
    # Tokens differ in scale by e^±6, as gradients do: what one scale per tensor must spread its range over.
    spread = torch.exp(2 * torch.randn(M, 1, generator=rng).clamp(-3, 3))
    x = torch.randn(M, K, generator=rng).bfloat16().requires_grad_()
    w = (0.02 * torch.randn(N, K, generator=rng)).bfloat16().requires_grad_()
    grad = (spread * torch.randn(M, N, generator=rng)).bfloat16()
    out = Float8Matmul(recipe, emulate=True)(x, w)
    out.backward(grad)
    x64, w64, grad64 = x.detach().double(), w.detach().double(), grad.double()
    return {
        "output": signal_to_noise(out.detach(), x64 @ w64.T),
        "grad_input": signal_to_noise(x.grad, grad64 @ w64),
        "grad_weight": signal_to_noise(w.grad, grad64.T @ x64),
    }


# A rounding to m bits of mantissa errs by up to u = 2^-(m+1) of the power of two below the value: uniformly spread, and
# values log-uniform within their octave, noise is u²/3 · 0.54 of signal. That is 31.5 dB for e4m3 and 25.5 for e5m2; a
# product has the noise of both operands: 28.5 dB, and 24.5 with one in e5m2. Floors are 1 dB below. bfloat16 has 55 dB.
FLOORS = {
    "tensorwise": {"output": 27.5, "grad_input": 23.5, "grad_weight": 23.5},
    "rowwise": {"output": 27.5, "grad_input": 27.5, "grad_weight": 27.5},
    "rowwise_with_gw_hp": {"output": 27.5, "grad_input": 27.5, "grad_weight": 45.0},
}


def assert_accuracy(name: str, measured: dict[str, Ratios]) -> None:
    for matmul, floor in FLOORS[name].items():
        assert measured[matmul].whole >= floor, f"{matmul}: {measured[matmul]} dB is too noisy"
        if matmul != "grad_weight":  # whose rows are sums over tokens: the few loud ones decide, at random
            assert measured[matmul].rows >= floor - 1, f"{matmul}: {measured[matmul]} dB, some rows are too noisy"
        assert (measured[matmul].whole <= 40) == (floor < 40), f"{matmul}: {measured[matmul]} dB is no float8"


@pytest.mark.parametrize("name", NAMES)
def test_accuracy_of_each_matmul(name):
    assert_accuracy(name, measure(recipes.load("float8", name)))


def changed(name: str, **fields: dict[str, str]) -> Float8Recipe:
    recipe = recipes.load("float8", name)
    return dataclasses.replace(
        recipe, **{part: dataclasses.replace(getattr(recipe, part), **values) for part, values in fields.items()}
    )


FAULTS = {
    "gradients without range": ("tensorwise", {"grad_output": {"dtype": "e4m3"}}, "some rows are too noisy"),
    "a scale per tensor": ("rowwise", {"grad_output": {"grad_input": "tensor"}}, "some rows are too noisy"),
    "too few bits": ("rowwise", {"weight": {"dtype": "e5m2"}}, "is too noisy"),
    "high precision": (
        "rowwise",
        {"input": {"grad_weight": "none"}, "grad_output": {"grad_weight": "none"}},
        "no float8",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_arithmetic_is_seen(fault):
    name, fields, message = FAULTS[fault]
    with pytest.raises(AssertionError, match=message):
        assert_accuracy(name, measure(changed(name, **fields)))
