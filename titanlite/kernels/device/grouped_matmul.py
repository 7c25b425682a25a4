"""Device code of `titanlite.kernels.grouped_matmul`: one launch for all groups, whatever rows they have.

The tiles of a group begin at its first row; its last one reads rows of the next group, too, and stores none of them.
The producer walks along the groups as the numbers of the tiles that it claims grow.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

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
from titanlite.kernels.device.launch import Blocks, launch
from titanlite.kernels.device.operands import aligned
from titanlite.kernels.device.specialised_operands import blocks
from titanlite.kernels.device.specialised_producer import tile_position


@gluon.jit
def _produce_rows(
    given, B_K_MAJOR: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, SHARE: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Claim tiles of all groups, one after the other; say where each lies, and load its operands."""
    a_desc, b_desc, a_bufs, b_bufs, words, ready, empty, offsets, counter, G, N, K = given
    it = 0
    group = 0
    before = 0  # tiles of the groups behind
    first = 0
    end = gl.load(offsets + 1)
    y_tiles = (N + BN - 1) // BN
    tile = gl.atomic_add(counter, 1, sem="relaxed", scope="gpu")
    x_tiles = (end + BM - 1) // BM
    while group < G:
        if tile < before + x_tiles * y_tiles:
            x, y = tile_position(tile - before, x_tiles, y_tiles, SHARE)
            row = first + x * BM
            await_empty(empty, it, STAGES)
            write_words(words, it % STAGES * WORDS, row, end, y * BN, group, 0)
            tile = gl.atomic_add(counter, 1, sem="relaxed", scope="gpu")
            for k in range(0, K, BK):
                slot = begin_load(a_desc, b_desc, ready, empty, it, 1, STAGES)
                tma.async_copy_global_to_shared(a_desc, [row, k], ready.index(slot), a_bufs.index(slot))
                at = [group * N + y * BN, k] if B_K_MAJOR else [group * K + k, y * BN]
                tma.async_copy_global_to_shared(b_desc, at, ready.index(slot), b_bufs.index(slot))
                it += 1
        else:
            before += x_tiles * y_tiles
            group += 1
            first = end
            end = gl.load(offsets + gl.minimum(group + 1, G))
            x_tiles = (end - first + BM - 1) // BM
    await_empty(empty, it, STAGES)
    write_words(words, it % STAGES * WORDS, -1, 0, 0, 0, 0)
    mbarrier.arrive(ready.index(it % STAGES), count=1)


@gluon.jit
def _multiply_rows(
    given, B_K_MAJOR: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Compute half number W of each tile."""
    a_bufs, b_bufs, c_bufs, words, ready, empty, c_desc, out, N, steps = given
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    c_buf = c_bufs.index(W)
    it = 0
    await_ready(ready, 0, STAGES)
    row = read_word(words, 0)
    while row >= 0:
        at = it % STAGES * WORDS
        end = read_word(words, at + 1)
        column = read_word(words, at + 2)
        row += HALF * W
        if row < end:
            acc = gl.zeros((HALF, BN), gl.float32, layout)
            for k in range(steps):
                slot = it % STAGES
                await_ready(ready, it, STAGES)
                a = a_bufs.index(slot).slice(HALF * W, HALF, dim=0)
                b = b_bufs.index(slot).permute((1, 0)) if B_K_MAJOR else b_bufs.index(slot)
                acc = warpgroup_mma(a, b, acc, use_acc=True, is_async=True)
                acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
                if k > 0:
                    mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), count=1)
                it += 1
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
            mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), count=1)
            if row + HALF <= end:
                store_half(acc, c_desc, c_buf, row, column)
            else:
                rows = row + gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))
                columns = column + gl.arange(0, BN, layout=gl.SliceLayout(0, layout))
                is_own = (rows < end)[:, None] & (columns < N)[None, :]
                gl.store(out + rows.to(gl.int64)[:, None] * N + columns[None, :], acc.to(c_buf.dtype), mask=is_own)
        else:
            for _ in range(steps):
                await_ready(ready, it, STAGES)
                mbarrier.arrive(empty.index(it % STAGES), count=1)
                it += 1
        await_ready(ready, it, STAGES)
        row = read_word(words, it % STAGES * WORDS)
    tma.store_wait(pendings=0)


@gluon.jit
def _grouped_matmul(
    a_desc, b_desc, c_desc, out, offsets, counter, G, N, K,
    B_K_MAJOR: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, SHARE: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    a_bufs, b_bufs, c_bufs, words, ready, empty = allocate_tiles(a_desc, b_desc, c_desc, 1, STAGES)
    producer = (a_desc, b_desc, a_bufs, b_bufs, words, ready, empty, offsets, counter, G, N, K)
    consumer = (a_bufs, b_bufs, c_bufs, words, ready, empty, c_desc, out, N, (K + BK - 1) // BK)
    gl.warp_specialize([
        (_multiply_rows, (consumer, B_K_MAJOR, BN, BK, STAGES, 0)),
        (_multiply_rows, (consumer, B_K_MAJOR, BN, BK, STAGES, 1)),
        (_produce_rows, (producer, B_K_MAJOR, BM, BN, BK, SHARE, STAGES)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


def launch_grouped_matmul(a: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Launch the operator's kernel."""
    (R, K), (G, N, _) = a.shape, weight.shape
    a = aligned(a.contiguous())
    by_k = weight.is_contiguous()
    weight = aligned(weight if by_k or weight.mT.is_contiguous() else weight.contiguous())
    by_k = weight.is_contiguous()
    out, counter = a.new_empty(R, N), offsets.new_zeros(1)
    launch(
        _grouped_matmul, (R, G, N, K, by_k, a.dtype), multiprocessors(a.device), (a, weight, out, offsets, counter),
        lambda: (
            blocks(a, (R, K), K, (ROWS, STEP)), _weight_blocks(weight, by_k), half_tiles(out, COLUMNS),
            out, offsets, counter, G, N, K, by_k, ROWS, COLUMNS, STEP, SHARE, STAGES,
        ),
        num_warps=4,
    )  # fmt: skip
    return out


def _weight_blocks(weight: Tensor, by_k: bool) -> Blocks:
    """View the weights of all groups as one matrix in blocks of a step."""
    G, N, K = weight.shape
    if by_k:
        return blocks(weight, (G * N, K), K, (COLUMNS, STEP))
    return blocks(weight, (G * K, N), N, (STEP, COLUMNS))
