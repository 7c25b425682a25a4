"""The copying warp of `specialised_gather`, in Gluon. TMA copies through a ring of four buffers in shared memory.

The warp first copies this rank's shard to its slot and sets the ready flags of the shard's chunks. Then it pulls the
peers' chunks. It takes no multiprocessor from the matmul. Thread blocks claim copies, as they claim tiles.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from titanlite.kernels.device.specialised_protocol import HEADER, N_CHUNKS, barrier, execute, signal, wait_for_chunk

OWN_PER_CLAIM = gl.constexpr(8)
"""Copies of this rank's shard that are claimed and counted together. For a peer's: rows of a tile / rows of a copy."""


@gluon.jit
def _claim(counter, n):
    """Add n to a counter, without waiting for its old value, which only the first lane gets. One warp calls this."""
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
    """Return the counter's old value to all lanes. ticket: the result of `_claim`."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [ticket], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _next(t, ticket, counter, PER_CLAIM: gl.constexpr):
    """Return the copy that follows copy number t, and the ticket (pending result of `_claim`) for the next PER_CLAIM
    copies."""
    t += 1
    if t % PER_CLAIM == 0:
        t = _claimed(ticket)
        ticket = _claim(counter, PER_CLAIM)
    return t, ticket


@gluon.jit
def _copied_block(t, rank, OWN: gl.constexpr, PER_CLAIM: gl.constexpr, RANKS: gl.constexpr):
    """Return the rank whose shard copy number t reads, and the block of the shard. OWN: the shard is this rank's;
    otherwise runs of PER_CLAIM blocks come from each peer in turn."""
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
    """Start to load the block of copy number t, this thread block's i-th copy, into shared memory.

    known: bits of the chunks that are known to be ready. Returned with the bits found while waiting.
    """
    bar, buf = bars.index(i % 4), ring.index(i % 4)
    source, block = _copied_block(t, rank, OWN, PER_CLAIM, RANKS)
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
    """Count the copies of a claim up to number t as written. With OWN, set the ready flag of a complete chunk."""
    source, block = _copied_block(t, rank, OWN, PER_CLAIM, RANKS)
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
    """Claim blocks of shards and copy them into G (`w_desc`), those of this rank's shard (OWN) also to its slot.

    Up to three copies are in flight, in a ring of four buffers. i: number of this thread block's copies so far. Returns
    the new number, when all copies are written and counted.
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
    before = -1  # number of the previous copy
    older = -1  # number of the copy before the previous one
    while t0 < copies:
        mbarrier.wait(bars.index(i % 4), (i // 4) & 1)
        source, block = _copied_block(t0, rank, OWN, PER_CLAIM, RANKS)
        row = block // col_blocks * CM
        column = block % col_blocks * CN
        to = (row // segment * RANKS + source) * segment + row % segment
        tma.async_copy_shared_to_global(w_desc, [to, column], ring.index(i % 4))
        # Wait until the previous copy has been read from its buffer, which is then filled again. If copy `older` ends a
        # run, wait until it has been written, so that the run may be counted.
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
def copy_shards(
    given, RANKS: gl.constexpr, BM: gl.constexpr, CM: gl.constexpr, CN: gl.constexpr
):  # fmt: skip
    """Copy this rank's shard to its slot, then pull the peers' shards from their slots.

    Every second thread block, beginning with the first that starts, copies blocks of this rank's shard until none is
    left. Only then does it wait for a peer, so that ranks do not wait for each other.
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
