"""SwiGLU against its definition in float64, on separate gate and up projections."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from titanlite.kernels.swiglu import BLOCK, swiglu

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
F32 = torch.finfo(torch.float32).eps


def gate_and_up(n_blocks: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Separate [5, F] projections, and the fused one, put together column by column."""
    rng = torch.Generator().manual_seed(0)
    gate, up = (3 * torch.randn(5, n_blocks * BLOCK, generator=rng).to(device, dtype) for _ in "gu")
    columns = []
    for start in range(0, n_blocks * BLOCK, BLOCK):
        columns += [gate[:, start : start + BLOCK], up[:, start : start + BLOCK]]
    return gate, up, torch.cat(columns, dim=1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n_blocks", [1, 3])
def test_one_rounding(n_blocks, dtype, device):
    gate, up, fused = gate_and_up(n_blocks, dtype, device)
    truth = F.silu(gate.double()) * up.double()
    # One rounding to dtype; before it a sigmoid (a few units in the last place) and two products in float32.
    bound = (torch.finfo(dtype).eps / 2 + 8 * F32) * truth.abs() + torch.finfo(torch.float32).tiny
    assert ((swiglu(fused).double() - truth).abs() <= bound).all()


@pytest.mark.parametrize("device", DEVICES)
def test_gradient(device):
    gate, up, fused = gate_and_up(2, torch.float32, device)
    fused.requires_grad_()
    gate, up = gate.double().requires_grad_(), up.double().requires_grad_()
    upstream = torch.randn(gate.shape, generator=torch.Generator().manual_seed(1)).to(device)
    swiglu(fused).backward(upstream)
    (F.silu(gate) * up).backward(upstream.double())
    truth = torch.stack((gate.grad.unflatten(1, (-1, BLOCK)), up.grad.unflatten(1, (-1, BLOCK))), dim=2).flatten(1)
    # Elementwise: a handful of float32 roundings of terms that may cancel, against the largest entry.
    assert (fused.grad - truth).abs().max() <= 8 * F32 * truth.abs().max()


def test_a_split_by_block_pairs_is_a_split_of_the_result():
    _, _, fused = gate_and_up(4, torch.float32, "cpu")
    whole = swiglu(fused)
    for rank, part in enumerate(fused.chunk(2, dim=1)):
        assert torch.equal(swiglu(part), whole.chunk(2, dim=1)[rank])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nonfinite_input_is_not_hidden(bad):
    assert not swiglu(torch.full((1, 2 * BLOCK), bad)).isfinite().any()
