"""Share roles and buffers between the kernels of `titanlite.kernels.grouped_matmul`.

A producer warp claims tiles and loads; two warpgroups of 64 rows each multiply, and do not wait for each other. A
finished half of a tile leaves by TMA while the next one is under way.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from titanlite.kernels.device.document_tiles import allocate_barriers, allocate_words, stacked
from titanlite.kernels.device.launch import Blocks
from titanlite.kernels.device.specialised_operands import blocks

ROWS, COLUMNS, STEP = 128, 256, 64
"""Rows and columns of a tile, and what is contracted in one step, in 16 bits."""
STAGES = 3
"""Steps on their way."""
WORDS = gl.constexpr(5)
"""Numbers that the producer tells the consumers of a tile."""
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
    mbarrier.wait(empty.index(slot), ((it // STAGES) & 1) ^ 1)
    mbarrier.expect(ready.index(slot), A_HALVES * a_desc.block_type.nbytes + b_desc.block_type.nbytes)
    return slot


@gluon.jit
def store_half(acc, c_desc, c_buf, row, column):
    """Start to store half a tile, when the one before has left the buffer."""
    tma.store_wait(pendings=0)
    c_buf.store(acc.to(c_buf.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(c_desc, [row, column], c_buf)


def half_tiles(out: Tensor, columns: int) -> Blocks:
    """View a result, of any number of dims, as a matrix in halves of tiles."""
    return blocks(out, (out.numel() // out.shape[-1], out.shape[-1]), out.shape[-1], (ROWS // 2, columns))
