"""Tokens to the rows of their experts and back, against a loop over tokens in float64."""

import pytest
import torch
from torch import Tensor

from tests.support.needs import DEVICES, slow
from tests.support.numbers import F32, leaf, normal, rows_of, within
from titanlite.kernels.routing import combine, expert_rows, gather_rows, route, router_logits, row_dots, spread_rows


def loop_combine(o: Tensor, rows: Tensor, weights: Tensor | None) -> Tensor:
    total = []
    for m, own in enumerate(rows.tolist()):
        here = [(k, r) for k, r in enumerate(own) if r >= 0]
        terms = [o[r] if weights is None else weights[m, k] * o[r] for k, r in here]
        total.append(torch.stack(terms).sum(0) if terms else (o[0] * 0).nan_to_num())
    return torch.stack(total)


ROWS = [(37, 8, 2, 0, 8), (37, 8, 2, 2, 3), (11, 12, 8, 0, 12), (9, 4, 1, 3, 1)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_weighted", [False, True], ids=["", "weights"])
@pytest.mark.parametrize("D", [48, *slow(129, 2048)])
@pytest.mark.parametrize("routing", ROWS, ids=str)
def test_combine(routing, D, is_weighted, dtype, device):
    rows, _, n = rows_of(*routing)
    M, K = rows.shape
    o = normal(M * K, D, dtype=dtype)
    o[n:] = torch.nan  # rows of no token
    weights = normal(M, K, seed=1) if is_weighted else None
    exact = [None if t is None else t.double().requires_grad_() for t in (o, weights)]
    given = [None if t is None else leaf(t, device) for t in (o, weights)]
    truth, got = loop_combine(exact[0], rows, exact[1]), combine(given[0], rows.to(device), given[1])
    sizes = loop_combine(o.abs().double(), rows, None if weights is None else weights.abs().double())
    # One rounding to dtype, and before it K products and sums of float32.
    assert got.dtype == dtype
    assert within(got.cpu(), truth, 2 * K * F32 * sizes)

    upstream = normal(M, D, seed=2, dtype=dtype)
    got.backward(upstream.to(device))
    truth.backward(upstream.double())
    wanted = exact[0].grad[:n]
    assert within(given[0].grad[:n].cpu(), wanted, F32 * wanted.abs())
    if weights is not None:
        sizes = row_dots(upstream.abs().double(), o.abs().double(), rows)  # a sum of D products
        assert ((given[1].grad.cpu() - exact[1].grad).abs() <= D * F32 * sizes).all()
        assert (given[1].grad.cpu()[rows < 0] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("routing", ROWS, ids=str)
def test_each_row_is_given_its_token(routing, dtype, device):
    """By slots, and by rows; the gradient adds up the rows of a token."""
    rows, slots, n = rows_of(*routing)
    M, K = rows.shape
    x, upstream = normal(M, 48, dtype=dtype), normal(M * K, 48, seed=1, dtype=dtype)
    upstream[n:] = torch.nan
    wanted = [x[slot // K] for slot in slots[:n].tolist()]
    of_x = loop_combine(upstream.double(), rows, None)
    for way in ("slots", "rows"):
        given = leaf(x, device)
        on_device = [t.to(device) for t in (rows, slots)]
        got = gather_rows(given, on_device[1], K) if way == "slots" else spread_rows(given, on_device[0], None, M * K)
        assert got.shape == (M * K, 48)
        assert got.dtype == dtype
        assert got[:n].tolist() == [row.tolist() for row in wanted]
        assert way == "rows" or (got[n:] == 0).all()
        got.backward(upstream.to(device))
        sizes = loop_combine(upstream.abs().double(), rows, None)
        assert within(given.grad.cpu(), of_x, K * F32 * sizes)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_is_copied(dtype, device):
    rows, slots, n = rows_of(37, 8, 2, 2, 3)
    x = normal(37, 48).to(device, dtype)
    wanted = x.view(torch.uint8)[slots[:n].to(device) // 2]
    for got in (gather_rows(x, slots.to(device), 2), spread_rows(x, rows.to(device), None, len(slots))):
        assert got.dtype == dtype
        assert torch.equal(got[:n].view(torch.uint8), wanted)


@pytest.mark.parametrize("is_weighted", [False, True])
def test_gradients_of_rows_in_float64(is_weighted):
    """Against differences, where each row has a token."""
    rows, slots, _ = rows_of(5, 6, 3, 0, 6)
    o, x, weights = (normal(n, d, seed=n, dtype=torch.float64).requires_grad_() for n, d in ((15, 4), (5, 4), (5, 3)))
    of = weights if is_weighted else None
    assert torch.autograd.gradcheck(lambda *given: combine(given[0], rows, given[1]), (o, of))
    assert torch.autograd.gradcheck(lambda *given: spread_rows(given[0], rows, given[1], 15), (x, of))
    assert torch.autograd.gradcheck(lambda x: gather_rows(x, slots, 3), (x,))


def test_no_tokens_at_all():
    choices = torch.zeros(0, 2, dtype=torch.int32)
    rows, slots, offsets = expert_rows(choices, 0, 4)
    x = torch.ones(0, 8, requires_grad=True)
    weights, chosen = route(router_logits(x, torch.ones(4, 8)), None, 2, "softmax", True, 1.0)
    got = combine(gather_rows(x, slots, 2), rows, weights)
    got.sum().backward()
    assert got.shape == x.grad.shape == (0, 8)
    assert chosen.shape == (0, 2)
    assert offsets.tolist() == [0] * 5
