"""Roles and buffers that the kernels of `titanlite.kernels.grouped_matmul` share.

A producer warp claims tiles and loads; two warpgroups of 64 rows each multiply, and do not wait for each other. TMA
stores a finished half of a tile, part by part, during the next tile.
"""

from typing import NamedTuple

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

from titanlite.kernels.device.launch import Blocks
from titanlite.kernels.device.shared_buffers import HALF, allocate_barriers, allocate_words, await_empty, stacked
from titanlite.kernels.device.specialised_matmul import PART
from titanlite.kernels.device.specialised_operands import SHARED_MEMORY, blocks

ROWS = 128
"""Rows of a tile, half of them for each consumer."""
COLUMNS = 256
"""Columns of a tile: narrower ones would read operands from the L2 cache faster than it gives them."""
STEP_BYTES = 128
"""Bytes of a row that are contracted in one step: the width that TMA swizzles."""
WORDS = gl.constexpr(5)
"""Numbers about a tile that the producer sends to the consumers."""
_OUT_BUFFERS = gl.constexpr(2)
"""Parts of a consumer's result that are stored at once."""
_OTHERS = 3072  # bytes of shared memory for scales, words, barriers and what warp specialisation keeps there
SHARE = 16
"""Blocks of rows that share a pass over the columns."""


@gluon.jit
def allocate_tiles(a_desc, b_desc, c_desc, A_HALVES: gl.constexpr, STAGES: gl.constexpr):
    """Allocate what producer and consumers share. A_HALVES: in how many blocks the rows of a tile come."""
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, stacked(A_HALVES * STAGES, a_desc), a_desc.layout)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, stacked(STAGES, b_desc), b_desc.layout)
    c_bufs = gl.allocate_shared_memory(c_desc.dtype, stacked(2 * _OUT_BUFFERS, c_desc), c_desc.layout)
    words = allocate_words(STAGES * WORDS)
    ready, empty = allocate_barriers(STAGES, 2)
    return a_bufs, b_bufs, c_bufs, words, ready, empty


@gluon.jit
def begin_load(a_desc, b_desc, ready, empty, it, A_HALVES: gl.constexpr, STAGES: gl.constexpr):
    """Wait until the buffers of a step are free, announce the bytes that will come, and return the slot."""
    slot = it % STAGES
    await_empty(empty, it, STAGES)
    mbarrier.expect(ready.index(slot), A_HALVES * a_desc.block_type.nbytes + b_desc.block_type.nbytes)
    return slot


@gluon.jit
def no_sums(BN: gl.constexpr, SPLIT: gl.constexpr, BITS: gl.constexpr):
    """Return the sums that a consumer begins with: of all columns, or with SPLIT of the left and of the right half."""
    COLUMNS: gl.constexpr = BN // 2 if SPLIT else BN
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 256 // BITS])
    sums = gl.zeros((HALF, COLUMNS), gl.float32, layout)
    return sums, sums


@gluon.jit
def add_step(sums, rest, a, b, it, empty, HAS_BEFORE, SPLIT: gl.constexpr, STAGES: gl.constexpr):
    """Add the product of a step, and release the buffers of the last finished one.

    Hopper's tensor cores add float8 products with about 14 bits. With SPLIT they add only the products of one step, and
    steps are added in float32, by one consumer while the other uses the tensor cores; in halves of the columns, since
    sums and products of all columns would not fit into registers.
    """
    if SPLIT:
        COLUMNS: gl.constexpr = sums.shape[1]
        product = warpgroup_mma(a, b.slice(0, COLUMNS, dim=1), gl.zeros_like(sums), use_acc=False, is_async=True)
        sums += warpgroup_mma_wait(num_outstanding=0, deps=(product,))
        product = warpgroup_mma(a, b.slice(COLUMNS, COLUMNS, dim=1), gl.zeros_like(rest), use_acc=False, is_async=True)
        product = warpgroup_mma_wait(num_outstanding=0, deps=(product,))
        mbarrier.arrive(empty.index(it % STAGES), count=1)
        rest += product
    else:
        sums = warpgroup_mma(a, b, sums, use_acc=True, is_async=True)
        sums = warpgroup_mma_wait(num_outstanding=1, deps=(sums,))
        if HAS_BEFORE:
            mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), count=1)
    return sums, rest


@gluon.jit
def finish_sum(sums, it, empty, SPLIT: gl.constexpr, STAGES: gl.constexpr):
    """Wait for the last product of a sum, and release its buffers."""
    if not SPLIT:
        sums = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
        mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), count=1)
    return sums


@gluon.jit
def allocate_scales(BN: gl.constexpr):
    """Allocate the scales of a tile's columns for each consumer."""
    return gl.allocate_shared_memory(gl.float32, [2, BN], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def load_scales(scales, column, columns, BN: gl.constexpr):
    """Start to load the scales of a tile's columns, of `columns` in all, beside its products."""
    at = column + gl.arange(0, BN, layout=gl.BlockedLayout([1], [32], [4], [0]))
    return gl.load(scales + at, mask=at < columns, other=0.0)


@gluon.jit
def scale_part(part, p: gl.constexpr, scales):
    """Scale part number p of a tile by column, with the scales of the tile in shared memory."""
    return part * scales.slice(p * PART, PART).load(gl.SliceLayout(0, part.type.layout))[None, :]


@gluon.jit
def store_part(part, p: gl.constexpr, c_desc, c_bufs, row, column, W: gl.constexpr):
    """Start to store part number p of consumer W's half of a tile, when the buffer's last one has left it."""
    c_buf = c_bufs.index(W * _OUT_BUFFERS + p % _OUT_BUFFERS)
    tma.store_wait(pendings=_OUT_BUFFERS - 1)
    c_buf.store(part.to(c_buf.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(c_desc, [row, column], c_buf)


@gluon.jit
def store_rows(part, p: gl.constexpr, out, c_bufs, row, end, column, columns, W: gl.constexpr):
    """Store the rows of a part that are before the end, to a matrix of `columns` columns."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    c_buf = c_bufs.index(W * _OUT_BUFFERS + p % _OUT_BUFFERS)
    tma.store_wait(pendings=0)
    c_buf.store(part.to(c_buf.dtype))
    rows = row + gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))
    at = column + gl.arange(0, PART, layout=gl.SliceLayout(0, layout))
    places = out + rows.to(gl.int64)[:, None] * columns + at[None, :]
    places = gl.max_contiguous(gl.multiple_of(places, [1, 16]), [1, 8])  # stored 16 bytes at a time
    gl.store(places, c_buf.load(layout), mask=(rows < gl.where(column < columns, end, 0))[:, None])


class TileShape(NamedTuple):
    """Elements of a step, steps loaded at once, and whether sums are split."""

    step: int
    stages: int
    split: bool


def tile_shape(dtype: torch.dtype, fast: bool) -> TileShape:
    """Return the shape of tiles for operands of a dtype."""
    of_stage, of_parts = (ROWS + COLUMNS) * STEP_BYTES, ROWS * PART.value * _OUT_BUFFERS.value * 2
    stages = (SHARED_MEMORY - _OTHERS - of_parts) // of_stage
    return TileShape(STEP_BYTES // dtype.itemsize, stages, dtype.itemsize == 1 and not fast)


def tile_parts(out: Tensor) -> Blocks:
    """View a result, of any number of dims, as a matrix in the parts of tiles that a consumer stores."""
    return blocks(out, (out.numel() // out.shape[-1], out.shape[-1]), out.shape[-1], (HALF.value, PART.value))
