"""Signals between GPUs and between thread blocks, as Triton functions.

Each rank has a flag for every rank: `flags[src]` counts the operators whose data rank `src` has made available to it.
The count only grows, so nothing is ever reset across GPUs. In each operator all ranks signal each other once. Two slots
of data, used alternately, are then enough: once all ranks have signalled operator e, they have finished reading the
slot of operator e−2 (`tests/unit/kernels/test_protocol.py` checks every interleaving).

The specialised gather has further flags of the same kind: the ready flags of each shard's chunks.

Instructions that order memory accesses, from writer → reader:

    data, by many blocks → peer's flag        each block: barrier, atomic add (acq_rel, gpu); last: fence.sys, store
    TMA stores → any flag or counter          wait_group (written, not only read), then as above
    peer's flag → peer's data                 load.acquire.sys, and a kernel boundary or fence.proxy.async
    block's stores → local counter            barrier, atomic add (release, gpu)
    local counter → TMA load of the data      load.acquire.gpu, fence.proxy.async: TMA reads through another proxy
"""

import triton
import triton.language as tl


@triton.jit
def load_acquire_sys(pointer):
    """Load words that peers write, with acquire semantics."""
    return tl.inline_asm_elementwise(
        "ld.acquire.sys.global.u32 $0, [$1];", "=r,l", [pointer], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def load_acquire_gpu(pointer):
    """Load a word that other thread blocks of this GPU write, with acquire semantics."""
    return tl.inline_asm_elementwise(
        "ld.acquire.gpu.global.u32 $0, [$1];", "=r,l", [pointer], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def store_relaxed_sys(pointer, value):
    """Store words that peers read. To publish earlier writes, call `fence_sys` first."""
    tl.inline_asm_elementwise(
        "st.relaxed.sys.global.u32 [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [pointer, value],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def fence_sys():
    """Order earlier writes before later ones for all GPUs, also writes of other blocks that this block has observed."""
    tl.inline_asm_elementwise("fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def fence_async_proxy():
    """Order earlier reads and writes before later TMA accesses to global memory."""
    tl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def tma_stores_written():
    """Wait until this thread block's TMA stores have been written, to memory of this GPU or of peers."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def nanoseconds():
    """Return the GPU's clock in nanoseconds."""
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def fail(failure, epoch, peer, waited, OP: tl.constexpr):
    """Store [1 + epoch, peer, nanoseconds waited, OP] in host memory, and stop the GPU's context. epoch: number of the
    call; OP: index of the operator in `channel.OPERATORS`."""
    tl.store(failure + 1, peer.to(tl.int64))
    tl.store(failure + 2, waited)
    tl.store(failure + 3, waited * 0 + OP)
    fence_sys()
    tl.store(failure, epoch.to(tl.int64) + 1)
    fence_sys()
    tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def signal_peers(peer_flags, epoch, rank, RANKS: tl.constexpr, LANES: tl.constexpr):
    """Signal to every rank that this rank's data of operator number `epoch` is available. peer_flags: [RANKS] addresses
    of the ranks' flags; LANES: RANKS rounded up to a power of two."""
    lane = tl.arange(0, LANES)
    peer = tl.where(lane < RANKS, lane, rank)
    fence_sys()
    flag = tl.load(peer_flags + peer).to(tl.pointer_type(tl.int32)) + rank
    store_relaxed_sys(flag, epoch + 1 + tl.zeros([LANES], tl.int32))


@triton.jit
def wait_for_peers(flags, epoch, deadline, failure, rank, RANKS: tl.constexpr, LANES: tl.constexpr, OP: tl.constexpr):
    """Wait until every rank has signalled operator number `epoch`. deadline: pointer to the longest wait in ns."""
    lane = tl.arange(0, LANES)
    peer = tl.where(lane < RANKS, lane, rank)
    limit = tl.load(deadline)
    start = nanoseconds()
    seen = load_acquire_sys(flags + peer)
    while tl.min(seen - (epoch + 1)) < 0:  # a difference, so that the count may wrap around
        waited = nanoseconds() - start
        if waited > limit:
            fail(failure, epoch, tl.max(tl.where(seen - (epoch + 1) < 0, peer, 0)), waited, OP)
        seen = load_acquire_sys(flags + peer)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["rank"])
def meet(
    scale, scale_whole, slots, peer_slots, slot_bytes, scale_bytes, rows, segment,
    flags, peer_flags, epoch_word, deadline, failure,
    rank, RANKS: tl.constexpr, LANES: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Wait until every rank has reached this operator. One thread block runs this before a kernel that fills the GPU.

    It also gathers scales, one for each of the `rows` of this rank's shard. It stores them in every rank's slot, in the
    order of the gathered rows, and copies the arrived scales of all ranks to `scale_whole`. SCALES: 0: none, 1: one
    number for all rows, 2: one for each row.
    """
    epoch = tl.load(epoch_word)
    if SCALES > 0:
        offset = (epoch & 1).to(tl.int64) * slot_bytes + scale_bytes
        for start in range(0, rows, 1024):
            row = start + tl.arange(0, 1024)
            value = tl.load(scale + row * (SCALES - 1), mask=row < rows)
            to = (row // segment * RANKS + rank) * segment + row % segment
            for r in tl.static_range(RANKS):
                address = (tl.load(peer_slots + r) + offset).to(tl.pointer_type(tl.float32))
                tl.store(address + to, value, mask=row < rows)
        tl.debug_barrier()
    signal_peers(peer_flags, epoch, rank, RANKS, LANES)
    wait_for_peers(flags, epoch, deadline, failure, rank, RANKS, LANES, 0)
    if SCALES > 0:
        offset = (epoch & 1).to(tl.int64) * slot_bytes + scale_bytes
        arrived = (slots + offset).to(tl.pointer_type(tl.float32))
        for start in range(0, rows * RANKS, 4096):
            row = start + tl.arange(0, 4096)
            tl.store(scale_whole + row, tl.load(arrived + row, mask=row < rows * RANKS), mask=row < rows * RANKS)


@triton.jit
def wait_for_count(counter, count, epoch, deadline, failure):
    """Wait until thread blocks of this launch have counted up to `count`. TMA may then load the data they stored."""
    seen = load_acquire_gpu(counter)
    if seen < count:
        limit = tl.load(deadline)
        start = nanoseconds()
        while seen < count:
            waited = nanoseconds() - start
            if waited > limit:
                fail(failure, epoch, seen - seen - 1, waited, 0)
            seen = load_acquire_gpu(counter)
    fence_async_proxy()
    tl.debug_barrier()
