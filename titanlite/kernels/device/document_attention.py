"""Device code of `titanlite.kernels.document_attention`: FlashAttention for Hopper that knows where documents begin.

A producer warp loads, two warpgroups of 64 rows each attend (`document_tiles`). The scores of a block are formed while
those before weigh their values: each warpgroup has two products on their way, and while one of the two computes
exponentials, the other has the tensor cores.

Source: Shah et al. 2024, "FlashAttention-3", section 3.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from titanlite.kernels.device.channel import multiprocessors
from titanlite.kernels.device.document_tiles import (
    CONSUMER_REGISTERS,
    HALF,
    LOG2E,
    PRODUCER_REGISTERS,
    ROWS,
    allocate_barriers,
    allocate_words,
    await_ready,
    first_seen,
    head_blocks,
    heads_of_tile,
    masked_scores,
    produce_query_tiles,
    read_word,
    stacked,
    with_whole_rows,
)
from titanlite.kernels.device.launch import launch

STAGES = 4
"""Blocks of keys or values on their way."""
TURNS = gl.constexpr(2)
"""Tiles of queries on their way."""


@gluon.jit
def _start_scores(q, s, kv_bufs, ready, it, BN: gl.constexpr, E: gl.constexpr, STAGES: gl.constexpr):
    """Start [64, BN] products of queries with the keys of use `it`."""
    await_ready(ready, it, STAGES)
    keys = kv_bufs.index(it % STAGES).reshape([BN, E]).permute((1, 0))
    return warpgroup_mma(q, keys, s, use_acc=False, is_async=True)


@gluon.jit
def _start_sums(p, o, kv_bufs, ready, it, BN: gl.constexpr, E: gl.constexpr, STAGES: gl.constexpr):
    """Start to add to [64, E] the values of use `it`, weighed."""
    await_ready(ready, it, STAGES)
    return warpgroup_mma(p, kv_bufs.index(it % STAGES).reshape([BN, E]), o, use_acc=True, is_async=True)


@gluon.jit
def _softmax_weights(s, m, total, k0, tokens, first, scale, MASK: gl.constexpr, layout: gl.constexpr):
    """Return weights by the largest score so far, that score, the sum of weights, and by what older ones shrink."""
    if MASK:
        keys = k0 + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, layout))
        s = masked_scores(s, keys[None, :], tokens[:, None], first[:, None])
    largest = gl.maximum(m, gl.max(s, 1) * scale)
    p = gl.exp2(s * scale - largest[:, None])
    shrink = gl.exp2(m - largest)
    return p, largest, total * shrink + gl.sum(p, 1), shrink


@gluon.jit
def _attend_to(
    count, q, s, o, p, m, total, it, k0, rows, buffers, scale,
    MASK: gl.constexpr, layout: gl.constexpr, o_layout: gl.constexpr,
    BN: gl.constexpr, E: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Attend to so many blocks of keys, from k0 on backwards. The values of the last one are still to be added."""
    kv_bufs, ready, empty = buffers
    tokens, first = rows
    for _ in range(count):
        s = _start_scores(q, s, kv_bufs, ready, it, BN, E, STAGES)
        o = _start_sums(p, o, kv_bufs, ready, it - 1, BN, E, STAGES)
        s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
        mbarrier.arrive(empty.index(it % STAGES), count=1)
        weights, m, total, shrink = _softmax_weights(s, m, total, k0, tokens, first, scale, MASK, layout)
        o, p = warpgroup_mma_wait(num_outstanding=0, deps=(o, p))
        mbarrier.arrive(empty.index((it - 1) % STAGES), count=1)
        o = o * gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None]
        p = gl.convert_layout(weights.to(p.dtype), p.type.layout)
        it += 2
        k0 -= BN
    return s, o, p, m, total, it, k0


