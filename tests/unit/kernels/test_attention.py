"""Attention within documents, windows and pieces against a mask over each document's square."""

import random
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tests.support.documents import bounds_of, sequences_of, starts_of
from tests.support.needs import DEVICES, slow
from tests.support.numbers import normal
from titanlite.data.context_split import _rank_runs
from titanlite.kernels import attention as file
from titanlite.kernels import flash_attention_4, flex_attention
from titanlite.kernels.attention import attention
from titanlite.kernels.flex_attention import attend_flexibly, flexible_grad
from titanlite.models.layers import CausalAttention, Sequences

OPERATOR, GRADIENT = torch.ops.titanlite.attention, torch.ops.titanlite.attention_grad
CHUNK = 128
WHOLE = None, None, None, None
"""In the place of what says where pieces are: samples are documents."""


def heads(M: int, H: int, E: int, seed: int, device: str = "cpu") -> Tensor:
    return normal(M, H, E, seed=seed, dtype=torch.float64, device=device)


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


def with_grads(attend, given: list[Tensor], grad: Tensor) -> list[Tensor]:
    own = [t.detach().requires_grad_() for t in given]
    out = attend(*own)
    return [out.detach(), *torch.autograd.grad(out, own, grad)]


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
    M, E, starts = sum(lengths), 8, starts_of(lengths, S).to(device)
    *given, grad = (heads(M, n, E, seed, device) for seed, n in enumerate((H, K, K, H)))
    ours = with_grads(lambda *of: CausalAttention(window)(*of, sequences_of(S, starts)), given, grad)
    for got, wanted in zip(ours, with_grads(lambda *of: each_by_itself(*of, starts, window), given, grad), strict=True):
        assert got.shape == wanted.shape
        assert (got - wanted).abs().max() <= 2e-13 * max(1, wanted.abs().max().item())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("S", "window"), [(24, 8), (23, 8), (9, 8), (8, 8), (8, 9), (8, 0), (8, 7), (1, 1), (300, 7)])
@pytest.mark.parametrize(("B", "H", "K"), [(1, 2, 2), (2, 6, 2), (3, 4, 1)])
def test_samples_attend_to_a_window(S: int, window: int, B: int, H: int, K: int, device: str) -> None:
    """Packed, and in rows. The bound is that of documents."""
    *given, grad = (heads(B * S, n, 8, seed, device) for seed, n in enumerate((H, K, K, H)))
    starts = starts_of([S] * B, S).to(device)
    attend, truth = CausalAttention(window), with_grads(lambda *of: each_by_itself(*of, starts, window), given, grad)

    def in_rows(*of: Tensor) -> Tensor:
        return attend(*(x.unflatten(0, (B, S)).transpose(1, 2) for x in of)).transpose(1, 2).flatten(0, 1)

    for form in (in_rows, lambda *of: attend(*of, Sequences(S))):
        for got, wanted in zip(with_grads(form, given, grad), truth, strict=True):
            assert (got - wanted).abs().max() <= 2e-13 * max(1, wanted.abs().max().item())


def test_a_boundary_that_is_off_by_one_shows() -> None:
    """So the tests above would fail: the second document begins a token late, or early; or a window is one short."""
    given = [heads(24, n, 8, seed) for seed, n in enumerate((4, 2, 2))]
    truth = each_by_itself(*given, starts_of([10, 14], 24), 0)
    for lengths in ([11, 13], [9, 15]):
        starts = starts_of(lengths, 24)
        assert (attention(*given, 24, 0, starts, bounds_of(starts)) - truth).abs().max() > 1e-2
    assert (attention(*given, 24, 7) - attention(*given, 24, 8)).abs().max() > 1e-2


