"""Attention to documents by the device code for Hopper, run by threads and by Triton's interpreter: no GPU is needed.

Run as a module with TRITON_INTERPRET=1, which Triton looks at when it is imported.
"""

import random
from itertools import product
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from tests.support.gluon_threads import run_gluon
from tests.unit.kernels.test_document_places import CHUNK, drawn_lengths, places_of, what_is_seen
from tests.unit.models.test_document_attention import packed, starts_of
from titanlite.kernels.device import document_attention, document_attention_grad, document_tiles
from titanlite.kernels.document_attention import _document_attention, _document_attention_grad


def interpret(kernel, key, blocks, tensors, arguments, **options) -> None:
    if isinstance(kernel, JITFunction):
        run_gluon(kernel, arguments())
    else:
        kernel[(blocks,)](*arguments())


def results_and_grads(given: list[Tensor], grad: Tensor, *more: Any) -> tuple[Tensor, ...]:
    q, k, v = given
    out, sums = document_attention.attend(q, k, v, *more)
    return out, sums, *document_attention_grad.attend_grad(grad, q, k, v, out, sums, *more)


def compare(lengths: list[int], S: int, of_ranks: list[list[int]], window: int, H: int, K: int) -> None:
    N, E, starts = sum(lengths), 16, starts_of(lengths, S)
    q, k, v, grad = (packed(N, n, E, seed).float() for seed, n in enumerate((H, K, K, H)))
    out, sums = _document_attention.definition(q.double(), k.double(), v.double(), starts, S, window)
    truth = (out, sums, *_document_attention_grad.definition(
        grad.double(), q.double(), k.double(), v.double(), out, sums, starts, S, window
    ))  # fmt: skip
    whole = results_and_grads([q, k, v], grad, starts, S, window, None)
    for got, wanted in zip(whole, truth, strict=True):
        assert (got - wanted).abs().max() < 1e-4 * max(1, wanted.abs().max().item())
    of_keys = [torch.zeros_like(k), torch.zeros_like(v)]
    for chunks in of_ranks:
        places = places_of(chunks)
        unseen = ~what_is_seen(starts[places], places, window, N).any(0)
        given = [q[places], *(t.masked_fill(unseen[:, None, None], 0) for t in (k, v))]
        ours = results_and_grads(given, grad[places], starts[places], S, window, places)
        for got, wanted in zip(ours[:3], whole[:3], strict=True):
            assert torch.equal(got, wanted[places]), "a query's results depend on the rank that has it"
        for total, part in zip(of_keys, ours[3:], strict=True):
            assert not part[unseen].any()
            total += part
    for got, wanted in zip(of_keys, truth[3:], strict=True):
        assert (got - wanted).abs().max() < 1e-4 * max(1, wanted.abs().max().item())


def main() -> None:
    document_attention.launch = document_attention_grad.launch = document_tiles.launch = interpret
    document_attention.multiprocessors = document_attention_grad.multiprocessors = lambda device: 1
    document_tiles._layout_of_heads = lambda *_: None
    document_tiles._SPANS = 4  # so that several steps find the spans
    torch.set_num_threads(1)
    for case, (H, K) in product(range(4), [(2, 2), (6, 2), (16, 1)]):
        chance = random.Random(100 * case + H)
        S = CHUNK * chance.choice([1, 2, 3, 6])
        chunks = chance.sample(range(6), 6)
        cut = chance.randrange(1, 6)
        of_ranks = [sorted(chunks[:cut]), sorted(chunks[cut:])]
        compare(drawn_lengths(6 * CHUNK, chance), S, of_ranks, (0, 1, 99, 319)[case], H, K)


if __name__ == "__main__":
    main()
