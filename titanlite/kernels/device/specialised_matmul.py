"""The matmul inside both collective matmuls, with specialised warps: a producer warp, and two warpgroups that consume.

The producer warp claims tiles and loads their operands. It runs ahead into the next tile, so that a wait for a peer's
rows does not stop the tensor cores. A finished tile is stored while the tensor cores work on the next tile.

In float8 each consumer is one warpgroup, which computes half of a tile's rows and does not wait for the other consumer:
one adds its sums while the other uses the tensor cores. In 16 bits one consumer of two warpgroups takes less power.
`specialised_push` has these roles. `specialised_gather` has a third role, a warp that copies.

Tiles are claimed, not assigned. If a thread block starts late, because another stream's kernel occupies its
multiprocessor, it finds fewer tiles left and delays no other block.

It is written in Gluon, Triton's lower layer, because Triton does not specialise warps on Hopper. It takes shapes
whose rows divide into tiles; `general_gather` and `general_push` take all others.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from titanlite.kernels.device.specialised_protocol import execute
from titanlite.kernels.device.tiles import WIDE

CONSUMER_REGISTERS = gl.constexpr(216)
WORKER_REGISTERS = gl.constexpr(72)
"""Registers per thread of the producer warp, and of the copying warp."""
PART = gl.constexpr(64)
"""Columns of a tile that are stored at once: 128 bytes, the width that TMA swizzles."""


@gluon.constexpr_function
def first_columns(n: int) -> int:
    """Return how many of a tile's n columns form its first tensor, a power of two. Any rest forms a second one."""
    return 128 if n == WIDE else n


@gluon.jit
def first_of(d0, d1, d2, d3, d4, d5, d6, d7, RANKS: gl.constexpr):
    """Return the first RANKS of the eight arguments as a tuple. The other arguments are None."""
    found = (d0, d1)
    if RANKS > 2:
        found += (d2,)
    if RANKS > 3:
        found += (d3,)
    if RANKS > 4:
        found += (d4,)
    if RANKS > 5:
        found += (d5,)
    if RANKS > 6:
        found += (d6,)
    if RANKS > 7:
        found += (d7,)
    return found