@gluon.jit
def _attend_halves(
    given, HEADS: gl.constexpr, P: gl.constexpr, TOKENS: gl.constexpr, BN: gl.constexpr, E: gl.constexpr,
    STAGES: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Attend with half number W of each tile."""
    q_bufs, kv_bufs, o_bufs, words, q_ready, q_empty, ready, empty = given[:8]
    starts, places, o_desc, sums, window, scale = given[8:]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, E, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    row = HALF * W + gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))
    o_buf = o_bufs.index(W)
    buffers = (kv_bufs, ready, empty)
    it = 0
    turn = 0
    await_ready(q_ready, 0, TURNS)
    t0 = read_word(words, 0)
    while t0 >= 0:
        slot = turn % TURNS
        group = read_word(words, slot * 5 + 1)
        n = read_word(words, slot * 5 + 2)
        free = read_word(words, slot * 5 + 3 + W)
        q = q_bufs.index(slot).reshape([2 * HALF, E]).slice(HALF * W, HALF, dim=0)
        tokens = t0 + row // P
        rows = (tokens, first_seen(starts, places, tokens, window))
        k0 = t0 + TOKENS - BN
        s = gl.zeros((HALF, BN), gl.float32, layout)
        o = gl.zeros((HALF, E), gl.float32, o_layout)
        m = gl.full((HALF,), -1e30, gl.float32, gl.SliceLayout(1, layout))
        total = gl.zeros((HALF,), gl.float32, gl.SliceLayout(1, layout))
        s = _start_scores(q, s, kv_bufs, ready, it, BN, E, STAGES)
        s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
        mbarrier.arrive(empty.index(it % STAGES), count=1)
        weights, m, total, _shrink = _softmax_weights(s, m, total, k0, rows[0], rows[1], scale, True, layout)
        p = gl.convert_layout(weights.to(o_buf.dtype), p_layout)
        it += 2
        k0 -= BN
        s, o, p, m, total, it, k0 = _attend_to(
            free, q, s, o, p, m, total, it, k0, rows, buffers, scale, False, layout, o_layout, BN, E, STAGES
        )
        s, o, p, m, total, it, k0 = _attend_to(
            n - 1 - free, q, s, o, p, m, total, it, k0, rows, buffers, scale, True, layout, o_layout, BN, E, STAGES
        )
        mbarrier.arrive(q_empty.index(slot), count=1)
        o = _start_sums(p, o, kv_bufs, ready, it - 1, BN, E, STAGES)
        gl.store(sums + tokens * HEADS + group * P + row % P, (m + gl.log2(total)) / LOG2E)
        o, p = warpgroup_mma_wait(num_outstanding=0, deps=(o, p))
        mbarrier.arrive(empty.index((it - 1) % STAGES), count=1)
        o = o * gl.convert_layout(1.0 / total, gl.SliceLayout(1, o_layout))[:, None]
        tma.store_wait(pendings=0)
        o_buf.reshape([HALF, E]).store(o.to(o_buf.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(o_desc, [t0 + HALF * W // P, group * P, 0], o_buf)
        turn += 1
        await_ready(q_ready, turn, TURNS)
        t0 = read_word(words, turn % TURNS * 5)
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["window"])
def _attention_of_documents(
    q_desc, k_desc, v_desc, o_desc, sums, starts, places, counter, tiles, window, scale,
    HEADS: gl.constexpr, P: gl.constexpr, GROUPS: gl.constexpr, TOKENS: gl.constexpr, BN: gl.constexpr,
    E: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Write results and the logarithms of sums of exponentials. `scale` is of the scores, times log2(e)."""
    q_bufs = gl.allocate_shared_memory(q_desc.dtype, stacked(TURNS, q_desc), q_desc.layout)
    kv_bufs = gl.allocate_shared_memory(k_desc.dtype, stacked(STAGES, k_desc), k_desc.layout)
    o_bufs = gl.allocate_shared_memory(o_desc.dtype, stacked(2, o_desc), o_desc.layout)
    words = allocate_words(TURNS * 5)
    q_ready, q_empty = allocate_barriers(TURNS, 2)
    ready, empty = allocate_barriers(STAGES, 2)
    producer = (
        q_desc, None, k_desc, v_desc, q_bufs, q_bufs, kv_bufs, words,
        q_ready, q_empty, ready, empty, starts, places, counter, tiles, window,
    )  # fmt: skip
    consumer = (
        q_bufs, kv_bufs, o_bufs, words, q_ready, q_empty, ready, empty, starts, places, o_desc, sums, window, scale,
    )  # fmt: skip
    gl.warp_specialize([
        (_attend_halves, (consumer, HEADS, P, TOKENS, BN, E, STAGES, 0)),
        (_attend_halves, (consumer, HEADS, P, TOKENS, BN, E, STAGES, 1)),
        (produce_query_tiles, (producer, HEADS, P, GROUPS, TOKENS, BN, TURNS, STAGES)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


def attend(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, window: int, places: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attend as the operator does, with heads that fit."""
    (M, H, E), K = q.shape, k.shape[1]
    P, window = heads_of_tile(H, K), window or longest
    q, k, v = (with_whole_rows(t) for t in (q, k, v))
    out, sums = q.new_empty(M, H, E), q.new_empty(M, H, dtype=torch.float32)
    counter, tokens = starts.new_zeros(1), ROWS // P
    launch(
        _attention_of_documents,
        (q.shape, k.shape, window, q.dtype, q.stride(), k.stride(), v.stride(), places is None),
        multiprocessors(q.device),
        (q, k, v, starts, places, out, sums, counter),
        lambda: (
            head_blocks(q, tokens, P), head_blocks(k, ROWS, 1), head_blocks(v, ROWS, 1),
            head_blocks(out, tokens // 2, P), sums, starts, places, counter,
            M // tokens * (H // P), window, E**-0.5 * LOG2E.value,
            H, P, H // K // P, tokens, ROWS, E, STAGES,
        ),
        num_warps=4,
    )  # fmt: skip
    return out, sums