def test_the_sums_are_logarithms_of_sums_of_exponentials() -> None:
    q, k, v = (heads(12, n, 8, seed) for seed, n in enumerate((4, 2, 2)))
    scores = torch.einsum("mhe,nhe->mhn", q, k.repeat_interleave(2, dim=1)) / 8**0.5
    places = torch.arange(12)
    for lengths, S in (([5, 7], 12), ([6, 6], 6)):
        starts = starts_of(lengths, S)
        unseen = (places > places[:, None]) | (places < starts[:, None])
        truth = scores.masked_fill(unseen[:, None], -torch.inf).logsumexp(-1)
        assert (OPERATOR(q, k, v, starts, *bounds_of(starts), None, S, 0)[1] - truth).abs().max() <= 1e-13
    rows = truth.unflatten(0, (2, 6)).transpose(1, 2)
    assert (OPERATOR(q, k, v, *WHOLE, 6, 0)[1] - rows).abs().max() <= 1e-13


def places_of(chunks: list[int]) -> Tensor:
    return (torch.tensor(chunks, dtype=torch.int32)[:, None] * CHUNK + torch.arange(CHUNK).int()).flatten()


def of_rank(starts: Tensor, chunks: list[int], window: int) -> tuple[Tensor, ...]:
    """Return what says where the pieces of a rank with some chunks of all tokens are, and its tokens."""
    places = places_of(chunks)
    at, runs = map(
        torch.from_numpy, _rank_runs(starts.cpu().numpy(), places.numpy().astype(np.int64), window, len(chunks))
    )
    places = places.to(starts.device)
    return starts[places], at.to(starts.device), runs, places


CASES = [  # lengths, S, and chunks of each rank
    ([5, 250, 1, 128, 384, 100, 28, 256], 384, ([0, 3, 5, 8], [1, 2, 4, 6, 7])),
    ([1] * 130 + [510], 640, ([4], [0, 1, 2, 3])),
    ([768], 768, ([0, 5], [1, 4], [2, 3])),
    ([768], 256, ([0, 1, 2, 3, 4, 5],)),
]


def seen_by(starts: Tensor, places: Tensor, window: int, N: int) -> Tensor:
    """[N]: the keys that some query of a rank sees."""
    keys, own = torch.arange(N, device=places.device), places[:, None]
    return ((keys <= own) & (keys >= starts[:, None]) & ((keys > own - window) if window else True)).any(0)


@pytest.mark.parametrize("dtype", [torch.float64, *slow(torch.float32)])
@pytest.mark.parametrize(("lengths", "S", "of_ranks"), CASES)
@pytest.mark.parametrize(("window", "H", "K"), [(0, 6, 2), (1, 2, 2), (100, 4, 1), (300, 4, 2)])
def test_ranks_together_compute_what_one_would(
    lengths: list[int], S: int, of_ranks: tuple[list[int], ...], window: int, H: int, K: int, dtype: torch.dtype
) -> None:
    """A key that no query of a rank sees is not read there, and gets zero. What sums of up to 768 terms in other orders
    differ by is 768 · 1.1e-16 of what they are made of, 1e-13; so it is for three of them, one of the other."""
    N, E, starts = sum(lengths), 8, starts_of(lengths, S)
    q, k, v, grad = (heads(N, n, E, seed).to(dtype) for seed, n in enumerate((H, K, K, H)))
    whole = with_grads(lambda *of: attention(*of, S, window, starts, bounds_of(starts)), [q, k, v], grad)
    ours = [torch.full_like(q, torch.nan), torch.full_like(q, torch.nan), torch.zeros_like(k), torch.zeros_like(v)]
    for chunks in of_ranks:
        pieces, places = of_rank(starts, chunks, window), places_of(chunks)
        unseen = ~seen_by(starts[places], places, window, N)
        own_k, own_v = (t.masked_fill(unseen[:, None, None], torch.nan) for t in (k, v))
        out, d_q, d_k, d_v = with_grads(
            lambda *of, pieces=pieces: OPERATOR(*of, *pieces, S, window)[0], [q[places], own_k, own_v], grad[places]
        )
        ours[0][places], ours[1][places] = out, d_q
        ours[2] += d_k
        ours[3] += d_v
        assert not any(t[unseen].any() for t in (d_k, d_v))
    bound = 1e-12 * torch.finfo(dtype).eps / torch.finfo(torch.float64).eps
    for got, wanted in zip(ours, whole, strict=True):
        assert (got - wanted).abs().max() <= bound * max(1, wanted.abs().max().item())


