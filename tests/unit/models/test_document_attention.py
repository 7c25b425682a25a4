"""Attention within documents against a mask over all of the square, and against each document by itself."""

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.support.needs import DEVICES, slow
from titanlite.kernels import document_attention as documents
from titanlite.kernels.document_attention import document_attention
from titanlite.models.layers import CausalAttention, Sequences


def starts_of(lengths: list[int], S: int) -> Tensor:
    """[M] int32, of documents of these lengths; those that a sample's end cuts begin again."""
    assert sum(lengths) % S == 0
    ends = torch.tensor(lengths).cumsum(0)
    begins = torch.zeros(sum(lengths), dtype=torch.int64)
    begins[ends[:-1]] = ends[:-1]
    begins[::S] = torch.arange(0, sum(lengths), S)
    return begins.cummax(0).values.int()


def each_by_itself(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, window: int) -> Tensor:
    """Attend in each document alone, with a mask over its square, and each head with keys and values of its own."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    found = []
    for n in starts.unique_consecutive(return_counts=True)[1].tolist():
        at = sum(map(len, found))
        own_q, own_k, own_v = (t[at : at + n].transpose(0, 1) for t in (q, k, v))
        scores = own_q @ own_k.mT / q.shape[2] ** 0.5
        unseen = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
        unseen |= torch.ones_like(unseen).tril(-window) if window else False
        found.append((scores.masked_fill(unseen, -torch.inf).softmax(-1) @ own_v).transpose(0, 1))
    return torch.cat(found)


def packed(M: int, H: int, E: int, seed: int, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(M, H, E, generator=generator, dtype=torch.float64).to(device)


LENGTHS = [  # and S
    ([5, 1, 1, 9, 8, 24], 24),  # a separator alone is a document of one token
    ([48], 24),  # longer than S
    ([1] * 12, 6),
    ([200, 3, 97, 260, 40], 300),  # of several blocks of rows
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("lengths", "S"), LENGTHS)
@pytest.mark.parametrize("window", [0, 1, 7])
@pytest.mark.parametrize(("H", "K"), [(2, 2), (6, 2), (4, 1)])
def test_documents_attend_as_each_would_alone(
    lengths: list[int], S: int, window: int, H: int, K: int, device: str
) -> None:
    """In float64. A score is a sum of E = 8 products of up to 10 over sqrt(E), exact within 9 · 1.1e-16 · 80 / sqrt(8):
    3e-14, relative of what softmax makes of it. Further sums have at most S terms of 1.1e-16 each, 3e-14; it is done
    twice."""
    E, starts = 8, starts_of(lengths, S).to(device)
    given = [packed(sum(lengths), n, E, seed, device).requires_grad_() for seed, n in enumerate((H, K, K))]
    grad = packed(sum(lengths), H, E, 3, device)
    out = CausalAttention(window)(*given, Sequences(S, starts))
    truth = each_by_itself(*given, starts, window)
    assert out.shape == grad.shape
    ours, theirs = ((result, *torch.autograd.grad(result, given, grad)) for result in (out, truth))
    for got, wanted in zip(ours, theirs, strict=True):
        assert (got - wanted).abs().max() <= 2e-13 * max(1, wanted.abs().max().item())


def test_a_boundary_that_is_off_by_one_shows() -> None:
    """So the test above would fail: the second document begins a token late, or early."""
    given = [packed(24, n, 8, seed) for seed, n in enumerate((4, 2, 2))]
    truth = each_by_itself(*given, starts_of([10, 14], 24), 0)
    for lengths in ([11, 13], [9, 15]):
        wrong = document_attention(*given, starts_of(lengths, 24), 24)
        assert (wrong - truth).abs().max() > 1e-2


def test_the_sums_are_logarithms_of_sums_of_exponentials() -> None:
    q, k, v = (packed(12, n, 8, seed) for seed, n in enumerate((4, 2, 2)))
    starts = starts_of([5, 7], 12)
    _, sums = documents._document_attention(q, k, v, starts, 12, 0)
    scores = torch.einsum("mhe,nhe->mhn", q, k.repeat_interleave(2, dim=1)) / 8**0.5
    places = torch.arange(12)
    unseen = (places > places[:, None]) | (places < starts[:, None])
    truth = scores.masked_fill(unseen[:, None], -torch.inf).logsumexp(-1)
    assert sums.shape == (12, 4)
    assert (sums - truth).abs().max() <= 1e-13


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float64)])
def test_the_operators_are_what_their_descriptions_say(dtype: torch.dtype) -> None:
    """Their results have the shapes, dtypes and strides that the compiler is told, and the gradient compiles."""
    starts = starts_of([5, 7, 12], 12)
    given = [packed(24, n, 8, seed).to(dtype).requires_grad_() for seed, n in enumerate((4, 2, 2))]
    torch.library.opcheck(torch.ops.titanlite.document_attention.default, (*given, starts, 12, 0))
    plain = [t.detach() for t in given]
    out, sums = documents._document_attention(*plain, starts, 12, 0)
    assert (out.dtype, sums.dtype) == (dtype, torch.promote_types(dtype, torch.float32))
    of_gradient = (torch.ones_like(out), *plain, out, sums, starts, 12, 0)
    torch.library.opcheck(torch.ops.titanlite.document_attention_grad.default, of_gradient)


@pytest.mark.parametrize("window", [0, 7])
def test_nothing_is_compiled_again_where_documents_change(window: int) -> None:
    attend, calls = CausalAttention(window), 0

    def counted(graph, inputs):
        nonlocal calls
        calls += 1
        return graph.forward

    compiled = torch.compile(attend, fullgraph=True, dynamic=False, backend=counted)
    given = [packed(24, n, 8, seed) for seed, n in enumerate((4, 2, 2))]
    for lengths in ([24], [1] * 24, [5, 7, 12], [12, 12]):
        starts = starts_of(lengths, 24)
        assert torch.equal(compiled(*given, Sequences(24, starts)), attend(*given, Sequences(24, starts)))
    assert calls == 1


@pytest.mark.parametrize(("S", "window"), [(24, 0), (24, 8), (12, 7), (6, 9)])
def test_flops_are_those_of_one_document_a_sample(S: int, window: int) -> None:
    """What documents leave of them is data, and no shape says it."""
    given = [packed(24, n, 8, seed).requires_grad_() for seed, n in enumerate((4, 2, 2))]
    seen = 24 // S * sum(min(i + 1, window or S) for i in range(S))
    with FlopCounterMode(display=False) as counter:
        out = document_attention(*given, starts_of([24], S), S, window)
        assert counter.get_total_flops() == 2 * 2 * 8 * 4 * seen  # two products, each 2·E a score, of H heads
        out.sum().backward()
    assert counter.get_total_flops() == 3.5 * 2 * 2 * 8 * 4 * seen


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("lengths", "S", "window"),
    [
        ([300, 5, 1, 1742], 1024, 0),
        ([1] * 100 + [156, 3, 509, 1, 255], 512, 0),
        ([2048, 100, 1948], 2048, 100),
        ([4096], 4096, 0),
    ],
)
@pytest.mark.parametrize(
    ("H", "K", "E"), [(8, 2, 128), (4, 4, 128), (6, 2, 128), (12, 1, 64), (64, 1, 64), (4, 1, 256), (2, 2, 32)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernels_compute_the_definition(
    lengths: list[int], S: int, window: int, H: int, K: int, E: int, dtype: torch.dtype
) -> None:
    """Against float64 of the same inputs. Weights and gradients of scores are rounded to the inputs' dtype before they
    are multiplied, results once more: three roundings of 2^-9 (2^-12) at most, of sums that do not cancel in norm."""
    starts = starts_of(lengths, S).cuda()
    given = [packed(sum(lengths), n, E, seed, "cuda").to(dtype).requires_grad_() for seed, n in enumerate((H, K, K))]
    assert documents.document_kernel(given[0]) == ("document_attention" if E in (64, 128) else "flex_attention")
    grad = packed(sum(lengths), H, E, 3, "cuda").to(dtype)
    found = [document_attention(*given, starts, S, window) for _ in range(2)]
    ours, again = ((out, *torch.autograd.grad(out, given, grad)) for out in found)
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))
    q, k, v = (t.detach().double() for t in given)
    out, sums = documents._document_attention.definition(q, k, v, starts, S, window)
    truth = documents._document_attention_grad.definition(grad.double(), q, k, v, out, sums, starts, S, window)
    for got, wanted in zip(ours, (out, *truth), strict=True):
        assert (got - wanted).norm() <= 3 * torch.finfo(dtype).eps / 2 * wanted.norm()
    own_sums = documents._document_attention(*(t.detach() for t in given), starts, S, window)[1]
    assert (own_sums - sums).abs().max() <= 1e-5
