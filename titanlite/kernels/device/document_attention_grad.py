"""Device code of the gradient of `titanlite.kernels.document_attention`, in two kernels without atomic sums.

    of queries           a tile of queries stays, blocks of keys pass by:    dQ += dS K
    of keys and values   a block of keys stays, tiles of queries pass by:    dV += Pᵀ dO,  dK += dSᵀ Q

    S = Q Kᵀ    P = exp(S - sums)    dP = dO Vᵀ    dS = P ∘ (dP - rowsum(dO ∘ O))

Both form P and dP: seven products in the place of five. In return no sum is shared between thread blocks, so two runs
give the same bits, and no copy of dQ in float32 is cleared, added to and read. Five products, with dQ added up by TMA
in the L2 cache, took 0.96 of the time at 131,072 tokens on an H200, and 1.06 at 8,192: the cache adds 1.5 TB/s where it
does not have the tile. The second works transposed: Pᵀ and dSᵀ leave the tensor cores in the registers in which the
next product wants them.

Source: Dao 2023, "FlashAttention-2", section 3.1; `document_tiles` for how the work is cut.
"""

import torch
import triton
import triton.language as tl
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
    await_empty,
    await_ready,
    first_seen,
    head_blocks,
    heads_of_tile,
    key_spans,
    load_block,
    masked_scores,
    produce_query_tiles,
    read_word,
    stacked,
    with_whole_rows,
    write_words,
)
from titanlite.kernels.device.launch import cdiv, launch

KEY_STAGES = 4
"""Blocks of keys or values on their way, beside a tile of queries."""
QUERY_ROWS = 64
"""Rows of a tile of queries that passes by a block of keys."""
QUERY_STAGES = 6
"""Such tiles, or those of the gradient, on their way."""
_DOT_ROWS = 32


