"""The matmul inside both collective matmuls, with its warps specialised: one loads, two groups of four multiply.

The loading warp runs ahead, over the end of a tile into the next, so that neither the wait for rows from a peer nor
the store of a finished tile stops the tensor cores. In the all-gather a third role, one warp of each thread block,
pulls the peers' rows through a small ring in shared memory: TMA moves the bytes both ways, and no multiprocessor is
given up.

Written in Gluon, Triton's lower layer, because Triton itself specialises no warps on Hopper. It takes the common
shapes: rows in whole tiles, 16-bit operands. The kernels of the two stems take the others.
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from titanlite.kernels.device.channel import MAX_RANKS, Channel

WORKER_REGISTERS = gl.constexpr(72)


@gluon.jit
def _load_acquire(pointer):
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.u32 $0, [$1];", "=r,l", [pointer], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _nanoseconds():
    return gl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=gl.int64, is_pure=False, pack=1)


@gluon.jit
def _do(asm: gl.constexpr):
    """Run an instruction without operands."""
    gl.inline_asm_elementwise(asm, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _wait_for_count(counter, count, epoch, deadline, failure):
    """As in `protocol`: wait for the copies of this launch; then TMA may load what they stored."""
    seen = _load_acquire(counter)
    if seen < count:
        limit = gl.load(deadline)
        start = _nanoseconds()
        while seen < count:
            waited = _nanoseconds() - start
            if waited > limit:
                gl.store(failure + 1, waited * 0 - 1)
                gl.store(failure + 2, waited)
                gl.store(failure + 3, waited * 0)
                _do("fence.acq_rel.sys; mov.u32 $0, 0;")
                gl.store(failure, epoch.to(gl.int64) + 1)
                _do("fence.acq_rel.sys; trap; mov.u32 $0, 0;")
            seen = _load_acquire(counter)
    _do("fence.proxy.async.global; mov.u32 $0, 0;")


@gluon.jit
def _multiply(
    acc, a_bufs, b_bufs, ready, empty, it, steps,
    A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One tile: `steps` products from the ring of buffers, starting at its position `it`."""
    for k in range(steps):
        slot = it % STAGES
        mbarrier.wait(ready.index(slot), (it // STAGES) & 1)
        a = a_bufs.index(slot) if A_K_MAJOR else a_bufs.index(slot).permute((1, 0))
        b = b_bufs.index(slot).permute((1, 0)) if B_K_MAJOR else b_bufs.index(slot)
        acc = warpgroup_mma(a, b, acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        # The product before this one is done with its buffers.
        mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), count=1, pred=k > 0)
        it += 1
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), count=1)
    return acc, it


