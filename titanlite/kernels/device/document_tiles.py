"""Cut the work of document attention, for all of its kernels; and load, by one warp, for those that compute.

A tile is 128 rows of queries: heads that share a head of keys, token by token, as many as there are by a power of two.
So 32 tokens of 4 heads each read the same keys, and little of a tile lies beyond the end of a document. Its keys are
those from the beginning of its first token's document to its last token, in blocks of 128 that end with the tile:

    documents         | a a a a a a a | b b b b b b b b b b b b b |
    tile of queries                                       * * * *
    blocks of keys                [ masked ][  free  ][ masked  ]        the last ends with the tile

Blocks in between are seen by all rows, and need no mask. Tiles are claimed one by one; tokens from the last to the
first, for late tokens see more. The producer tells the consumers, in words of shared memory that every thread reads,
what they are to do: a number that came out of a reduction would make the compiler take their loops for divergent.

Queries may be of some of the tokens alone (`places`). Those of a tile are consecutive even so: consumers count as if
all tokens before were there, and only the producer looks up where the keys lie.
"""

from collections.abc import Mapping
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from titanlite.kernels.device.launch import Blocks, launch
from titanlite.kernels.device.specialised_protocol import barrier

ROWS = 128
"""Rows of a tile of queries, half of them for each consumer; and keys of a block."""
HALF = gl.constexpr(64)
LOG2E = gl.constexpr(1.4426950408889634)
CONSUMER_REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(24)
_DTYPES: Mapping[torch.dtype, gl.dtype] = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
_SPANS = 128
"""Blocks of keys whose spans `_attention_spans` finds at once."""


def head_blocks(x: Tensor, tokens: int, n: int) -> Blocks:
    """View [M, heads, E] in blocks of n heads of so many tokens."""
    box = (tokens, n, x.shape[2])
    layout = _layout_of_heads(box, x.dtype)
    return Blocks(x, tuple(x.shape), x.stride()[:2], box, layout)


def with_whole_rows(x: Tensor) -> Tensor:
    """Return [M, heads, E] as TMA reads it: copied, unless heads are runs of numbers at multiples of 16 bytes."""
    places = [stride * x.itemsize for stride in x.stride()[:2]] + [x.data_ptr()]
    return x if x.stride(2) == 1 and not any(place % 16 for place in places) else x.contiguous()


@cache
def _layout_of_heads(box: tuple[int, int, int], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(box), _DTYPES[dtype])