@triton.jit
def _attention_row_dots(grad, out, dots, N, E: tl.constexpr, ROWS: tl.constexpr):
    """Sum the products of each row of two [N, E], in float32."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at, inside = row[:, None] * E + tl.arange(0, E)[None, :], (row < N)[:, None]
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(dots + row, tl.sum(g * tl.load(out + at, mask=inside, other=0.0).to(tl.float32), 1), mask=row < N)


@gluon.jit
def _queries_of_keys(
    count, q, g, dq, it, k0, rows, numbers, buffers, scale,
    MASK: gl.constexpr, layout: gl.constexpr, o_layout: gl.constexpr,
    BN: gl.constexpr, E: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Add what so many blocks of keys give, from k0 on backwards."""
    kv_bufs, ready, empty = buffers
    tokens, first = rows
    sums, dots = numbers
    for _ in range(count):
        k = kv_bufs.index(it % STAGES).reshape([BN, E])
        v = kv_bufs.index((it + 1) % STAGES).reshape([BN, E])
        zeros = gl.zeros((HALF, BN), gl.float32, layout)
        await_ready(ready, it, STAGES)
        s = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
        await_ready(ready, it + 1, STAGES)
        dp = warpgroup_mma(g, v.permute((1, 0)), zeros, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
        if MASK:
            keys = k0 + gl.arange(0, BN, layout=gl.SliceLayout(0, layout))
            s = masked_scores(s, keys[None, :], tokens[:, None], first[:, None])
        p = gl.exp2(s * scale - sums[:, None])
        dp = warpgroup_mma_wait(num_outstanding=0, deps=(dp,))
        mbarrier.arrive(empty.index((it + 1) % STAGES), count=1)
        ds = gl.convert_layout((p * (dp - dots[:, None])).to(q.dtype), gl.DotOperandLayout(0, o_layout, 2))
        dq = warpgroup_mma(ds, k, dq, use_acc=True, is_async=True)
        dq, ds = warpgroup_mma_wait(num_outstanding=0, deps=(dq, ds))
        mbarrier.arrive(empty.index(it % STAGES), count=1)
        it += 2
        k0 -= BN
    return dq, it, k0


@gluon.jit
def _of_queries(
    given, HEADS: gl.constexpr, P: gl.constexpr, TOKENS: gl.constexpr, BN: gl.constexpr, E: gl.constexpr,
    STAGES: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Compute the gradient of half number W of each tile of queries."""
    q_bufs, g_bufs, kv_bufs, o_bufs, words, q_ready, q_empty, ready, empty = given[:9]
    starts, places, o_desc, sums, dots, window, scale = given[9:]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, E, 16])
    row = HALF * W + gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))
    q = q_bufs.index(0).reshape([2 * HALF, E]).slice(HALF * W, HALF, dim=0)
    g = g_bufs.index(0).reshape([2 * HALF, E]).slice(HALF * W, HALF, dim=0)
    o_buf = o_bufs.index(W)
    buffers = (kv_bufs, ready, empty)
    it = 0
    turn = 0
    await_ready(q_ready, 0, 1)
    t0 = read_word(words, 0)
    while t0 >= 0:
        group = read_word(words, 1)
        n = read_word(words, 2)
        free = read_word(words, 3 + W)
        tokens = t0 + row // P
        rows = (tokens, first_seen(starts, places, tokens, window))
        place = tokens * HEADS + group * P + row % P
        numbers = (gl.load(sums + place) * LOG2E, gl.load(dots + place))
        k0 = t0 + TOKENS - BN
        dq = gl.zeros((HALF, E), gl.float32, o_layout)
        dq, it, k0 = _queries_of_keys(
            1, q, g, dq, it, k0, rows, numbers, buffers, scale * LOG2E, True, layout, o_layout, BN, E, STAGES
        )
        dq, it, k0 = _queries_of_keys(
            free, q, g, dq, it, k0, rows, numbers, buffers, scale * LOG2E, False, layout, o_layout, BN, E, STAGES
        )
        dq, it, k0 = _queries_of_keys(
            n - 1 - free, q, g, dq, it, k0, rows, numbers, buffers, scale * LOG2E, True, layout, o_layout, BN, E, STAGES
        )
        mbarrier.arrive(q_empty.index(0), count=1)
        tma.store_wait(pendings=0)
        o_buf.reshape([HALF, E]).store((dq * scale).to(o_buf.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(o_desc, [t0 + HALF * W // P, group * P, 0], o_buf)
        turn += 1
        await_ready(q_ready, turn, 1)
        t0 = read_word(words, 0)
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["window"])
def _attention_grad_of_queries(
    q_desc, g_desc, k_desc, v_desc, o_desc, sums, dots, starts, places, counter, tiles, window, scale,
    HEADS: gl.constexpr, P: gl.constexpr, GROUPS: gl.constexpr, TOKENS: gl.constexpr, BN: gl.constexpr,
    E: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    q_bufs = gl.allocate_shared_memory(q_desc.dtype, stacked(1, q_desc), q_desc.layout)
    g_bufs = gl.allocate_shared_memory(q_desc.dtype, stacked(1, q_desc), q_desc.layout)
    kv_bufs = gl.allocate_shared_memory(k_desc.dtype, stacked(STAGES, k_desc), k_desc.layout)
    o_bufs = gl.allocate_shared_memory(o_desc.dtype, stacked(2, o_desc), o_desc.layout)
    words = allocate_words(5)
    q_ready, q_empty = allocate_barriers(1, 2)
    ready, empty = allocate_barriers(STAGES, 2)
    producer = (
        q_desc, g_desc, k_desc, v_desc, q_bufs, g_bufs, kv_bufs, words,
        q_ready, q_empty, ready, empty, starts, places, counter, tiles, window,
    )  # fmt: skip
    consumer = (
        q_bufs, g_bufs, kv_bufs, o_bufs, words, q_ready, q_empty, ready, empty,
        starts, places, o_desc, sums, dots, window, scale,
    )  # fmt: skip
    gl.warp_specialize([
        (_of_queries, (consumer, HEADS, P, TOKENS, BN, E, STAGES, 0)),
        (_of_queries, (consumer, HEADS, P, TOKENS, BN, E, STAGES, 1)),
        (produce_query_tiles, (producer, HEADS, P, GROUPS, TOKENS, BN, 1, STAGES)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


@gluon.jit
def _produce_key_blocks(
    given,
    HEADS: gl.constexpr,
    P: gl.constexpr,
    GROUPS: gl.constexpr,
    TOKENS: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Claim blocks of keys, the longest work first; load each, its values, and the queries that see some of it."""
    q_desc, g_desc, k_desc, v_desc, k_buf, v_buf, q_bufs, words = given[:8]
    k_ready, k_empty, ready, empty, begins, ends, frees, order, counter, tiles = given[8:]
    it = 0
    turn = 0
    tile = gl.atomic_add(counter, 1, sem="relaxed", scope="gpu")
    while tile < tiles:
        following = gl.atomic_add(counter, 1, sem="relaxed", scope="gpu")
        block = gl.load(order + tile // (HEADS // P // GROUPS))
        head = tile % (HEADS // P // GROUPS)
        j0 = block * BN
        t0 = j0
        if begins is not None:
            t0 = gl.load(begins + block)
        n = (gl.load(ends + block) - t0 + TOKENS - 1) // TOKENS
        await_empty(k_empty, turn, 1)
        write_words(words, 0, (j0, head, n, gl.load(frees + 2 * block), gl.load(frees + 2 * block + 1)))
        if begins is not None:  # of the block's own tokens all are among the queries, or none
            write_words(words, 5, (t0, (gl.load(begins + block + 1) - t0) // TOKENS))
        mbarrier.expect(k_ready.index(0), 2 * k_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(k_desc, [j0, head, 0], k_ready.index(0), k_buf)
        tma.async_copy_global_to_shared(v_desc, [j0, head, 0], k_ready.index(0), v_buf)
        for group in range(head * GROUPS, (head + 1) * GROUPS):
            for i in range(n):
                it = load_block(q_desc, [t0 + i * TOKENS, group * P, 0], q_bufs, ready, empty, it, STAGES)
                it = load_block(g_desc, [t0 + i * TOKENS, group * P, 0], q_bufs, ready, empty, it, STAGES)
        tile = following
        turn += 1
    await_empty(k_empty, turn, 1)
    write_words(words, 0, (-1, 0, 0, 0, 0))
    mbarrier.arrive(k_ready.index(0), count=1)


@gluon.jit
def _keys_of_queries(
    count, k, v, dk, dv, it, t0, keys, group, numbers, buffers, scale,
    MASK: gl.constexpr, layout: gl.constexpr, o_layout: gl.constexpr, HEADS: gl.constexpr, P: gl.constexpr,
    TOKENS: gl.constexpr, E: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Add what so many tiles of queries give, from token t0 on."""
    q_bufs, ready, empty = buffers
    sums, dots, starts, places, window = numbers
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    column = gl.arange(0, TOKENS * P, layout=gl.SliceLayout(0, layout))
    for _ in range(count):
        tokens = t0 + column // P
        place = tokens * HEADS + group * P + column % P
        # What is subtracted is where the sums begin: it takes no registers of its own.
        less_sum = gl.load(sums + place) * (-LOG2E / scale)
        less_dot = -gl.load(dots + place)
        q = q_bufs.index(it % STAGES).reshape([TOKENS * P, E])
        g = q_bufs.index((it + 1) % STAGES).reshape([TOKENS * P, E])
        s = gl.zeros((HALF, TOKENS * P), gl.float32, layout) + less_sum[None, :]
        dp = gl.zeros((HALF, TOKENS * P), gl.float32, layout) + less_dot[None, :]
        await_ready(ready, it, STAGES)
        s = warpgroup_mma(k, q.permute((1, 0)), s, use_acc=True, is_async=True)
        await_ready(ready, it + 1, STAGES)
        dp = warpgroup_mma(v, g.permute((1, 0)), dp, use_acc=True, is_async=True)
        s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
        if MASK:
            own = tokens
            if places is not None:
                own = gl.load(places + tokens)
            first = gl.maximum(gl.load(starts + tokens), own - window + 1)
            s = masked_scores(s, keys[:, None], own[None, :], first[None, :])
        p = gl.exp2(s * scale)
        dp = warpgroup_mma_wait(num_outstanding=0, deps=(dp,))
        weights = gl.convert_layout(p.to(k.dtype), p_layout)
        dv = warpgroup_mma(weights, g, dv, use_acc=True, is_async=True)
        ds = gl.convert_layout((p * dp).to(k.dtype), p_layout)
        dk = warpgroup_mma(ds, q, dk, use_acc=True, is_async=True)
        dv, weights = warpgroup_mma_wait(num_outstanding=1, deps=(dv, weights))
        mbarrier.arrive(empty.index((it + 1) % STAGES), count=1)
        dk, ds = warpgroup_mma_wait(num_outstanding=0, deps=(dk, ds))
        mbarrier.arrive(empty.index(it % STAGES), count=1)
        it += 2
        t0 += TOKENS
    return dk, dv, it, t0


@gluon.jit
def _of_keys(
    given, HEADS: gl.constexpr, P: gl.constexpr, GROUPS: gl.constexpr, TOKENS: gl.constexpr, E: gl.constexpr,
    STAGES: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Compute the gradients of half number W of each block of keys and values."""
    k_buf, v_buf, q_bufs, dk_bufs, dv_bufs, words, k_ready, k_empty, ready, empty = given[:10]
    starts, places, dk_desc, dv_desc, sums, dots, window, scale = given[10:]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS * P, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, E, 16])
    row = HALF * W + gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))
    k = k_buf.reshape([2 * HALF, E]).slice(HALF * W, HALF, dim=0)
    v = v_buf.reshape([2 * HALF, E]).slice(HALF * W, HALF, dim=0)
    buffers = (q_bufs, ready, empty)
    numbers = (sums, dots, starts, places, window)
    it = 0
    turn = 0
    await_ready(k_ready, 0, 1)
    j0 = read_word(words, 0)
    while j0 >= 0:
        head = read_word(words, 1)
        n = read_word(words, 2)
        free = read_word(words, 3 + W)
        if places is None:
            begin = j0
            own = 2 * HALF // TOKENS
        else:
            begin = read_word(words, 5)
            own = read_word(words, 6)
        skipped = gl.minimum(own // 2 * W, n)  # queries before the keys of this half
        diagonal = gl.minimum(own // 2, n - skipped)
        middle = gl.minimum(gl.maximum(0, (free - begin) // TOKENS - skipped - diagonal), n - skipped - diagonal)
        dk = gl.zeros((HALF, E), gl.float32, o_layout)
        dv = gl.zeros((HALF, E), gl.float32, o_layout)
        for group in range(head * GROUPS, (head + 1) * GROUPS):
            for _ in range(2 * skipped):
                await_ready(ready, it, STAGES)
                mbarrier.arrive(empty.index(it % STAGES), count=1)
                it += 1
            t0 = begin + skipped * TOKENS
            dk, dv, it, t0 = _keys_of_queries(
                diagonal, k, v, dk, dv, it, t0, j0 + row, group, numbers, buffers, scale * LOG2E,
                True, layout, o_layout, HEADS, P, TOKENS, E, STAGES,
            )  # fmt: skip
            dk, dv, it, t0 = _keys_of_queries(
                middle, k, v, dk, dv, it, t0, j0 + row, group, numbers, buffers, scale * LOG2E,
                False, layout, o_layout, HEADS, P, TOKENS, E, STAGES,
            )  # fmt: skip
            dk, dv, it, t0 = _keys_of_queries(
                n - skipped - diagonal - middle, k, v, dk, dv, it, t0, j0 + row, group, numbers, buffers, scale * LOG2E,
                True, layout, o_layout, HEADS, P, TOKENS, E, STAGES,
            )  # fmt: skip
        mbarrier.arrive(k_empty.index(0), count=1)
        tma.store_wait(pendings=0)
        dv_bufs.index(W).reshape([HALF, E]).store(dv.to(v.dtype))
        dk_bufs.index(W).reshape([HALF, E]).store((dk * scale).to(k.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(dv_desc, [j0 + HALF * W, head, 0], dv_bufs.index(W))
        tma.async_copy_shared_to_global(dk_desc, [j0 + HALF * W, head, 0], dk_bufs.index(W))
        turn += 1
        await_ready(k_ready, turn, 1)
        j0 = read_word(words, 0)
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["window"])
def _attention_grad_of_keys(
    q_desc, g_desc, k_desc, v_desc, dk_desc, dv_desc, sums, dots, starts, places, begins, ends, frees, order, counter,
    tiles, window, scale,
    HEADS: gl.constexpr, P: gl.constexpr, GROUPS: gl.constexpr, TOKENS: gl.constexpr, BN: gl.constexpr,
    E: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    k_buf = gl.allocate_shared_memory(k_desc.dtype, k_desc.block_type.shape, k_desc.layout)
    v_buf = gl.allocate_shared_memory(k_desc.dtype, k_desc.block_type.shape, k_desc.layout)
    q_bufs = gl.allocate_shared_memory(q_desc.dtype, stacked(STAGES, q_desc), q_desc.layout)
    dk_bufs = gl.allocate_shared_memory(dk_desc.dtype, stacked(2, dk_desc), dk_desc.layout)
    dv_bufs = gl.allocate_shared_memory(dk_desc.dtype, stacked(2, dk_desc), dk_desc.layout)
    words = allocate_words(5 if places is None else 7)
    k_ready, k_empty = allocate_barriers(1, 2)
    ready, empty = allocate_barriers(STAGES, 2)
    producer = (
        q_desc, g_desc, k_desc, v_desc, k_buf, v_buf, q_bufs, words,
        k_ready, k_empty, ready, empty, begins, ends, frees, order, counter, tiles,
    )  # fmt: skip
    consumer = (
        k_buf, v_buf, q_bufs, dk_bufs, dv_bufs, words, k_ready, k_empty, ready, empty,
        starts, places, dk_desc, dv_desc, sums, dots, window, scale,
    )  # fmt: skip
    gl.warp_specialize([
        (_of_keys, (consumer, HEADS, P, GROUPS, TOKENS, E, STAGES, 0)),
        (_of_keys, (consumer, HEADS, P, GROUPS, TOKENS, E, STAGES, 1)),
        (_produce_key_blocks, (producer, HEADS, P, GROUPS, TOKENS, BN, STAGES)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


def attend_grad(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    starts: Tensor,
    longest: int,
    window: int,
    places: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients as the operator does, of heads that fit."""
    (M, H, E), (N, K, _) = q.shape, k.shape
    P, window, grad = heads_of_tile(H, K), window or longest, grad.contiguous()
    q, k, v = (with_whole_rows(t) for t in (q, k, v))
    key = (q.shape, k.shape, window, q.dtype, q.stride(), k.stride(), v.stride(), places is None)
    d_q, (d_k, d_v) = torch.empty_like(out), k.new_empty(2, N, K, E)
    dots = torch.empty_like(sums)
    (counter, other_counter), blocks = starts.new_zeros(2, 4), multiprocessors(q.device)  # both of them aligned
    tokens, few = ROWS // P, QUERY_ROWS // P
    launch(
        _attention_row_dots, (M, H, E, q.dtype), cdiv(M * H, _DOT_ROWS), (grad, out, dots),
        lambda: (grad, out, dots, M * H, E, _DOT_ROWS), num_warps=4,
    )  # fmt: skip
    launch(
        _attention_grad_of_queries, key, blocks, (q, grad, k, v, d_q, sums, dots, starts, places, counter),
        lambda: (
            head_blocks(q, tokens, P), head_blocks(grad, tokens, P), head_blocks(k, ROWS, 1), head_blocks(v, ROWS, 1),
            head_blocks(d_q, tokens // 2, P), sums, dots, starts, places, counter,
            M // tokens * (H // P), window, E**-0.5, H, P, H // K // P, tokens, ROWS, E, KEY_STAGES,
        ),
        num_warps=4,
    )  # fmt: skip
    begins, ends, frees, order = key_spans(starts, places, N // ROWS, window)
    launch(
        _attention_grad_of_keys, key, blocks,
        (q, grad, k, v, d_k, d_v, sums, dots, starts, places, begins, ends, frees, order, other_counter),
        lambda: (
            head_blocks(q, few, P), head_blocks(grad, few, P), head_blocks(k, ROWS, 1), head_blocks(v, ROWS, 1),
            head_blocks(d_k, HALF.value, 1), head_blocks(d_v, HALF.value, 1),
            sums, dots, starts, places, begins, ends, frees, order, other_counter,
            N // ROWS * K, window, E**-0.5, H, P, H // K // P, few, ROWS, E, QUERY_STAGES,
        ),
        num_warps=4,
    )  # fmt: skip
    return d_q, d_k, d_v
