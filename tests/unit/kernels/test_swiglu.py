"""SwiGLU against its definition in float64, on separate gate and up projections."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.needs import DEVICES
from tests.support.numbers import F32, normal, within
from titanlite.kernels.float8_scales import cast_to, scale_of
from titanlite.kernels.swiglu import BLOCK, swiglu, swiglu_cast, swiglu_grad, swiglu_grad_cast


def gate_and_up(n_blocks: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Separate [5, F] projections, and the fused one, put together column by column."""
    gate, up = (3 * normal(5, n_blocks * BLOCK, seed=seed, dtype=dtype, device=device) for seed in range(2))
    columns = zip(gate.split(BLOCK, dim=1), up.split(BLOCK, dim=1), strict=True)
    return gate, up, torch.cat([part for pair in columns for part in pair], dim=1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n_blocks", [1, 3, 17])
def test_result_and_gradient(n_blocks, dtype, device):
    """One rounding to dtype. Before it a sigmoid, a few units in the last place, and two products in float32; backward
    a handful of roundings of terms that may cancel, against the largest entry."""
    gate, up, fused = gate_and_up(n_blocks, dtype, device)
    fused.requires_grad_()
    gate, up = gate.double().requires_grad_(), up.double().requires_grad_()
    upstream = normal(*gate.shape, seed=2, dtype=dtype, device=device)
    result, true_result = swiglu(fused), F.silu(gate) * up
    result.backward(upstream)
    true_result.backward(upstream.double())
    least = torch.finfo(torch.float32).tiny + torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    assert within(result, true_result, 8 * F32 * true_result.abs() + least)
    truth = torch.stack((gate.grad.unflatten(1, (-1, BLOCK)), up.grad.unflatten(1, (-1, BLOCK))), dim=2).flatten(1)
    for got in (fused.grad, swiglu_grad(upstream, fused.detach())):
        assert within(got, truth, 8 * F32 * truth.abs().max())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nonfinite_gradients_stay_where_they_are(bad, device):
    _, _, fused = gate_and_up(17, torch.bfloat16, device)
    upstream = torch.ones(5, 17 * BLOCK, dtype=torch.bfloat16, device=device)
    upstream[3, 16 * BLOCK + 5] = bad
    where = (~swiglu_grad(upstream, fused).isfinite()).nonzero().tolist()
    assert where == [[3, 2 * 16 * BLOCK + 5], [3, 2 * 16 * BLOCK + BLOCK + 5]]


def test_a_split_by_block_pairs_is_a_split_of_the_result():
    _, _, fused = gate_and_up(4, torch.float32, "cpu")
    whole = swiglu(fused)
    for rank, part in enumerate(fused.chunk(2, dim=1)):
        assert torch.equal(swiglu(part), whole.chunk(2, dim=1)[rank])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nonfinite_input_is_not_hidden(bad):
    assert not swiglu(torch.full((1, 2 * BLOCK), bad)).isfinite().any()


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def by_two_passes(y: Tensor, by_row: bool, dtype: torch.dtype, pow2: bool) -> tuple[Tensor, Tensor]:
    scale, scale_inv = scale_of(y.abs().amax(1, keepdim=True) if by_row else y.abs().amax(), dtype, pow2)
    return cast_to(y, scale, dtype), scale_inv


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("by_row", "dtype", "pow2"), [(True, E4M3, True), (False, E5M2, False), (False, E4M3, True)])
@pytest.mark.parametrize(("rows", "n_blocks"), [(37, 3), (5, 112), (3, 130)])
def test_casts_in_one_pass(rows, n_blocks, by_row, dtype, pow2, device):
    """A GPU's sigmoid differs in the last place, which a bit in a thousand shows after two roundings."""
    x = normal(rows, 2 * n_blocks * BLOCK) * torch.exp(normal(rows, 1, seed=1))
    x, grad = (t.to(device, torch.bfloat16) for t in (x, normal(rows, n_blocks * BLOCK, seed=2)))
    wanted = by_two_passes(swiglu(x), by_row, E4M3, pow2)
    wanted_grad = by_two_passes(swiglu_grad.definition(grad, x), by_row, dtype, pow2)
    qdata, scale_inv = swiglu_cast(x, by_row, E4M3, pow2)
    grad_qdata, grad_scale_inv, again, again_scale_inv = swiglu_grad_cast(grad, x, by_row, dtype, E4M3, pow2)
    assert torch.equal(again.view(torch.uint8), qdata.view(torch.uint8))
    assert torch.equal(again_scale_inv, scale_inv)
    for got, got_scale_inv, (want, want_scale_inv) in (
        (qdata, scale_inv, wanted),
        (grad_qdata, grad_scale_inv, wanted_grad),
    ):
        assert got.is_contiguous()
        assert got.dtype == want.dtype
        equal = got.view(torch.uint8) == want.view(torch.uint8)
        if device == "cpu":
            assert equal.all()
            assert torch.equal(got_scale_inv, want_scale_inv)
        else:
            assert equal.float().mean() > 0.999
            assert (got_scale_inv / want_scale_inv - 1).abs().max() <= 2**-8
    assert scale_inv.shape == grad_scale_inv.shape == ((rows, 1) if by_row else ())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("by_row", [True, False])
def test_what_is_not_a_number_stays_one_when_cast(by_row, device):
    x = torch.ones(3, 2 * BLOCK, device=device, dtype=torch.bfloat16)
    x[1, 5] = torch.nan
    qdata, scale_inv = swiglu_cast(x, by_row, E4M3, True)
    assert scale_inv.isnan().sum() == 1
    assert qdata.float().isnan().sum() == (BLOCK if by_row else qdata.numel())
