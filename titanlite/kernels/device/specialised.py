"""The matmul inside both collective matmuls, with its warps specialised: one loads, two groups of four multiply.

In float8 the two groups are teams with half of a tile's rows each, and do not wait for each other: one adds its sums
while the other has the tensor cores. In 16 bits they are one team, which takes less power.

The loading warp draws tiles and runs ahead, over the end of a tile into the next, so that a wait for rows from a peer
does not stop the tensor cores; a finished tile is stored while they work on the next one. In the all-gather a third
role, one warp of each thread block, publishes this rank's shard and then pulls the peers' through a small ring in
shared memory: TMA moves the bytes both ways, and no multiprocessor is given up.

Tiles and copies are drawn, not dealt out: a block that gets its multiprocessor late, because another stream's kernel
has it, finds less left to do and holds nobody up.

Written in Gluon, Triton's lower layer, because Triton itself specialises no warps on Hopper. It takes the common
shapes: rows in whole tiles. The kernels of the two stems take the others.
"""

from functools import cache

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

from titanlite.kernels.device import protocol
from titanlite.kernels.device.channel import HEADER as COUNTERS_HEADER
from titanlite.kernels.device.channel import PIECES, Channel
from titanlite.kernels.device.launch import Blocks, cdiv
from titanlite.kernels.device.operands import Rows
from titanlite.kernels.device.tiles import WIDE, Tiles, in_steps
from titanlite.kernels.products import MAX_RANKS

_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # the name from Triton 3.7 on, and before
WORKER_REGISTERS = gl.constexpr(72)
TEAM_REGISTERS = gl.constexpr(216)
HEADER = gl.constexpr(COUNTERS_HEADER)
N_PIECES = gl.constexpr(PIECES)
OWN_PER_DRAW = gl.constexpr(8)
"""Copies of the own shard that are drawn and counted together; of the peers', as many as a tile is high."""
PART = gl.constexpr(64)
"""Columns of a tile that are stored together: 128 bytes, the width that TMA swizzles."""


@gluon.constexpr_function
def first_columns(n: int) -> int:
    """How many of a tile's columns are one tensor, whose sizes are powers of two; the rest are one part, or none."""
    return 128 if n == WIDE else n


# The instructions of `protocol`, compiled as Gluon.
_load_acquire = gluon.jit(protocol.load_acquire_gpu.fn)
_load_acquire_sys = gluon.jit(protocol.load_acquire_sys.fn)
_store_relaxed_sys = gluon.jit(protocol.store_relaxed_sys.fn)
_nanoseconds = gluon.jit(protocol.nanoseconds.fn)
_fence_sys = gluon.jit(protocol.fence_sys.fn)
_fence_async_proxy = gluon.jit(protocol.fence_async_proxy.fn)
_fail = gluon.jit(protocol.fail.fn)


