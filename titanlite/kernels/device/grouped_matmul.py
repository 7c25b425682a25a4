"""Device code of `titanlite.kernels.grouped_matmul`: one launch for all groups, whatever their numbers of rows.

The tiles of a group begin at its first row. The last tile of a group may also read rows of the next group, which it
does not store. Tiles are numbered group by group, and the producer advances through the groups as it claims tiles.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

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
    store_rows,
    tile_parts,
    tile_shape,
)
from titanlite.kernels.device.launch import launch
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


@gluon.jit
def _produce_rows(
    given, B_K_MAJOR: gl.constexpr, BESIDE: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    SHARE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Claim tiles of all groups, group by group. For each, send its position to the consumers and load its operands."""
    a_desc, b_desc, a_bufs, b_bufs, words, ready, empty, offsets, counter, G, N, K = given
    it = 0
    group = 0
    before = 0  # tiles of all earlier groups
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
            write_words(words, it % STAGES * WORDS, (row, end, y * BN, group, 0))
            tile = gl.atomic_add(counter, 1, sem="relaxed", scope="gpu")
            for k in range(0, K, BK):
                slot = begin_load(a_desc, b_desc, ready, empty, it, 1, STAGES)
                tma.async_copy_global_to_shared(a_desc, [row, k], ready.index(slot), a_bufs.index(slot))
                if BESIDE:
                    at = [y * BN, group * K + k]
                elif B_K_MAJOR:
                    at = [group * N + y * BN, k]
                else:
                    at = [group * K + k, y * BN]
                tma.async_copy_global_to_shared(b_desc, at, ready.index(slot), b_bufs.index(slot))
                it += 1
        else:
            before += x_tiles * y_tiles
            group += 1
            first = end
            end = gl.load(offsets + gl.minimum(group + 1, G))
            x_tiles = (end - first + BM - 1) // BM
    await_empty(empty, it, STAGES)
    write_words(words, it % STAGES * WORDS, (-1, 0, 0, 0, 0))
    mbarrier.arrive(ready.index(it % STAGES), count=1)