@gluon.jit
def _load(
    a_desc, b_desc, a_bufs, b_bufs, ready, empty, it, steps, m0, n0,
    A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The loads for one tile."""
    for k in range(steps):
        slot = it % STAGES
        mbarrier.wait(empty.index(slot), ((it // STAGES) & 1) ^ 1)
        mbarrier.expect(ready.index(slot), a_desc.block_type.nbytes + b_desc.block_type.nbytes)
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


# --- all-gather → matmul -----------------------------------------------------------------------------------------


@gluon.jit
def _gather_tile(
    tile,
    rank,
    segments,
    per_segment,
    y_tiles,
    segment,
    RANKS: gl.constexpr,
    GROUP: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
):
    """First row and column of a tile, the rank its rows come from, and its first row in that rank's shard."""
    x_tiles = segments * RANKS * per_segment
    own = segments * per_segment
    width = GROUP * y_tiles
    first = (tile // width) * GROUP
    in_group = min(x_tiles - first, GROUP)
    x = first + (tile % width) % in_group
    n0 = ((tile % width) // in_group) * BN
    # This rank's own tiles first, then one of each peer in turn, as they arrive.
    theirs = x - own
    source = rank
    at = x
    if x >= own:
        source = (rank + 1 + theirs % (RANKS - 1)) % RANKS
        at = theirs // (RANKS - 1)
    outer = at // per_segment
    inner = (at % per_segment) * BM
    return outer * segment * RANKS + source * segment + inner, n0, source, outer * segment + inner


@gluon.jit
def _gather_multiply(
    c_desc, a_bufs, b_bufs, c_buf, ready, empty, bias,
    rank, segments, per_segment, y_tiles, segment, steps, N,
    RANKS: gl.constexpr, GROUP: gl.constexpr, BIAS: gl.constexpr, B_K_MAJOR: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BN, 16])
    tiles = segments * RANKS * per_segment * y_tiles
    it = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        m0, n0, _, _ = _gather_tile(tile, rank, segments, per_segment, y_tiles, segment, RANKS, GROUP, BM, BN)
        acc = gl.zeros((BM, BN), gl.float32, layout)
        acc, it = _multiply(acc, a_bufs, b_bufs, ready, empty, it, steps, True, B_K_MAJOR, STAGES)
        if BIAS:
            columns = n0 + gl.arange(0, BN, layout=gl.SliceLayout(0, layout))
            acc += gl.load(bias + columns, mask=columns < N, other=0.0).to(gl.float32)[None, :]
        out = acc.to(c_desc.dtype)
        tma.store_wait(pendings=0)
        c_buf.store(out)
        fence_async_shared()
        tma.async_copy_shared_to_global(c_desc, [m0, n0], c_buf)
    tma.store_wait(pendings=0)


@gluon.jit
def _gather_load(
    g_desc, o_desc, a_bufs, b_bufs, ready, empty, counters, epoch, deadline, failure,
    rank, segments, per_segment, y_tiles, segment, steps, count,
    RANKS: gl.constexpr, GROUP: gl.constexpr, B_K_MAJOR: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, HEADER: gl.constexpr,
):  # fmt: skip
    tiles = segments * RANKS * per_segment * y_tiles
    units = segments * per_segment
    it = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        m0, n0, source, row = _gather_tile(tile, rank, segments, per_segment, y_tiles, segment, RANKS, GROUP, BM, BN)
        if source != rank:
            _wait_for_count(counters + HEADER + source * units + row // BM, count, epoch, deadline, failure)
        it = _load(g_desc, o_desc, a_bufs, b_bufs, ready, empty, it, steps, m0, n0, True, B_K_MAJOR, BK, STAGES)


@gluon.jit
def _fetch(
    t,
    p0,
    p1,
    p2,
    p3,
    p4,
    p5,
    p6,
    p7,
    slot_row,
    rank,
    col_blocks,
    bar,
    buf,
    RANKS: gl.constexpr,
    CM: gl.constexpr,
    CN: gl.constexpr,
):
    """Start copy number t: a block of a peer's slot into shared memory."""
    source = (rank + 1 + t % (RANKS - 1)) % RANKS
    block = t // (RANKS - 1)
    row = slot_row + (block // col_blocks) * CM
    col = (block % col_blocks) * CN
    mbarrier.expect(bar, p0.block_type.nbytes)
    if source == 0:
        tma.async_copy_global_to_shared(p0, [row, col], bar, buf)
    if source == 1:
        tma.async_copy_global_to_shared(p1, [row, col], bar, buf)
    if RANKS > 2:  # noqa: SIM102  # known when compiling
        if source == 2:
            tma.async_copy_global_to_shared(p2, [row, col], bar, buf)
    if RANKS > 3:  # noqa: SIM102  # known when compiling
        if source == 3:
            tma.async_copy_global_to_shared(p3, [row, col], bar, buf)
    if RANKS > 4:  # noqa: SIM102  # known when compiling
        if source == 4:
            tma.async_copy_global_to_shared(p4, [row, col], bar, buf)
    if RANKS > 5:  # noqa: SIM102  # known when compiling
        if source == 5:
            tma.async_copy_global_to_shared(p5, [row, col], bar, buf)
    if RANKS > 6:  # noqa: SIM102  # known when compiling
        if source == 6:
            tma.async_copy_global_to_shared(p6, [row, col], bar, buf)
    if RANKS > 7:  # noqa: SIM102  # known when compiling
        if source == 7:
            tma.async_copy_global_to_shared(p7, [row, col], bar, buf)


@gluon.jit
def _gather_pull(
    p0, p1, p2, p3, p4, p5, p6, p7, w_desc, ring, bars, counters, slot_row,
    rank, rows, segment, col_blocks,
    RANKS: gl.constexpr, BM: gl.constexpr, CM: gl.constexpr, CN: gl.constexpr, HEADER: gl.constexpr,
):  # fmt: skip
    """Copy blocks of the peers' slots into G through a ring of four buffers, three on their way, and count them."""
    copies = (rows // CM) * col_blocks * (RANKS - 1)
    units = rows // BM
    draw = counters + 4
    t0 = gl.atomic_add(draw, 1, sem="relaxed", scope="gpu")
    t1 = gl.atomic_add(draw, 1, sem="relaxed", scope="gpu")
    t2 = gl.atomic_add(draw, 1, sem="relaxed", scope="gpu")
    for j in gl.static_range(3):
        t = t0 if j == 0 else (t1 if j == 1 else t2)
        if t < copies:
            _fetch(
                t, p0, p1, p2, p3, p4, p5, p6, p7, slot_row, rank, col_blocks,
                bars.index(j), ring.index(j), RANKS, CM, CN,
            )  # fmt: skip
    i = 0
    stored = counters  # the count that the copy before this one adds to
    while t0 < copies:
        mbarrier.wait(bars.index(i % 4), (i // 4) & 1)
        source = (rank + 1 + t0 % (RANKS - 1)) % RANKS
        block = t0 // (RANKS - 1)
        row = (block // col_blocks) * CM
        to = (row // segment) * segment * RANKS + source * segment + row % segment
        tma.async_copy_shared_to_global(w_desc, [to, (block % col_blocks) * CN], ring.index(i % 4))
        # The copy before is written, not only read: now others may be told, and its buffer filled again.
        _do("cp.async.bulk.wait_group 1; mov.u32 $0, 0;")
        gl.thread_barrier()
        if i > 0:
            gl.atomic_add(stored, 1, sem="release", scope="gpu")
        stored = counters + HEADER + source * units + row // BM
        t3 = gl.atomic_add(draw, 1, sem="relaxed", scope="gpu")
        if t3 < copies:
            _fetch(
                t3, p0, p1, p2, p3, p4, p5, p6, p7, slot_row, rank, col_blocks,
                bars.index((i + 3) % 4), ring.index((i + 3) % 4), RANKS, CM, CN,
            )  # fmt: skip
        t0 = t1
        t1 = t2
        t2 = t3
        i += 1
    if i > 0:
        _do("cp.async.bulk.wait_group 0; mov.u32 $0, 0;")
        gl.thread_barrier()
        gl.atomic_add(stored, 1, sem="release", scope="gpu")


@gluon.jit(do_not_specialize=["rank"])
def gather_matmul(
    g_desc, o_desc, c_desc, bias, p0, p1, p2, p3, p4, p5, p6, p7, w_desc,
    counters, epoch_word, deadline, failure,
    slot_rows, rows, segment, N, K, rank,
    RANKS: gl.constexpr, GROUP: gl.constexpr, BIAS: gl.constexpr, B_K_MAJOR: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    CM: gl.constexpr, CN: gl.constexpr, HEADER: gl.constexpr,
):  # fmt: skip
    """As `all_gather_matmul._gather_matmul`, for the form "left" gathered along rows in whole tiles."""
    epoch = gl.load(epoch_word) - 1
    a_bufs = gl.allocate_shared_memory(g_desc.dtype, [STAGES, BM, BK], g_desc.layout)
    b_bufs = gl.allocate_shared_memory(o_desc.dtype, [STAGES, BN, BK] if B_K_MAJOR else [STAGES, BK, BN], o_desc.layout)
    c_buf = gl.allocate_shared_memory(c_desc.dtype, [BM, BN], c_desc.layout)
    ring = gl.allocate_shared_memory(w_desc.dtype, [4, CM, CN], w_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    bars = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(4):
        mbarrier.init(bars.index(i), count=1)
    col_blocks = gl.cdiv(K, CN)
    segments = rows // segment
    per_segment = segment // BM
    y_tiles = gl.cdiv(N, BN)
    steps = gl.cdiv(K, BK)
    gl.warp_specialize(
        [
            (_gather_multiply, (
                c_desc, a_bufs, b_bufs, c_buf, ready, empty, bias,
                rank, segments, per_segment, y_tiles, segment, steps, N,
                RANKS, GROUP, BIAS, B_K_MAJOR, BM, BN, BK, STAGES,
            )),
            (_gather_load, (
                g_desc, o_desc, a_bufs, b_bufs, ready, empty, counters, epoch, deadline, failure,
                rank, segments, per_segment, y_tiles, segment, steps, (BM // CM) * col_blocks,
                RANKS, GROUP, B_K_MAJOR, BM, BN, BK, STAGES, HEADER,
            )),
            (_gather_pull, (
                p0, p1, p2, p3, p4, p5, p6, p7, w_desc, ring, bars, counters, (epoch & 1) * slot_rows,
                rank, rows, segment, col_blocks, RANKS, BM, CM, CN, HEADER,
            )),
        ],
        [1, 1],
        [WORKER_REGISTERS, WORKER_REGISTERS],
    )  # fmt: skip
    # The last block leaves the counters as the next operator wants them.
    gl.thread_barrier()
    finished = gl.atomic_add(counters + 2, 1, sem="acq_rel", scope="gpu")
    if finished == gl.num_programs(0) - 1:
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
        used = HEADER + RANKS * (rows // BM)
        for start in range(0, used, 256):
            at = start + gl.arange(0, 256, layout=layout)
            gl.store(counters + at, gl.zeros([256], gl.int32, layout), mask=at < used)


# --- matmul → reduce-scatter -------------------------------------------------------------------------------------


@gluon.jit
def _push_tile(tile, rank, per_segment, y_tiles, segment, RANKS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr):
    """First row and column of a tile, its owner, and its first row in the owner's part."""
    owner = (tile // y_tiles + rank + 1) % RANKS
    group = tile // (y_tiles * RANKS)
    within = (group % per_segment) * BM
    outer = group // per_segment
    return outer * segment * RANKS + owner * segment + within, (tile % y_tiles) * BN, owner, outer * segment + within


@gluon.jit
def _push_multiply(
    d0, d1, d2, d3, d4, d5, d6, d7, a_bufs, b_bufs, c_buf, ready, empty, first_row,
    rank, tiles, per_segment, y_tiles, segment, steps,
    RANKS: gl.constexpr, A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BN, 16])
    it = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        _, col, owner, row = _push_tile(tile, rank, per_segment, y_tiles, segment, RANKS, BM, BN)
        acc = gl.zeros((BM, BN), gl.float32, layout)
        acc, it = _multiply(acc, a_bufs, b_bufs, ready, empty, it, steps, A_K_MAJOR, B_K_MAJOR, STAGES)
        out = acc.to(d0.dtype)
        tma.store_wait(pendings=0)
        c_buf.store(out)
        fence_async_shared()
        at = first_row + row
        if owner == 0:
            tma.async_copy_shared_to_global(d0, [at, col], c_buf)
        if owner == 1:
            tma.async_copy_shared_to_global(d1, [at, col], c_buf)
        if RANKS > 2:  # noqa: SIM102  # known when compiling
            if owner == 2:
                tma.async_copy_shared_to_global(d2, [at, col], c_buf)
        if RANKS > 3:  # noqa: SIM102  # known when compiling
            if owner == 3:
                tma.async_copy_shared_to_global(d3, [at, col], c_buf)
        if RANKS > 4:  # noqa: SIM102  # known when compiling
            if owner == 4:
                tma.async_copy_shared_to_global(d4, [at, col], c_buf)
        if RANKS > 5:  # noqa: SIM102  # known when compiling
            if owner == 5:
                tma.async_copy_shared_to_global(d5, [at, col], c_buf)
        if RANKS > 6:  # noqa: SIM102  # known when compiling
            if owner == 6:
                tma.async_copy_shared_to_global(d6, [at, col], c_buf)
        if RANKS > 7:  # noqa: SIM102  # known when compiling
            if owner == 7:
                tma.async_copy_shared_to_global(d7, [at, col], c_buf)
    _do("cp.async.bulk.wait_group 0; mov.u32 $0, 0;")  # written to the owners before this kernel ends


@gluon.jit
def _push_load(
    a_desc, b_desc, a_bufs, b_bufs, ready, empty, rank, tiles, per_segment, y_tiles, segment, steps,
    RANKS: gl.constexpr, A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    it = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        m0, n0, _, _ = _push_tile(tile, rank, per_segment, y_tiles, segment, RANKS, BM, BN)
        it = _load(a_desc, b_desc, a_bufs, b_bufs, ready, empty, it, steps, m0, n0, A_K_MAJOR, B_K_MAJOR, BK, STAGES)


@gluon.jit(do_not_specialize=["rank"])
def matmul_push(
    a_desc, b_desc, d0, d1, d2, d3, d4, d5, d6, d7, epoch_word,
    slot_rows, staged_rows, segment, N, K, rank,
    RANKS: gl.constexpr, A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As `matmul_reduce_scatter._matmul_push`, for one product scattered along rows in whole tiles."""
    parity = gl.load(epoch_word) & 1
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [STAGES, BM, BK] if A_K_MAJOR else [STAGES, BK, BM], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES, BN, BK] if B_K_MAJOR else [STAGES, BK, BN], b_desc.layout)
    c_buf = gl.allocate_shared_memory(d0.dtype, [BM, BN], d0.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    per_segment = segment // BM
    y_tiles = gl.cdiv(N, BN)
    steps = gl.cdiv(K, BK)
    tiles = (staged_rows // BM) * RANKS * y_tiles
    gl.warp_specialize(
        [
            (_push_multiply, (
                d0, d1, d2, d3, d4, d5, d6, d7, a_bufs, b_bufs, c_buf, ready, empty,
                parity * slot_rows + rank * staged_rows, rank, tiles, per_segment, y_tiles, segment, steps,
                RANKS, A_K_MAJOR, B_K_MAJOR, BM, BN, STAGES,
            )),
            (_push_load, (
                a_desc, b_desc, a_bufs, b_bufs, ready, empty, rank, tiles, per_segment, y_tiles, segment, steps,
                RANKS, A_K_MAJOR, B_K_MAJOR, BM, BN, BK, STAGES,
            )),
        ],
        [1],
        [WORKER_REGISTERS],
    )  # fmt: skip


# --- host --------------------------------------------------------------------------------------------------------

_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@cache
def _layout(box: tuple[int, int], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(box), _DTYPES[dtype])


def descriptor(matrix: Tensor, box: tuple[int, int]) -> TensorDescriptor:
    """A TMA descriptor of a row-major matrix of 16-bit floats, for blocks of the shape `box`."""
    made = object.__new__(TensorDescriptor)  # without its checks: `obstacle` has made them
    made.base, made.shape, made.strides = matrix, matrix.shape, matrix.stride()
    made.block_shape, made.layout, made.padding = list(box), _layout(box, matrix.dtype), "zero"
    return made


def peer_descriptors(
    to: Channel, dtype: torch.dtype, columns: int, box: tuple[int, int]
) -> list[TensorDescriptor | None]:
    """Descriptors of all ranks' two slots as one matrix each, and None up to `MAX_RANKS`."""
    key = (dtype, columns, box)
    found = to.descriptors.get(key)
    if found is None:
        rows = 2 * to.capacity // (columns * dtype.itemsize)
        matrices = [slots[: rows * columns * dtype.itemsize].view(dtype).view(rows, columns) for slots in to.peers]
        found = [descriptor(matrix, box) for matrix in matrices] + [None] * (MAX_RANKS - to.ranks)
        to.descriptors[key] = found
    return found
