"""RMSNorm against its definition in float64."""

import re

import pytest
import torch
from torch import Tensor

from tests.kernels.compile_only import compiling
from titanlite.kernels.rms_norm import add_rms_norm, fork_rms_norm, rms_norm

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


# A row of no power of two, several to a thread block or one, more than all thread blocks have at a time.
GRADIENTS = [(7, 48), (1, 8), (33, 129), (300, 1152), (40_000, 64), (5, 4096), (3, 16_384), (0, 16)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["alone", "fork", "add"])
@pytest.mark.parametrize("shape", GRADIENTS, ids=str)
def test_gradients(shape, form, dtype, device):
    given = list(inputs(shape, dtype, device))
    if form != "add":
        given[1] = torch.zeros_like(given[1])
    exact = [t.double().requires_grad_() for t in given]
    x, residual, weight = (t.requires_grad_() for t in given)
    generator = torch.Generator().manual_seed(1)
    of_normed, of_total = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(2))
    sum64 = exact[0] + exact[1]
    if form == "add":  # the sum is rounded before it is normalised
        sum64 = sum64 + ((x + residual).double() - sum64).detach()
    normed, total = {
        "alone": lambda: (rms_norm(x, weight, EPS), x),
        "fork": lambda: fork_rms_norm(x, weight, EPS),
        "add": lambda: add_rms_norm(x, residual, weight, EPS),
    }[form]()
    assert torch.equal(total.double(), sum64)
    assert torch.equal(normed, rms_norm(total, weight, EPS))
    outputs, upstream = ([normed], [of_normed]) if form == "alone" else ([normed, total], [of_normed, of_total])
    torch.autograd.backward(outputs, upstream)
    truth = [definition(sum64, exact[2]), sum64][: len(outputs)]
    torch.autograd.backward(truth, [t.double() for t in upstream])
    if form == "add":
        assert torch.equal(residual.grad, x.grad)
    # One rounding to dtype; before it, float32 sums of D terms, or of M, whose roundings add up with the root.
    for got, wanted, terms in ((x.grad, exact[0].grad, shape[1]), (weight.grad, exact[2].grad, shape[0])):
        assert got.dtype == dtype
        slack = (16 + 4 * terms**0.5) * F32 * wanted.abs().max() if wanted.numel() else 0
        assert ((got.double() - wanted).abs() <= torch.finfo(dtype).eps / 2 * wanted.abs() + slack).all()


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_that_lie_otherwise(device):
    x, grad, weight = inputs((24, 48), torch.bfloat16, device)
    mean = x.float().square().mean(-1, keepdim=True)
    wanted = torch.ops.titanlite.rms_norm_grad(grad, x, weight, mean, grad, EPS)
    turned = grad.t().contiguous().t()
    for of_normed, rest in ((turned, grad), (grad, turned)):
        got = torch.ops.titanlite.rms_norm_grad(of_normed, x, weight, mean, rest, EPS)
        assert all(torch.equal(g, w) for g, w in zip(got, wanted, strict=True))
    heads = [t.view(24, 3, 16) for t in (grad, x)]
    by_head, _ = torch.ops.titanlite.rms_norm_grad(*heads, weight[:16], mean[:, None].expand(-1, 3, 1), None, EPS)
    assert by_head.shape == (24, 3, 16)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_fork", [False, True])
def test_operator(is_fork, device):
    """What a compiler is told of the results is what they are."""
    x, grad, weight = inputs((24, 48), torch.bfloat16, device)
    mean = x.float().square().mean(-1, keepdim=True)
    given = grad, x, weight, mean, x if is_fork else None, EPS
    torch.library.opcheck(torch.ops.titanlite.rms_norm_grad.default, given)


@pytest.mark.gpu
def test_two_runs_give_the_same_bits():
    x, grad, weight = inputs((40_000, 1152), torch.bfloat16, "cuda")
    mean = x.float().square().mean(-1, keepdim=True)
    first, second = (torch.ops.titanlite.rms_norm_grad(grad, x, weight, mean, x, EPS) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("D", [1152, 2048, 4096, 8192])
def test_code_for_sm_90_moves_16_bytes_of_a_row_at_once(D, monkeypatch):
    device = pytest.importorskip("titanlite.kernels.device.rms_norm")
    monkeypatch.setattr(device, "multiprocessors", lambda device: 132)
    x, grad, weight = inputs((8, D), torch.bfloat16, "cpu")
    with compiling() as compiled:
        device.rms_norm_grad(grad, x, weight, torch.ones(8, 1), x, EPS)
    code = compiled["_rms_norm_grad"].asm["ptx"]
    for access, matrices in (("ld", 3), ("st", 1)):  # both gradients and the input; the gradient of that
        found = re.findall(rf"\b{access}\.global(?:\.v([24]))?\.b32 ", code)
        assert found.count("4") >= 2 * matrices  # each thread has 16 of a row


def test_zero_row_has_a_gradient():
    x = torch.zeros(1, 8, requires_grad=True)
    rms_norm(x, torch.ones(8), EPS).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((1, 8), EPS**-0.5))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nonfinite_input_is_not_hidden(bad):
    assert rms_norm(torch.tensor([[1.0, bad]]), torch.ones(2), EPS).isnan().any()