def in_form(form: int, window: int = 0) -> tuple[tuple[Tensor, ...], tuple]:
    """Queries, keys and values; and what says where pieces are: of whole samples, of documents, of a rank's part."""
    starts = starts_of([100, 28, 256], 384)
    pieces = [WHOLE, (starts, *bounds_of(starts), None), of_rank(starts, [0, 2], window)][form]
    return tuple(
        heads(n, h, 8, seed) for seed, (n, h) in enumerate(((256 if form == 2 else 384, 4), (384, 2), (384, 2)))
    ), pieces


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float64)])
@pytest.mark.parametrize("form", [0, 1, 2], ids=["samples", "documents", "a part"])
def test_the_operators_are_what_their_descriptions_say(form: int, dtype: torch.dtype) -> None:
    """Their results have the shapes, dtypes and strides that the compiler is told, and the gradient compiles."""
    given, pieces = in_form(form)
    more, plain = (*pieces, 384, 0), [t.to(dtype) for t in given]
    torch.library.opcheck(OPERATOR.default, (*(t.clone().requires_grad_() for t in plain), *more))
    out, sums = OPERATOR(*plain, *more)
    assert (out.dtype, sums.dtype) == (dtype, torch.promote_types(dtype, torch.float32))
    torch.library.opcheck(GRADIENT.default, (torch.ones_like(out), *plain, out, sums, *more))


@pytest.mark.parametrize("window", [0, 7])
def test_nothing_is_compiled_again_where_documents_change(window: int) -> None:
    attend, calls = CausalAttention(window), 0

    def counted(graph, inputs):
        nonlocal calls
        calls += 1
        return graph.forward

    compiled = torch.compile(attend, fullgraph=True, dynamic=False, backend=counted)
    given = [heads(24, n, 8, seed) for seed, n in enumerate((4, 2, 2))]
    for lengths in ([24], [1] * 24, [5, 7, 12], [12, 12]):
        sequences = sequences_of(24, starts_of(lengths, 24))
        assert torch.equal(compiled(*given, sequences), attend(*given, sequences))
    assert calls == 1


@pytest.mark.parametrize(("S", "window", "form"), [(384, 0, 0), (384, 8, 1), (128, 7, 0), (384, 0, 2)])
def test_flops_are_those_of_one_document_a_sample(S: int, window: int, form: int) -> None:
    """What documents leave of them is data, and no shape says it. A part has its share."""
    given, pieces = in_form(form)
    seen = len(given[0]) * sum(min(i + 1, window or S) for i in range(S)) // S
    with FlopCounterMode(display=False) as counter:
        out = OPERATOR(*(t.requires_grad_() for t in given), *pieces, S, window)[0]
        assert counter.get_total_flops() == 2 * 2 * 8 * 4 * seen  # two products, each 2·E a score, of H heads
        out.sum().backward()
    assert counter.get_total_flops() == 3.5 * 2 * 2 * 8 * 4 * seen


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("form", [0, 1, 2], ids=["samples", "documents", "a part"])
def test_flex_attention_computes_the_definition(form: int, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its compiler, so forward alone."""
    monkeypatch.setattr(flex_attention, "_compiled", lambda function: function)
    (given, pieces), S = in_form(form, window), 128 if form == 0 else 384
    found = flex_attention.attend_flexibly(*(t.float() for t in given), pieces[0], pieces[3], S, window)
    for got, wanted in zip(found, OPERATOR(*given, *pieces, S, window), strict=True):
        assert got.shape == wanted.shape
        assert (got - wanted).abs().max() <= 1e-5


class Watched(TorchDispatchMode):
    """As torch has one around the first call of a compiled block, to find results that share memory with inputs."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def densely(in_rows: list[Tensor], mask: BlockMask) -> Tensor:
    """Attend as FlexAttention, which has no gradients on CPUs."""
    q, k, v = in_rows
    seen = create_mask(mask.mask_mod, len(q), None, q.shape[2], k.shape[2], "cpu")
    return scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)


