"""All-gather → matmul for the common shapes: `specialised_matmul` with a third role, a warp that copies.

The copier first brings this rank's shard to its slot and sets the ready flags of its chunks, then pulls the peers'
chunks through a small ring in shared memory: TMA moves the bytes both ways, and no multiprocessor is given up. Copies
are claimed as tiles are.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from titanlite.kernels.device.specialised_matmul import (
    CONSUMER_REGISTERS,
    PART,
    WORKER_REGISTERS,
    announce,
    announce_end,
    consume,
    consume_in_steps,
    first_columns,
    first_of,
    load_operands,
    tile_position,
)
from titanlite.kernels.device.specialised_protocol import (
    HEADER,
    N_CHUNKS,
    barrier,
    execute,
    leave_kernel,
    signal,
    wait_for_chunk,
    wait_for_copies,
)

OWN_PER_CLAIM = gl.constexpr(8)
"""Copies of the own shard that are claimed and counted together; of the peers', as many as a tile is high."""


@gluon.jit
def _produce(
    given,
    RANKS: gl.constexpr, GROUP: gl.constexpr, B_K_MAJOR: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    s_desc, g_desc, o_desc, rest_desc, a_bufs, b_bufs, rest_bufs, tiles, ready, empty = given[:10]
    counters, epoch, deadline, failure, rank, segments, per_segment, y_tiles, segment, steps, count = given[10:]
    units = segments * per_segment
    x_tiles = units * RANKS
    it = 0
    claimed = gl.atomic_add(counters + 1, 1, sem="relaxed", scope="gpu")
    while claimed < x_tiles * y_tiles:
        following = gl.atomic_add(counters + 1, 1, sem="relaxed", scope="gpu")
        x, y = tile_position(claimed, x_tiles, y_tiles, GROUP)
        # This rank's own tiles first, then one of each peer in turn, as they arrive.
        theirs = x - units
        source = rank
        unit = x
        if theirs >= 0:
            source = (rank + 1 + theirs % (RANKS - 1)) % RANKS
            unit = theirs // (RANKS - 1)
        row = (unit // per_segment * RANKS + source) * segment + unit % per_segment * BM
        if theirs >= 0:
            wait_for_copies(counters + HEADER + source * units + unit, count, epoch, deadline, failure)
        announce(row // BM * y_tiles + y, tiles, empty, it, STAGES)
        if theirs >= 0:
            it = load_operands(
                g_desc, o_desc, rest_desc, a_bufs, b_bufs, rest_bufs, ready, empty, it, steps, row, y * BN,
                True, B_K_MAJOR, BK, STAGES,
            )  # fmt: skip
        else:
            it = load_operands(
                s_desc, o_desc, rest_desc, a_bufs, b_bufs, rest_bufs, ready, empty, it, steps, unit * BM, y * BN,
                True, B_K_MAJOR, BK, STAGES,
            )  # fmt: skip
        claimed = following
    announce_end(tiles, ready, empty, it, STAGES)


@gluon.jit
def _claim(counter, n):
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
def _claimed(ticket):
    """Return what `_claim` has found to all lanes."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [ticket], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _next(t, ticket, counter, PER_CLAIM: gl.constexpr):
    """Return the copy after number t, and the ticket for the next run of copies."""
    t += 1
    if t % PER_CLAIM == 0:
        t = _claimed(ticket)
        ticket = _claim(counter, PER_CLAIM)
    return t, ticket


@gluon.jit
def _place(t, rank, OWN: gl.constexpr, PER_CLAIM: gl.constexpr, RANKS: gl.constexpr):
    """Return whose block copy number t takes, and which: runs of the peers' blocks take turns."""
    source = rank
    block = t
    if not OWN:
        run = t // PER_CLAIM
        source = (rank + 1 + run % (RANKS - 1)) % RANKS
        block = run // (RANKS - 1) * PER_CLAIM + t % PER_CLAIM
    return source, block


@gluon.jit
def _fetch(
    t, i, known, froms, ring, bars, from_row, rank, col_blocks, chunk_blocks, flags, epoch, deadline, failure,
    OWN: gl.constexpr, PER_CLAIM: gl.constexpr, RANKS: gl.constexpr, CM: gl.constexpr, CN: gl.constexpr,
):  # fmt: skip
    """Start copy number t, as this block's i-th: a block of a shard into shared memory.

    Args:
        known: bits of the chunks that are known to be ready.

    Returns:
        The same, afterwards.
    """
    bar, buf = bars.index(i % 4), ring.index(i % 4)
    source, block = _place(t, rank, OWN, PER_CLAIM, RANKS)
    if OWN:
        mbarrier.expect(bar, froms[0].block_type.nbytes)
        tma.async_copy_global_to_shared(froms[0], [block // col_blocks * CM, block % col_blocks * CN], bar, buf)
    else:
        word = source * N_CHUNKS + block // chunk_blocks
        if (known >> word) & 1 == 0:
            known = wait_for_chunk(word, flags, epoch, deadline, failure, RANKS)
        mbarrier.expect(bar, froms[0].block_type.nbytes)
        for r in gl.static_range(RANKS):
            if source == r:
                tma.async_copy_global_to_shared(
                    froms[r], [from_row + block // col_blocks * CM, block % col_blocks * CN], bar, buf
                )
    return known


@gluon.jit
def _stored(
    t, rank, counters, peer_flags, copies, col_blocks, chunk_blocks, units, epoch,
    OWN: gl.constexpr, RANKS: gl.constexpr, PER_CLAIM: gl.constexpr, BM: gl.constexpr, CM: gl.constexpr,
):  # fmt: skip
    """Count what has been written, copy number t the last, and set the ready flag of a chunk that is whole."""
    source, block = _place(t, rank, OWN, PER_CLAIM, RANKS)
    n = t % PER_CLAIM + 1
    if OWN:
        chunk = block // chunk_blocks
        size = min(copies, (chunk + 1) * chunk_blocks) - chunk * chunk_blocks
        counted = gl.atomic_add(counters + HEADER - N_CHUNKS + chunk, n, sem="acq_rel", scope="gpu")
        if counted + n == size:
            signal(peer_flags, RANKS + rank * N_CHUNKS + chunk, epoch, RANKS)
    else:
        unit = block // col_blocks * CM // BM
        gl.atomic_add(counters + HEADER + source * units + unit, n, sem="release", scope="gpu")


@gluon.jit
def _copies(
    i, froms, slots, w_desc, ring, bars, counters, flags, peer_flags, epoch, deadline, failure,
    slot_row, rank, rows, segment, col_blocks,
    OWN: gl.constexpr, PER_CLAIM: gl.constexpr,
    RANKS: gl.constexpr, BM: gl.constexpr, CM: gl.constexpr, CN: gl.constexpr,
):  # fmt: skip
    """Copy blocks of shards through a ring of four buffers, three on their way, into G, and this rank's to its slot.

    Args:
        i: copies of this thread block so far.

    Returns:
        The same, afterwards. All has been written, and counted.
    """
    blocks = rows // CM * col_blocks
    chunk_blocks = gl.cdiv(gl.cdiv(blocks, N_CHUNKS), OWN_PER_CLAIM) * OWN_PER_CLAIM
    copies = blocks * (1 if OWN else RANKS - 1)
    claims = counters + (5 if OWN else 4)
    known = gl.to_tensor(0).to(gl.int64)
    ticket = _claim(claims, PER_CLAIM)
    t0, ticket = _next(-1, ticket, claims, PER_CLAIM)
    t1, ticket = _next(t0, ticket, claims, PER_CLAIM)
    t2, ticket = _next(t1, ticket, claims, PER_CLAIM)
    for j in gl.static_range(3):
        t = t0 if j == 0 else (t1 if j == 1 else t2)
        if t < copies:
            known = _fetch(
                t, i + j, known, froms, ring, bars, slot_row, rank, col_blocks, chunk_blocks, flags, epoch, deadline,
                failure, OWN, PER_CLAIM, RANKS, CM, CN,
            )  # fmt: skip
    before = -1  # number of the copy before
    older = -1  # and of the one before that
    while t0 < copies:
        mbarrier.wait(bars.index(i % 4), (i // 4) & 1)
        source, block = _place(t0, rank, OWN, PER_CLAIM, RANKS)
        row = block // col_blocks * CM
        column = block % col_blocks * CN
        to = (row // segment * RANKS + source) * segment + row % segment
        tma.async_copy_shared_to_global(w_desc, [to, column], ring.index(i % 4))
        # The copy before must have been read, so that its buffer may be filled again; the older one, if it is the last
        # of a run, written, so that it may be counted.
        run_ends = (older >= 0) & (older % PER_CLAIM == PER_CLAIM - 1)
        if OWN:
            for r in gl.static_range(RANKS):
                if rank == r:
                    tma.async_copy_shared_to_global(slots[r], [slot_row + row, column], ring.index(i % 4))
            execute("cp.async.bulk.wait_group.read 2; mov.u32 $0, 0;")
            if run_ends:
                execute("cp.async.bulk.wait_group 4; mov.u32 $0, 0;")
        else:
            execute("cp.async.bulk.wait_group.read 1; mov.u32 $0, 0;")
            if run_ends:
                execute("cp.async.bulk.wait_group 2; mov.u32 $0, 0;")
        barrier()
        if run_ends:
            _stored(
                older, rank, counters, peer_flags, copies, col_blocks, chunk_blocks, rows // BM, epoch,
                OWN, RANKS, PER_CLAIM, BM, CM,
            )  # fmt: skip
        older = before
        before = t0
        t3, ticket = _next(t2, ticket, claims, PER_CLAIM)
        if t3 < copies:
            known = _fetch(
                t3, i + 3, known, froms, ring, bars, slot_row, rank, col_blocks, chunk_blocks, flags, epoch, deadline,
                failure, OWN, PER_CLAIM, RANKS, CM, CN,
            )  # fmt: skip
        t0 = t1
        t1 = t2
        t2 = t3
        i += 1
    execute("cp.async.bulk.wait_group 0; mov.u32 $0, 0;")
    barrier()
    if (older >= 0) & (older % PER_CLAIM == PER_CLAIM - 1):
        _stored(
            older, rank, counters, peer_flags, copies, col_blocks, chunk_blocks, rows // BM, epoch,
            OWN, RANKS, PER_CLAIM, BM, CM,
        )  # fmt: skip
    if before >= 0:
        _stored(
            before, rank, counters, peer_flags, copies, col_blocks, chunk_blocks, rows // BM, epoch,
            OWN, RANKS, PER_CLAIM, BM, CM,
        )  # fmt: skip
    return i


@gluon.jit
def _copy(
    given, RANKS: gl.constexpr, BM: gl.constexpr, CM: gl.constexpr, CN: gl.constexpr
):  # fmt: skip
    """Copy this rank's shard to its slot, then the peers' from theirs.

    Of the thread blocks that run, every second one, the first included, copies all there is of the own shard before it
    waits for a peer: no rank then waits for one that waits for it.
    """
    shard_desc, peers, w_desc, ring, bars, counters, flags, peer_flags, epoch, deadline, failure = given[:11]
    slot_row, rank, rows, segment, col_blocks = given[11:]
    ticket = gl.atomic_add(counters, 1, sem="relaxed", scope="gpu")
    i = gl.to_tensor(0)
    if ticket % 2 == 0:
        i = _copies(
            i, (shard_desc,), peers, w_desc, ring, bars, counters, flags, peer_flags, epoch, deadline,
            failure, slot_row, rank, rows, segment, col_blocks, True, OWN_PER_CLAIM, RANKS, BM, CM, CN,
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
    CM: gl.constexpr, CN: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    """Gather and multiply as the kernels of `general_gather`, for the form "left" gathered along rows in whole tiles.

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
    c_bufs = gl.allocate_shared_memory(c_desc.dtype, [CONSUMERS, BM // CONSUMERS, PART], c_desc.layout)
    ring = gl.allocate_shared_memory(w_desc.dtype, [4, CM, CN], w_desc.layout)
    tiles = gl.allocate_shared_memory(gl.int32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    bars = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    for i in gl.static_range(4):
        mbarrier.init(bars.index(i), count=1)
    col_blocks = gl.cdiv(K, CN)
    segments = rows // segment
    per_segment = segment // BM
    y_tiles = gl.cdiv(N, BN)
    steps = gl.cdiv(K, BK)
    consumer = (
        (c_desc,), bias, scale, other_scale, a_bufs, b_bufs, rest_bufs, c_bufs, tiles, ready, empty,
        0, RANKS * (rows // BM), y_tiles, steps, N, segment, per_segment,
    )  # fmt: skip
    producer = (
        s_desc, g_desc, o_desc, rest_desc, a_bufs, b_bufs, rest_bufs, tiles, ready, empty,
        counters, epoch, deadline, failure,
        rank, segments, per_segment, y_tiles, segment, steps, (BM // CM) * col_blocks,
    )  # fmt: skip
    copier = (
        shard_desc, first_of(p0, p1, p2, p3, p4, p5, p6, p7, RANKS), w_desc, ring, bars,
        counters, flags, peer_flags, epoch, deadline, failure,
        (epoch & 1) * slot_rows, rank, rows, segment, col_blocks,
    )  # fmt: skip
    if CONSUMERS == 1:
        gl.warp_specialize([
            (consume, (consumer, BIAS, OF_ROWS, OF_COLUMNS, 1, True, B_K_MAJOR, BM, BN, STAGES, 1, 0)),
            (_produce, (producer, RANKS, GROUP, B_K_MAJOR, BM, BN, BK, STAGES)),
            (_copy, (copier, RANKS, BM, CM, CN)),
        ], [1, 1], [WORKER_REGISTERS, WORKER_REGISTERS])  # fmt: skip
    elif FAST:
        gl.warp_specialize([
            (consume, (consumer, BIAS, OF_ROWS, OF_COLUMNS, 1, True, B_K_MAJOR, BM, BN, STAGES, 2, 0)),
            (consume, (consumer, BIAS, OF_ROWS, OF_COLUMNS, 1, True, B_K_MAJOR, BM, BN, STAGES, 2, 1)),
            (_produce, (producer, RANKS, GROUP, B_K_MAJOR, BM, BN, BK, STAGES)),
            (_copy, (copier, RANKS, BM, CM, CN)),
        ], [4, 1, 1], [CONSUMER_REGISTERS, WORKER_REGISTERS, WORKER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume_in_steps, (consumer, BIAS, OF_ROWS, OF_COLUMNS, 1, BM, BN, STAGES, 0)),
            (consume_in_steps, (consumer, BIAS, OF_ROWS, OF_COLUMNS, 1, BM, BN, STAGES, 1)),
            (_produce, (producer, RANKS, GROUP, B_K_MAJOR, BM, BN, BK, STAGES)),
            (_copy, (copier, RANKS, BM, CM, CN)),
        ], [4, 1, 1], [CONSUMER_REGISTERS, WORKER_REGISTERS, WORKER_REGISTERS])  # fmt: skip
    used = HEADER + RANKS * (rows // BM)
    leave_kernel(counters, used, epoch_word, epoch, flags, peer_flags, deadline, failure, rank, False, RANKS, CONSUMERS)