@gluon.jit
def _do(asm: gl.constexpr):
    """Run an instruction without operands."""
    gl.inline_asm_elementwise(asm, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _wait_for_count(counter, count, epoch, deadline, failure):
    """As `protocol.wait_for_count`: then TMA may load what the copies of this launch have stored."""
    seen = _load_acquire(counter)
    if seen < count:
        limit = gl.load(deadline)
        start = _nanoseconds()
        while seen < count:
            waited = _nanoseconds() - start
            if waited > limit:
                _fail(failure, epoch, seen * 0 - 1, waited, 0)
            seen = _load_acquire(counter)
    _fence_async_proxy()


@gluon.jit
def _pieces(flags, epoch, RANKS: gl.constexpr):
    """Bits of the pieces that are published: number `source · N_PIECES + piece`.

    A word is written by operators alone that have its piece, so it may lie behind by any number of them. It is never
    ahead: a peer is at its next operator when all have come to that, behind this one.
    """
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    known = gl.to_tensor(0).to(gl.int64)
    for first in gl.static_range(0, RANKS * N_PIECES, 32):
        inside = first + lane < RANKS * N_PIECES
        seen = _load_acquire_sys(flags + RANKS + first + gl.where(inside, lane, 0))
        there = inside & (seen == epoch + 1)
        bits = gl.sum(gl.where(there, gl.full([32], 1, gl.int32, lane.type.layout) << lane, 0), axis=0)
        known |= (bits.to(gl.int64) & 0xFFFFFFFF) << first
    return known


@gluon.jit
def _wait_for_piece(word, flags, epoch, deadline, failure, RANKS: gl.constexpr):
    """Wait until a piece of a peer's shard is published; then TMA may load all that is in the bits returned."""
    known = _pieces(flags, epoch, RANKS)
    if (known >> word) & 1 == 0:
        limit = gl.load(deadline)
        start = _nanoseconds()
        while (known >> word) & 1 == 0:
            waited = _nanoseconds() - start
            if waited > limit:
                _fail(failure, epoch, word // N_PIECES, waited, 0)
            known = _pieces(flags, epoch, RANKS)
    _fence_async_proxy()
    return known


@gluon.jit
def _signal(peer_flags, word, epoch, RANKS: gl.constexpr):
    """Store `epoch + 1` in a word of every rank's flags, behind all that this block has seen happen."""
    _fence_sys()
    for r in gl.static_range(RANKS):
        _store_relaxed_sys(gl.load(peer_flags + r) + word * 4, epoch + 1)


@gluon.jit
def _wait_for_peers(flags, epoch, deadline, failure, rank, RANKS: gl.constexpr, TEAMS: gl.constexpr):
    """As `protocol.wait_for_peers`, by the warps of the first team."""
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [8 // TEAMS], [0]))
    peer = gl.where(lane < RANKS, lane, rank)
    limit = gl.load(deadline)
    start = _nanoseconds()
    behind = _load_acquire_sys(flags + peer) - (epoch + 1)
    while gl.min(behind, axis=0) < 0:  # a difference, so that the count may wrap
        waited = _nanoseconds() - start
        if waited > limit:
            _fail(failure, epoch, gl.max(gl.where(behind < 0, peer, 0), axis=0), waited, 1)
        behind = _load_acquire_sys(flags + peer) - (epoch + 1)
    _barrier()


@gluon.jit
def _those_of(d0, d1, d2, d3, d4, d5, d6, d7, RANKS: gl.constexpr):
    """The first RANKS of them; the others are None."""
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


# --- multiplying -------------------------------------------------------------------------------------------------


@gluon.jit
def _write_word(buffer, value):
    """By a role of one warp."""
    buffer.store(gl.full([1], value, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    _barrier()


@gluon.jit
def _read_word(buffer, WARPS: gl.constexpr):
    """By a role of so many warps."""
    return gl.max(buffer.load(gl.BlockedLayout([1], [32], [WARPS], [0])), axis=0)


@gluon.jit
def _halves(x):
    """Left and right half of a tile."""
    return x.reshape(x.shape[0], 2, x.shape[1] // 2).permute(0, 2, 1).split()


@gluon.jit
def _parts(x):
    """A tile's parts of `PART` columns."""
    if x.shape[1] == PART:
        parts = (x,)
    elif x.shape[1] == 2 * PART:
        parts = _halves(x)
    else:
        left, right = _halves(x)
        parts = _halves(left) + _halves(right)
    return parts


@gluon.jit
def _store(
    part, p: gl.constexpr, tile, dests, c_buf, first_row, x_blocks, y_tiles,
    BM: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """Start to store part number p of a tile, or of a team's rows of it, which begin at `first_row` instead."""
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
def _step(
    acc, use_acc, it, a_bufs, b_bufs, ready, TEAM: gl.constexpr,
    A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Start the product of step `it`, or of a team's rows, when its operands are there."""
    slot = it % STAGES
    mbarrier.wait(ready.index(slot), (it // STAGES) & 1)
    a = a_bufs.index(slot) if A_K_MAJOR else a_bufs.index(slot).permute((1, 0))
    if a.shape[0] > acc.shape[0]:
        a = a.slice(TEAM * acc.shape[0], acc.shape[0], dim=0)
    b = b_bufs.index(slot).permute((1, 0)) if B_K_MAJOR else b_bufs.index(slot)
    return warpgroup_mma(a, b, acc, use_acc=use_acc, is_async=True)


@gluon.jit
def _give_back(sums, it, empty, HAS_BEFORE: gl.constexpr, STAGES: gl.constexpr):
    """Wait until the tensor cores have done with the step before `it` in the same sum, and give its buffers back."""
    sums = warpgroup_mma_wait(num_outstanding=1, deps=(sums,))
    if HAS_BEFORE:
        mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), count=1)
    return sums


@gluon.jit
def _scaled(
    acc, bias, row_scale, column_scale, tile, x_blocks, y_tiles, segment, per_segment, N, layout: gl.constexpr,
    BIAS: gl.constexpr, OF_ROWS: gl.constexpr, OF_COLUMNS: gl.constexpr, OWNERS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, TEAM: gl.constexpr, FROM: gl.constexpr,
):  # fmt: skip
    """A tile's columns from FROM on, or a team's rows of them, times the operands' scales, and a bias added.

    OF_ROWS, OF_COLUMNS: scales: 0 none, 1 one number, 2 one for each row, or column.
    """
    if OF_ROWS == 1:
        acc = acc * gl.load(row_scale)
    elif OF_ROWS == 2:
        owner = tile // y_tiles // x_blocks
        x = (tile // y_tiles) % x_blocks
        row = (x // per_segment * OWNERS + owner) * segment + x % per_segment * BM
        ROWS: gl.constexpr = acc.shape[0]
        rows = row + TEAM * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
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
def _multiply(
    given,
    BIAS: gl.constexpr, OF_ROWS: gl.constexpr, OF_COLUMNS: gl.constexpr, OWNERS: gl.constexpr,
    A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, TEAMS: gl.constexpr, TEAM: gl.constexpr,
):  # fmt: skip
    """Compute the tiles that come with the operands. A tile: (destination · x_blocks + row) · y_tiles + column.

    given: destinations, bias, scales of rows and columns, the buffers and barriers; the first row, how the tiles lie.

    OWNERS: among how many the rows of the operand are dealt out, `segment` rows each; a destination is an owner.
    TEAM: of TEAMS, which compute as many rows of each tile each.
    """
    dests, bias, row_scale, column_scale, a_bufs, b_bufs, _rest, c_bufs, tiles, ready, empty = given[:11]
    first_row, x_blocks, y_tiles, steps, N, segment, per_segment = given[11:]
    ROWS: gl.constexpr = BM // TEAMS
    WARPS: gl.constexpr = 8 // TEAMS
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [WARPS, 1], [16, BN, 256 // a_bufs.dtype.primitive_bitwidth]
    )
    PARTS: gl.constexpr = BN // PART
    c_buf = c_bufs.index(TEAM)
    first_row += TEAM * ROWS
    it = 0
    before = -1
    out = gl.zeros((ROWS, BN), c_buf.dtype, layout)
    mbarrier.wait(ready.index(0), 0)
    tile = _read_word(tiles.index(0), WARPS)
    while tile >= 0:
        sums = gl.zeros((ROWS, BN), gl.float32, layout)
        parts = _parts(out)
        for k in gl.static_range(PARTS):  # the tile before is stored beside the first products
            sums = _step(sums, k > 0, it, a_bufs, b_bufs, ready, TEAM, A_K_MAJOR, B_K_MAJOR, STAGES)
            if before >= 0:
                _store(parts[k], k, before, dests, c_buf, first_row, x_blocks, y_tiles, BM, BN)
            sums = _give_back(sums, it, empty, k > 0, STAGES)
            it += 1
        for _ in range(PARTS, steps):
            sums = _step(sums, True, it, a_bufs, b_bufs, ready, TEAM, A_K_MAJOR, B_K_MAJOR, STAGES)
            sums = _give_back(sums, it, empty, True, STAGES)
            it += 1
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
        mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), count=1)
        out = _scaled(
            acc, bias, row_scale, column_scale, tile, x_blocks, y_tiles, segment, per_segment, N, layout,
            BIAS, OF_ROWS, OF_COLUMNS, OWNERS, BM, BN, TEAM, 0,
        ).to(c_buf.dtype)  # fmt: skip
        before = tile
        mbarrier.wait(ready.index(it % STAGES), (it // STAGES) & 1)
        tile = _read_word(tiles.index(it % STAGES), WARPS)
    if before >= 0:
        parts = _parts(out)
        for p in gl.static_range(PARTS):
            _store(parts[p], p, before, dests, c_buf, first_row, x_blocks, y_tiles, BM, BN)
    _do("cp.async.bulk.wait_group 0; mov.u32 $0, 0;")  # written, not only read


@gluon.jit
def _multiply_in_steps(
    given,
    BIAS: gl.constexpr, OF_ROWS: gl.constexpr, OF_COLUMNS: gl.constexpr, OWNERS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, TEAM: gl.constexpr,
):  # fmt: skip
    """As `_multiply`, by one of two teams, with the product of each step added to the others in float32.

    One team adds, and stores, while the other has the tensor cores. Sums and products take twice the registers, which
    a tile of 256 columns would not leave; one of 192 comes as 128 and 64, for tensors have powers of two.
    """
    dests, bias, row_scale, column_scale, a_bufs, b_bufs, rest_bufs, c_bufs, tiles, ready, empty = given[:11]
    first_row, x_blocks, y_tiles, steps, N, segment, per_segment = given[11:]
    ROWS: gl.constexpr = BM // 2
    FIRST: gl.constexpr = first_columns(BN)
    REST: gl.constexpr = BN - FIRST
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, FIRST, 32])
    rest_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 32])
    c_buf = c_bufs.index(TEAM)
    first_row += TEAM * ROWS
    it = 0
    mbarrier.wait(ready.index(0), 0)
    tile = _read_word(tiles.index(0), 4)
    while tile >= 0:
        acc = gl.zeros((ROWS, FIRST), gl.float32, layout)
        sums = gl.zeros((ROWS, FIRST), gl.float32, layout)
        rest = gl.zeros((ROWS, PART), gl.float32, rest_layout)
        rest_sums = gl.zeros((ROWS, PART), gl.float32, rest_layout)
        for _ in range(steps):
            sums = _step(sums, False, it, a_bufs, b_bufs, ready, TEAM, True, True, STAGES)
            if REST > 0:
                rest_sums = _step(rest_sums, False, it, a_bufs, rest_bufs, ready, TEAM, True, True, STAGES)
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
        parts = _parts(_scaled(
            acc, bias, row_scale, column_scale, tile, x_blocks, y_tiles, segment, per_segment, N, layout,
            BIAS, OF_ROWS, OF_COLUMNS, OWNERS, BM, BN, TEAM, 0,
        ).to(c_buf.dtype))  # fmt: skip
        for p in gl.static_range(FIRST // PART):
            _store(parts[p], p, tile, dests, c_buf, first_row, x_blocks, y_tiles, BM, BN)
        if REST > 0:
            part = _scaled(
                rest, bias, row_scale, column_scale, tile, x_blocks, y_tiles, segment, per_segment, N, rest_layout,
                BIAS, OF_ROWS, OF_COLUMNS, OWNERS, BM, BN, TEAM, FIRST,
            ).to(c_buf.dtype)  # fmt: skip
            _store(part, FIRST // PART, tile, dests, c_buf, first_row, x_blocks, y_tiles, BM, BN)
        mbarrier.wait(ready.index(it % STAGES), (it // STAGES) & 1)
        tile = _read_word(tiles.index(it % STAGES), 4)
    _do("cp.async.bulk.wait_group 0; mov.u32 $0, 0;")  # written, not only read


@gluon.jit
def _announce(tile, tiles, empty, it, STAGES: gl.constexpr):
    """Say which tile the next operands are for."""
    mbarrier.wait(empty.index(it % STAGES), ((it // STAGES) & 1) ^ 1)
    _write_word(tiles.index(it % STAGES), tile)


@gluon.jit
def _load(
    a_desc, b_desc, rest_desc, a_bufs, b_bufs, rest_bufs, ready, empty, it, steps, m0, n0,
    A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The loads for one tile."""
    n_bytes: gl.constexpr = a_desc.block_type.nbytes + b_desc.block_type.nbytes
    for k in range(steps):
        slot = it % STAGES
        mbarrier.wait(empty.index(slot), ((it // STAGES) & 1) ^ 1)
        if rest_desc is None:
            mbarrier.expect(ready.index(slot), n_bytes)
        else:
            mbarrier.expect(ready.index(slot), n_bytes + rest_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                rest_desc, [n0 + b_desc.block_type.shape[0], k * BK], ready.index(slot), rest_bufs.index(slot)
            )
        if A_K_MAJOR:
            tma.async_copy_global_to_shared(a_desc, [m0, k * BK], ready.index(slot), a_bufs.index(slot))
        else:
            tma.async_copy_global_to_shared(a_desc, [k * BK, m0], ready.index(slot), a_bufs.index(slot))
        if B_K_MAJOR:
            tma.async_copy_global_to_shared(b_desc, [n0, k * BK], ready.index(slot), b_bufs.index(slot))
        else:
            tma.async_copy_global_to_shared(b_desc, [k * BK, n0], ready.index(slot), b_bufs.index(slot))
        it += 1
    return it


@gluon.jit
def _tile(drawn, x_tiles, y_tiles, GROUP: gl.constexpr):
    """The block of rows and that of columns of a tile, by its number.

    GROUP blocks of rows share a pass over the columns, so that the tiles on their way at once read few operands.
    """
    width = GROUP * y_tiles
    first = (drawn // width) * GROUP
    in_group = min(x_tiles - first, GROUP)
    return first + (drawn % width) % in_group, (drawn % width) // in_group


@gluon.jit
def _end(tiles, ready, empty, it, STAGES: gl.constexpr):
    """Say that no tile is left."""
    _announce(-1, tiles, empty, it, STAGES)
    mbarrier.arrive(ready.index(it % STAGES), count=1)


@gluon.jit
def _leave(
    counters, used, epoch_word, epoch, flags, peer_flags, deadline, failure, rank,
    MEET: gl.constexpr, RANKS: gl.constexpr, TEAMS: gl.constexpr,
):  # fmt: skip
    """By a kernel's last block: leave the counters as the next operator wants them. MEET: all ranks before."""
    _barrier()
    finished = gl.atomic_add(counters + 2, 1, sem="acq_rel", scope="gpu")
    if finished == gl.num_programs(0) - 1:
        if MEET:
            _signal(peer_flags, rank, epoch, RANKS)
            _wait_for_peers(flags, epoch, deadline, failure, rank, RANKS, TEAMS)
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [8 // TEAMS], [0])
        for start in range(0, used, 256):
            at = start + gl.arange(0, 256, layout=layout)
            gl.store(counters + at, gl.zeros([256], gl.int32, layout), mask=at < used)
        gl.store(epoch_word, epoch + 1)


# --- all-gather → matmul -----------------------------------------------------------------------------------------


@gluon.jit
def _gather_load(
    given,
    RANKS: gl.constexpr, GROUP: gl.constexpr, B_K_MAJOR: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    s_desc, g_desc, o_desc, rest_desc, a_bufs, b_bufs, rest_bufs, tiles, ready, empty = given[:10]
    counters, epoch, deadline, failure, rank, segments, per_segment, y_tiles, segment, steps, count = given[10:]
    units = segments * per_segment
    x_tiles = units * RANKS
    it = 0
    drawn = gl.atomic_add(counters + 1, 1, sem="relaxed", scope="gpu")
    while drawn < x_tiles * y_tiles:
        following = gl.atomic_add(counters + 1, 1, sem="relaxed", scope="gpu")
        x, y = _tile(drawn, x_tiles, y_tiles, GROUP)
        # This rank's own tiles first, then one of each peer in turn, as they arrive.
        theirs = x - units
        source = rank
        unit = x
        if theirs >= 0:
            source = (rank + 1 + theirs % (RANKS - 1)) % RANKS
            unit = theirs // (RANKS - 1)
        row = (unit // per_segment * RANKS + source) * segment + unit % per_segment * BM
        if theirs >= 0:
            _wait_for_count(counters + HEADER + source * units + unit, count, epoch, deadline, failure)
        _announce(row // BM * y_tiles + y, tiles, empty, it, STAGES)
        if theirs >= 0:
            it = _load(
                g_desc, o_desc, rest_desc, a_bufs, b_bufs, rest_bufs, ready, empty, it, steps, row, y * BN,
                True, B_K_MAJOR, BK, STAGES,
            )  # fmt: skip
        else:
            it = _load(
                s_desc, o_desc, rest_desc, a_bufs, b_bufs, rest_bufs, ready, empty, it, steps, unit * BM, y * BN,
                True, B_K_MAJOR, BK, STAGES,
            )  # fmt: skip
        drawn = following
    _end(tiles, ready, empty, it, STAGES)


@gluon.jit
def _draw(counter, n):
    """Add n to a counter without waiting for what it was, by a role of one warp; its first lane alone gets to know."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .b32 lane;
        mov.u32 lane, %laneid;
        setp.eq.u32 first, lane, 0;
        mov.u32 $0, 0;
        @first atom.relaxed.gpu.global.add.u32 $0, [$1], $2;
        }""",
        "=r,l,r",
        [counter, n],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _drawn(ticket):
    """What `_draw` has found, for all lanes."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [ticket], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _next(t, ticket, draw, PER_DRAW: gl.constexpr):
    """The copy after number t, and the ticket for the next run of copies."""
    t += 1
    if t % PER_DRAW == 0:
        t = _drawn(ticket)
        ticket = _draw(draw, PER_DRAW)
    return t, ticket


@gluon.jit
def _place(t, rank, OWN: gl.constexpr, PER_DRAW: gl.constexpr, RANKS: gl.constexpr):
    """Whose block copy number t takes, and which: runs of the peers' blocks take turns."""
    source = rank
    block = t
    if not OWN:
        run = t // PER_DRAW
        source = (rank + 1 + run % (RANKS - 1)) % RANKS
        block = run // (RANKS - 1) * PER_DRAW + t % PER_DRAW
    return source, block


@gluon.jit
def _fetch(
    t, i, known, froms, ring, bars, from_row, rank, col_blocks, piece_blocks, flags, epoch, deadline, failure,
    OWN: gl.constexpr, PER_DRAW: gl.constexpr, RANKS: gl.constexpr, CM: gl.constexpr, CN: gl.constexpr,
):  # fmt: skip
    """Start copy number t, as this block's i-th: a block of a shard into shared memory.

    Args:
        known: bits of the pieces that have been waited for.

    Returns:
        The same, afterwards.
    """
    bar, buf = bars.index(i % 4), ring.index(i % 4)
    source, block = _place(t, rank, OWN, PER_DRAW, RANKS)
    if OWN:
        mbarrier.expect(bar, froms[0].block_type.nbytes)
        tma.async_copy_global_to_shared(froms[0], [block // col_blocks * CM, block % col_blocks * CN], bar, buf)
    else:
        word = source * N_PIECES + block // piece_blocks
        if (known >> word) & 1 == 0:
            known = _wait_for_piece(word, flags, epoch, deadline, failure, RANKS)
        mbarrier.expect(bar, froms[0].block_type.nbytes)
        for r in gl.static_range(RANKS):
            if source == r:
                tma.async_copy_global_to_shared(
                    froms[r], [from_row + block // col_blocks * CM, block % col_blocks * CN], bar, buf
                )
    return known


@gluon.jit
def _stored(
    t, rank, counters, peer_flags, copies, col_blocks, piece_blocks, units, epoch,
    OWN: gl.constexpr, RANKS: gl.constexpr, PER_DRAW: gl.constexpr, BM: gl.constexpr, CM: gl.constexpr,
):  # fmt: skip
    """Count what has been written, copy number t the last, and tell the peers of a piece that is whole."""
    source, block = _place(t, rank, OWN, PER_DRAW, RANKS)
    n = t % PER_DRAW + 1
    if OWN:
        piece = block // piece_blocks
        size = min(copies, (piece + 1) * piece_blocks) - piece * piece_blocks
        counted = gl.atomic_add(counters + HEADER - N_PIECES + piece, n, sem="acq_rel", scope="gpu")
        if counted + n == size:
            _signal(peer_flags, RANKS + rank * N_PIECES + piece, epoch, RANKS)
    else:
        unit = block // col_blocks * CM // BM
        gl.atomic_add(counters + HEADER + source * units + unit, n, sem="release", scope="gpu")


@gluon.jit
def _copies(
    i, froms, slots, w_desc, ring, bars, counters, flags, peer_flags, epoch, deadline, failure,
    slot_row, rank, rows, segment, col_blocks,
    OWN: gl.constexpr, PER_DRAW: gl.constexpr,
    RANKS: gl.constexpr, BM: gl.constexpr, CM: gl.constexpr, CN: gl.constexpr,
):  # fmt: skip
    """Copy blocks of shards through a ring of four buffers, three on their way, into G, and this rank's to its slot.

    Args:
        i: copies of this thread block so far.

    Returns:
        The same, afterwards. All has been written, and counted.
    """
    blocks = rows // CM * col_blocks
    piece_blocks = gl.cdiv(gl.cdiv(blocks, N_PIECES), OWN_PER_DRAW) * OWN_PER_DRAW
    copies = blocks * (1 if OWN else RANKS - 1)
    draw = counters + (5 if OWN else 4)
    known = gl.to_tensor(0).to(gl.int64)
    ticket = _draw(draw, PER_DRAW)
    t0, ticket = _next(-1, ticket, draw, PER_DRAW)
    t1, ticket = _next(t0, ticket, draw, PER_DRAW)
    t2, ticket = _next(t1, ticket, draw, PER_DRAW)
    for j in gl.static_range(3):
        t = t0 if j == 0 else (t1 if j == 1 else t2)
        if t < copies:
            known = _fetch(
                t, i + j, known, froms, ring, bars, slot_row, rank, col_blocks, piece_blocks, flags, epoch, deadline,
                failure, OWN, PER_DRAW, RANKS, CM, CN,
            )  # fmt: skip
    before = -1  # number of the copy before
    older = -1  # and of the one before that
    while t0 < copies:
        mbarrier.wait(bars.index(i % 4), (i // 4) & 1)
        source, block = _place(t0, rank, OWN, PER_DRAW, RANKS)
        row = block // col_blocks * CM
        column = block % col_blocks * CN
        to = (row // segment * RANKS + source) * segment + row % segment
        tma.async_copy_shared_to_global(w_desc, [to, column], ring.index(i % 4))
        # The copy before must have been read, so that its buffer may be filled again; the older one, if it is the last
        # of a run, written, so that others may be told.
        told = (older >= 0) & (older % PER_DRAW == PER_DRAW - 1)
        if OWN:
            for r in gl.static_range(RANKS):
                if rank == r:
                    tma.async_copy_shared_to_global(slots[r], [slot_row + row, column], ring.index(i % 4))
            _do("cp.async.bulk.wait_group.read 2; mov.u32 $0, 0;")
            if told:
                _do("cp.async.bulk.wait_group 4; mov.u32 $0, 0;")
        else:
            _do("cp.async.bulk.wait_group.read 1; mov.u32 $0, 0;")
            if told:
                _do("cp.async.bulk.wait_group 2; mov.u32 $0, 0;")
        _barrier()
        if told:
            _stored(
                older, rank, counters, peer_flags, copies, col_blocks, piece_blocks, rows // BM, epoch,
                OWN, RANKS, PER_DRAW, BM, CM,
            )  # fmt: skip
        older = before
        before = t0
        t3, ticket = _next(t2, ticket, draw, PER_DRAW)
        if t3 < copies:
            known = _fetch(
                t3, i + 3, known, froms, ring, bars, slot_row, rank, col_blocks, piece_blocks, flags, epoch, deadline,
                failure, OWN, PER_DRAW, RANKS, CM, CN,
            )  # fmt: skip
        t0 = t1
        t1 = t2
        t2 = t3
        i += 1
    _do("cp.async.bulk.wait_group 0; mov.u32 $0, 0;")
    _barrier()
    if (older >= 0) & (older % PER_DRAW == PER_DRAW - 1):
        _stored(
            older, rank, counters, peer_flags, copies, col_blocks, piece_blocks, rows // BM, epoch,
            OWN, RANKS, PER_DRAW, BM, CM,
        )  # fmt: skip
    if before >= 0:
        _stored(
            before, rank, counters, peer_flags, copies, col_blocks, piece_blocks, rows // BM, epoch,
            OWN, RANKS, PER_DRAW, BM, CM,
        )  # fmt: skip
    return i


@gluon.jit
def _gather_copy(
    given, RANKS: gl.constexpr, BM: gl.constexpr, CM: gl.constexpr, CN: gl.constexpr
):  # fmt: skip
    """Publish and pull.

    Of the thread blocks that run, every second one, the first included, publishes all there is before it waits for a
    peer: no rank then waits for one that waits for it.
    """
    shard_desc, peers, w_desc, ring, bars, counters, flags, peer_flags, epoch, deadline, failure = given[:11]
    slot_row, rank, rows, segment, col_blocks = given[11:]
    ticket = gl.atomic_add(counters, 1, sem="relaxed", scope="gpu")
    i = gl.to_tensor(0)
    if ticket % 2 == 0:
        i = _copies(
            i, (shard_desc,), peers, w_desc, ring, bars, counters, flags, peer_flags, epoch, deadline,
            failure, slot_row, rank, rows, segment, col_blocks, True, OWN_PER_DRAW, RANKS, BM, CM, CN,
        )  # fmt: skip
    _copies(
        i, peers, peers, w_desc, ring, bars, counters, flags, peer_flags, epoch, deadline,
        failure, slot_row, rank, rows, segment, col_blocks, False, BM // CM, RANKS, BM, CM, CN,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["rank"])
def gather_matmul(
    s_desc, g_desc, o_desc, c_desc, bias, scale, other_scale,
    shard_desc, w_desc, p0, p1, p2, p3, p4, p5, p6, p7, rest_desc,
    counters, flags, peer_flags, epoch_word, deadline, failure,
    slot_rows, rows, segment, N, K, rank,
    RANKS: gl.constexpr, GROUP: gl.constexpr, BIAS: gl.constexpr, OF_ROWS: gl.constexpr, OF_COLUMNS: gl.constexpr,
    FAST: gl.constexpr, B_K_MAJOR: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    CM: gl.constexpr, CN: gl.constexpr, TEAMS: gl.constexpr,
):  # fmt: skip
    """As `all_gather_matmul._publish` and `._gather_matmul`, for the form "left" gathered along rows in whole tiles.

    s_desc, g_desc, o_desc, c_desc: the shard, G, O and the product, in blocks as they are multiplied; shard_desc,
    w_desc, p0 … p7: the shard, G and all ranks' slots, in blocks as they are copied; rest_desc: O again, in blocks of
    what a tile of 192 columns has beyond 128. OF_ROWS, OF_COLUMNS: scales of G and of O: 0 none, 1 one number, 2 one
    for each row. FAST: add all products in the tensor cores.
    """
    epoch = gl.load(epoch_word)
    a_bufs = gl.allocate_shared_memory(g_desc.dtype, [STAGES, BM, BK], g_desc.layout)
    b_shape: gl.constexpr = [STAGES, first_columns(BN), BK] if B_K_MAJOR else [STAGES, BK, BN]
    b_bufs = gl.allocate_shared_memory(o_desc.dtype, b_shape, o_desc.layout)
    rest_bufs = b_bufs  # where there is no rest they are not used
    if rest_desc is not None:
        rest_bufs = gl.allocate_shared_memory(rest_desc.dtype, [STAGES, PART, BK], rest_desc.layout)
    c_bufs = gl.allocate_shared_memory(c_desc.dtype, [TEAMS, BM // TEAMS, PART], c_desc.layout)
    ring = gl.allocate_shared_memory(w_desc.dtype, [4, CM, CN], w_desc.layout)
    tiles = gl.allocate_shared_memory(gl.int32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    bars = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=TEAMS)
    for i in gl.static_range(4):
        mbarrier.init(bars.index(i), count=1)
    col_blocks = gl.cdiv(K, CN)
    segments = rows // segment
    per_segment = segment // BM
    y_tiles = gl.cdiv(N, BN)
    steps = gl.cdiv(K, BK)
    multiply = (
        (c_desc,), bias, scale, other_scale, a_bufs, b_bufs, rest_bufs, c_bufs, tiles, ready, empty,
        0, RANKS * (rows // BM), y_tiles, steps, N, segment, per_segment,
    )  # fmt: skip
    load = (
        s_desc, g_desc, o_desc, rest_desc, a_bufs, b_bufs, rest_bufs, tiles, ready, empty,
        counters, epoch, deadline, failure,
        rank, segments, per_segment, y_tiles, segment, steps, (BM // CM) * col_blocks,
    )  # fmt: skip
    copy = (
        shard_desc, _those_of(p0, p1, p2, p3, p4, p5, p6, p7, RANKS), w_desc, ring, bars,
        counters, flags, peer_flags, epoch, deadline, failure,
        (epoch & 1) * slot_rows, rank, rows, segment, col_blocks,
    )  # fmt: skip
    if TEAMS == 1:
        gl.warp_specialize([
            (_multiply, (multiply, BIAS, OF_ROWS, OF_COLUMNS, 1, True, B_K_MAJOR, BM, BN, STAGES, 1, 0)),
            (_gather_load, (load, RANKS, GROUP, B_K_MAJOR, BM, BN, BK, STAGES)),
            (_gather_copy, (copy, RANKS, BM, CM, CN)),
        ], [1, 1], [WORKER_REGISTERS, WORKER_REGISTERS])  # fmt: skip
    elif FAST:
        gl.warp_specialize([
            (_multiply, (multiply, BIAS, OF_ROWS, OF_COLUMNS, 1, True, B_K_MAJOR, BM, BN, STAGES, 2, 0)),
            (_multiply, (multiply, BIAS, OF_ROWS, OF_COLUMNS, 1, True, B_K_MAJOR, BM, BN, STAGES, 2, 1)),
            (_gather_load, (load, RANKS, GROUP, B_K_MAJOR, BM, BN, BK, STAGES)),
            (_gather_copy, (copy, RANKS, BM, CM, CN)),
        ], [4, 1, 1], [TEAM_REGISTERS, WORKER_REGISTERS, WORKER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_multiply_in_steps, (multiply, BIAS, OF_ROWS, OF_COLUMNS, 1, BM, BN, STAGES, 0)),
            (_multiply_in_steps, (multiply, BIAS, OF_ROWS, OF_COLUMNS, 1, BM, BN, STAGES, 1)),
            (_gather_load, (load, RANKS, GROUP, B_K_MAJOR, BM, BN, BK, STAGES)),
            (_gather_copy, (copy, RANKS, BM, CM, CN)),
        ], [4, 1, 1], [TEAM_REGISTERS, WORKER_REGISTERS, WORKER_REGISTERS])  # fmt: skip
    used = HEADER + RANKS * (rows // BM)
    _leave(counters, used, epoch_word, epoch, flags, peer_flags, deadline, failure, rank, False, RANKS, TEAMS)


# --- matmul → reduce-scatter -------------------------------------------------------------------------------------


@gluon.jit
def _push_load(
    given,
    RANKS: gl.constexpr, GROUP: gl.constexpr, A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    a_desc, b_desc, rest_desc, a_bufs, b_bufs, rest_bufs, tiles, ready, empty, counters = given[:10]
    rank, staged_tiles, per_segment, y_tiles, segment, steps = given[10:]
    x_tiles = staged_tiles * RANKS
    it = 0
    drawn = gl.atomic_add(counters + 1, 1, sem="relaxed", scope="gpu")
    while drawn < x_tiles * y_tiles:
        following = gl.atomic_add(counters + 1, 1, sem="relaxed", scope="gpu")
        x, y = _tile(drawn, x_tiles, y_tiles, GROUP)
        owner = (x + rank + 1) % RANKS  # all of them in turn, this rank last
        staged = x // RANKS
        row = (staged // per_segment * RANKS + owner) * segment + staged % per_segment * BM
        _announce((owner * staged_tiles + staged) * y_tiles + y, tiles, empty, it, STAGES)
        it = _load(
            a_desc, b_desc, rest_desc, a_bufs, b_bufs, rest_bufs, ready, empty, it, steps, row, y * BN,
            A_K_MAJOR, B_K_MAJOR, BK, STAGES,
        )  # fmt: skip
        drawn = following
    _end(tiles, ready, empty, it, STAGES)


@gluon.jit(do_not_specialize=["rank"])
def matmul_push(
    a_desc, b_desc, scale, other_scale, d0, d1, d2, d3, d4, d5, d6, d7, rest_desc,
    counters, flags, peer_flags, epoch_word, deadline, failure,
    slot_rows, staged_rows, segment, N, K, rank,
    RANKS: gl.constexpr, GROUP: gl.constexpr, OF_ROWS: gl.constexpr, OF_COLUMNS: gl.constexpr, FAST: gl.constexpr,
    A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, TEAMS: gl.constexpr,
):  # fmt: skip
    """As `matmul_reduce_scatter._matmul_push`, for one product scattered along rows in whole tiles.

    rest_desc: as of `gather_matmul`.
    """
    epoch = gl.load(epoch_word)
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [STAGES, BM, BK] if A_K_MAJOR else [STAGES, BK, BM], a_desc.layout)
    b_shape: gl.constexpr = [STAGES, first_columns(BN), BK] if B_K_MAJOR else [STAGES, BK, BN]
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, b_shape, b_desc.layout)
    rest_bufs = b_bufs  # where there is no rest they are not used
    if rest_desc is not None:
        rest_bufs = gl.allocate_shared_memory(rest_desc.dtype, [STAGES, PART, BK], rest_desc.layout)
    c_bufs = gl.allocate_shared_memory(d0.dtype, [TEAMS, BM // TEAMS, PART], d0.layout)
    tiles = gl.allocate_shared_memory(gl.int32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=TEAMS)
    staged_tiles = staged_rows // BM
    y_tiles = gl.cdiv(N, BN)
    steps = gl.cdiv(K, BK)
    multiply = (
        _those_of(d0, d1, d2, d3, d4, d5, d6, d7, RANKS), None, scale, other_scale,
        a_bufs, b_bufs, rest_bufs, c_bufs, tiles, ready, empty,
        (epoch & 1) * slot_rows + rank * staged_rows, staged_tiles, y_tiles, steps, N, segment, segment // BM,
    )  # fmt: skip
    load = (
        a_desc, b_desc, rest_desc, a_bufs, b_bufs, rest_bufs, tiles, ready, empty, counters,
        rank, staged_tiles, segment // BM, y_tiles, segment, steps,
    )  # fmt: skip
    if TEAMS == 1:
        gl.warp_specialize([
            (_multiply, (multiply, False, OF_ROWS, OF_COLUMNS, RANKS, A_K_MAJOR, B_K_MAJOR, BM, BN, STAGES, 1, 0)),
            (_push_load, (load, RANKS, GROUP, A_K_MAJOR, B_K_MAJOR, BM, BN, BK, STAGES)),
        ], [1], [WORKER_REGISTERS])  # fmt: skip
    elif FAST:
        gl.warp_specialize([
            (_multiply, (multiply, False, OF_ROWS, OF_COLUMNS, RANKS, A_K_MAJOR, B_K_MAJOR, BM, BN, STAGES, 2, 0)),
            (_multiply, (multiply, False, OF_ROWS, OF_COLUMNS, RANKS, A_K_MAJOR, B_K_MAJOR, BM, BN, STAGES, 2, 1)),
            (_push_load, (load, RANKS, GROUP, A_K_MAJOR, B_K_MAJOR, BM, BN, BK, STAGES)),
        ], [4, 1], [TEAM_REGISTERS, WORKER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_multiply_in_steps, (multiply, False, OF_ROWS, OF_COLUMNS, RANKS, BM, BN, STAGES, 0)),
            (_multiply_in_steps, (multiply, False, OF_ROWS, OF_COLUMNS, RANKS, BM, BN, STAGES, 1)),
            (_push_load, (load, RANKS, GROUP, A_K_MAJOR, B_K_MAJOR, BM, BN, BK, STAGES)),
        ], [4, 1], [TEAM_REGISTERS, WORKER_REGISTERS])  # fmt: skip
    _leave(counters, HEADER, epoch_word, epoch, flags, peer_flags, deadline, failure, rank, True, RANKS, TEAMS)


# --- host --------------------------------------------------------------------------------------------------------

SHARED_MEMORY = 232448
"""Bytes that a thread block may have on sm_90."""

_DTYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
}


@cache
def _layout(box: tuple[int, int], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(box), _DTYPES[dtype])


def teams(dtype: torch.dtype) -> int:
    """How many teams multiply operands of a dtype (docs/performance.md, "Collective matmuls", has both of both)."""
    return 2 if dtype.itemsize == 1 else 1


def stages(pick: Tiles, itemsize: int, ring: int = 0) -> int:
    """How many steps of operands fit into a multiprocessor's shared memory.

    Args:
        pick: tiles.
        itemsize: bytes of an operand's element.
        ring: bytes of the buffers for copies.
    """
    words = 2048  # barriers and what warp specialisation keeps there
    free = SHARED_MEMORY - words - ring - pick.m * PART.value * 2
    return free // ((pick.m + pick.n) * pick.k * itemsize)


def operand_blocks(operand: Tensor, rows: Rows, n: int, k: int) -> Blocks:
    """An operand whose rows [N, K] are a tile's columns, in blocks of a step: of the first columns, if not of all."""
    box = (first_columns(n), k) if rows.k_major else (k, n)
    return blocks(operand, rows.shape, rows.stride, box)


def rest_blocks(operand: Tensor, rows: Rows, n: int, k: int) -> Blocks | None:
    """The same for the rest of a tile's columns, if there is one."""
    rest = n - first_columns(n)
    return blocks(operand, rows.shape, rows.stride, (rest, k)) if rest else None


def has_steps_for_parts(pick: Tiles, K: int, itemsize: int, fast_accum: bool) -> bool:
    """Whether the next tile has a step beside which to store each part; sums in steps are stored before it begins."""
    return in_steps(itemsize, fast_accum) or pick.n // PART.value <= cdiv(K, pick.k)


def blocks(matrix: Tensor, shape: tuple[int, int], stride: int, box: tuple[int, int]) -> Blocks:
    """A matrix at the beginning of a tensor, seen in blocks of the shape `box`."""
    return Blocks(matrix, shape, stride, box, _layout(box, matrix.dtype))


def peer_blocks(to: Channel, dtype: torch.dtype, columns: int, box: tuple[int, int]) -> list[Blocks | None]:
    """All ranks' two slots as one matrix each, and None up to `MAX_RANKS`."""
    key = (dtype, columns, box)
    found = to.blocks.get(key)
    if found is None:
        rows = 2 * to.capacity // (columns * dtype.itemsize)
        slots = [slots[: rows * columns * dtype.itemsize].view(dtype) for slots in to.peers]
        found = [blocks(memory, (rows, columns), columns, box) for memory in slots] + [None] * (MAX_RANKS - to.ranks)
        to.blocks[key] = found
    return found
