"""Device code of the weights' gradients of `titanlite.kernels.grouped_matmul`: sums over the rows of each group.

A tile of a group's gradient takes several steps over the rows of the group, which begin and end anywhere. Its first and
last step may also read rows of neighbouring groups. These rows are set to zero in the buffer of one operand.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from titanlite.kernels.device.channel import multiprocessors
from titanlite.kernels.device.grouped_tiles import (
    COLUMNS,
    ROWS,
    SHARE,
    WORDS,
    add_step,
    allocate_scales,
    allocate_tiles,
    begin_load,
    finish_sum,
    load_scales,
    no_sums,
    scale_part,
    store_part,
    tile_parts,
    tile_shape,
)
from titanlite.kernels.device.launch import Blocks, launch
from titanlite.kernels.device.operands import aligned
from titanlite.kernels.device.shared_buffers import (
    CONSUMER_REGISTERS,
    HALF,
    PRODUCER_REGISTERS,
    await_empty,
    await_ready,
    read_word,
    write_words,
)
from titanlite.kernels.device.specialised_matmul import PART, column_parts
from titanlite.kernels.device.specialised_operands import blocks
from titanlite.kernels.device.specialised_producer import tile_position

_MANY = gl.constexpr(2048)
"""Number of rows of a group from which on an additional step takes relatively little time."""


@gluon.jit
def _produce_contracted(
    given, BY_ROWS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, SHARE: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Claim tiles of all groups, group by group. For each, send its position to the consumers and load its operands.
    BY_ROWS: whether operands are contiguous along the contracted rows."""
    a_desc, b_desc, a_bufs, b_bufs, words, ready, empty, offsets, counter, G, N, K = given
    it = 0
    x_tiles = (N + BM - 1) // BM
    y_tiles = (K + BN - 1) // BN
    tile = gl.atomic_add(counter, 1, sem="relaxed", scope="gpu")
    while tile < G * x_tiles * y_tiles:
        group = tile // (x_tiles * y_tiles)
        x, y = tile_position(tile % (x_tiles * y_tiles), x_tiles, y_tiles, SHARE)
        first = gl.load(offsets + group)
        end = gl.load(offsets + group + 1)
        begin = first
        if BY_ROWS:
            line = first // BK * BK  # from this row on, a step reads whole lines of the L2 cache, not parts of two
            is_free = (end - line + BK - 1) // BK == (end - first + BK - 1) // BK
            if (end > first) & (is_free | (end - first >= _MANY)):
                begin = line
        await_empty(empty, it, STAGES)
        write_words(words, it % STAGES * WORDS, (group * N + x * BM, y * BN, end - begin, first - begin, 0))
        tile = gl.atomic_add(counter, 1, sem="relaxed", scope="gpu")
        if end == begin:
            mbarrier.arrive(ready.index(it % STAGES), count=1)
            it += 1
        for row in range(begin, end, BK):
            slot = begin_load(a_desc, b_desc, ready, empty, it, 2, STAGES)
            for half in gl.static_range(2):
                feature = x * BM + half * (BM // 2)
                at = [feature, row] if BY_ROWS else [row, feature]
                tma.async_copy_global_to_shared(a_desc, at, ready.index(slot), a_bufs.index(2 * slot + half))
            at = [y * BN, row] if BY_ROWS else [row, y * BN]
            tma.async_copy_global_to_shared(b_desc, at, ready.index(slot), b_bufs.index(slot))
            it += 1
    await_empty(empty, it, STAGES)
    write_words(words, it % STAGES * WORDS, (-1, 0, 0, 0, 0))
    mbarrier.arrive(ready.index(it % STAGES), count=1)


@gluon.jit
def _clear_others(buffer, first, end, BY_ROWS: gl.constexpr):
    """Set a block's rows of other groups, before `first` and from `end` on, to zero; with BY_ROWS its columns."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    x = buffer.load(layout)
    if BY_ROWS:
        row = gl.arange(0, buffer.shape[1], layout=gl.SliceLayout(0, layout))[None, :]
    else:
        row = gl.arange(0, buffer.shape[0], layout=gl.SliceLayout(1, layout))[:, None]
    buffer.store(gl.where((row >= first) & (row < end), x, gl.zeros_like(x)))
    fence_async_shared()


@gluon.jit
def _contract_rows(
    given, BY_ROWS: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr,
    W: gl.constexpr,
):  # fmt: skip
    """Compute and store half number W (64 rows) of each tile that the producer announces."""
    a_bufs, b_bufs, c_bufs, words, ready, empty, c_desc, row_scales, column_scales, scale_bufs, N, K = given
    it = 0
    await_ready(ready, 0, STAGES)
    row = read_word(words, 0)
    while row >= 0:
        at = it % STAGES * WORDS
        column = read_word(words, at + 1)
        end = read_word(words, at + 2)
        first = read_word(words, at + 3)
        row += HALF * W
        sums, rest = no_sums(BN, SPLIT, a_bufs.dtype.primitive_bitwidth)
        if row_scales is not None:
            rows = row % N + gl.arange(0, HALF, layout=gl.SliceLayout(1, sums.type.layout))
            of_rows = gl.load(row_scales + rows)
        if column_scales is not None:
            of_columns = load_scales(column_scales, column, K, BN)
        for k in range(0, end, BK):
            slot = it % STAGES
            await_ready(ready, it, STAGES)
            a = a_bufs.index(2 * slot + W)
            if (k < first) | (end - k < BK):
                _clear_others(a, first - k, end - k, BY_ROWS)
            b = b_bufs.index(slot)
            a = a if BY_ROWS else a.permute((1, 0))
            b = b.permute((1, 0)) if BY_ROWS else b
            sums, rest = add_step(sums, rest, a, b, it, empty, k > 0, SPLIT, STAGES)
            it += 1
        if end == 0:  # an empty group: the producer has sent words, but no operands
            it += 1
            if SPLIT:
                mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), count=1)
        sums = finish_sum(sums, it, empty, SPLIT, STAGES)
        if row_scales is not None:
            sums = sums * of_rows[:, None]
            rest = rest * of_rows[:, None]
        if column_scales is not None:
            scale_bufs.index(W).store(of_columns)
        parts = column_parts(sums)
        if SPLIT:
            parts += column_parts(rest)
        for p in gl.static_range(BN // PART):
            part = parts[p]
            if column_scales is not None:
                part = scale_part(part, p, scale_bufs.index(W))
            store_part(part, p, c_desc, c_bufs, row, column + p * PART, W)
        await_ready(ready, it, STAGES)
        row = read_word(words, it % STAGES * WORDS)
    tma.store_wait(pendings=0)


@gluon.jit
def _grouped_weight_gradient(
    a_desc, b_desc, c_desc, row_scales, column_scales, offsets, counter, G, N, K,
    BY_ROWS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, SPLIT: gl.constexpr,
    SHARE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute the gradient of each group's weight, [N, K]: a product contracted over the group's rows. BY_ROWS: whether
    the contracted dim is contiguous in both operands, as float8 requires."""
    a_bufs, b_bufs, c_bufs, words, ready, empty = allocate_tiles(a_desc, b_desc, c_desc, 2, STAGES)
    producer = (a_desc, b_desc, a_bufs, b_bufs, words, ready, empty, offsets, counter, G, N, K)
    scale_bufs = words  # a placeholder if there are no scales
    if column_scales is not None:
        scale_bufs = allocate_scales(BN)
    consumer = (
        a_bufs, b_bufs, c_bufs, words, ready, empty, c_desc,
        row_scales, column_scales, scale_bufs, N, K,
    )  # fmt: skip
    gl.warp_specialize([
        (_contract_rows, (consumer, BY_ROWS, BN, BK, SPLIT, STAGES, 0)),
        (_contract_rows, (consumer, BY_ROWS, BN, BK, SPLIT, STAGES, 1)),
        (_produce_contracted, (producer, BY_ROWS, BM, BN, BK, SHARE, STAGES)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


def launch_grouped_gradient(grad: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    return launch_scaled_grouped_gradient(grad, x, None, None, offsets, x.dtype, True)


def launch_scaled_grouped_gradient(
    grad: Tensor,
    x: Tensor,
    grad_scale_inv: Tensor | None,
    x_scale_inv: Tensor | None,
    offsets: Tensor,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    """Run the scaled operator, or without scales the plain one, whose operands are [R, N] and [R, K]."""
    tile, by_rows = tile_shape(x.dtype, fast_accum), x.dtype.itemsize == 1
    G, (N, K) = len(offsets) - 1, (len(grad), len(x)) if by_rows else (grad.shape[1], x.shape[1])
    out, counter = x.new_empty(G, N, K, dtype=out_dtype), offsets.new_zeros(1)
    grad, x = aligned(grad.contiguous()), aligned(x.contiguous())

    def view(operand: Tensor, width: int) -> Blocks:
        rows, columns = operand.shape
        return blocks(operand, (rows, columns), columns, (width, tile.step) if by_rows else (tile.step, width))

    launch(
        _grouped_weight_gradient,
        (grad.shape, G, N, K, x.dtype, out.dtype, tile.split, grad_scale_inv is None, x_scale_inv is None),
        multiprocessors(x.device),
        (grad, x, out, grad_scale_inv, x_scale_inv, offsets, counter),
        lambda: (
            view(grad, ROWS // 2), view(x, COLUMNS), tile_parts(out), grad_scale_inv, x_scale_inv, offsets, counter,
            G, N, K, by_rows, ROWS, COLUMNS, tile.step, tile.split, SHARE, tile.stages,
        ),
        num_warps=4,
    )  # fmt: skip
    return out