@gluon.jit
def shared_buffers(
    a_desc, b_desc, rest_desc, c_desc, A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    """Allocate the buffers that producer and consumers share: operands, parts of results, tiles' numbers, barriers."""
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [STAGES, BM, BK] if A_K_MAJOR else [STAGES, BK, BM], a_desc.layout)
    b_shape: gl.constexpr = [STAGES, first_columns(BN), BK] if B_K_MAJOR else [STAGES, BK, BN]
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, b_shape, b_desc.layout)
    rest_bufs = b_bufs  # a placeholder if a tile has no second tensor
    if rest_desc is not None:
        rest_bufs = gl.allocate_shared_memory(rest_desc.dtype, [STAGES, PART, BK], rest_desc.layout)
    c_bufs = gl.allocate_shared_memory(c_desc.dtype, [CONSUMERS, BM // CONSUMERS, PART], c_desc.layout)
    tiles = gl.allocate_shared_memory(gl.int32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    return a_bufs, b_bufs, rest_bufs, c_bufs, tiles, ready, empty


@gluon.jit
def _read_word(buffer, WARPS: gl.constexpr):
    """Return a word of shared memory. All WARPS warps of a role call this together."""
    return gl.max(buffer.load(gl.BlockedLayout([1], [32], [WARPS], [0])), axis=0)


@gluon.jit
def _halves(x):
    """Split a tile into its left and right half."""
    return x.reshape(x.shape[0], 2, x.shape[1] // 2).permute(0, 2, 1).split()


@gluon.jit
def column_parts(x):
    """Split a tile into parts of `PART` columns, from left to right."""
    if x.shape[1] == PART:
        parts = (x,)
    elif x.shape[1] == 2 * PART:
        parts = _halves(x)
    else:
        left, right = _halves(x)
        parts = _halves(left) + _halves(right)
    return parts


@gluon.jit
def _store_part(
    part, p: gl.constexpr, tile, dests, c_buf, first_row, x_blocks, y_tiles,
    BM: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """Start to store part number p of a tile, or of a consumer's rows of the tile, in the tile's destination.
    first_row: where the first tile's rows begin in each destination."""
    tma.store_wait(pendings=0)
    c_buf.store(part)
    fence_async_shared()
    row = first_row + (tile // y_tiles) % x_blocks * BM
    column = (tile % y_tiles) * BN + p * PART
    dest = tile // y_tiles // x_blocks
    for d in gl.static_range(len(dests)):
        if dest == d:
            tma.async_copy_shared_to_global(dests[d], [row, column], c_buf)


@gluon.jit
def _start_product(
    acc, use_acc, it, a_bufs, b_bufs, ready, CONSUMER: gl.constexpr,
    A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Start the product of step `it` when its operands have arrived, for the rows of this consumer."""
    slot = it % STAGES
    mbarrier.wait(ready.index(slot), (it // STAGES) & 1)
    a = a_bufs.index(slot) if A_K_MAJOR else a_bufs.index(slot).permute((1, 0))
    if a.shape[0] > acc.shape[0]:
        a = a.slice(CONSUMER * acc.shape[0], acc.shape[0], dim=0)
    b = b_bufs.index(slot).permute((1, 0)) if B_K_MAJOR else b_bufs.index(slot)
    return warpgroup_mma(a, b, acc, use_acc=use_acc, is_async=True)


@gluon.jit
def _release_buffers(sums, it, empty, HAS_BEFORE: gl.constexpr, STAGES: gl.constexpr):
    """Wait until the tensor cores have finished step `it - 1`, and release its buffers. HAS_BEFORE: whether that step
    is of the same tile; otherwise its buffers have been released already."""
    sums = warpgroup_mma_wait(num_outstanding=1, deps=(sums,))
    if HAS_BEFORE:
        mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), count=1)
    return sums


@gluon.jit
def _scaled_tile(
    acc, bias, row_scale, column_scale, tile, x_blocks, y_tiles, segment, per_segment, N, layout: gl.constexpr,
    BIAS: gl.constexpr, OF_ROWS: gl.constexpr, OF_COLUMNS: gl.constexpr, OWNERS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, CONSUMER: gl.constexpr, FROM: gl.constexpr,
):  # fmt: skip
    """Scale the sums `acc` of a consumer's rows of a tile, from the tile's column FROM on, and add the bias.

    OF_ROWS, OF_COLUMNS: scales of rows and of columns: 0: none, 1: one number, 2: one for each.
    """
    if OF_ROWS == 1:
        acc = acc * gl.load(row_scale)
    elif OF_ROWS == 2:
        owner = tile // y_tiles // x_blocks
        x = (tile // y_tiles) % x_blocks
        row = (x // per_segment * OWNERS + owner) * segment + x % per_segment * BM
        ROWS: gl.constexpr = acc.shape[0]
        rows = row + CONSUMER * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
        acc = acc * gl.load(row_scale + rows)[:, None]
    columns = (tile % y_tiles) * BN + FROM + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, layout))
    if OF_COLUMNS == 1:
        acc = acc * gl.load(column_scale)
    elif OF_COLUMNS == 2:
        acc = acc * gl.load(column_scale + columns, mask=columns < N, other=0.0)[None, :]
    if BIAS:
        acc += gl.load(bias + columns, mask=columns < N, other=0.0).to(gl.float32)[None, :]
    return acc


@gluon.jit
def consume(
    given,
    BIAS: gl.constexpr, OF_ROWS: gl.constexpr, OF_COLUMNS: gl.constexpr, OWNERS: gl.constexpr,
    A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """Compute and store the tiles that the producer announces.

    A tile's number: (destination · x_blocks + block of rows) · y_tiles + block of columns.
    given: destinations, bias, scales of rows and columns, buffers and barriers, and sizes that locate tiles.
    OWNERS: number of ranks that own rows of the product, `segment` rows each in turn. Each owner is a destination.
    CONSUMER: the number of this consumer among CONSUMERS, which share the rows of each tile.
    """
    dests, bias, row_scale, column_scale, a_bufs, b_bufs, _rest, c_bufs, tiles, ready, empty = given[:11]
    first_row, x_blocks, y_tiles, steps, N, segment, per_segment = given[11:]
    ROWS: gl.constexpr = BM // CONSUMERS
    WARPS: gl.constexpr = 8 // CONSUMERS
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [WARPS, 1], [16, BN, 256 // a_bufs.dtype.primitive_bitwidth]
    )
    PARTS: gl.constexpr = BN // PART
    c_buf = c_bufs.index(CONSUMER)
    first_row += CONSUMER * ROWS
    it = 0
    before = -1
    out = gl.zeros((ROWS, BN), c_buf.dtype, layout)
    mbarrier.wait(ready.index(0), 0)
    tile = _read_word(tiles.index(0), WARPS)
    while tile >= 0:
        sums = gl.zeros((ROWS, BN), gl.float32, layout)
        parts = column_parts(out)
        for k in gl.static_range(PARTS):  # the previous tile is stored during the first products
            sums = _start_product(sums, k > 0, it, a_bufs, b_bufs, ready, CONSUMER, A_K_MAJOR, B_K_MAJOR, STAGES)
            if before >= 0:
                _store_part(parts[k], k, before, dests, c_buf, first_row, x_blocks, y_tiles, BM, BN)
            sums = _release_buffers(sums, it, empty, k > 0, STAGES)
            it += 1
        for _ in range(PARTS, steps):
            sums = _start_product(sums, True, it, a_bufs, b_bufs, ready, CONSUMER, A_K_MAJOR, B_K_MAJOR, STAGES)
            sums = _release_buffers(sums, it, empty, True, STAGES)
            it += 1
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
        mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), count=1)
        out = _scaled_tile(
            acc, bias, row_scale, column_scale, tile, x_blocks, y_tiles, segment, per_segment, N, layout,
            BIAS, OF_ROWS, OF_COLUMNS, OWNERS, BM, BN, CONSUMER, 0,
        ).to(c_buf.dtype)  # fmt: skip
        before = tile
        mbarrier.wait(ready.index(it % STAGES), (it // STAGES) & 1)
        tile = _read_word(tiles.index(it % STAGES), WARPS)
    if before >= 0:
        parts = column_parts(out)
        for p in gl.static_range(PARTS):
            _store_part(parts[p], p, before, dests, c_buf, first_row, x_blocks, y_tiles, BM, BN)
    execute("cp.async.bulk.wait_group 0; mov.u32 $0, 0;")  # until stores have reached memory, not only left the buffers


@gluon.jit
def consume_in_steps(
    given,
    BIAS: gl.constexpr, OF_ROWS: gl.constexpr, OF_COLUMNS: gl.constexpr, OWNERS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """Compute and store tiles like `consume`, as one of two consumers, but add the product of each step in float32.

    One consumer adds and stores while the other uses the tensor cores. Sums and products take twice the registers, too
    many for a tile of 256 columns. A tile of 192 columns is two tensors, as sizes of tensors are powers of two.
    """
    dests, bias, row_scale, column_scale, a_bufs, b_bufs, rest_bufs, c_bufs, tiles, ready, empty = given[:11]
    first_row, x_blocks, y_tiles, steps, N, segment, per_segment = given[11:]
    ROWS: gl.constexpr = BM // 2
    FIRST: gl.constexpr = first_columns(BN)
    REST: gl.constexpr = BN - FIRST
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, FIRST, 32])
    rest_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 32])
    c_buf = c_bufs.index(CONSUMER)
    first_row += CONSUMER * ROWS
    it = 0
    mbarrier.wait(ready.index(0), 0)
    tile = _read_word(tiles.index(0), 4)
    while tile >= 0:
        acc = gl.zeros((ROWS, FIRST), gl.float32, layout)
        sums = gl.zeros((ROWS, FIRST), gl.float32, layout)
        rest = gl.zeros((ROWS, PART), gl.float32, rest_layout)
        rest_sums = gl.zeros((ROWS, PART), gl.float32, rest_layout)
        for _ in range(steps):
            sums = _start_product(sums, False, it, a_bufs, b_bufs, ready, CONSUMER, True, True, STAGES)
            if REST > 0:
                rest_sums = _start_product(rest_sums, False, it, a_bufs, rest_bufs, ready, CONSUMER, True, True, STAGES)
                sums = warpgroup_mma_wait(num_outstanding=1, deps=(sums,))
                acc += sums
                rest_sums = warpgroup_mma_wait(num_outstanding=0, deps=(rest_sums,))
                mbarrier.arrive(empty.index(it % STAGES), count=1)
                rest += rest_sums
            else:
                sums = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
                mbarrier.arrive(empty.index(it % STAGES), count=1)
                acc += sums
            it += 1
        parts = column_parts(_scaled_tile(
            acc, bias, row_scale, column_scale, tile, x_blocks, y_tiles, segment, per_segment, N, layout,
            BIAS, OF_ROWS, OF_COLUMNS, OWNERS, BM, BN, CONSUMER, 0,
        ).to(c_buf.dtype))  # fmt: skip
        for p in gl.static_range(FIRST // PART):
            _store_part(parts[p], p, tile, dests, c_buf, first_row, x_blocks, y_tiles, BM, BN)
        if REST > 0:
            part = _scaled_tile(
                rest, bias, row_scale, column_scale, tile, x_blocks, y_tiles, segment, per_segment, N, rest_layout,
                BIAS, OF_ROWS, OF_COLUMNS, OWNERS, BM, BN, CONSUMER, FIRST,
            ).to(c_buf.dtype)  # fmt: skip
            _store_part(part, FIRST // PART, tile, dests, c_buf, first_row, x_blocks, y_tiles, BM, BN)
        mbarrier.wait(ready.index(it % STAGES), (it // STAGES) & 1)
        tile = _read_word(tiles.index(it % STAGES), 4)
    execute("cp.async.bulk.wait_group 0; mov.u32 $0, 0;")  # until stores have reached memory, not only left the buffers
