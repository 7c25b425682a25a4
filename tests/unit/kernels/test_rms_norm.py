"""RMSNorm against its definition in float64."""

import pytest
import torch
from torch import Tensor

from tests.support.compile_only import accesses, compiling
from tests.support.needs import DEVICES
from tests.support.numbers import F32, normal, within
from titanlite.kernels.device.rms_norm import launch_rms_norm_grad
from titanlite.kernels.rms_norm import fork_rms_norm, rms_norm
from titanlite.models.layers import RMSNorm

EPS = 1e-5


def definition(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def inputs(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> list[Tensor]:
    """x, a residual or a gradient, and the weight."""
    drawn = normal(*shape), normal(*shape, seed=1), 1 + normal(shape[-1], seed=2)
    return [t.to(device, dtype) for t in drawn]


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
    assert within(rms_norm(x, weight, EPS), truth, slack * truth.abs())


# A row of no power of two, several to a thread block or one, more than all thread blocks have at a time; of heads.
GRADIENTS = [(7, 48), (1, 8), (33, 129), (300, 1152), (40_000, 64), (5, 4096), (3, 16_384), (0, 16), (24, 3, 16)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_fork", [False, True], ids=["alone", "fork"])
@pytest.mark.parametrize("shape", GRADIENTS, ids=str)
def test_gradients(shape, is_fork, dtype, device):
    x, upstream, weight = inputs(shape, dtype, device)
    exact = [t.double().requires_grad_() for t in (x, weight)]
    given = [t.clone().requires_grad_() for t in (x, weight)]
    normed, stream = fork_rms_norm(*given, EPS) if is_fork else (rms_norm(*given, EPS), given[0])
    assert torch.equal(stream, x)
    assert torch.equal(normed, rms_norm(x, weight, EPS))
    truth = definition(*exact)
    of_stream = upstream.flip(0)  # another one
    torch.autograd.backward([normed, stream][: 1 + is_fork], [upstream, of_stream][: 1 + is_fork])
    torch.autograd.backward([truth, exact[0]][: 1 + is_fork], [upstream.double(), of_stream.double()][: 1 + is_fork])
    assert [t.grad.dtype for t in given] == [dtype, dtype]
    # A sum over rows: roundings of one size, of any sign, add up with its root.
    for got, wanted, operations in zip(given, exact, (8, 8 + x[..., 0].numel() ** 0.5), strict=True):
        largest = wanted.grad.abs().max() if wanted.numel() else 0
        assert within(got.grad, wanted.grad, operations * F32 * largest)


def test_one_row_and_wider_streams():
    x = normal(8, dtype=torch.float64)
    row, rows = (t.clone().requires_grad_() for t in (x, x[None]))
    for t in (row, rows):
        torch.autograd.backward(fork_rms_norm(t, torch.ones(8), EPS), [t.detach(), torch.full_like(t, 1 + 2.0**-40)])
    assert torch.equal(row.grad, rows.grad[0])
    alone = x.clone().requires_grad_()
    rms_norm(alone, torch.ones(8), EPS).backward(x)
    # What is added to the stream's gradient is of float32; the stream's own is not rounded to that.
    torch.testing.assert_close(row.grad - alone.grad, torch.full_like(x, 1 + 2.0**-40), rtol=0, atol=2.0**-44)


@pytest.mark.parametrize("shape", [(), (1,), (1, 8), (3, 8)], ids=str)
def test_a_weight_of_another_width_is_refused(shape):
    with pytest.raises(ValueError, match=r"rms_norm: weight \[.*\]; want the width of x \[4, 8\]"):
        rms_norm(torch.ones(4, 8), torch.ones(shape), EPS)


def test_a_compiler_knows_how_the_gradient_lies():
    """That of a turned tensor lies in rows."""
    x, _, weight = inputs((16, 5), torch.float32, "cpu")
    wanted, got = (t.clone().requires_grad_() for t in (x, x))

    def loss(x: Tensor) -> Tensor:
        return (rms_norm((x * 2).t(), weight.new_ones(16), EPS) ** 2 * torch.arange(16)).sum()

    loss(wanted).backward()
    torch.compile(loss, dynamic=False)(got).backward()
    torch.testing.assert_close(got.grad, wanted.grad)


@pytest.mark.parametrize("D", [1152, 2048, 4096, 8192])
def test_code_for_sm_90_moves_16_bytes_of_a_row_at_once(D):
    x, grad, weight = inputs((8, D), torch.bfloat16, "cpu")
    with compiling() as compiled:
        launch_rms_norm_grad(grad, x, weight, torch.ones(8, 1), x, EPS)
    found = accesses(compiled["_rms_norm_grad"])
    each = 4 if D == 1152 else 2  # accesses for what a thread has of a row: 32 numbers, 16 in all others
    # Both gradients, the input and the weight; the gradient, and that of the weight, which is of twice as many bytes.
    assert found["ld", 4] == 4 * each
    assert found["st", 4] == 3 * each


class Doubled(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("layer", [RMSNorm, Doubled])
def test_forms_beside_the_residual_stream(layer):
    """Of a class that changes `forward` too."""
    x, residual, weight = inputs((5, 48), torch.bfloat16, "cpu")
    norm = layer(48, EPS)
    norm.weight = torch.nn.Parameter(weight)
    for (normed, stream), wanted in ((norm.fork(x), x), (norm.add(x, residual), x + residual)):
        assert torch.equal(stream, wanted)
        assert torch.equal(normed, norm(wanted))
    assert torch.equal(norm(x), (2 if layer is Doubled else 1) * rms_norm(x, weight, EPS))


def test_zero_row_has_a_gradient():
    x = torch.zeros(1, 8, requires_grad=True)
    rms_norm(x, torch.ones(8), EPS).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((1, 8), EPS**-0.5))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nonfinite_input_is_not_hidden(bad):
    assert rms_norm(torch.tensor([[1.0, bad]]), torch.ones(2), EPS).isnan().any()
