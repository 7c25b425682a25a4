"""Device code of the weights' gradients of `titanlite.kernels.grouped_matmul`: what is contracted has ragged ends.

A tile of a group's gradient runs over the rows of the group. Its last step reads rows of the next group, too: of one
operand they are set to zero where they lie.
"""

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
    PRODUCER_REGISTERS,
    await_empty,
    await_ready,
    read_word,
    write_words,
)
from titanlite.kernels.device.grouped_tiles import (
    COLUMNS,
    ROWS,
    SHARE,
    STAGES,
    STEP,
    WORDS,
    allocate_tiles,
    begin_load,
    half_tiles,
    store_half,
)
from titanlite.kernels.device.launch import launch
from titanlite.kernels.device.operands import aligned
from titanlite.kernels.device.specialised_operands import blocks
from titanlite.kernels.device.specialised_producer import tile_position


@gluon.jit
def _produce_contracted(
    given, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, SHARE: gl.constexpr, STAGES: gl.constexpr
):
    """Claim tiles of all groups, one after the other; say where each lies, and load its rows."""
    a_desc, b_desc, a_bufs, b_bufs, words, ready, empty, offsets, counter, G, N, K = given
    it = 0
    x_tiles = (N + BM - 1) // BM
    y_tiles = (K + BN - 1) // BN
    tile = gl.atomic_add(counter, 1, sem="relaxed", scope="gpu")
    while tile < G * x_tiles * y_tiles:
        group = tile // (x_tiles * y_tiles)
        x, y = tile_position(tile % (x_tiles * y_tiles), x_tiles, y_tiles, SHARE)
        first = gl.load(offsets + group)
        n = gl.load(offsets + group + 1) - first
        await_empty(empty, it, STAGES)
        write_words(words, it % STAGES * WORDS, group * N + x * BM, y * BN, n, 0, 0)
        tile = gl.atomic_add(counter, 1, sem="relaxed", scope="gpu")
        if n == 0:
            mbarrier.arrive(ready.index(it % STAGES), count=1)
            it += 1
        for row in range(first, first + n, BK):
            slot = begin_load(a_desc, b_desc, ready, empty, it, 2, STAGES)
            for half in gl.static_range(2):
                at = [row, x * BM + half * (BM // 2)]
                tma.async_copy_global_to_shared(a_desc, at, ready.index(slot), a_bufs.index(2 * slot + half))
            tma.async_copy_global_to_shared(b_desc, [row, y * BN], ready.index(slot), b_bufs.index(slot))
            it += 1
    await_empty(empty, it, STAGES)
    write_words(words, it % STAGES * WORDS, -1, 0, 0, 0, 0)
    mbarrier.arrive(ready.index(it % STAGES), count=1)


@gluon.jit
def _clear_rows(buffer, n):
    """Set to zero the rows of a block from number n on."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    x = buffer.load(layout)
    row = gl.arange(0, buffer.shape[0], layout=gl.SliceLayout(1, layout))
    buffer.store(gl.where((row < n)[:, None], x, gl.zeros_like(x)))
    fence_async_shared()


@gluon.jit
def _contract_rows(given, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, W: gl.constexpr):
    """Compute half number W of each tile."""
    a_bufs, b_bufs, c_bufs, words, ready, empty, c_desc = given
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    c_buf = c_bufs.index(W)
    it = 0
    await_ready(ready, 0, STAGES)
    row = read_word(words, 0)
    while row >= 0:
        at = it % STAGES * WORDS
        column = read_word(words, at + 1)
        n = read_word(words, at + 2)
        acc = gl.zeros((HALF, BN), gl.float32, layout)
        for k in range(0, n, BK):
            slot = it % STAGES
            await_ready(ready, it, STAGES)
            a = a_bufs.index(2 * slot + W)
            if n - k < BK:
                _clear_rows(a, n - k)
            acc = warpgroup_mma(a.permute((1, 0)), b_bufs.index(slot), acc, use_acc=True, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
            if k > 0:
                mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), count=1)
            it += 1
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        if n == 0:  # the words alone
            it += 1
        mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), count=1)
        store_half(acc, c_desc, c_buf, row + HALF * W, column)
        await_ready(ready, it, STAGES)
        row = read_word(words, it % STAGES * WORDS)
    tma.store_wait(pendings=0)


@gluon.jit
def _grouped_weight_gradient(
    a_desc, b_desc, c_desc, offsets, counter, G, N, K,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, SHARE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    a_bufs, b_bufs, c_bufs, words, ready, empty = allocate_tiles(a_desc, b_desc, c_desc, 2, STAGES)
    producer = (a_desc, b_desc, a_bufs, b_bufs, words, ready, empty, offsets, counter, G, N, K)
    consumer = (a_bufs, b_bufs, c_bufs, words, ready, empty, c_desc)
    gl.warp_specialize([
        (_contract_rows, (consumer, BN, BK, STAGES, 0)),
        (_contract_rows, (consumer, BN, BK, STAGES, 1)),
        (_produce_contracted, (producer, BM, BN, BK, SHARE, STAGES)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


def launch_grouped_gradient(grad: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """Launch the operator's kernel."""
    (R, N), K, G = grad.shape, x.shape[1], len(offsets) - 1
    grad, x = aligned(grad.contiguous()), aligned(x.contiguous())
    out, counter = x.new_empty(G, N, K), offsets.new_zeros(1)
    launch(
        _grouped_weight_gradient, (R, G, N, K, x.dtype), multiprocessors(x.device), (grad, x, out, offsets, counter),
        lambda: (
            blocks(grad, (R, N), N, (STEP, ROWS // 2)), blocks(x, (R, K), K, (STEP, COLUMNS)),
            half_tiles(out, COLUMNS), offsets, counter, G, N, K, ROWS, COLUMNS, STEP, SHARE, STAGES,
        ),
        num_warps=4,
    )  # fmt: skip
    return out
