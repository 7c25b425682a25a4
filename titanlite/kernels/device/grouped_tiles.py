"""Share roles and buffers between the kernels of `titanlite.kernels.grouped_matmul`.

A producer warp claims tiles and loads; two warpgroups of 64 rows each multiply, and do not wait for each other. A
finished half of a tile leaves by TMA while the next one is under way.
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

from titanlite.kernels.device.document_tiles import allocate_barriers, allocate_words, await_empty, stacked
from titanlite.kernels.device.launch import Blocks
from titanlite.kernels.device.specialised_operands import SHARED_MEMORY, blocks

ROWS = 128
"""Rows of a tile, half of them for each consumer."""
STEP_BYTES = 128
"""Bytes of a row that are contracted in one step: the width that TMA swizzles."""
WORDS = gl.constexpr(5)
"""Numbers that the producer tells the consumers of a tile."""
_OTHERS = 2048  # bytes of shared memory for words, barriers and what warp specialisation keeps there
SHARE = 16
"""Blocks of rows that share a pass over the columns."""


@gluon.jit
def allocate_tiles(a_desc, b_desc, c_desc, A_HALVES: gl.constexpr, STAGES: gl.constexpr):
    """Allocate what producer and consumers share. A_HALVES: in how many blocks the rows of a tile come."""
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, stacked(A_HALVES * STAGES, a_desc), a_desc.layout)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, stacked(STAGES, b_desc), b_desc.layout)
    c_bufs = gl.allocate_shared_memory(c_desc.dtype, stacked(2, c_desc), c_desc.layout)
    words = allocate_words(STAGES * WORDS)
    ready, empty = allocate_barriers(STAGES, 2)
    return a_bufs, b_bufs, c_bufs, words, ready, empty


@gluon.jit
def begin_load(a_desc, b_desc, ready, empty, it, A_HALVES: gl.constexpr, STAGES: gl.constexpr):
    """Wait until the buffers of a step are free, and say how many bytes will come; returns the slot."""
    slot = it % STAGES
    await_empty(empty, it, STAGES)
    mbarrier.expect(ready.index(slot), A_HALVES * a_desc.block_type.nbytes + b_desc.block_type.nbytes)
    return slot


@gluon.jit
def start_product(acc, a, b, SPLIT: gl.constexpr):
    """Start the product of a step, whose sum is added to the others: here, or by the tensor cores."""
    if SPLIT:
        sums = warpgroup_mma(a, b, gl.zeros_like(acc), use_acc=False, is_async=True)
    else:
        sums = warpgroup_mma(a, b, acc, use_acc=True, is_async=True)
    return sums


@gluon.jit
def finish_product(acc, sums, it, empty, HAS_BEFORE, SPLIT: gl.constexpr, STAGES: gl.constexpr):
    """Release the buffers of the step whose product is there: of this one, or of the one before it in the same sum.

    Hopper's tensor cores add float8 products with about 14 bits. With SPLIT they add those of one step alone, and steps
    are added in float32, by one consumer while the other has the tensor cores.
    """
    if SPLIT:
        sums = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
        mbarrier.arrive(empty.index(it % STAGES), count=1)
        sums += acc
    else:
        sums = warpgroup_mma_wait(num_outstanding=1, deps=(sums,))
        if HAS_BEFORE:
            mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), count=1)
    return sums


@gluon.jit
def finish_sum(acc, it, empty, SPLIT: gl.constexpr, STAGES: gl.constexpr):
    """Wait for the last product of a sum, and release its buffers."""
    if not SPLIT:
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), count=1)
    return acc


@gluon.jit
def store_half(acc, c_desc, c_buf, row, column):
    """Start to store half a tile, when the one before has left the buffer."""
    tma.store_wait(pendings=0)
    c_buf.store(acc.to(c_buf.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(c_desc, [row, column], c_buf)


class TileShape(NamedTuple):
    """The shape of a kernel's tiles: columns, elements of a step, steps on their way, whether their sums are split."""

    columns: int
    step: int
    stages: int
    split: bool


def tile_shape(dtype: torch.dtype, fast: bool) -> TileShape:
    """Return the shape of tiles for operands of a dtype; sums that are split take twice the registers."""
    columns = 256 if fast or dtype.itemsize > 1 else 128
    of_stage, of_halves = (ROWS + columns) * STEP_BYTES, ROWS * columns * 2
    stages = (SHARED_MEMORY - _OTHERS - of_halves) // of_stage
    return TileShape(columns, STEP_BYTES // dtype.itemsize, stages, columns == 128)


def half_tiles(out: Tensor, columns: int) -> Blocks:
    """View a result, of any number of dims, as a matrix in halves of tiles."""
    return blocks(out, (out.numel() // out.shape[-1], out.shape[-1]), out.shape[-1], (ROWS // 2, columns))
