"""Causal attention with context parallelism: P ranks share N tokens, and each rank's tokens attend to those of all.

The N tokens are cut into chunks of C tokens, and each rank has n = N / (P·C) of these chunks, in order. Of the other
ranks' chunks a rank needs only keys and values of the documents that its own tokens are part of. It receives these
chunks before forward, and again before backward. Then it sends their gradients back to the owners, which add them up in
the order of ranks.

    chunks   [2, (P - 1)·n] int64   indices of the chunks to send, among the rank's own, sorted by receiver;
                                    indices of the chunks to receive, among all, sorted by sender
    counts   [2, P] int64, on CPU   number of chunks to, and from, each rank; the rest of `chunks` is undefined

Source: gathers instead of a ring: Llama Team 2024, "The Llama 3 Herd of Models", section 3.3.2.
"""

from collections import Counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.device import Device, host_tensors
from titanlite.kernels.attention import Bounds, with_gradient
from titanlite.kernels.collectives import process_group_of
from titanlite.kernels.operators import Sent, Split, operator

exchanged = Counter[int]()
"""Number of times that this process has exchanged keys, by the window of the attention."""


class KeyChunks(NamedTuple):
    """The chunks of keys that ranks exchange, and their numbers per rank, as the table of this module shows them."""

    chunks: Tensor
    counts: Tensor


def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    longest: int,
    window: int,
    starts: Tensor,
    bounds: Bounds,
    places: Tensor,
    exchange: KeyChunks,
    group: str,
) -> Tensor:
    """Compute the `attention` of this rank's M tokens to the N tokens of all ranks of a group. Collective.

    Args:
        q, k, v, longest, window: see `attention`; of this rank's tokens. N is a multiple of `longest`.
        starts: [M] int32, index among the N tokens of the first token of each token's document.
        bounds: of this rank's pieces of documents, and of the keys among the N that they see within the window.
        places: [M] int32, index of each token among the N.
        exchange: the chunks to exchange.
        group: name of the process group.
    """
    return _context_attention(q, k, v, starts, *bounds, places, *exchange, group, longest, window)[0]


def _sent_keys(_device: Device, q: Tensor, k: Tensor, *others: Any) -> list[Sent]:
    exchanged[others[-1]] += 1
    return [Sent("all_to_all", _bytes_of_chunks(k, 0, *others[2:-2]))]


def _sent_for_gradients(_device: Device, grad: Tensor, q: Tensor, k: Tensor, *others: Any) -> list[Sent]:
    given = k, *others[4:-2]
    return [Sent("all_to_all", _bytes_of_chunks(given[0], direction, *given[1:])) for direction in (0, 1)]


def _bytes_of_chunks(
    k: Tensor, direction: int, _bounds: Tensor, _runs: Tensor, places: Tensor, chunks: Tensor, counts: Tensor, *_: Any
) -> int:
    """Return the bytes of keys and values sent to other ranks (direction 0), or of gradients sent back (1)."""
    with host_tensors():
        n = int(counts[direction].sum())
    return 2 * n * _tokens_of_chunk(places, chunks, counts) * k[0].numel() * k.itemsize


# Tensor-parallel ranks split the heads, as for `attention`.
@operator("context_attention", None, splits=(Split((1, 1, 1, *(None,) * 6), 1),), sends=_sent_keys)
def _context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    bounds: Tensor,
    runs: Tensor,
    places: Tensor,
    chunks: Tensor,
    counts: Tensor,
    group: str,
    longest: int,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Gather keys and values, and return the attention of each query and the log-sum-exp of its scores."""
    exchanged[window] += 1
    whole_k, whole_v = _gather_keys(k, v, places, chunks, counts, group)
    return torch.ops.titanlite.attention(q, whole_k, whole_v, starts, bounds, runs, places, longest, window)


@operator("context_attention_grad", None, splits=(Split((*(1,) * 6, *(None,) * 6), 1),), sends=_sent_for_gradients)
def _context_attention_grad(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    starts: Tensor,
    bounds: Tensor,
    runs: Tensor,
    places: Tensor,
    chunks: Tensor,
    counts: Tensor,
    group: str,
    longest: int,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    whole = _gather_keys(k, v, places, chunks, counts, group)
    d_q, d_k, d_v = torch.ops.titanlite.attention_grad(
        grad, q, *whole, out, sums, starts, bounds, runs, places, longest, window
    )
    del whole  # before the gradients are concatenated, which allocates as much
    return d_q, *_sum_at_owners(d_k, d_v, places, chunks, counts, group)


def _gather_keys(
    k: Tensor, v: Tensor, places: Tensor, chunks: Tensor, counts: Tensor, group: str
) -> tuple[Tensor, Tensor]:
    """Gather keys and values of all tokens, [N, K, E] each; zeros in chunks that this rank does not need."""
    n_ranks, C = counts.shape[1], _tokens_of_chunk(places, chunks, counts)
    both = torch.cat((k, v), 1)
    sent, got, (for_each, from_each) = _lists(chunks, counts)
    rows = both.view(-1, C, *both.shape[1:])
    arrived = _swap_chunks(rows[sent], for_each, from_each, group)
    whole = rows.new_zeros(len(rows) * n_ranks, *rows.shape[1:])
    whole[_own(places, C)] = rows
    whole[got] = arrived
    k, v = whole.flatten(0, 1).split(k.shape[1], 1)
    return k, v


def _sum_at_owners(
    d_k: Tensor, d_v: Tensor, places: Tensor, chunks: Tensor, counts: Tensor, group: str
) -> tuple[Tensor, Tensor]:
    """Send gradients of keys and values to their owners. Return the sums for this rank's own ones, [M, K, E] each.

    `d_k` and `d_v`, [N, K, E], are the gradients from this rank's queries. Sums are formed in float32 or wider.
    """
    C = _tokens_of_chunk(places, chunks, counts)
    both = torch.cat((d_k, d_v), 1)
    rows = both.view(-1, C, *both.shape[1:])
    sent, got, (for_each, from_each) = _lists(chunks, counts)
    arrived = _swap_chunks(rows[got], from_each, for_each, group)
    sums = rows[_own(places, C)].to(torch.promote_types(d_k.dtype, torch.float32))
    for at, of_rank in zip(sent.split(for_each), arrived.split(for_each), strict=True):
        sums[at] += of_rank  # a rank has each chunk once
    k, v = sums.flatten(0, 1).to(d_k.dtype).split(d_k.shape[1], 1)
    return k.contiguous(), v.contiguous()


def _tokens_of_chunk(places: Tensor, chunks: Tensor, counts: Tensor) -> int:
    return len(places) * (counts.shape[1] - 1) // chunks.shape[1]


def _own(places: Tensor, C: int) -> Tensor:
    """Return the indices of this rank's chunks among all chunks, [n]."""
    return places[::C].long() // C


def _lists(chunks: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, list[list[int]]]:
    """Return the indices of the chunks to send and to receive, and the numbers of chunks to and from each rank."""
    each = counts.tolist()
    return chunks[0, : sum(each[0])], chunks[1, : sum(each[1])], each


def _swap_chunks(rows: Tensor, sent: list[int], got: list[int], group: str) -> Tensor:
    """Exchange rows with all ranks, `sent[r]` to and `got[r]` from rank r; received rows are in the order of ranks."""
    arrived = rows.new_empty(sum(got), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows, got, sent, group=process_group_of(group))
    return arrived


with_gradient("context_attention", 3)
