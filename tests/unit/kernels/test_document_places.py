"""Attention of some of the tokens' queries to keys of all: ranks that share the queries out, against one with all."""

import os
import random
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.support.needs import LOOPS_BY_INTERPRETER, slow
from tests.unit.models.test_document_attention import packed, starts_of
from titanlite.kernels import flex_documents
from titanlite.kernels.document_attention import document_attention

CHUNK = 128
CASES = [  # lengths, S, and chunks of each rank
    ([5, 250, 1, 128, 384, 100, 28, 256], 384, ([0, 3, 5, 8], [1, 2, 4, 6, 7])),
    ([1] * 130 + [510], 640, ([4], [0, 1, 2, 3])),
    ([768], 768, ([0, 5], [1, 4], [2, 3])),
    ([768], 256, ([0, 1, 2, 3, 4, 5],)),
]


def places_of(chunks: list[int]) -> Tensor:
    return (torch.tensor(chunks, dtype=torch.int32)[:, None] * CHUNK + torch.arange(CHUNK).int()).flatten()


def drawn_lengths(N: int, chance: random.Random) -> list[int]:
    """Draw lengths of documents that make N: runs of single tokens, up to ends of chunks, whole chunks, and others."""
    lengths = list[int]()
    while N:
        kind = chance.randrange(4)
        n = (1, N % CHUNK or CHUNK, 3 * CHUNK, chance.randrange(1, 700))[kind]
        for _ in range(chance.randrange(1, 150) if kind == 0 else 1):
            lengths.append(min(n, N))
            N -= lengths[-1]
            if not N:
                break
    return lengths