@pytest.mark.parametrize("of_gradients", [False, True])
def test_flex_attention_is_compiled_in_a_mode_that_hides_vmap(of_gradients: bool, monkeypatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(flex_attention, "_compiled", cache(flex_attention._compiled.__wrapped__))
    if of_gradients:
        monkeypatch.setattr(flex_attention, "_flex", densely)
    library = torch.library.Library("titanlite_test", "FRAGMENT")
    library.define("flexibly(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor starts) -> Tensor[]")

    def flexibly(grad: Tensor, *given: Tensor) -> list[Tensor]:
        given = *given, None, 128, 0
        found = flexible_grad(grad, *given) if of_gradients else attend_flexibly(*given)
        assert not any(each.requires_grad for each in found)
        return [*found]

    library.impl("flexibly", flexibly, "CPU")
    starts = starts_of([100, 28, 128], 128)
    given = [heads(256, n, 8, seed).float().requires_grad_() for seed, n in enumerate((4, 2, 2))]
    grad = heads(256, 4, 8, 3).float()
    with Watched():
        found = torch.ops.titanlite_test.flexibly(grad, *given, starts)
    pieces = starts, *bounds_of(starts), None
    wanted = OPERATOR(*given, *pieces, 128, 0)
    wanted = GRADIENT(grad, *given, *wanted, *pieces, 128, 0) if of_gradients else wanted
    for got, true in zip(found, wanted, strict=True):
        assert (got - true).abs().max() <= 1e-5


# --- on GPUs -----------------------------------------------------------------------------------------------------


KERNELS = ["flash_attention_4", "flex_attention"]


def on_gpu(test: Callable[..., None]) -> Callable[..., None]:
    """Needs a GPU; the package imports what is deprecated."""
    return pytest.mark.gpu(pytest.mark.filterwarnings("ignore::DeprecationWarning")(test))


@pytest.fixture
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Attend by it alone."""
    widths = ()
    if request.param == "flash_attention_4":
        pytest.importorskip("flash_attn.cute")
        widths = flash_attention_4.WIDTHS[torch.cuda.get_device_capability()[0]]
    monkeypatch.setattr(flash_attention_4, "_served", widths)
    return request.param


def check(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, pieces: tuple, S: int, window: int) -> None:
    """Against float64 of the same inputs. Weights and gradients of scores are rounded to the inputs' dtype before they
    are multiplied, results once more: three roundings of half an eps, of sums that do not cancel in norm; gradients of
    keys that a rank has in two runs once more. In a document of one token they cancel: float32's roundings are left."""
    out, sums = OPERATOR(q, k, v, *pieces, S, window)
    grads = GRADIENT(grad, q, k, v, out, sums, *pieces, S, window)
    wide = [t.double() for t in (q, k, v)]
    truth, true_sums = file._attention.definition(*wide, *pieces, S, window)
    true_grads = file._attention_grad.definition(grad.double(), *wide, truth, true_sums, *pieces, S, window)
    for got, wanted in zip((out, *grads), (truth, *true_grads), strict=True):
        assert got.shape == wanted.shape
        strides = ([step for step, n in zip(t.stride(), t.shape, strict=True) if n > 1] for t in (got, wanted))
        assert len({*map(tuple, strides)}) == 1  # that of an axis of one means nothing
        roundings = 3 + (pieces[3] is not None and len(got) == len(k))
        left = 2**-22 * grad.double().norm() * (q.shape[1] / k.shape[1]) ** 0.5
        assert (got - wanted).norm() <= roundings * torch.finfo(q.dtype).eps / 2 * wanted.norm() + left
    assert (sums - true_sums).abs().max() <= 1e-5


@on_gpu
@pytest.mark.parametrize("kernel", KERNELS, indirect=True)
@pytest.mark.parametrize(
    ("H", "K", "E"),
    [
        *[(8, 2, E) for E in (64, 96, 128, 192, 256)],
        *[(1, 1, 64), (4, 4, 128), (6, 2, 128), (7, 1, 128), (12, 1, 64), (12, 12, 64), (64, 8, 128), (2, 2, 32)],
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_compute_the_definition(kernel: str, H: int, K: int, E: int, dtype: torch.dtype) -> None:
    S, cases = 1024, ([300, 5, 1, 1742], [1] * 100 + [156, 3, 509, 1, 255, 1024], None)
    if kernel == "flex_attention" and (E not in (64, 256) or dtype == torch.float16):
        cases = cases[:1]
    for lengths, window in product(cases, (0, 100)):
        q, k, v, grad = (heads(2 * S, n, E, seed, "cuda").to(dtype) for seed, n in enumerate((H, K, K, H)))
        starts = starts_of(lengths or [S, S], S).cuda()
        assert file.attention_kernel(q) == kernel
        check(q, k, v, grad, (starts, *bounds_of(starts), None) if lengths else WHOLE, S, window)


@on_gpu
@pytest.mark.parametrize("kernel", KERNELS, indirect=True)
@pytest.mark.parametrize(("H", "K", "E"), [(32, 8, 128), (16, 16, 64), (6, 2, 64), (4, 1, 256)])
def test_kernels_of_ranks_compute_the_definition(kernel: str, H: int, K: int, E: int) -> None:
    N, chance = 4096, random.Random(2)
    cuts = sorted(chance.sample(range(1, N), 12))
    cases = [700, 1, 3000, 395], [1] * N, [128, 256, 1664, 2048], [b - a for a, b in pairwise([0, *cuts, N])]
    halves = [*range(16)], [*range(8), *range(24, 32)], sorted(chance.sample(range(32), 16))
    if kernel == "flex_attention":
        cases, halves = cases[:1], halves[1:2]
    for lengths, chunks, window in product(cases, halves, (0, 200)):
        starts = starts_of(lengths, N).cuda()
        pieces = of_rank(starts, chunks, window)
        given = [heads(N, n, E, seed, "cuda").to(torch.bfloat16) for seed, n in enumerate((H, K, K, H))]
        own = pieces[3]
        check(given[0][own], *given[1:3], given[3][own], pieces, N, window)


@on_gpu
@pytest.mark.parametrize("kernel", KERNELS, indirect=True)
@pytest.mark.parametrize("window", [0, 100])
def test_compiled_blocks_attend_to_documents(kernel: str, window: int) -> None:
    """The first call of what is compiled is watched by torch."""
    starts = starts_of([300, 5, 1, 1742], 1024).cuda()
    given = [heads(2048, n, 64, seed, "cuda").to(torch.bfloat16).requires_grad_() for seed, n in enumerate((8, 2, 2))]
    grad, pieces = heads(2048, 8, 64, 3, "cuda").to(torch.bfloat16), (starts, *bounds_of(starts), None)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return OPERATOR(q, k, v, *pieces, 1024, window)[0] * 1.0

    compiled, plain = (with_grads(each, given, grad) for each in (torch.compile(attend), attend))
    for got, wanted in zip(compiled, plain, strict=True):
        assert (got - wanted).norm() <= torch.finfo(torch.bfloat16).eps * wanted.norm()


@on_gpu
@pytest.mark.parametrize("kernel", KERNELS[:1], indirect=True)
def test_deterministic_kernels_repeat_their_bits(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    starts = starts_of([700, 1, 3000, 395], 4096).cuda()
    for E, pieces in product((64, 128, 256), (WHOLE, (starts, *bounds_of(starts), None))):
        q, k, v, grad = (heads(4096, n, E, seed, "cuda").to(torch.bfloat16) for seed, n in enumerate((8, 2, 2, 8)))
        out, sums = OPERATOR(q, k, v, *pieces, 4096, 0)
        first, *others = (GRADIENT(grad, q, k, v, out, sums, *pieces, 4096, 0) for _ in range(4))
        assert all(torch.equal(a, b) for again in others for a, b in zip(first, again, strict=True))
