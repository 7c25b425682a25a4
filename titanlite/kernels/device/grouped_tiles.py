"""Roles and buffers that the kernels of `titanlite.kernels.grouped_matmul` share.

A producer warp claims tiles and loads their operands. Two consumers, warpgroups with 64 rows of each tile, multiply and
do not wait for each other. TMA stores a finished half of a tile in parts, while the next tile is computed.
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
"""Rows of a tile. Each of the two consumers computes half of them."""
COLUMNS = 256
"""Columns of a tile. Narrower tiles would need their operands faster than the L2 cache delivers them."""
STEP_BYTES = 128
"""Bytes of an operand's row that are contracted in one step: the width that TMA swizzles."""
WORDS = gl.constexpr(5)
"""Numbers that the producer sends to the consumers for each tile."""
_OUT_BUFFERS = gl.constexpr(2)
"""Buffers of each consumer for parts of its result that TMA stores."""
_OTHERS = 3072  # bytes of shared memory for scales, words, barriers and Triton's warp specialisation
SHARE = 16
"""Blocks of rows whose tiles are computed in one pass over the columns."""


@gluon.jit
def allocate_tiles(a_desc, b_desc, c_desc, A_HALVES: gl.constexpr, STAGES: gl.constexpr):
    """Allocate the buffers and barriers that the roles share. A_HALVES: number of loads for a tile's rows, 1 or 2."""
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, stacked(A_HALVES * STAGES, a_desc), a_desc.layout)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, stacked(STAGES, b_desc), b_desc.layout)
    c_bufs = gl.allocate_shared_memory(c_desc.dtype, stacked(2 * _OUT_BUFFERS, c_desc), c_desc.layout)
    words = allocate_words(STAGES * WORDS)
    ready, empty = allocate_barriers(STAGES, 2)
    return a_bufs, b_bufs, c_bufs, words, ready, empty


@gluon.jit
def begin_load(a_desc, b_desc, ready, empty, it, A_HALVES: gl.constexpr, STAGES: gl.constexpr):
    """Wait until the buffers of step `it` are free, announce the bytes to be loaded, and return the buffers' index."""
    slot = it % STAGES
    await_empty(empty, it, STAGES)
    mbarrier.expect(ready.index(slot), A_HALVES * a_desc.block_type.nbytes + b_desc.block_type.nbytes)
    return slot


@gluon.jit
def no_sums(BN: gl.constexpr, SPLIT: gl.constexpr, BITS: gl.constexpr):
    """Return a consumer's sums, set to zero: with SPLIT of the left and of the right half of BN columns, otherwise of
    all columns, twice. BITS: size of an operand's element."""
    COLUMNS: gl.constexpr = BN // 2 if SPLIT else BN
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 256 // BITS])
    sums = gl.zeros((HALF, COLUMNS), gl.float32, layout)
    return sums, sums


@gluon.jit
def add_step(sums, rest, a, b, it, empty, HAS_BEFORE, SPLIT: gl.constexpr, STAGES: gl.constexpr):
    """Add the product of step `it` to the sums, and release the buffers of the last finished step.

    Hopper's tensor cores add float8 products with a precision of about 14 bits. With SPLIT they add only the products
    of one step, and one consumer adds the steps in float32 while the other uses the tensor cores. `sums` and `rest` are
    then halves of the columns, because sums and products of all columns would not fit into registers.
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
    """Wait for the last product of a tile, and release its buffers. With SPLIT, `add_step` has done so."""
    if not SPLIT:
        sums = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
        mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), count=1)
    return sums


@gluon.jit
def allocate_scales(BN: gl.constexpr):
    """Allocate shared memory for the scales of a tile's BN columns, once for each of the two consumers."""
    return gl.allocate_shared_memory(gl.float32, [2, BN], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def load_scales(scales, column, columns, BN: gl.constexpr):
    """Start to load the scales of a tile's BN columns from `column` on; 0 for columns beyond `columns`."""
    at = column + gl.arange(0, BN, layout=gl.BlockedLayout([1], [32], [4], [0]))
    return gl.load(scales + at, mask=at < columns, other=0.0)


@gluon.jit
def scale_part(part, p: gl.constexpr, scales):
    """Scale the columns of part number p of a tile. scales: of all the tile's columns, in shared memory."""
    return part * scales.slice(p * PART, PART).load(gl.SliceLayout(0, part.type.layout))[None, :]


@gluon.jit
def store_part(part, p: gl.constexpr, c_desc, c_bufs, row, column, W: gl.constexpr):
    """Start to store part number p of consumer W's half of a tile, once the last store from its buffer has ended."""
    c_buf = c_bufs.index(W * _OUT_BUFFERS + p % _OUT_BUFFERS)
    tma.store_wait(pendings=_OUT_BUFFERS - 1)
    c_buf.store(part.to(c_buf.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(c_desc, [row, column], c_buf)


@gluon.jit
def store_rows(part, p: gl.constexpr, out, c_bufs, row, end, column, columns, W: gl.constexpr):
    """Store only the rows of part number p of consumer W that lie before row `end`, to a matrix of `columns` columns.
    TMA would also store the rows that belong to the next group."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    c_buf = c_bufs.index(W * _OUT_BUFFERS + p % _OUT_BUFFERS)
    tma.store_wait(pendings=0)
    c_buf.store(part.to(c_buf.dtype))
    rows = row + gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))
    at = column + gl.arange(0, PART, layout=gl.SliceLayout(0, layout))
    places = out + rows.to(gl.int64)[:, None] * columns + at[None, :]
    places = gl.max_contiguous(gl.multiple_of(places, [1, 16]), [1, 8])  # so that 16 bytes are stored at a time
    gl.store(places, c_buf.load(layout), mask=(rows < gl.where(column < columns, end, 0))[:, None])


class TileShape(NamedTuple):
    """Contracted elements per step, steps that are loaded at once, and whether `add_step` splits sums."""

    step: int
    stages: int
    split: bool


def tile_shape(dtype: torch.dtype, fast: bool) -> TileShape:
    """Return the shape of tiles for operands of a dtype. fast: let tensor cores add all float8 products."""
    of_stage, of_parts = (ROWS + COLUMNS) * STEP_BYTES, ROWS * PART.value * _OUT_BUFFERS.value * 2
    stages = (SHARED_MEMORY - _OTHERS - of_parts) // of_stage
    return TileShape(STEP_BYTES // dtype.itemsize, stages, dtype.itemsize == 1 and not fast)


def tile_parts(out: Tensor) -> Blocks:
    """View a result with any number of dims as a matrix, in blocks as large as the parts that a consumer stores."""
    return blocks(out, (out.numel() // out.shape[-1], out.shape[-1]), out.shape[-1], (HALF.value, PART.value))