@gluon.jit
def _multiply_rows(
    given, B_K_MAJOR: gl.constexpr, BN: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr, W: gl.constexpr
):
    """Compute and store half number W (64 rows) of each tile that the producer announces."""
    a_bufs, b_bufs, c_bufs, words, ready, empty, c_desc, out = given[:8]
    row_scales, column_scales, scale_bufs, of_group, N, steps = given[8:]
    it = 0
    await_ready(ready, 0, STAGES)
    row = read_word(words, 0)
    while row >= 0:
        at = it % STAGES * WORDS
        end = read_word(words, at + 1)
        column = read_word(words, at + 2)
        group = read_word(words, at + 3)
        row += HALF * W
        if row < end:
            sums, rest = no_sums(BN, SPLIT, a_bufs.dtype.primitive_bitwidth)
            rows = row + gl.arange(0, HALF, layout=gl.SliceLayout(1, sums.type.layout))
            if row_scales is not None:
                of_rows = gl.load(row_scales + rows, mask=rows < end, other=0.0)
                of_columns = load_scales(column_scales + group * of_group, column, N, BN)
            for k in range(steps):
                slot = it % STAGES
                await_ready(ready, it, STAGES)
                a = a_bufs.index(slot).slice(HALF * W, HALF, dim=0)
                b = b_bufs.index(slot).permute((1, 0)) if B_K_MAJOR else b_bufs.index(slot)
                sums, rest = add_step(sums, rest, a, b, it, empty, k > 0, SPLIT, STAGES)
                it += 1
            sums = finish_sum(sums, it, empty, SPLIT, STAGES)
            if row_scales is not None:
                sums = sums * of_rows[:, None]
                rest = rest * of_rows[:, None]
                scale_bufs.index(W).store(of_columns)
            parts = column_parts(sums)
            if SPLIT:
                parts += column_parts(rest)
            for p in gl.static_range(BN // PART):
                part = parts[p]
                if row_scales is not None:
                    part = scale_part(part, p, scale_bufs.index(W))
                if row + HALF <= end:
                    store_part(part, p, c_desc, c_bufs, row, column + p * PART, W)
                else:
                    store_rows(part, p, out, c_bufs, row, end, column + p * PART, N, W)
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
    a_desc, b_desc, c_desc, out, row_scales, column_scales, offsets, counter, of_group, G, N, K,
    B_K_MAJOR: gl.constexpr, BESIDE: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    SPLIT: gl.constexpr, SHARE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Multiply the rows of each of G groups by the group's weight, and scale the product by row and by column.

    B_K_MAJOR: whether rows of weights are along K. BESIDE: whether the groups' weights lie side by side in memory, [N,
    G·K]; otherwise they are stacked. of_group: number of column scales of each group; 0 if all groups share them.
    """
    a_bufs, b_bufs, c_bufs, words, ready, empty = allocate_tiles(a_desc, b_desc, c_desc, 1, STAGES)
    producer = (a_desc, b_desc, a_bufs, b_bufs, words, ready, empty, offsets, counter, G, N, K)
    steps = (K + BK - 1) // BK
    scale_bufs = words  # a placeholder if there are no scales
    if column_scales is not None:
        scale_bufs = allocate_scales(BN)
    consumer = (
        a_bufs, b_bufs, c_bufs, words, ready, empty, c_desc, out,
        row_scales, column_scales, scale_bufs, of_group, N, steps,
    )  # fmt: skip
    gl.warp_specialize([
        (_multiply_rows, (consumer, B_K_MAJOR, BN, SPLIT, STAGES, 0)),
        (_multiply_rows, (consumer, B_K_MAJOR, BN, SPLIT, STAGES, 1)),
        (_produce_rows, (producer, B_K_MAJOR, BESIDE, BM, BN, BK, SHARE, STAGES)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


def launch_grouped_matmul(a: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return launch_scaled_grouped_matmul(a, weight, None, None, offsets, a.dtype, True)


def launch_scaled_grouped_matmul(
    a: Tensor,
    weight: Tensor,
    scale_inv: Tensor | None,
    weight_scale_inv: Tensor | None,
    offsets: Tensor,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    """Run the scaled operator, or without scales the plain one, whose weights may be transposed in memory."""
    (R, K), (G, N, _), tile = a.shape, weight.shape, tile_shape(a.dtype, fast_accum)
    is_read = weight.mT.is_contiguous() if scale_inv is None else weight.stride() == (K, G * K, 1)
    weight = weight if is_read else weight.contiguous()
    beside = not weight.is_contiguous() and weight.stride(2) == 1
    by_k = beside or weight.is_contiguous()
    of_group = N if weight_scale_inv is not None and len(weight_scale_inv) > 1 else 0
    a, weight = aligned(a.contiguous()), aligned(weight)
    out, counter = a.new_empty(R, N, dtype=out_dtype), offsets.new_zeros(1)
    shape = (N, G * K) if beside else (G * N, K) if by_k else (G * K, N)
    box = (COLUMNS, tile.step) if by_k else (tile.step, COLUMNS)
    launch(
        _grouped_matmul,
        (R, G, N, K, by_k, beside, of_group, a.dtype, out_dtype, tile.split),
        multiprocessors(a.device),
        (a, weight, out, scale_inv, weight_scale_inv, offsets, counter),
        lambda: (
            blocks(a, (R, K), K, (ROWS, tile.step)), blocks(weight, shape, shape[1], box),
            tile_parts(out), out, scale_inv, weight_scale_inv, offsets, counter,
            of_group, G, N, K, by_k, beside, ROWS, COLUMNS, tile.step, tile.split, SHARE, tile.stages,
        ),
        num_warps=4,
    )  # fmt: skip
    return out
