"""RMSNorm against its definition in float64."""

import pytest
import torch
from torch import Tensor

from titanlite.kernels.rms_norm import add_rms_norm, rms_norm

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
EPS = 1e-5
F32 = torch.finfo(torch.float32).eps


def definition(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def inputs(shape: tuple[int, int], dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(shape, generator=rng).to(device, dtype) for _ in "xr")
    return x, residual, (1 + torch.randn(shape[1], generator=rng)).to(device, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4, 64), (3, 129), (1, 1), (0, 16)])
@pytest.mark.parametrize("scale", [1, 1e4])
def test_one_rounding(shape, dtype, scale, device):
    x, _, weight = inputs(shape, dtype, device)
    x *= scale
    truth = definition(x.double(), weight.double())
    # One rounding to dtype; before it, float32: the mean of D squares (relative D/2 roundings at worst, halved by the
    # root), the root and two products.
    slack = (shape[1] / 4 + 4) * F32
    bound = (torch.finfo(dtype).eps / 2 + slack) * truth.abs()
    assert ((rms_norm(x, weight, EPS).double() - truth).abs() <= bound).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_residual_is_added_first(dtype, device):
    x, residual, weight = inputs((5, 48), dtype, device)
    normed, total = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(total, weight, EPS))


@pytest.mark.parametrize("device", DEVICES)
def test_gradients(device):
    inputs32 = [t.requires_grad_() for t in inputs((7, 48), torch.float32, device)]
    inputs64 = [t.detach().double().requires_grad_() for t in inputs32]
    upstream = torch.randn(2, 7, 48, generator=torch.Generator().manual_seed(1)).to(device)
    x, residual, weight = inputs64
    normed, total = add_rms_norm(*inputs32, EPS)
    (normed * upstream[0] + total * upstream[1]).sum().backward()
    (definition(x + residual, weight) * upstream[0] + (x + residual) * upstream[1]).sum().backward()
    for got, truth in zip(inputs32, inputs64, strict=True):
        # Sums of at most 48 float32 terms, each of a few roundings, against the largest entry.
        assert (got.grad - truth.grad).abs().max() <= 48 * F32 * truth.grad.abs().max()


def test_zero_row_has_a_gradient():
    x = torch.zeros(1, 8, requires_grad=True)
    rms_norm(x, torch.ones(8), EPS).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((1, 8), EPS**-0.5))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nonfinite_input_is_not_hidden(bad):
    assert rms_norm(torch.tensor([[1.0, bad]]), torch.ones(2), EPS).isnan().any()