def results_and_grads(attend: Callable[..., Tensor], given: list[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    own = [t.detach().requires_grad_() for t in given]
    out = attend(*own)
    return out.detach(), *torch.autograd.grad(out, own, grad)


def what_is_seen(starts: Tensor, places: Tensor, window: int, N: int) -> Tensor:
    """[M, N]: whether a query sees a key."""
    keys, own = torch.arange(N, device=places.device), places[:, None]
    return (keys <= own) & (keys >= starts[:, None]) & ((keys > own - window) if window else True)


@pytest.mark.parametrize("dtype", [torch.float64, *slow(torch.float32)])
@pytest.mark.parametrize(("lengths", "S", "of_ranks"), CASES)
@pytest.mark.parametrize(("window", "H", "K"), [(0, 6, 2), (1, 2, 2), (100, 4, 1), (300, 4, 2)])
def test_ranks_together_compute_what_one_would(
    lengths: list[int], S: int, of_ranks: tuple[list[int], ...], window: int, H: int, K: int, dtype: torch.dtype
) -> None:
    """Keys that no query of a rank sees are zeros there, and get zeros. What sums of up to 768 terms in other orders
    differ by is 768 · 1.1e-16 of what they are made of, 1e-13; so it is for three of them, one of the other."""
    N, E, starts = sum(lengths), 8, starts_of(lengths, S)
    q, k, v, grad = (packed(N, n, E, seed).to(dtype) for seed, n in enumerate((H, K, K, H)))
    whole = results_and_grads(lambda q, k, v: document_attention(q, k, v, starts, S, window), [q, k, v], grad)
    ours = [torch.full_like(q, torch.nan), torch.full_like(q, torch.nan), torch.zeros_like(k), torch.zeros_like(v)]
    for chunks in of_ranks:
        places = places_of(chunks)
        unseen = ~what_is_seen(starts[places], places, window, N).any(0)
        given = [q[places], *(t.masked_fill(unseen[:, None, None], 0) for t in (k, v))]
        attend = partial(document_attention, starts=starts[places], longest=S, window=window, places=places)
        out, d_q, d_k, d_v = results_and_grads(attend, given, grad[places])
        ours[0][places], ours[1][places] = out, d_q
        ours[2] += d_k
        ours[3] += d_v
        assert not d_k[unseen].any()
        assert not d_v[unseen].any()
    bound = 1e-12 * torch.finfo(dtype).eps / torch.finfo(torch.float64).eps
    for got, wanted in zip(ours, whole, strict=True):
        assert (got - wanted).abs().max() <= bound * max(1, wanted.abs().max().item())


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [0, 100])
def test_flex_attention_computes_the_definition(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its compiler, so forward alone."""
    monkeypatch.setattr(flex_documents, "_compiled", lambda function: function)
    lengths, S, (chunks, *_) = CASES[0]
    places = places_of(chunks)
    starts = starts_of(lengths, S)[places]
    sizes = ((len(places), 4), (1152, 2), (1152, 2))
    q, k, v = (packed(n, heads, 8, seed).float() for seed, (n, heads) in enumerate(sizes))
    found = flex_documents.attend_flexibly(q, k, v, starts, S, window, places)
    truth = torch.ops.titanlite.document_attention(q.double(), k.double(), v.double(), starts, S, window, places)
    for got, wanted in zip(found, truth, strict=True):
        assert got.shape == wanted.shape
        assert (got - wanted).abs().max() <= 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float64)])
def test_the_operators_are_what_their_descriptions_say(dtype: torch.dtype) -> None:
    """With places, too: results have the shapes, dtypes and strides that the compiler is told."""
    places, starts = places_of([0, 2]), starts_of([100, 28, 256], 384)
    sizes = ((256, 4), (384, 2), (384, 2))
    given = [packed(n, heads, 8, seed).to(dtype).requires_grad_() for seed, (n, heads) in enumerate(sizes)]
    more: tuple[Any, ...] = (starts[places], 384, 0, places)
    torch.library.opcheck(torch.ops.titanlite.document_attention.default, (*given, *more))
    plain = [t.detach() for t in given]
    out, sums = torch.ops.titanlite.document_attention(*plain, *more)
    of_gradient = (torch.ones_like(out), *plain, out, sums, *more)
    torch.library.opcheck(torch.ops.titanlite.document_attention_grad.default, of_gradient)


def test_flops_are_the_share_of_the_queries() -> None:
    places, starts = places_of([0, 2]), starts_of([100, 28, 256], 384)
    q, (k, v) = packed(256, 4, 8, 0).requires_grad_(), (packed(384, 2, 8, seed).requires_grad_() for seed in (1, 2))
    with FlopCounterMode(display=False) as counter:
        out = document_attention(q, k, v, starts[places], 384, 0, places)
        assert counter.get_total_flops() == 2 * 2 * 8 * 4 * (384 * 385 // 2) * 2 // 3
        out.sum().backward()
    assert counter.get_total_flops() == 3.5 * 2 * 2 * 8 * 4 * (384 * 385 // 2) * 2 // 3


@pytest.mark.slow
@LOOPS_BY_INTERPRETER
def test_values_of_device_code() -> None:
    """Triton's interpreter has to be asked for before Triton is imported."""
    run = [sys.executable, "-W", "ignore", "-m", "tests.support.interpreted_documents"]
    done = subprocess.run(run, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


ON_GPU = [  # documents of 4096 tokens
    [700, 1, 3000, 395],
    [1] * 4096,
    [128, 256, 1664, 2048],
    [*drawn_lengths(4096, random.Random(1))],
]
HALVES = [  # chunks of the first of two ranks
    [*range(16)],
    [*range(8), *range(24, 32)],
    sorted(random.Random(2).sample(range(32), 16)),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("H", "K", "E"), [(32, 8, 128), (16, 16, 64), (6, 2, 64)])
def test_kernels_of_two_ranks_compute_what_one_does(H: int, K: int, E: int) -> None:
    """A query's tile and its blocks of keys are the same on whichever rank, and so are the bits of its results. The
    gradients of keys are the same sums in two parts: three roundings to bfloat16, by at most half a unit of each."""
    N, dtype = 4096, torch.bfloat16
    q, k, v, grad = (packed(N, n, E, seed, "cuda").to(dtype) for seed, n in enumerate((H, K, K, H)))
    attend, attend_grad = torch.ops.titanlite.document_attention, torch.ops.titanlite.document_attention_grad
    for lengths, window in product(ON_GPU, (0, 200, N)):
        starts = starts_of(lengths, N).cuda()
        out, sums = attend(q, k, v, starts, N, window)
        d_q, *of_whole = attend_grad(grad, q, k, v, out, sums, starts, N, window)
        for first in HALVES:
            parts = list[list[Tensor]]()
            for chunks in (first, sorted({*range(32)} - {*first})):
                at = places_of(chunks).cuda()
                unseen = ~what_is_seen(starts[at], at, window, N).any(0)
                own_q, own_k, own_v = q[at], *(t.masked_fill(unseen[:, None, None], 0) for t in (k, v))
                found = attend(own_q, own_k, own_v, starts[at], N, window, at)
                torch.full((2, N, K, E), torch.nan, dtype=dtype, device="cuda")  # what new memory has in it
                own_d_q, *of_part = attend_grad(grad[at], own_q, own_k, own_v, *found, starts[at], N, window, at)
                for got, wanted in zip((*found, own_d_q), (out, sums, d_q), strict=True):
                    assert torch.equal(got, wanted[at])
                assert not any(t[unseen].any() for t in of_part)
                parts.append(of_part)
            for whole, *both in zip(of_whole, *parts, strict=True):
                whole, both = whole.double(), [t.double() for t in both]
                bound = torch.finfo(dtype).eps / 2 * sum(t.norm() for t in (whole, *both))
                assert (sum(both) - whole).norm() <= bound


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 200])
def test_flex_attention_computes_the_definition_on_gpus(window: int) -> None:
    """Heads of 32 numbers are not for the kernels for Hopper. As of these, three roundings of 2^-9."""
    (lengths, *_), (_, chunks, _), N, dtype = ON_GPU, HALVES, 4096, torch.bfloat16
    places = places_of(chunks).cuda()
    starts = starts_of(lengths, N).cuda()[places]
    sizes = ((2048, 2), (N, 2), (N, 2))
    given = [packed(n, heads, 32, seed, "cuda").to(dtype) for seed, (n, heads) in enumerate(sizes)]
    grad = packed(2048, 2, 32, 3, "cuda").to(dtype)
    attend = partial(document_attention, starts=starts, longest=N, window=window, places=places)
    ours, truth = (results_and_grads(attend, [t.to(of) for t in given], grad.to(of)) for of in (dtype, torch.float64))
    for got, wanted in zip(ours, truth, strict=True):
        assert (got - wanted).norm() <= 3 * torch.finfo(dtype).eps / 2 * wanted.norm()
