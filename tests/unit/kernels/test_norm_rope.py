"""Normalised and rotated heads against their definition in float64, one head of a token at a time."""

from functools import partial

import pytest
import torch
from torch import Tensor

from tests.support.compile_only import accesses, compiling
from tests.support.needs import DEVICES
from tests.support.numbers import F32, normal, within
from titanlite.kernels.device.norm_rope import launch_norm_rope, launch_norm_rope_grad
from titanlite.kernels.norm_rope import norm_rope
from titanlite.kernels.rope import rope_table

EPS = 1e-6
# Tokens, tokens of a sequence, key/value heads, queries of each, width of a head: that of no power of two, too; more
# tokens than all thread blocks have at a time.
SIZES = [(18, 9, 2, 3, 16), (5, 5, 1, 1, 24), (70, 35, 3, 2, 128), (12, 4, 1, 4, 256), (40_000, 8000, 1, 2, 64)]


def drawn(sizes: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """A projection and both weights, the angles, and gradients of queries, keys and values."""
    M, S, K, R, E = sizes
    draw = partial(normal, dtype=dtype, device=device)
    given = [draw(M, K * (R + 2) * E), 1 + draw(E, seed=1) / 4, 1 + draw(E, seed=2) / 4]
    angles = [t.to(device) for t in rope_table(S, E, 1e4, None)]
    return given, angles, [draw(M, n, E, seed=3 + i) for i, n in enumerate((K * R, K, K))]


def in_float64(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, angles: list[Tensor], R: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Each head by itself, put together column by column."""
    E = 2 * angles[0].shape[1]
    cos, sin = (t.double().repeat(len(qkv) // len(t), 1) for t in angles)
    found: tuple[list[Tensor], ...] = [], [], []
    for n, head in enumerate(qkv.split(E, dim=1)):
        which = max(n % (R + 2) - R + 1, 0)
        if which < 2:
            head = head / (head.square().mean(1, keepdim=True) + EPS).sqrt() * (q_weight, k_weight)[which]
            low, high = head.chunk(2, dim=1)
            head = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=1)
        found[which].append(head)
    q, k, v = (torch.stack(heads, dim=1) for heads in found)
    return q, k, v


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_heads_and_gradients(sizes: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    given, angles, upstream = drawn(sizes, dtype, device)
    M, _, K, R, E = sizes
    exact = [x.double().requires_grad_() for x in given]
    truth = in_float64(*exact, angles, R)
    torch.autograd.backward(truth, [x.double() for x in upstream])
    given = [x.requires_grad_() for x in given]
    heads = norm_rope(*given, *angles, R, EPS)
    assert [tuple(x.shape) for x in heads] == [(M, K * R, E), (M, K, E), (M, K, E)]
    # Before a rounding to the dtype, float32 operations on terms that may cancel, against the largest.
    assert all(within(got, true, 8 * F32 * true.abs().max()) for got, true in zip(heads[:2], truth, strict=False))
    assert torch.equal(heads[2].double(), truth[2])
    torch.autograd.backward(heads, upstream)
    assert all(x.grad is not None and x.grad.dtype == dtype for x in given)
    of_qkv, *of_weights = zip(given, exact, strict=True)
    assert within(of_qkv[0].grad, of_qkv[1].grad, 16 * F32 * of_qkv[1].grad.abs().max())  # type: ignore[arg-type,union-attr]
    for (got, wanted), heads_of_kv in zip(of_weights, (R, 1), strict=True):
        # A sum over tokens and heads: roundings of one size, of any sign, add up with its root.
        assert within(got.grad, wanted.grad, 8 * F32 * (M * K * heads_of_kv) ** 0.5 * 4)


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_not_a_number_stays_in_its_head(device: str) -> None:
    (qkv, *weights), angles, _ = drawn((6, 6, 2, 2, 16), torch.float32, device)
    qkv[4, 4 * 16 + 3] = torch.nan  # the first query of the second key
    q, k, v = norm_rope(qkv, *weights, *angles, 2, EPS)
    assert sorted({(m, head) for m, head, _ in q.isnan().nonzero().tolist()}) == [(4, 2)]
    assert not k.isnan().any()
    assert not v.isnan().any()


@pytest.mark.parametrize("E", [128, 256])
def test_code_for_sm_90_moves_16_bytes_of_a_head_at_once(E: int) -> None:
    given, angles, upstream = drawn((8, 4, 2, 2, E), torch.bfloat16, "cpu")
    with compiling() as compiled:
        launch_norm_rope(*given, *angles, 2, EPS)
        launch_norm_rope_grad(*upstream, *given, *angles, 2, EPS)
    for name, heads in (("_norm_rope", 2), ("_norm_rope_grad", 3)):  # a query, a key and, backward, a value
        assert accesses(compiled[name])["st", 4] == 2 * heads, name  # halves
