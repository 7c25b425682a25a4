"""Attention to a window against a mask over all of the square."""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.support.needs import DEVICES, slow
from titanlite.kernels.window_attention import _window_attention, _window_attention_grad, window_attention
from titanlite.models.layers import CausalAttention


def masked(window: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every token against every other, and each head with keys and values of its own."""
    own, other = torch.arange(q.shape[2], device=q.device)[:, None], torch.arange(q.shape[2], device=q.device)
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    scores = q @ k.transpose(2, 3) / q.shape[3] ** 0.5
    return scores.masked_fill((other > own) | (other <= own - window), -torch.inf).softmax(-1) @ v


def heads(B: int, S: int, H: int, E: int, seed: int, device: str) -> Tensor:
    """[B, H, S, E] as a projection leaves them: tokens outermost in memory."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, S, H, E, generator=generator, dtype=torch.float64).to(device).transpose(1, 2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("S", "window"),
    [(24, 8), (23, 8), (25, 8), (17, 8), (16, 8), (9, 8), (8, 8), (8, 9), (8, 0), (8, 7), (8, 4), (7, 1), (1, 1)],
)
@pytest.mark.parametrize(("B", "H", "K"), [(1, 2, 2), (2, 6, 2), (3, 4, 1)])
def test_a_window_is_the_mask(S: int, window: int, B: int, H: int, K: int, device: str) -> None:
    """In float64. A score is a sum of E = 8 products of up to 10 over sqrt(E), exact within 9 · 1.1e-16 · 80 / sqrt(8):
    3e-14, relative of what softmax makes of it. Further sums have at most S terms, 3e-15 each; it is done twice."""
    E = 8
    given = [heads(B, S, n, E, seed, device).requires_grad_() for seed, n in enumerate((H, K, K))]
    grad = heads(B, S, H, E, 3, device)
    out, truth = CausalAttention(window)(*given), masked(window or S, *given)
    assert out.shape == grad.shape
    ours, theirs = ((result, *torch.autograd.grad(result, given, grad)) for result in (out, truth))
    for got, wanted in zip(ours, theirs, strict=True):
        assert (got - wanted).abs().max() <= 1e-13 * max(1, wanted.abs().max().item())


@pytest.mark.parametrize("window", [8, 7])
def test_compiles_without_a_break(window: int) -> None:
    given = [heads(2, 24, n, 8, seed, "cpu").requires_grad_() for seed, n in enumerate((4, 2, 2))]
    attend = torch.compile(CausalAttention(window), fullgraph=True, dynamic=False, backend="aot_eager")
    out, truth = attend(*given), masked(window, *given)
    assert (out - truth).abs().max() <= 1e-13
    out.sum().backward()


@pytest.mark.parametrize(("S", "window"), [(24, 8), (23, 7), (5, 5), (3, 8)])
def test_flops_are_those_of_the_scores_that_a_window_sees(S: int, window: int) -> None:
    given = [heads(2, S, n, 8, seed, "cpu").requires_grad_() for seed, n in enumerate((4, 2, 2))]
    seen = sum(min(i + 1, window) for i in range(S))
    with FlopCounterMode(display=False) as counter:
        out = window_attention(*given, window)
        assert counter.get_total_flops() == 2 * 2 * 8 * 2 * 4 * seen  # two products, each 2·E a score, of B·H heads
        out.sum().backward()
    assert counter.get_total_flops() == 3.5 * 2 * 2 * 8 * 2 * 4 * seen


@pytest.mark.parametrize("S", [64, 61])
def test_pieces_compute_no_score_but_those_of_themselves_and_of_the_piece_before(S: int) -> None:
    B, H, E, W = 2, 4, 8, 8
    q, k, v, grad = (heads(B, S, n, E, seed, "cpu") for seed, n in enumerate((H, 2, 2, H)))
    product = 2 * E * B * H * 64 * 2 * W  # each of 64 queries, those that fill the last piece too, against 2·W keys
    with FlopCounterMode(display=False) as counter:
        out, sums = _window_attention.definition(q, k, v, W)
        assert counter.get_total_flops() == 2 * product
        _window_attention_grad.definition(grad, q, k, v, out, sums, W)
    assert counter.get_total_flops() == 7 * product


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float64)])
def test_the_operator_is_what_its_description_says(dtype: torch.dtype) -> None:
    """Its results have the shapes, dtypes and strides that the compiler is told, and its gradient compiles."""
    given = [heads(2, 12, n, 8, seed, "cpu").to(dtype).requires_grad_() for seed, n in enumerate((4, 2, 2))]
    torch.library.opcheck(torch.ops.titanlite.window_attention.default, (*given, 8))


@pytest.mark.gpu
def test_gemmas_window_runs_in_a_fused_kernel_forward_and_backward() -> None:
    """bf16 at the widths of gemma3 1B. Both forms round weights and results once, but divide before or after and sum in
    another order: within twice the error. A window of one token less is five times that error off.
    """
    B, S, H, K, E, W = 2, 2048, 4, 1, 256, 512
    *inputs, grad = (heads(B, S, n, E, seed, "cuda").bfloat16() for seed, n in enumerate((H, K, K, H)))

    def run(attend: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        given = [t.to(dtype).requires_grad_() for t in inputs]
        out = attend(*given)
        return [out, *torch.autograd.grad(out, given, grad.to(dtype))]

    square = functools.partial(masked, W)
    got, other = (run(CausalAttention(window), torch.bfloat16) for window in (W, W - 1))
    assert CausalAttention(W).kernel(*(t.bfloat16() for t in inputs)) == "flash_attention"
    theirs, truths = run(square, torch.bfloat16), run(square, torch.float64)
    for ours, wrong, rounded, truth in zip(got, other, theirs, truths, strict=True):
        bound = 2 * (rounded - truth).norm()
        assert (ours - truth).norm() <= bound < (wrong - truth).norm()