@gluon.jit
def _put_word(buffer, value):
    buffer.store(gl.full([1], value, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def write_words(buffer, at, values):
    """Write words of shared memory from number `at` on, by a role of one warp."""
    for i in gl.static_range(len(values)):
        _put_word(buffer.index(at + i), values[i])
    barrier()


@gluon.jit
def read_word(buffer, at):
    """Read a word of shared memory, by a role of four warps."""
    return gl.max(buffer.index(at).load(gl.BlockedLayout([1], [32], [4], [0])), axis=0)


@gluon.constexpr_function
def stacked(n, desc):
    """Return the shape of n buffers for a descriptor's blocks."""
    return [n, *desc.block_type.shape]


@gluon.jit
def allocate_words(N: gl.constexpr):
    """Allocate N words of shared memory."""
    return gl.allocate_shared_memory(gl.int32, [N, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def allocate_barriers(N: gl.constexpr, CONSUMERS: gl.constexpr):
    """Allocate barriers of N buffers: that they are ready, and that as many consumers have done with them."""
    ready = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    return ready, empty


@gluon.jit
def await_ready(ready, it, N: gl.constexpr):
    """Wait until use number `it` of N buffers may be read."""
    mbarrier.wait(ready.index(it % N), (it // N) & 1)


@gluon.jit
def await_empty(empty, it, N: gl.constexpr):
    """Wait until use number `it` of N buffers may be written."""
    mbarrier.wait(empty.index(it % N), ((it // N) & 1) ^ 1)


@gluon.jit
def load_block(desc, at, bufs, ready, empty, it, N: gl.constexpr):
    """Start to load a block into the next of N buffers; returns the number of the next use."""
    await_empty(empty, it, N)
    mbarrier.expect(ready.index(it % N), desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, at, ready.index(it % N), bufs.index(it % N))
    return it + 1


@gluon.jit
def first_seen(starts, places, tokens, window):
    """Return the first token that each one sees, as if tokens before it were queries too: as far back as it lies."""
    first = gl.load(starts + tokens)
    if places is not None:
        first -= gl.load(places + tokens) - tokens
    return gl.maximum(first, tokens - window + 1)


@gluon.jit
def produce_query_tiles(
    given, HEADS: gl.constexpr, P: gl.constexpr, GROUPS: gl.constexpr, TOKENS: gl.constexpr, BN: gl.constexpr,
    TURNS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Claim tiles of queries; load each, its gradient too if there is one, and the blocks of keys and values it sees.

    HEADS: of queries, P to a tile, and GROUPS such groups to a head of keys. TURNS: buffers for tiles of queries.
    STAGES: for blocks of keys, or values.
    """
    q_desc, g_desc, k_desc, v_desc, q_bufs, g_bufs, kv_bufs, words = given[:8]
    q_ready, q_empty, ready, empty, starts, places, counter, tiles, window = given[8:]
    it = 0
    turn = 0
    tile = gl.atomic_add(counter, 1, sem="relaxed", scope="gpu")
    while tile < tiles:
        following = gl.atomic_add(counter, 1, sem="relaxed", scope="gpu")
        t0 = ((tiles - 1 - tile) // (HEADS // P)) * TOKENS
        group = tile % (HEADS // P)
        # What the first token sees begins first; a block is free for a half if it is behind where its last one's does.
        first = first_seen(starts, places, t0, window)
        middle_first = first_seen(starts, places, t0 + (HALF - 1) // P, window)
        last_first = first_seen(starts, places, t0 + TOKENS - 1, window)
        k0 = t0 + TOKENS - BN
        n = (t0 + TOKENS - first + BN - 1) // BN
        free = gl.minimum(gl.maximum(0, (k0 - middle_first) // BN), n - 1)
        other_free = gl.minimum(gl.maximum(0, (k0 - last_first) // BN), n - 1)
        slot = turn % TURNS
        await_empty(q_empty, turn, TURNS)
        write_words(words, slot * 5, (t0, group, n, free, other_free))
        if g_desc is None:
            mbarrier.expect(q_ready.index(slot), q_desc.block_type.nbytes)
        else:
            mbarrier.expect(q_ready.index(slot), 2 * q_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(g_desc, [t0, group * P, 0], q_ready.index(slot), g_bufs.index(slot))
        tma.async_copy_global_to_shared(q_desc, [t0, group * P, 0], q_ready.index(slot), q_bufs.index(slot))
        if places is not None:
            k0 += gl.load(places + t0) - t0
        for _ in range(n):
            it = load_block(k_desc, [k0, group // GROUPS, 0], kv_bufs, ready, empty, it, STAGES)
            it = load_block(v_desc, [k0, group // GROUPS, 0], kv_bufs, ready, empty, it, STAGES)
            k0 -= BN
        tile = following
        turn += 1
    await_empty(q_empty, turn, TURNS)
    write_words(words, turn % TURNS * 5, (-1, 0, 0, 0, 0))
    mbarrier.arrive(q_ready.index(turn % TURNS), count=1)


@gluon.jit
def masked_scores(s, keys, tokens, first):
    """Set to −∞ what a token does not see: keys behind it, and before the first that it sees."""
    return gl.where((keys <= tokens) & (keys >= first), s, -float("inf"))


@triton.jit
def _first_beyond(starts, places, keys, M, window, STEPS: tl.constexpr):
    """Return, of each key, the first token whose document or window begins behind it, by bisection."""
    low, high = tl.zeros_like(keys), tl.zeros_like(keys) + M
    for _ in range(STEPS):
        middle = (low + high) // 2
        is_open = low < high
        start = tl.load(starts + middle, mask=is_open, other=0)
        place = middle if places is None else tl.load(places + middle, mask=is_open, other=0)
        is_beyond = (start > keys) | (place >= keys + window)
        low = tl.where(is_open & ~is_beyond, middle + 1, low)
        high = tl.where(is_open & is_beyond, middle, high)
    return low


@triton.jit
def _work_of(begins, ends, block, N, BLOCK: tl.constexpr):
    begin = block * BLOCK if begins is None else tl.load(begins + block, mask=block < N, other=0)
    return tl.load(ends + block, mask=block < N, other=0) - begin


@triton.jit
def _attention_spans(
    starts, places, begins, ends, frees, order, M, N, window,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Find, of each block of keys, the tokens that see some; of each half of it, those behind that see all; its rank.

    order: [N] blocks, from that with most tokens to that with fewest. One thread block does it: N is small.
    """
    if begins is not None:
        tl.store(begins + N, M)
    for base in range(0, N, CHUNK):
        block = base + tl.arange(0, CHUNK)
        inside, first = block < N, block * BLOCK
        if begins is not None:  # a token's place is beyond the key before the block if it is not before the block
            tl.store(begins + block, _first_beyond(places, places, first - 1, M, window, STEPS), mask=inside)
        tl.store(ends + block, _first_beyond(starts, places, first + BLOCK - 1, M, window, STEPS), mask=inside)
        for half in tl.static_range(2):
            free = _first_beyond(starts, places, first + half * (BLOCK // 2), M, window, STEPS)
            tl.store(frees + 2 * block + half, free, mask=inside)
    tl.debug_barrier()
    for base in range(0, N, CHUNK):
        block = base + tl.arange(0, CHUNK)
        work = _work_of(begins, ends, block, N, BLOCK)
        rank = tl.zeros((CHUNK,), tl.int32)
        for other_base in range(0, N, CHUNK):
            other = other_base + tl.arange(0, CHUNK)
            others = tl.where(other < N, _work_of(begins, ends, other, N, BLOCK), -1)
            is_before = (others[None, :] > work[:, None]) | (
                (others[None, :] == work[:, None]) & (other[None, :] < block[:, None])
            )
            rank += tl.sum(is_before.to(tl.int32), 1)
        tl.store(order + rank, block, mask=block < N)


def key_spans(
    starts: Tensor, places: Tensor | None, N: int, window: int
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """Return, of blocks of `ROWS` keys, the tokens that see them.

    Args:
        starts: [M] int32, where the document of each token begins.
        places: [M] int32, of the tokens among keys; None: they are all tokens.
        N: blocks.
        window: tokens that a token sees, the own one included.

    Returns:
        Which token is the first that is not before a block, [N + 1], and None without places; where the tokens end that
        see some of a block, [N]; where those behind end that see all of each half of it, [2·N]; and the blocks, those
        that most tokens see first, [N]. All int32.
    """
    M = len(starts)
    begins = None if places is None else starts.new_empty(N + 1)
    ends, frees, order = (starts.new_empty(n) for n in (N, 2 * N, N))
    launch(
        _attention_spans, (M, N, window, places is None), 1, (starts, places, begins, ends, frees, order),
        lambda: (starts, places, begins, ends, frees, order, M, N, window, ROWS, _SPANS, M.bit_length()), num_warps=8,
    )  # fmt: skip
    return begins, ends, frees, order


def heads_of_tile(H: int, K: int) -> int:
    """Return how many heads of queries that share one of keys are in a tile: the power of two in their number."""
    return min(HALF.value, (H // K) & -(H // K))
